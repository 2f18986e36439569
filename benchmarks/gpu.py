"""What one GPU reaches: tokens/s, MFU and peak memory of Llama 3 by technique, and the largest model that fits.

    python benchmarks/gpu.py [--only 3B] [--steps 8] [--record FILE.jsonl]

Each case trains in a process of its own, through titanlite's own build and step, on tokens of Python's standard
library. MFU is of 989 dense TFLOP/s (H100 and H200, bfloat16) or of the rate in the table of devices, and again of the
rate that a large matmul reaches on this card in this call: the second shows how much of the loss is the card's.
Ratios are of each case to the first of its model and sequence length.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from record import add_record_option, record

from titanlite.checks.preflight import preflight
from titanlite.config.load import load
from titanlite.runtime.console import start_logging
from titanlite.runtime.hardware import hardware_of
from titanlite.runtime.process_group import pick_device, process_group, read_ranks
from titanlite.step import train_step
from titanlite.techniques.float8.layers import weight_scaler
from titanlite.tools.ingest.prepare import prepare_text
from titanlite.train import build

ROOT = Path(__file__).parents[1]
WARM_UP = 4
GIB = 2**30

COMPILE = ["--compile.enable=true"]
FLOAT8 = [*COMPILE, "--quantize.linear.float8.enable=true"]
ROWWISE = [*FLOAT8, "--quantize.linear.float8.recipe_name=rowwise"]
WHOLE_LOGITS = [f"--training.loss={ROOT}/benchmarks/plan_accuracy.py:logits_in_full"]


def ac(mode: str) -> list[str]:
    return [f"--activation_checkpoint.mode={mode}"]


VARIANTS: dict[str, list[str]] = {
    "eager": ac("selective"),
    "compile": [*ac("selective"), *COMPILE],
    "compile, float8 tensorwise": [*ac("selective"), *FLOAT8],
    "compile, float8 rowwise": [*ac("selective"), *ROWWISE],
    "compile, no AC": [*ac("none"), *COMPILE],
    "compile, full AC": [*ac("full"), *COMPILE],
    "compile, whole logits": [*ac("selective"), *COMPILE, *WHOLE_LOGITS],
}
"""The first is what the others are measured against."""

LADDER: dict[str, list[str]] = {
    "float32 states": [],
    "bfloat16 moments": ["--optimizer.state_dtype=bfloat16"],
    "in backward": ["--optimizer.in_backward=true", "--training.max_norm=0.0"],
    "bfloat16 weights and moments": ["--optimizer.state_dtype=bfloat16", "--training.dtype=bfloat16"],
    "moments on disk": ["--offload.optimizer=disk"],
    "all offloaded": ["--training.enable_cpu_offload=true"],
}
"""8B on one card, each with full recomputation, compiled."""


@dataclass(frozen=True)
class Case:
    flavor: str
    seq_len: int
    batch: int
    name: str
    options: list[str]

    @property
    def title(self) -> str:
        return f"{self.flavor}, {self.batch} x {self.seq_len}, {self.name}"

    @property
    def words(self) -> list[str]:
        return [
            f"--model.flavor={self.flavor}",
            f"--training.seq_len={self.seq_len}",
            f"--training.global_batch_size={self.batch}",
            f"--training.local_batch_size={self.batch}",
            "--model.args.vocab_size=128256",
            "--checkpoint.enable=false",
            "--metrics.loggers=[]",
            "--training.mixed_precision_param=bfloat16",
            *self.options,
        ]


def cases() -> list[Case]:
    found = [
        Case(flavor, seq_len, batch, name, options)
        for flavor, seq_len, batch in (("1B", 4096, 4), ("1B", 8192, 2), ("3B", 4096, 2), ("3B", 8192, 1))
        for name, options in VARIANTS.items()
    ]
    ladder = [Case("8B", 4096, 1, name, [*ac("full"), *COMPILE, *options]) for name, options in LADDER.items()]
    fp8 = ac("none")
    layers = "--model.args.n_layers=6"
    shaped = [
        Case("8B", 8192, 1, f"6 layers, {name}", [*fp8, layers, *options])
        for name, options in (("compile", COMPILE), ("float8 tensorwise", FLOAT8), ("float8 rowwise", ROWWISE))
    ]
    return found + shaped + ladder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="cases whose title contains this")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--case", help=argparse.SUPPRESS)
    parser.add_argument("--list", action="store_true", help="the cases, and nothing else")
    add_record_option(parser)
    arguments = parser.parse_args()
    chosen = [case for case in cases() if arguments.only in case.title]
    if arguments.list:
        print("\n".join(case.title for case in chosen))
    elif arguments.case:
        [case] = [case for case in cases() if case.title == arguments.case]
        print(json.dumps(measure(case.words, arguments.steps)), flush=True)
        os._exit(0)
    elif not torch.cuda.is_available():
        sys.exit("there is no GPU that torch can use")
    else:
        report(chosen, arguments.steps, arguments.record)


def report(chosen: list[Case], steps: int, path: Path | None) -> None:
    hardware = hardware_of(torch.device("cuda", 0))
    reached = matmul_rate()
    peak = hardware.bf16_flops if hardware else None
    name = torch.cuda.get_device_name()
    stated = f"{peak / 1e12:.0f} dense TFLOP/s stated" if peak else "no rate known"
    print(f"{name}, torch {torch.__version__}; bfloat16 {stated}, {reached / 1e12:.0f} reached by 8192^3")
    record(path, name=f"bfloat16 matmul, {name}", value=reached / 1e12, unit="TFLOP/s", better="higher")
    print("| case | tokens/s | TFLOP/s | MFU | of reached | peak GiB | to the first |")
    print("|---|---|---|---|---|---|---|")
    first: dict[tuple[str, int], float] = {}
    for case in chosen:
        found = run(case, steps)
        if isinstance(found, str):
            print(f"| {case.title} | {found} |||||||", flush=True)
            continue
        speed, flops = found["tokens"] / statistics.median(found["seconds"]), found["flops_per_token"]
        reference = first.setdefault((case.flavor, case.seq_len), speed)
        mfu = f"{100 * speed * flops / peak:.1f} %" if peak else "n/a"
        print(
            f"| {case.title} | {speed:,.0f} | {speed * flops / 1e12:.0f} | {mfu} "
            f"| {100 * speed * flops / reached:.1f} % | {found['peak'] / GIB:.1f} | {speed / reference:.2f} |",
            flush=True,
        )
        speeds = [found["tokens"] / seconds for seconds in found["seconds"]]
        ratio = [it / reference for it in speeds]
        record(path, name=f"{case.title}: tokens/s", values=speeds, unit="tokens/s", better="higher")
        record(path, name=f"{case.title}: speed to the first", values=ratio, better="higher")
        record(path, name=f"{case.title}: peak memory", value=found["peak"] / GIB, unit="GiB", better="lower")
        if peak:
            shares = [100 * it * flops / peak for it in speeds]
            record(path, name=f"{case.title}: MFU", values=shares, unit="%", better="higher")


def run(case: Case, steps: int) -> dict[str, Any] | str:
    """What a process of its own measures, or in words why it cannot."""
    command = [sys.executable, __file__, f"--case={case.title}", f"--steps={steps}"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=900)
    if result.returncode == 0:
        return json.loads(result.stdout.splitlines()[-1])
    if "out of memory" in result.stderr.lower():
        return "out of memory"
    return f"failed: {result.stderr.strip().splitlines()[-1][:120] if result.stderr.strip() else result.returncode}"


def measure(options: list[str], steps: int) -> dict[str, Any]:
    """Seconds of each step after the warm-up, and the peak of allocated bytes in them."""
    ranks = read_ranks({})
    device = pick_device(ranks)
    with tempfile.TemporaryDirectory() as folder:
        options = [f"--job.dump_folder={folder}", *options]
        config = load(ROOT / "train_configs" / "llama3_8b.toml", options, world_size=1)
        start_logging(1)
        resolved = preflight(config, ranks, device)
        with process_group(ranks, device):
            made = build(config, resolved, ranks=ranks, device=device, prepare_text=prepare_text)
            scale_weights = weight_scaler(made.model, config.quantize.linear.float8)
            scale_weights()
            seconds = []
            for number in range(WARM_UP + steps):
                if number == WARM_UP:
                    torch.cuda.reset_peak_memory_stats(device)
                batches = list(islice(made.batches, made.accumulation))
                torch.cuda.synchronize(device)
                started = time.perf_counter()
                train_step(
                    made.model,
                    batches,
                    optimizer=made.optimizer,
                    group=made.group,
                    max_norm=config.training.max_norm,
                    loss_function=made.loss_function,
                    decide=made.guard.decide,
                    gradients=made.gradients,
                )
                scale_weights()
                torch.cuda.synchronize(device)
                seconds.append(time.perf_counter() - started)
            return {
                "seconds": seconds[WARM_UP:],
                "tokens": config.training.global_batch_size * config.training.seq_len,
                "flops_per_token": made.model.flops_per_token(config.training.seq_len),
                "peak": torch.cuda.max_memory_allocated(device),
            }


def matmul_rate(size: int = 8192, repeats: int = 50) -> float:
    """FLOP/s of a bfloat16 matmul, after as many to warm the card."""
    a, b = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    for _ in range(repeats):
        torch.mm(a, b, out=out)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(repeats):
        torch.mm(a, b, out=out)
    end.record()
    torch.cuda.synchronize()
    return 2 * size**3 * repeats / (start.elapsed_time(end) / 1000)


if __name__ == "__main__":
    main()
