"""What titanlite costs: steps through its whole loop, against a plain PyTorch loop written by hand (plain_llama.py).

    python benchmarks/bench_step.py [--processes 2] [--runs 5] [--dtype bfloat16] [--section.key=value ...]

Both train a Llama of 5.5 M parameters on 8 sequences of 256 tokens. Runs of the two alternate, each in processes of its
own, so that they meet the same noise and neither profits from the other's settings. On several processes the plain loop
uses FSDP2 as its documentation shows it, and in bfloat16 on one process autocast. Options are titanlite's alone:
--compile.enable=true, --parallelism.data_parallel_replicate_degree=2. Prints medians, and the ratio plain / titanlite:
above 1, titanlite is faster.
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
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from record import add_record_option, record

from titanlite.checkpoint.manager import Progress
from titanlite.config.load import load
from titanlite.config.schema import Config
from titanlite.console import start_logging
from titanlite.data.prepare import open_tokens
from titanlite.job import pick_device, process_group, read_ranks
from titanlite.preflight import preflight
from titanlite.train import build, train

TURN, TURNS, WARM_UP = 5, 8, 2
ROOT = Path(__file__).parents[1]
MODEL = {"dim": 256, "n_layers": 6, "n_heads": 4, "n_kv_heads": 2, "hidden_dim": 704, "vocab_size": 2048}
SEQ_LEN, BATCH = 256, 8
SAME = [
    *(f"--model.args.{name}={value}" for name, value in MODEL.items()),
    f"--training.seq_len={SEQ_LEN}",
    f"--training.global_batch_size={BATCH}",
    "--validation.enable=false",
    "--checkpoint.enable=false",
]
Turn = Callable[[], None]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--turn", type=int, default=TURN, help="steps that are timed together")
    parser.add_argument("--turns", type=int, default=TURNS)
    parser.add_argument("--contender", action="store_true", help=argparse.SUPPRESS)
    add_record_option(parser)
    arguments, options = parser.parse_known_args()
    if arguments.contender:
        compete(options, arguments.turn, arguments.turns)
        return
    results: dict[str, list[dict[str, float]]] = {"plain": [], "titanlite": []}
    with tempfile.TemporaryDirectory() as folder:
        places = [f"--job.dump_folder={folder}"]
        ours = [*places, *SAME, f"--training.mixed_precision_param={arguments.dtype}", *options]
        settings = settings_of_plain(load(ROOT / "train_configs" / "debug.toml", [*places, *SAME]), arguments.dtype)
        settings |= {"turn": arguments.turn, "turns": WARM_UP + arguments.turns}
        lengths = [f"--turn={arguments.turn}", f"--turns={arguments.turns}"]
        for _ in range(arguments.runs):
            results["plain"].append(run_plain(settings, arguments.processes))
            results["titanlite"].append(run_titanlite(arguments.processes, [*lengths, *ours]))
    report(results, arguments, options)


def run_titanlite(processes: int, options: Sequence[str]) -> dict[str, float]:
    """Steps of debug.toml with these options, in processes of its own."""
    return launch([__file__, "--contender", *options], processes)


def run_plain(settings: dict[str, Any], processes: int) -> dict[str, float]:
    return launch([str(ROOT / "benchmarks" / "plain_llama.py"), json.dumps(settings)], processes)


def launch(words: Sequence[str], processes: int) -> dict[str, float]:
    """What a script prints at its end: its turns become their median, without the first."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
    command = [sys.executable, *(launcher if processes > 1 else []), *words]
    threads = max(1, len(os.sched_getaffinity(0)) // processes)
    environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
    result = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment, check=True)
    found = json.loads(result.stdout.splitlines()[-1])
    return {"seconds": statistics.median(found["turns"][WARM_UP:]), "mib": found["mib"]}


def settings_of_plain(config: Config, dtype: str) -> dict[str, Any]:
    """For plain_llama.py: the same model, and the same tokens, which are prepared here."""
    from titanlite.data.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(config.data.tokenizer)
    cache = Path(config.job.dump_folder, "data_cache")
    store = open_tokens(config.data.path, data=config.data, tokenizer=tokenizer, cache_folder=cache)
    tokens = str(store.folder / "00000.tokens")
    return {"model": MODEL, "seq_len": SEQ_LEN, "batch": BATCH, "tokens": tokens, "dtype": dtype}


def compete(options: list[str], steps: int, turns: int) -> None:
    """Take turns of a few steps, and print the seconds a step of each and the peak memory."""
    ranks = read_ranks(os.environ)
    config = load(ROOT / "train_configs" / "debug.toml", options, world_size=ranks.world_size)
    turn = titanlite_turns(config, steps)
    seconds = []
    for _ in range(WARM_UP + turns):
        started = time.perf_counter()
        turn()
        seconds.append((time.perf_counter() - started) / steps)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
    dist.barrier()
    if ranks.rank == 0:
        print(json.dumps({"turns": seconds, "mib": memory}), flush=True)
    os._exit(0)


def titanlite_turns(config: Config, steps: int) -> Turn:
    """Steps through titanlite's own loop."""
    ranks = read_ranks(os.environ)
    device = pick_device(ranks)
    ingredients = preflight(config, ranks, device)
    process_group(ranks, device).__enter__()
    start_logging(1)  # no lines on standard output
    made = build(config, ingredients, ranks=ranks, device=device)
    progress = Progress()

    def turn() -> None:
        nonlocal progress
        train(replace(made, steps=progress.step + steps, progress=progress))
        progress = Progress(progress.step + steps, progress.samples + steps * config.training.global_batch_size)

    return turn


def report(results: dict[str, list[dict[str, float]]], arguments: argparse.Namespace, options: list[str]) -> None:
    how = " ".join([f"{arguments.processes} process(es), {arguments.dtype}", *options])
    print(f"{how}; torch {torch.__version__}, {arguments.runs} runs each")
    for name, runs in results.items():
        times = sorted(1000 * run["seconds"] for run in runs)
        memory = statistics.median(run["mib"] for run in runs)
        spread = f"({times[0]:.1f} to {times[-1]:.1f})"
        print(f"  {name:<10} {statistics.median(times):7.1f} ms/step {spread}, {memory:.0f} MiB")
    aim_of_time = AIMS.get((arguments.processes, arguments.dtype), "")
    for what, key, aim in (("time of a step", "seconds", aim_of_time), ("peak memory", "mib", ">= 1")):
        plain, ours = ([run[key] for run in runs] for runs in results.values())
        pairs = [a / b for a, b in zip(plain, ours, strict=True)]
        ratio = statistics.median(plain) / statistics.median(ours)
        print(f"  plain / titanlite, {what}: {ratio:.3f} (pair by pair {min(pairs):.3f} to {max(pairs):.3f})")
        record(
            arguments.record, name=f"plain / titanlite, {what}, {how}", pairs=(plain, ours), better="higher", aim=aim
        )


AIMS = {(1, "float32"): ">= 1.00", (1, "bfloat16"): ">= 1.00", (2, "float32"): ">= 1.05"}


if __name__ == "__main__":
    main()
