"""Best learning rate at several widths and depths, with and without a parametrization that transfers it.

    python benchmarks/transfer.py --results FILE.jsonl [--rules standard completep] [--optimizer AdamW]
        [--widths 64 128 256 512] [--depths 2 4 8 16] [--seeds 1] [--steps 100] [--powers -11 -4]
        [--record FILE.jsonl]

Trains models of bytes on the standard library's source: every width at the base depth, and every depth at the base
width. Then prints all results of the file with this optimizer and number of steps: the loss (the mean of the last
fifth of the steps, over seeds) for each learning rate of a grid of powers of two, and how many grid steps the best one
is away from that of the base size. Runs that are in the file are not repeated, so an interrupted sweep resumes, and a
sweep may be made of several calls. A rate with fewer seeds than others of its size is not shown. One thread.

At the base width, mup is standard, and at the base depth, completep is mup: those runs have the same bits.
"""

import argparse
import json
import math
import statistics
import tempfile
from pathlib import Path

import torch
from record import add_record_option, record

import titanlite

BASE_WIDTH, BASE_DEPTH = 64, 2
RULES = {
    "standard": {},
    "mup": {"optimizer.parametrization": "mup", "optimizer.base_width": BASE_WIDTH},
    "completep": {
        "optimizer.parametrization": "completep",
        "optimizer.base_width": BASE_WIDTH,
        "optimizer.base_depth": BASE_DEPTH,
    },
}
OPTIONS = {
    "data.tokenizer": "bytes",
    "validation.enable": False,
    "checkpoint.enable": False,
    "metrics.loggers": [],
    "metrics.log_freq": 1,
    "training.seq_len": 64,
    "training.global_batch_size": 8,
    "guard.nonfinite": "stop",
}


def options_of(rule: str, optimizer: str, width: int, depth: int) -> dict[str, object]:
    """Return the options of a size: heads of 16, feed-forward layers three times as wide as the model."""
    shape = {
        "dim": width,
        "n_layers": depth,
        "n_heads": width // 16,
        "n_kv_heads": width // 16,
        "hidden_dim": 3 * width,
    }
    of_muon = {"optimizer.name": "Muon", "optimizer.args": {"ns_dtype": "float32"}} if optimizer == "Muon" else {}
    return OPTIONS | {f"model.args.{name}": value for name, value in shape.items()} | RULES[rule] | of_muon


def train(options: dict[str, object], *, rate: float, seed: int, steps: int, folder: str) -> float:
    """Return the mean loss of the last fifth of the steps; infinity if it is not finite."""
    run = {"optimizer.lr": rate, "debug.seed": seed, "training.steps": steps, "lr_scheduler.warmup_steps": steps // 10}
    with tempfile.TemporaryDirectory(dir=folder) as name:
        places = {"job.dump_folder": name, "data.cache_folder": f"{folder}/cache"}
        try:
            records = titanlite.run_training(titanlite.load_config("debug", options | run | places))
        except titanlite.RunStopped:
            return math.inf
    losses = [math.inf if loss is None else loss for loss in records.column("loss")]
    return statistics.mean(losses[-steps // 5 :])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--rules", nargs="+", choices=RULES, default=["standard", "completep"])
    parser.add_argument("--optimizer", choices=["AdamW", "Muon"], default="AdamW")
    parser.add_argument("--widths", nargs="+", type=int, default=[64, 128, 256, 512])
    parser.add_argument("--depths", nargs="+", type=int, default=[2, 4, 8, 16])
    parser.add_argument("--powers", nargs=2, type=int, default=[-11, -4], help="least and greatest power of two")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--steps", type=int, default=100)
    add_record_option(parser)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rates = [2.0**power for power in range(arguments.powers[0], arguments.powers[1] + 1)]
    widths = [(width, BASE_DEPTH) for width in arguments.widths]
    sizes = list(dict.fromkeys([*widths, *((BASE_WIDTH, depth) for depth in arguments.depths)]))
    lines = arguments.results.read_text().splitlines() if arguments.results.exists() else []
    done = {tuple(key): loss for key, loss in map(json.loads, lines)}
    with tempfile.TemporaryDirectory() as folder, arguments.results.open("a") as file:
        for size in sorted(sizes, key=math.prod):
            for rule in arguments.rules:
                for rate in rates:
                    for seed in range(arguments.seeds):
                        key = (rule, arguments.optimizer, *size, rate, seed, arguments.steps)
                        if key in done:
                            continue
                        options = options_of(rule, arguments.optimizer, *size)
                        done[key] = train(options, rate=rate, seed=seed, steps=arguments.steps, folder=folder)
                        file.write(json.dumps([key, done[key]]) + "\n")
                        file.flush()
    losses: dict[tuple[str, int, int], dict[float, list[float]]] = {}
    for (rule, optimizer, *size, rate, _, steps), loss in done.items():
        if (optimizer, steps) == (arguments.optimizer, arguments.steps):
            losses.setdefault((rule, *size), {}).setdefault(rate, []).append(loss)
    rates = sorted({rate for of_size in losses.values() for rate in of_size})
    print(
        "| rule | width | depth | seeds |"
        + "".join(f" 2^{math.log2(rate):.0f} |" for rate in rates)
        + " best, from the base |"
    )
    print("|---" * (len(rates) + 5) + "|")
    best: dict[tuple[str, int, int], int] = {}
    for rule, width, depth in sorted(losses, key=lambda key: (key[0], key[2], key[1])):
        of_size = losses[rule, width, depth]
        seeds = max(map(len, of_size.values()))
        means = {rate: statistics.mean(of_size[rate]) for rate in rates if len(of_size.get(rate, [])) == seeds}
        best[rule, width, depth] = rates.index(min(means, key=means.__getitem__))
        base = best.get((rule, BASE_WIDTH, BASE_DEPTH), best.get(("completep", BASE_WIDTH, BASE_DEPTH), 0))
        away = best[rule, width, depth] - base
        shown = "".join(f" {means[rate]:.3f} |" if rate in means else " |" for rate in rates)
        print(f"| {rule} | {width} | {depth} | {seeds} |{shown} {away:+d} |")
        name = f"{arguments.optimizer}, {rule}, width {width}, depth {depth}: grid steps of the best rate"
        record(arguments.record, name=name, value=away)


if __name__ == "__main__":
    main()
