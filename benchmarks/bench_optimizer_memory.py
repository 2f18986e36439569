"""Memory and time of ways to keep the optimizer small, side by side, in one CPU process.

    python benchmarks/bench_optimizer_memory.py
    python benchmarks/bench_optimizer_memory.py --only AdamW --model.args.dim=512 --training.global_batch_size=8

State: bytes of moments for each parameter. Peak: peak memory of PyTorch's allocator after the first step. Plan: the
same, as `titanlite plan` predicts it. First: seconds of the first step, including compilation unless it is cached.
Step: median CPU time of later steps, in one thread. Further options are the config's.
"""

import argparse
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from measured_memory import measure, train  # scripts beside this one
from plan_accuracy import DEBUG, planned
from record import add_record_option, record

from titanlite.config.load import load
from titanlite.models.base import unique_parameters
from titanlite.schema import Config
from titanlite.tools.plan.estimate import model_of
from titanlite.tools.plan.hardware import find_hardware

MIB = 2**20
SIZES = [
    "--training.seq_len=128", "--training.global_batch_size=1", "--training.mixed_precision_param=float32",
    "--training.max_norm=0", "--model.args.dim=256", "--model.args.n_layers=12", "--model.args.n_heads=4",
    "--model.args.n_kv_heads=4", "--model.args.hidden_dim=768", "--model.args.vocab_size=2048",
]  # fmt: skip
IN_BACKWARD = "--optimizer.in_backward=true"
VARIANTS = {
    "AdamW": [],
    "AdamW, bfloat16 moments": ["--optimizer.state_dtype=bfloat16"],
    "AdamW8bit": ["--optimizer.name=torchao.optim.AdamW8bit"],
    "AdamW4bit": ["--optimizer.name=torchao.optim.AdamW4bit"],
    "AdamW, in backward": [IN_BACKWARD],
    "AdamW8bit, in backward": ["--optimizer.name=torchao.optim.AdamW8bit", IN_BACKWARD],
}


class Clock:
    """Clock of steps, in the place of the recorder that `measured_memory.train` takes."""

    def __init__(self) -> None:
        self.seconds: list[tuple[float, float]] = []
        """Wall time and CPU time of each step."""

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        started = time.perf_counter(), time.process_time()
        yield
        self.seconds.append((time.perf_counter() - started[0], time.process_time() - started[1]))


def seconds_of_steps(config: Config, steps: int) -> list[tuple[float, float]]:
    """Time steps. Call it in a process of its own: it sets one thread."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=0, world_size=1)
        clock = Clock()
        train(config, clock, 0, 1, 1 + steps)  # pyright: ignore[reportArgumentType]
        dist.destroy_process_group()
    return clock.seconds


def predicted_peak(config: Config) -> int:
    """Plan the peak memory. Call it in a process of its own: it sets one thread."""
    torch.set_num_threads(1)
    return planned(config, 1, replace(find_hardware("H100"), measured=True), 1).peak


@dataclass
class Measured:
    """Bytes and seconds of one variant."""

    state: float
    """Bytes for each parameter."""
    peak: int
    planned: int
    first: float
    steps: list[float]
    """CPU time."""


def measured(config: Config, steps: int) -> Measured:
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, spawn, max_tasks_per_child=1) as pool:
        first, *seconds = pool.submit(seconds_of_steps, config, steps).result()
        plan = pool.submit(predicted_peak, config).result()
    [found] = measure(config, processes=1)
    model_cls, args = model_of(config)
    with torch.device("meta"):
        parameters = sum(parameter.numel() for _, parameter in unique_parameters(model_cls(args)))
    return Measured(found.breakdown["optimizer"] / parameters, found.peak, plan, first[0], [cpu for _, cpu in seconds])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="variants whose name contains this")
    parser.add_argument("--steps", type=int, default=8, help="after the first")
    add_record_option(parser)
    arguments, overrides = parser.parse_known_args()
    print("| | state, bytes a parameter | peak, MiB | plan, MiB | first, s | step, CPU ms |")
    print("|---|---|---|---|---|---|", flush=True)
    base: Measured | None = None
    for name, options in VARIANTS.items():
        if arguments.only not in name:
            continue
        result = measured(load(DEBUG, [*SIZES, *options, *overrides], world_size=1), arguments.steps)
        print(
            f"| {name} | {result.state:.2f} | {result.peak / MIB:.1f} | {result.planned / MIB:.1f} "
            f"| {result.first:.1f} | {1000 * statistics.median(result.steps):.0f} |",
            flush=True,
        )
        base = result if name == "AdamW" else base
        case = " ".join([name, *overrides])
        if base:
            times = [seconds / statistics.median(base.steps) for seconds in result.steps]
            record(arguments.record, name=f"peak memory / AdamW, {case}", value=result.peak / base.peak, better="lower")
            record(arguments.record, name=f"CPU time of a step / AdamW, {case}", values=times, better="lower")
        accuracy = result.planned / result.peak
        record(arguments.record, name=f"planned / measured peak, {case}", value=accuracy, better="none", aim="1 +- 0.1")


if __name__ == "__main__":
    main()
