"""What titanlite costs: steps of debug.toml through its whole loop, against a plain PyTorch loop written by hand.

    python benchmarks/bench_step.py
    OMP_NUM_THREADS=1 torchrun --nproc_per_node 2 benchmarks/bench_step.py

Both train the same model on batches of the same size in the same process, in turns of a few steps, so that they meet
the same noise. On several processes the plain loop uses FSDP2 as its documentation shows. Prints the ratio of the
median step times, plain / titanlite: above 1, titanlite is faster. Options of the config can follow.
"""

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F

from titanlite.checkpoint.manager import Progress
from titanlite.config.load import load
from titanlite.config.schema import Config
from titanlite.console import start_logging
from titanlite.data.tokens import TokenStore
from titanlite.job import pick_device, process_group, read_ranks
from titanlite.preflight import Ingredients, preflight
from titanlite.train import Run, build, train

TURN, TURNS, WARM_UP = 5, 24, 4


def titanlite_turns(run: Run) -> Callable[[], float]:
    """A function that trains TURN steps through `train` and returns the seconds a step."""
    progress = Progress()

    def turn() -> float:
        nonlocal progress
        training = run.config.training.model_copy(update={"steps": progress.step + TURN})
        config = run.config.model_copy(update={"training": training})
        started = time.perf_counter()
        train(replace(run, config=config, progress=progress))
        seconds = (time.perf_counter() - started) / TURN
        progress = Progress(progress.step + TURN, progress.samples + TURN * training.global_batch_size)
        return seconds

    return turn


def plain_turns(
    config: Config, ingredients: Ingredients, tokens: TokenStore, device: torch.device
) -> Callable[[], float]:
    """The same for a loop as one would write it by hand."""
    torch.manual_seed(0)
    ranks = dist.get_world_size()
    model: Any = ingredients.model(ingredients.args)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.02) if parameter.ndim == 2 else nn.init.ones_(parameter)
    model.init_buffers()
    model.to(device)
    compute_type = getattr(torch, config.training.mixed_precision_param)
    if ranks > 1:
        policy = MixedPrecisionPolicy(param_dtype=compute_type, reduce_dtype=torch.float32, cast_forward_inputs=False)
        for block in model.layers:
            fully_shard(block, mp_policy=policy)
        fully_shard(model, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.optimizer.lr, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 20))
    seq_len, count = config.training.seq_len, config.training.global_batch_size // ranks
    flat = np.memmap(tokens.folder / "00000.tokens", dtype=np.uint16, mode="r")
    random = np.random.default_rng(dist.get_rank())
    steps = 0

    def batch() -> Tensor:
        starts = random.integers(0, len(flat) - seq_len - 1, count)
        return torch.from_numpy(np.stack([flat[s : s + seq_len + 1] for s in starts]).astype(np.int64)).to(device)

    def step() -> Tensor:
        stretch = batch()
        autocast = ranks == 1 and compute_type != torch.float32
        with torch.autocast(device.type, compute_type, enabled=autocast):
            logits = model(stretch[:, :-1])
        loss = F.cross_entropy(logits.float().flatten(0, 1), stretch[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), config.training.max_norm)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        return loss

    def turn() -> float:
        nonlocal steps
        started = time.perf_counter()
        for _ in range(TURN):
            loss = step()
            steps += 1
            if steps % config.metrics.log_freq == 0:
                float(loss)
        return (time.perf_counter() - started) / TURN

    return turn


def main() -> None:
    ranks = read_ranks(os.environ)
    device = pick_device(ranks)
    root = Path(__file__).parents[1]
    with tempfile.TemporaryDirectory() as folder:
        options = ["--checkpoint.enable=false", f"--job.dump_folder={folder}", *sys.argv[1:]]
        config = load(root / "train_configs" / "debug.toml", options, world_size=ranks.world_size)
        ingredients = preflight(config, ranks, device)
        with process_group(ranks, device):
            start_logging(1)  # no lines on the console
            run = build(config, ingredients, ranks=ranks, device=device)
            [data] = Path(folder, "data_cache").glob("*/index.json")
            contenders = {
                "plain": plain_turns(config, ingredients, TokenStore(data.parent), device),
                "titanlite": titanlite_turns(run),
            }
            seconds: dict[str, list[float]] = {name: [] for name in contenders}
            for _ in range(WARM_UP + TURNS):
                for name, turn in contenders.items():
                    seconds[name].append(turn())
            run.metrics.close()
    if ranks.rank == 0:
        report({name: values[WARM_UP:] for name, values in seconds.items()}, ranks.world_size, device)


def report(seconds: dict[str, list[float]], world_size: int, device: torch.device) -> None:
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    pairs = sorted(p / t for p, t in zip(seconds["plain"], seconds["titanlite"], strict=True))
    quarter = len(pairs) // 4
    print(
        f"{world_size} process(es) on {device.type}, {torch.get_num_threads()} thread(s) each, torch {torch.__version__}"
    )
    for name, median in medians.items():
        print(
            f"  {name:<10} {1000 * median:8.1f} ms/step  ({1000 * min(seconds[name]):.1f} to {1000 * max(seconds[name]):.1f})"
        )
    print(f"  plain / titanlite: {medians['plain'] / medians['titanlite']:.3f}", end="")
    print(f"  (of {len(pairs)} pairs the middle half lies from {pairs[quarter]:.3f} to {pairs[-1 - quarter]:.3f})")


if __name__ == "__main__":
    main()
