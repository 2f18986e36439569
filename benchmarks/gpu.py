"""What one GPU reaches: tokens/s, MFU and peak memory of Llama 3 and Qwen3-MoE by technique, beside a plain loop.

    python benchmarks/gpu.py [--only 8B] [--seconds 500] [--out FILE.json]

Each case is a run of `titanlite train` in a process of its own, on tokens of Python's standard library, and its figures
are those of the run's own metrics.jsonl. The plain loop (plain_llama.py) trains the same model with autocast, whole
logits and a fused AdamW. MFU is of the device's stated rate (989 dense TFLOP/s for H100 and H200 in bfloat16); a large
matmul of random numbers says what this card reaches. A file that exists is continued: what it holds is not run again.
`plan_accuracy.py gpu` compares such a file with the plan of each case.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from titanlite.runtime.hardware import hardware_of

ROOT = Path(__file__).parents[1]
WINDOW, WINDOWS, WARM_UP = 5, 6, 3
"""Steps of a log window, windows that are measured, and windows before them."""
LLAMA_8B, QWEN3_MOE = "llama3_8b", "qwen3_30b_a3b"


def ac(mode: str) -> list[str]:
    return [f"--activation_checkpoint.mode={mode}"]


COMPILE = ["--compile.enable=true"]
FLOAT8 = [*COMPILE, "--quantize.linear.float8.enable=true"]
ROWWISE = [*FLOAT8, "--quantize.linear.float8.recipe_name=rowwise"]
CUDNN = "--training.attention_backend=cudnn"
LAYERS = "--model.args.n_layers="
ONE = "--training.local_batch_size=1"
HALF = ["--training.dtype=bfloat16", "--optimizer.state_dtype=bfloat16"]
LORA = ["--lora.rank=16", "--freeze.dtype=bfloat16"]


@dataclass(frozen=True)
class Case:
    flavor: str
    batch: int
    seq_len: int
    name: str
    options: list[str] = field(default_factory=list)
    config: str = LLAMA_8B
    layers: int | None = None
    plain: bool = False
    """The plain loop; `options` says whether it is compiled."""

    @property
    def model(self) -> str:
        layers = f", {self.layers} layers" if self.layers else ""
        return f"{self.flavor}{layers}, {self.batch} x {self.seq_len}"

    @property
    def title(self) -> str:
        return f"{self.model}: {self.name}"

    @property
    def words(self) -> list[str]:
        """Options of `titanlite train CONFIG`, and of `titanlite plan CONFIG`."""
        layers = [f"{LAYERS}{self.layers}"] if self.layers else []
        return [
            f"--model.flavor={self.flavor}",
            *layers,
            f"--training.seq_len={self.seq_len}",
            f"--training.global_batch_size={self.batch}",
            f"--training.local_batch_size={self.batch}",
            "--training.mixed_precision_param=bfloat16",
            "--checkpoint.enable=false",
            *self.options,
        ]


def cases() -> list[Case]:
    one = ("1B", 4, 4096)
    found = [
        Case(*one, "plain loop", plain=True),
        Case(*one, "plain loop, compiled", COMPILE, plain=True),
        *(
            Case(*one, name, options)
            for name, options in {
                "eager": ac("none"),
                "compiled": [*ac("none"), *COMPILE],
                "compiled, selective AC": [*ac("selective"), *COMPILE],
                "compiled, full AC": [*ac("full"), *COMPILE],
                "compiled, float8 tensorwise": [*ac("none"), *FLOAT8],
                "compiled, float8 rowwise": [*ac("none"), *ROWWISE],
                "compiled, cuDNN attention": [*ac("none"), *COMPILE, CUDNN],
                "compiled, document mask": [*ac("none"), *COMPILE, "--data.document_mask=true"],
                "compiled, Muon": [*ac("none"), *COMPILE, "--optimizer.name=Muon"],
                "compiled, micro-batches of one": [*ac("none"), *COMPILE, ONE],
                "compiled, reproducible layouts": [*ac("none"), *COMPILE, ONE, "--debug.reproducible_layouts=true"],
                "compiled, weights and moments on the host": [
                    *ac("none"),
                    *COMPILE,
                    "--training.enable_cpu_offload=true",
                ],
            }.items()
        ),
    ]
    eight = [
        Case("8B", 1, 8192, "plain loop", layers=6, plain=True),
        Case("8B", 1, 8192, "plain loop, compiled", COMPILE, layers=6, plain=True),
        *(
            Case("8B", 1, 8192, name, [*ac("none"), *options], layers=6)
            for name, options in {
                "eager": [],
                "compiled": COMPILE,
                "compiled, cuDNN attention": [*COMPILE, CUDNN],
                "compiled, float8 tensorwise": FLOAT8,
                "compiled, float8 rowwise": ROWWISE,
            }.items()
        ),
    ]
    whole = [
        Case("8B", 1, 4096, name, [*ac("full"), *COMPILE, *options])
        for name, options in {
            "bfloat16 weights and moments": HALF,
            "the same, updated in backward": [*HALF, "--optimizer.in_backward=true", "--training.max_norm=0.0"],
            "LoRA on bfloat16": LORA,
        }.items()
    ]
    experts = [
        Case("30B-A3B", 2, 4096, name, [*ac("none"), *options], config=QWEN3_MOE, layers=4)
        for name, options in {"eager": [], "compiled": COMPILE}.items()
    ]
    three = [Case("3B", 2, 4096, "compiled, selective AC", [*ac("selective"), *COMPILE])]
    return found + eight + whole + experts + three


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="cases whose title contains this")
    parser.add_argument("--seconds", type=float, default=3600, help="no case starts after these seconds")
    parser.add_argument("--out", type=Path, help="file of results")
    parser.add_argument("--list", action="store_true", help="the cases, and nothing else")
    arguments = parser.parse_args()
    chosen = [case for case in cases() if arguments.only in case.title]
    if arguments.list:
        print("\n".join(case.title for case in chosen))
        return
    if not torch.cuda.is_available():
        sys.exit("there is no GPU that torch can use")
    began = time.monotonic()
    results: dict[str, Any] = {"cases": {}}
    if arguments.out and arguments.out.exists():
        results = json.loads(arguments.out.read_text())
    for case in chosen:
        if case.title in results["cases"] or time.monotonic() - began > arguments.seconds:
            continue
        results["cases"][case.title] = measure(case)
        write(results, arguments.out)
        print(f"{case.title}: {results['cases'][case.title]}", flush=True)
    # Last, because this process takes memory of the GPU from here on.
    hardware = hardware_of(torch.device("cuda", 0))
    name = torch.cuda.get_device_name()
    assert hardware is not None, f"the table of devices has no {name}"
    results |= {
        "device": name,
        "hardware": hardware.name,
        "torch": torch.__version__,
        "matmul_tflops": matmul_rate() / 1e12,
        "copy_gigabytes_per_second": copy_rate() / 1e9,
    }
    write(results, arguments.out)
    print(
        f"{name}, torch {torch.__version__}: {results['matmul_tflops']:.0f} TFLOP/s of {hardware.bf16_flops / 1e12:.0f}"
        f" (bfloat16, 8192^3), {results['copy_gigabytes_per_second']:.0f} GB/s of {hardware.memory_bandwidth / 1e9:.0f}"
    )
    print(table(results))


def write(results: dict[str, Any], out: Path | None) -> None:
    if out:
        out.write_text(json.dumps(results, indent=1) + "\n")


def table(results: dict[str, Any]) -> str:
    """Speeds of the cases, each to the first of its model."""
    lines = ["| case | tokens/s | spread | MFU | peak GiB | to the first |", "|---|---|---|---|---|---|"]
    first: dict[str, float] = {}
    for case in cases():
        found = results["cases"].get(case.title)
        if found is None or "failed" in found:
            if found:
                lines.append(f"| {case.title} | {found['failed']} |||||")
            continue
        speeds = found["tokens_per_second"]
        speed = statistics.median(speeds)
        reference = first.setdefault(case.model, speed)
        mfu = f"{100 * found['mfu']:.1f} %" if found.get("mfu") else ""
        lines.append(
            f"| {case.title} | {speed:,.0f} | {min(speeds):,.0f} to {max(speeds):,.0f} | {mfu} "
            f"| {found['memory_gib']:.1f} | {speed / reference:.2f} |"
        )
    return "\n".join(lines)


def measure(case: Case) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        began = time.monotonic()
        command = plain_words(case, folder) if case.plain else train_words(case, folder)
        turns = "\n" * (WARM_UP + WINDOWS)
        result = subprocess.run(command, capture_output=True, text=True, timeout=600, input=turns)
        if result.returncode:
            lines = (result.stderr or result.stdout).strip().splitlines() or [f"exit code {result.returncode}"]
            if any("out of memory" in line for line in lines):
                return {"failed": "out of memory"}
            errors = [line for line in lines if "rror" in line]
            return {"failed": (errors or lines)[-1][:300]}
        tokens = case.batch * case.seq_len
        if case.plain:
            turn = [json.loads(line) for line in result.stdout.splitlines()][1 + WARM_UP :]
            found = {
                "tokens_per_second": [tokens / record["seconds"] for record in turn],
                "memory_gib": max(record["mib"] for record in turn) / 1024,
            }
        else:
            lines = Path(folder, "bench", "metrics.jsonl").read_text().splitlines()
            records = [json.loads(line) for line in lines][WARM_UP:]
            found = {
                "tokens_per_second": [record["tokens_per_second"] for record in records],
                "memory_gib": max(record["memory_gib"] for record in records),
                "mfu": statistics.median(record["mfu"] for record in records),
                "loss": records[-1]["loss"],
                "config": case.config,
                "words": case.words,
            }
        return found | {"wall_seconds": round(time.monotonic() - began, 1)}


def train_words(case: Case, folder: str) -> list[str]:
    steps = WINDOW * (WARM_UP + WINDOWS)
    return [
        *(sys.executable, "-m", "titanlite", "train", case.config, *case.words),
        f"--job.dump_folder={folder}",
        "--job.name=bench",
        f"--training.steps={steps}",
        "--lr_scheduler.warmup_steps=20",
        f"--metrics.log_freq={WINDOW}",
        "--validation.enable=false",
    ]


def plain_words(case: Case, folder: str) -> list[str]:
    """The same model, and as many random tokens as a step reads."""
    from titanlite.models.llama3 import Llama3

    args = Llama3.flavors[case.flavor]
    fields = ("dim", "n_layers", "n_heads", "n_kv_heads", "hidden_dim", "vocab_size", "tied_head")
    shape = {key: getattr(args, key) for key in fields}
    if case.layers:
        shape["n_layers"] = case.layers
    tokens = Path(folder, "tokens")
    drawn = torch.randint(2048, (4 * case.batch * case.seq_len,), dtype=torch.int32)
    tokens.write_bytes(drawn.to(torch.uint16).numpy().tobytes())
    settings = {
        "model": shape,
        "seq_len": case.seq_len,
        "batch": case.batch,
        "tokens": str(tokens),
        "dtype": "bfloat16",
        "device": "cuda",
        "compile": case.options == COMPILE,
        "turn": WINDOW,
        "turns": WARM_UP + WINDOWS,
    }
    return [sys.executable, str(ROOT / "benchmarks" / "plain_llama.py"), json.dumps(settings)]


def matmul_rate(size: int = 8192, repeats: int = 50) -> float:
    """FLOP/s of a bfloat16 matmul of random numbers, after as many to warm the card."""
    a, b = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    return 2 * size**3 / seconds_of(lambda: torch.mm(a, b, out=out), repeats)


def copy_rate(repeats: int = 20) -> float:
    """Bytes a second that a copy of 1 GiB reads and writes."""
    source = torch.randn(2**28, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / seconds_of(lambda: target.copy_(source), repeats)


def seconds_of(work: Any, repeats: int) -> float:
    for _ in range(repeats):
        work()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(repeats):
        work()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1000 / repeats


if __name__ == "__main__":
    if os.environ.get("CUDA_VISIBLE_DEVICES") is None:
        os.environ["CUDA_VISIBLE_DEVICES"] = "0"
    main()
