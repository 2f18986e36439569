"""What profiling costs: steps without [profiling], with it between windows, and turns of steps with one window each.

    python benchmarks/bench_profile.py [--processes 2] [--runs 5] [--section.key=value ...]

The model and the turns are those of bench_step.py. Each contender is in processes of its own, and they take turns.
Prints the ratio off / between, which is 1 if hooks cost nothing outside a window, and the seconds that a window adds:
of its one step, and to write the trace.
"""

import argparse
import logging
import os
import statistics
import tempfile
from dataclasses import replace

import torch
from bench_step import ROOT, SAME, TURN, TURNS, WARM_UP, Turn, alternate
from plain_llama import take_turns
from record import add_record_option, ratios, record

from titanlite.checkpoint.manager import Progress
from titanlite.checks.preflight import preflight
from titanlite.config.load import load
from titanlite.runtime.console import LOGGER
from titanlite.runtime.process_group import pick_device, process_group, read_ranks
from titanlite.schema import Config
from titanlite.tools.ingest.prepare import prepare_text
from titanlite.train import build, train

STEPS = 1_000_000
OPTIONS = {
    "off": [],
    "between": ["--profiling.enable_profiling=true", f"--profiling.profile_freq={STEPS}"],
    "window": ["--profiling.enable_profiling=true", f"--profiling.profile_freq={TURN}"],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--contender", action="store_true", help=argparse.SUPPRESS)
    add_record_option(parser)
    arguments, options = parser.parse_known_args()
    if arguments.contender:
        compete(options)
        return
    runs = []
    with tempfile.TemporaryDirectory() as folder:
        same = [f"--job.dump_folder={folder}", f"--training.steps={STEPS}", *SAME, *options]
        words = {
            name: [__file__, "--contender", f"--job.name={name}", *same, *added] for name, added in OPTIONS.items()
        }
        runs = [alternate(words, arguments.processes, TURNS) for _ in range(arguments.runs)]
    how = " ".join([f"{arguments.processes} process(es)", *options])
    between = [statistics.median(ratios(run["off"].seconds, run["between"].seconds)) for run in runs]
    print(f"{how}; torch {torch.__version__}, {arguments.runs} runs of {TURNS} turns of {TURN} steps")
    print(f"  off / between windows: {statistics.median(between):.3f} (runs {min(between):.3f} to {max(between):.3f})")
    record(arguments.record, name=f"off / between windows, {how}", values=between, better="higher", aim=">= 0.99")
    added = [
        TURN * statistics.median(a - b for a, b in zip(run["window"].seconds, run["off"].seconds, strict=True))
        for run in runs
    ]
    print(f"  a window of one step adds {statistics.median(added):.2f} s (runs {min(added):.2f} to {max(added):.2f})")
    record(arguments.record, name=f"seconds of a window, {how}", values=added, unit="s", better="lower")


def compete(options: list[str]) -> None:
    ranks = read_ranks(os.environ)
    config = load(ROOT / "train_configs" / "debug.toml", options, world_size=ranks.world_size)
    turn = turns_of(config)
    turn()
    if ranks.rank == 0:
        print("{}", flush=True)
    take_turns(turn, WARM_UP + TURNS, TURN, ranks.rank, ranks.world_size)


def turns_of(config: Config) -> Turn:
    """Turns of steps through titanlite's own loop, all with the same profiler. A window ends with its turn."""
    ranks = read_ranks(os.environ)
    device = pick_device(ranks)
    process_group(ranks, device).__enter__()
    logging.getLogger(LOGGER).setLevel(logging.ERROR)  # standard output is for the answers
    resolved = preflight(config, ranks, device)
    made = build(config, resolved, ranks=ranks, device=device, prepare_text=prepare_text)
    progress = Progress()

    def turn() -> None:
        nonlocal progress
        run = replace(made, steps=progress.step + TURN, progress=progress)
        vars(run)["observers"] = made.observers
        train(run)
        for observer in made.observers:
            observer.close()
        progress = Progress(progress.step + TURN, progress.samples_seen + TURN * config.training.global_batch_size)

    return turn


if __name__ == "__main__":
    main()
