"""The memory ladder: what each rung saves and what it costs, side by side.

    python benchmarks/memory_ladder.py [--runs 3] [--only bfloat16] [--record FILE.jsonl]

Measured: the most that PyTorch's allocator has given out at once on one of 2 CPU processes that train a small Llama
(measured_memory.py), and the time of a step (titanlite's contender of bench_step.py, the two by turns), each against
the first rung.
Planned: the device's peak for Llama 3 8B on 8 H100s, sequences of 8,192, two a GPU. Rungs are not added up but for the
last.
"""

import argparse
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path

import bench_step
from measured_memory import measure  # scripts beside this one
from plan_accuracy import planned
from record import add_record_option, ratios, record

from titanlite.config.load import load
from titanlite.tools.plan.hardware import find_hardware

ROOT = Path(__file__).parents[1]
GIB, MIB = 2**30, 2**20
PROCESSES = 2
SMALL = [
    "--training.seq_len=256", "--training.global_batch_size=4", "--model.args.dim=256", "--model.args.n_layers=8",
    "--model.args.n_heads=4", "--model.args.n_kv_heads=2", "--model.args.hidden_dim=768",
]  # fmt: skip
KEEP = ["--parallelism.fsdp_reshard_after_forward=never"]
BACKWARD = ["--optimizer.in_backward=true", "--training.max_norm=0.0"]
RUNGS: dict[str, list[str]] = {
    "gathered parameters are kept": KEEP,
    "gathered again for backward (the default)": [],
    "half a batch at a time": ["--training.local_batch_size=1"],
    "AC selective, op": ["--activation_checkpoint.mode=selective"],
    "AC selective, every 2nd block": [
        "--activation_checkpoint.mode=selective", "--activation_checkpoint.selective_ac_option=2"
    ],
    "AC full": ["--activation_checkpoint.mode=full"],
    "moments in bfloat16": ["--optimizer.state_dtype=bfloat16"],
    "moments in 8 bits": ["--optimizer.name=torchao.optim.AdamW8bit"],
    "updates in backward": BACKWARD,
    "weights and moments in bfloat16": ["--optimizer.state_dtype=bfloat16", "--training.dtype=bfloat16"],
    "moments on disk": ["--offload.optimizer=disk"],
    "CPU offload": ["--training.enable_cpu_offload=true"],
    "AC full, moments in bfloat16, updates in backward": [
        "--activation_checkpoint.mode=full", "--optimizer.state_dtype=bfloat16", *BACKWARD
    ],
}  # fmt: skip
WHOLE_LOGITS = "whole logits (not titanlite's loss)"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3, help="of each rung")
    parser.add_argument("--only", default="", help="rungs whose name contains this")
    add_record_option(parser)
    arguments = parser.parse_args()
    print("| rung | measured MiB | of the first | step, of the first | planned 8B on 8, GiB |")
    print("|---|---|---|---|---|", flush=True)
    for line in rows(arguments.runs, arguments.only, arguments.record):
        print(line, flush=True)


def rows(runs: int, only: str, path: Path | None) -> Iterator[str]:
    (first, base), *_ = RUNGS.items()
    lowest = peak(base)
    yield f"| {first} | {lowest / MIB:.1f} | 1 | 1 | {plan_of_8b(base)} |"
    whole = [f"--training.loss={ROOT}/benchmarks/plan_accuracy.py:logits_in_full", *KEEP]
    for name, options in {**RUNGS, WHOLE_LOGITS: whole}.items():
        if options is base or only not in name:
            continue
        measured = peak(options)
        share = measured / lowest
        times = [step_ratio(options, base) for _ in range(runs)]
        cost = statistics.median(times) if times else float("nan")
        yield f"| {name} | {measured / MIB:.1f} | {share:.2f} | {cost:.2f} | {plan_of_8b(options)} |"
        record(path, name=f"memory ladder, peak of {name} / {first}", value=share, better="lower")
        if times:
            record(path, name=f"memory ladder, step of {name} / {first}", values=times, better="lower")


def peak(options: list[str]) -> int:
    """Bytes, of the rank that has most."""
    with tempfile.TemporaryDirectory() as folder:
        words = [*SMALL, *options, f"--offload.path={folder}"] if on_disk(options) else [*SMALL, *options]
        config = load(ROOT / "train_configs" / "debug.toml", words, world_size=PROCESSES)
        return max(rank.peak for rank in measure(config, processes=PROCESSES))


def on_disk(options: list[str]) -> bool:
    return any(option.startswith("--offload") for option in options)


def step_ratio(options: list[str], base: list[str]) -> float:
    """Of the time of a step: both are there at once, and take turns."""
    with tempfile.TemporaryDirectory() as folder:
        places = ["--checkpoint.enable=false", "--validation.enable=false", f"--data.cache_folder={folder}/data"]
        words = {
            name: bench_step.titanlite_words(["--turn=3", f"--job.dump_folder={folder}/{name}", *places, *SMALL, *rung])
            for name, rung in (("rung", options), ("base", base))
        }
        found = bench_step.alternate(words, PROCESSES, bench_step.TURNS)
        return statistics.median(ratios(found["rung"].seconds, found["base"].seconds))


def plan_of_8b(options: list[str]) -> str:
    """GiB on each GPU, bfloat16 compute."""
    sizes = ["--training.global_batch_size=16", "--training.local_batch_size=2", "--data.tokenizer=bytes"]
    none = ["--activation_checkpoint.mode=none"]
    config = load(ROOT / "train_configs" / "llama3_8b.toml", [*sizes, *none, *options], world_size=8)
    return f"{planned(config, 8, find_hardware('H100'), 8).peak / GIB:.1f}"


if __name__ == "__main__":
    main()
