"""Loss with bfloat16 weights and moments, rounded stochastically (as titanlite does) and to nearest.

    python benchmarks/bench_rounding.py [--steps 300] [--only NAME] [--record FILE.jsonl]
    python benchmarks/bench_rounding.py --time      # seconds of the optimizer's step alone, of the debug model

Trains the debug model at a tenth of its size on the standard library, and prints the loss on held-out files. Runs have
the same seed, data and schedule; only dtypes and rounding differ.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import torch
from record import add_record_option, record
from torch import Tensor

from titanlite.checks.preflight import preflight
from titanlite.config.load import load
from titanlite.models.registry import resolve_model
from titanlite.optim import build_optimizer
from titanlite.optim.rounding import SlicedAdamW
from titanlite.runtime.allocator import keep_freed_memory
from titanlite.runtime.process_group import pick_device, process_group, read_ranks
from titanlite.schema import Optimizer
from titanlite.tools.ingest.prepare import prepare_text
from titanlite.train import build, finish, train

ROOT = Path(__file__).parents[1]
MOMENTS, WEIGHTS = "optimizer.state_dtype=bfloat16", "training.dtype=bfloat16"
SLOW = "optimizer.beta2=0.999"
VARIANTS: dict[str, tuple[list[str], bool]] = {
    "float32": ([], False),
    "moments, stochastic": ([MOMENTS], False),
    "moments, nearest": ([MOMENTS], True),
    "moments and weights, stochastic": ([MOMENTS, WEIGHTS], False),
    "moments and weights, nearest": ([MOMENTS, WEIGHTS], True),
    "beta2 0.999: float32": ([SLOW], False),
    "beta2 0.999: moments, stochastic": ([SLOW, MOMENTS], False),
    "beta2 0.999: moments, nearest": ([SLOW, MOMENTS], True),
}
"""Options, and whether values are rounded to nearest, by name."""
NOISE = 0.001
"""Change of the loss by float32 rounding alone (docs/numerics.md)."""

OPTIONS = [
    *(f"model.args.{size}" for size in ("dim=128", "n_layers=4", "n_heads=4", "n_kv_heads=2", "hidden_dim=352")),
    *("training.global_batch_size=8", "optimizer.lr=1e-3", "lr_scheduler.warmup_steps=20", "validation.sequences=64"),
    *("checkpoint.enable=false", "metrics.loggers=[]"),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--only", default="")
    parser.add_argument("--time", action="store_true")
    add_record_option(parser)
    arguments = parser.parse_args()
    if arguments.time:
        time_optimizer(arguments.record)
        return
    ranks = read_ranks({})
    device = pick_device(ranks)
    losses: dict[str, float] = {}
    steps = f"training.steps={arguments.steps}", f"validation.freq={arguments.steps}"
    with tempfile.TemporaryDirectory() as folder, process_group(ranks, device):
        for number, (name, (options, nearest)) in enumerate(VARIANTS.items()):
            if arguments.only not in name:
                continue
            places = f"job.dump_folder={folder}", f"job.name=run-{number}"
            overrides = [f"--{option}" for option in (*OPTIONS, *steps, *places, *options)]
            config = load(ROOT / "train_configs" / "debug.toml", overrides)
            run = build(config, preflight(config, ranks, device), ranks=ranks, device=device, prepare_text=prepare_text)
            if nearest:
                assert isinstance(run.optimizer, SlicedAdamW)
                run.optimizer.round = to_nearest
            finish(run, train(run))
            losses[name] = json.loads(run.folder.records("validation").read_text())["loss"]
            print(f"{name:<34} {losses[name]:.4f}", flush=True)
    note(arguments, losses)


def note(arguments: argparse.Namespace, losses: dict[str, float]) -> None:
    """Record losses relative to float32 with the same beta2, where both were trained."""
    for name, loss in losses.items():
        base = "beta2 0.999: float32" if name.startswith("beta2") else "float32"
        if name != base and base in losses:
            more = loss - losses[base]
            record(
                arguments.record, name=f"held-out loss against float32, {arguments.steps} steps, bfloat16 {name}",
                value=more, low=more - NOISE, high=more + NOISE, better="none" if "nearest" in name else "lower",
                aim="" if "nearest" in name else "docs/numerics.md",
            )  # fmt: skip


def time_optimizer(path: Path | None) -> None:
    keep_freed_memory()
    taken: dict[str, list[float]] = {}
    for weights, moments in (("float32", "float32"), ("float32", "bfloat16"), ("bfloat16", "bfloat16")):
        model, args = resolve_model("llama3", "debug", {})
        built = model(args).to(getattr(torch, weights))
        optimizer = build_optimizer(built, Optimizer.model_validate({"state_dtype": moments}), seed=0)
        seconds = []
        for parameter in built.parameters():
            parameter.grad = torch.randn_like(parameter)
        for _ in range(6):
            started = time.perf_counter()
            optimizer.step()
            seconds.append(time.perf_counter() - started)
        name = f"weights {weights}, moments {moments}"
        print(f"{name}: {1000 * statistics.median(seconds[1:]):.0f} ms")
        taken[name] = [1000 * each for each in seconds[1:]]
        what = "the optimizer's step of the debug model"
        record(path, name=f"{what}, {name}", values=taken[name], unit="ms", better="lower")
        base, *others = taken
        if others:
            record(path, name=f"{what}, {name} / float32", pairs=(taken[name], taken[base]), better="lower")


def to_nearest(values: Tensor, bits: Tensor) -> Tensor:
    return values.to(torch.bfloat16)


if __name__ == "__main__":
    main()
