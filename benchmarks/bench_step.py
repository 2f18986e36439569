"""What titanlite costs: steps of debug.toml through its whole loop, against a plain PyTorch loop written by hand.

    python benchmarks/bench_step.py [--processes 2] [--runs 5] [--section.key=value ...]

Both train the same model on batches of the same size. Runs of the two alternate, each in a process of its own, so that
they meet the same noise and neither profits from the other's settings. On several processes the plain loop uses FSDP2
as its documentation shows. Prints the medians, and the ratio plain / titanlite: above 1, titanlite is faster.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
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
from titanlite.data.prepare import open_tokens
from titanlite.data.tokens import TokenStore
from titanlite.job import pick_device, process_group, read_ranks
from titanlite.preflight import Ingredients, preflight
from titanlite.train import build, train

TURN, TURNS, WARM_UP = 5, 8, 2
ROOT = Path(__file__).parents[1]
Turn = Callable[[], None]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--contender", choices=CONTENDERS, help=argparse.SUPPRESS)
    arguments, options = parser.parse_known_args()
    if arguments.contender:
        compete(arguments.contender, options)
        return
    results: dict[str, list[dict[str, float]]] = {name: [] for name in CONTENDERS}
    with tempfile.TemporaryDirectory() as folder:
        options = [f"--job.dump_folder={folder}", "--checkpoint.enable=false", *options]
        for _ in range(arguments.runs):
            for name in CONTENDERS:
                results[name].append(run(name, arguments.processes, options))
    report(results, arguments.processes)


def run(contender: str, processes: int, options: list[str]) -> dict[str, float]:
    """One run in processes of its own."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
    command = [sys.executable, *(launcher if processes > 1 else []), __file__, "--contender", contender, *options]
    threads = max(1, len(os.sched_getaffinity(0)) // processes)
    environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
    result = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment, check=True)
    return json.loads(result.stdout.splitlines()[-1])


def compete(contender: str, options: list[str]) -> None:
    """Take turns of a few steps, and print the median seconds a step and the peak memory."""
    ranks = read_ranks(os.environ)
    config = load(ROOT / "train_configs" / "debug.toml", options, world_size=ranks.world_size)
    device = pick_device(ranks)
    ingredients = preflight(config, ranks, device)
    seconds = []
    turn = CONTENDERS[contender](config, ingredients, device)
    for _ in range(WARM_UP + TURNS):
        started = time.perf_counter()
        turn()
        seconds.append((time.perf_counter() - started) / TURN)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
    dist.barrier()
    if ranks.rank == 0:
        print(json.dumps({"seconds": statistics.median(seconds[WARM_UP:]), "mib": memory}), flush=True)
    os._exit(0)


def titanlite_turns(config: Config, ingredients: Ingredients, device: torch.device) -> Turn:
    """Steps through titanlite's own loop."""
    ranks = read_ranks(os.environ)
    process_group(ranks, device).__enter__()
    start_logging(1)  # no lines on standard output
    run = build(config, ingredients, ranks=ranks, device=device)
    progress = Progress()

    def turn() -> None:
        nonlocal progress
        train(replace(run, steps=progress.step + TURN, progress=progress))
        progress = Progress(progress.step + TURN, progress.samples + TURN * config.training.global_batch_size)

    return turn


def plain_turns(config: Config, ingredients: Ingredients, device: torch.device) -> Turn:
    """Steps of a loop as one would write it by hand, with only the model and the tokens taken from titanlite."""
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    ranks = dist.get_world_size()
    cache = Path(config.job.dump_folder, "data_cache")
    tokens = open_tokens(config.data.path, data=config.data, tokenizer=ingredients.tokenizer, cache_folder=cache)
    model = plain_model(config, ingredients, device, ranks)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.optimizer.lr, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 20))
    compute_type = getattr(torch, config.training.mixed_precision_param)
    batch = plain_batches(config, tokens, device, ranks)
    steps = 0

    def turn() -> None:
        nonlocal steps
        for _ in range(TURN):
            stretch = batch()
            with torch.autocast(device.type, compute_type, enabled=ranks == 1 and compute_type != torch.float32):
                logits = model(stretch[:, :-1])
            loss = F.cross_entropy(logits.float().flatten(0, 1), stretch[:, 1:].flatten())
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), config.training.max_norm)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            steps += 1
            if steps % config.metrics.log_freq == 0:
                loss.item()

    return turn


def plain_model(config: Config, ingredients: Ingredients, device: torch.device, ranks: int) -> nn.Module:
    torch.manual_seed(0)
    model: Any = ingredients.model(ingredients.args)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.02) if parameter.ndim == 2 else nn.init.ones_(parameter)
    model.init_buffers()
    model.to(device)
    if ranks > 1:
        compute_type = getattr(torch, config.training.mixed_precision_param)
        policy = MixedPrecisionPolicy(param_dtype=compute_type, reduce_dtype=torch.float32, cast_forward_inputs=False)
        for block in model.layers:
            fully_shard(block, mp_policy=policy)
        fully_shard(model, mp_policy=policy)
    return model


def plain_batches(config: Config, tokens: TokenStore, device: torch.device, ranks: int) -> Callable[[], Tensor]:
    seq_len, count = config.training.seq_len, config.training.global_batch_size // ranks
    flat = np.memmap(tokens.folder / "00000.tokens", dtype=np.uint16, mode="r")
    random = np.random.default_rng(dist.get_rank())

    def batch() -> Tensor:
        starts = random.integers(0, len(flat) - seq_len - 1, count)
        return torch.from_numpy(np.stack([flat[s : s + seq_len + 1] for s in starts]).astype(np.int64)).to(device)

    return batch


CONTENDERS = {"plain": plain_turns, "titanlite": titanlite_turns}


def report(results: dict[str, list[dict[str, float]]], processes: int) -> None:
    print(f"{processes} process(es), torch {torch.__version__}, {len(results['plain'])} runs each")
    for name, runs in results.items():
        times = sorted(1000 * run["seconds"] for run in runs)
        memory = statistics.median(run["mib"] for run in runs)
        spread = f"({times[0]:.1f} to {times[-1]:.1f})"
        print(f"  {name:<10} {statistics.median(times):7.1f} ms/step {spread}, {memory:.0f} MiB")
    pairs = [p["seconds"] / t["seconds"] for p, t in zip(results["plain"], results["titanlite"], strict=True)]
    plain, ours = (statistics.median(run["seconds"] for run in runs) for runs in results.values())
    print(f"  plain / titanlite: {plain / ours:.3f} (pair by pair {min(pairs):.3f} to {max(pairs):.3f})")


if __name__ == "__main__":
    main()
