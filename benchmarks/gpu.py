"""What one GPU reaches: tokens/s, MFU and peak memory of Llama 3 and Qwen3-MoE by technique, beside a plain loop.

    python benchmarks/gpu.py [--only 8B] [--seconds 500] [--out FILE.json]
    python benchmarks/gpu.py queue --out FOLDER         all that is unmeasured, in pieces (gpu_queue.py; see its --help)
    python benchmarks/gpu.py card                       rates of this card, as JSON

Each case is a run of `titanlite train` in a process of its own, on tokens of Python's standard library, and its figures
are those of the run's own metrics.jsonl. The plain loop (plain_llama.py) trains the same model with autocast, whole
logits and a fused AdamW. MFU is of the device's stated rate (989 dense TFLOP/s for H100 and H200 in bfloat16); a large
matmul of random numbers says what this card reaches. A file that exists is continued: what it holds is not run again.
`plan_accuracy.py gpu` compares such a file with the plan of each case.
"""

import argparse
import gzip
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from titanlite.runtime.hardware import hardware_of
from titanlite.tools.plan.hardware import find_hardware

ROOT = Path(__file__).parents[1]
WINDOW, WINDOWS, WARM_UP = 5, 6, 3
"""Steps of a log window, windows that are measured, and windows before them."""
LLAMA_8B, QWEN3_MOE, GEMMA3, GPT_OSS = "llama3_8b", "qwen3_30b_a3b", "gemma3_1b", "gpt_oss_20b"
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "124M": ("debug", {"dim": 768, "n_layers": 12, "n_heads": 12, "n_kv_heads": 12, "hidden_dim": 2048,
                       "vocab_size": 50304, "tied_head": True}),
    "Gemma 3 1B": ("1B", {}),
    "gpt-oss, 8 experts": ("20B", {"n_experts": 8}),
}  # fmt: skip
"""Names that are no flavors: a flavor of the config, and its arguments. 124M has the sizes of GPT-2: three matrices of
hidden_dim 2048 are as large as its two of 3072."""


def ac(mode: str) -> list[str]:
    return [f"--activation_checkpoint.mode={mode}"]


COMPILE = ["--compile.enable=true"]
FLOAT8 = [*COMPILE, "--quantize.linear.float8.enable=true"]
ROWWISE = [*FLOAT8, "--quantize.linear.float8.recipe_name=rowwise"]
CUDNN = "--training.attention_backend=cudnn"
DOCUMENTS = "--data.document_mask=true"
ON_HOST = "--activation_checkpoint.offload=true"
CUDA_GRAPHS = [*COMPILE, "mode=reduce-overhead"]
"""Of the plain loop."""
ONE = "--training.local_batch_size=1"
REPRODUCIBLE = [ONE, "--debug.reproducible_layouts=true"]
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
    window: int = WINDOW

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
        flavor, args = self.shape
        return [
            f"--model.flavor={flavor}",
            *(f"--model.args.{key}={json.dumps(value)}" for key, value in args.items()),
            f"--training.seq_len={self.seq_len}",
            f"--training.global_batch_size={self.batch}",
            f"--training.local_batch_size={self.batch}",
            "--training.mixed_precision_param=bfloat16",
            "--checkpoint.enable=false",
            *self.options,
        ]

    @property
    def shape(self) -> tuple[str, dict[str, Any]]:
        """The flavor, and arguments in place of its own."""
        flavor, args = SHAPES.get(self.flavor, (self.flavor, {}))
        return flavor, args | ({"n_layers": self.layers} if self.layers else {})


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
                "compiled, activations on the host": [*ac("none"), *COMPILE, ON_HOST],
                "compiled, full AC, activations on the host": [*ac("full"), *COMPILE, ON_HOST],
                "compiled, float8 tensorwise": [*ac("none"), *FLOAT8],
                "compiled, float8 rowwise": [*ac("none"), *ROWWISE],
                "compiled, cuDNN attention": [*ac("none"), *COMPILE, CUDNN],
                "compiled, document mask": [*ac("none"), *COMPILE, DOCUMENTS],
                "compiled, Muon": [*ac("none"), *COMPILE, "--optimizer.name=Muon"],
                "compiled, micro-batches of one": [*ac("none"), *COMPILE, ONE],
                "compiled, reproducible layouts": [*ac("none"), *COMPILE, *REPRODUCIBLE],
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
                "reproducible layouts": REPRODUCIBLE,
                "reproducible layouts, context degree 2": [*REPRODUCIBLE, "--debug.reproducible_context_degree=2"],
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
    small = [
        Case("124M", batch, 1024, name, options, plain=name.startswith("plain"), window=window)
        for batch, window in ((12, 20), (64, 5))
        for name, options in {
            "plain loop, compiled": COMPILE,
            "plain loop, compiled, CUDA graphs": CUDA_GRAPHS,
            "compiled": [*ac("none"), *COMPILE],
        }.items()
    ]
    windows = [
        Case("Gemma 3 1B", 2, 4096, name, [*ac("none"), *COMPILE, *options], config=GEMMA3)
        for name, options in {
            "compiled": [],
            "compiled, without windows": ["--model.args.full_every=1"],
            "compiled, document mask": [DOCUMENTS],
        }.items()
    ]
    sinks = [
        Case("gpt-oss, 8 experts", 2, 4096, name, [*ac("none"), *COMPILE, *options], config=GPT_OSS, layers=4)
        for name, options in {"compiled": [], "compiled, document mask": [DOCUMENTS]}.items()
    ]
    return found + eight + whole + experts + three + small + windows + sinks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    if sys.argv[1:2] == ["queue"]:
        import gpu_queue  # a script beside this one

        return gpu_queue.main(sys.argv[2:])
    if sys.argv[1:2] == ["card"]:
        return print(json.dumps(card()))
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
    results |= card()
    write(results, arguments.out)
    print(card_line(results))
    print(table(results))


def card() -> dict[str, Any]:
    """Names and rates of the GPU. The process takes memory of it from here on."""
    hardware, found = hardware_of(torch.device("cuda", 0)), torch.cuda.get_device_properties(0)
    assert hardware is not None, f"the table of devices has no {found.name}"
    return {
        "device": found.name,
        "hardware": hardware.name,
        "gpu": str(found.uuid),
        "torch": torch.__version__,
        "matmul_tflops": matmul_rate() / 1e12,
        "copy_gigabytes_per_second": copy_rate() / 1e9,
    }


def card_line(results: dict[str, Any]) -> str:
    peaks = find_hardware(results["hardware"])
    return (
        f"{results['device']}, torch {results['torch']}: {results['matmul_tflops']:.0f} TFLOP/s of "
        f"{peaks.bf16_flops / 1e12:.0f} (bfloat16, 8192^3), {results['copy_gigabytes_per_second']:.0f} GB/s of "
        f"{peaks.memory_bandwidth / 1e9:.0f}"
    )


def write(results: dict[str, Any], out: Path | None) -> None:
    """Replace the file at once: who is killed here leaves the results before these."""
    if out:
        new = out.with_name(f".{out.name}.new")
        new.write_text(json.dumps(results, indent=1) + "\n")
        new.replace(out)


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


def measure(
    case: Case,
    *,
    tree: Path = ROOT,
    words: Sequence[str] | None = None,
    windows: int = WINDOWS,
    profiles: bool = False,
    seconds: float = 600,
) -> dict[str, Any]:
    """Return the figures of a case, or why it failed.

    Args:
        tree: checkout whose titanlite trains.
        words: options in place of the case's.
        profiles: record the last step of one window more, which is not measured.

    Raises:
        subprocess.TimeoutExpired: it took more than these seconds.
    """
    with tempfile.TemporaryDirectory() as folder:
        began = time.monotonic()
        words = case.words if words is None else words
        steps = case.window * (WARM_UP + windows + profiles)
        command = plain_words(case, folder, windows) if case.plain else train_words(case, folder, words, steps)
        if profiles:
            command += profile_words(steps)
        result = execute(command, seconds, tree=tree, lines="\n" * (WARM_UP + windows))
        if result.returncode:
            return {"failed": error_line(result)}
        tokens = case.batch * case.seq_len
        if case.plain:
            turn = [json.loads(line) for line in result.stdout.splitlines()][1 + WARM_UP :]
            found = {
                "tokens_per_second": [tokens / record["seconds"] for record in turn],
                "memory_gib": max(record["mib"] for record in turn) / 1024,
            }
        else:
            lines = Path(folder, "bench", "metrics.jsonl").read_text().splitlines()
            records = [json.loads(line) for line in lines][WARM_UP : -1 if profiles else None]
            found = {
                "tokens_per_second": [record["tokens_per_second"] for record in records],
                "memory_gib": max(record["memory_gib"] for record in records),
                "mfu": statistics.median(record["mfu"] for record in records),
                "loss": records[-1]["loss"],
                "config": case.config,
                "words": words,
            }
            if profiles:
                found["profile"] = kernels_of(Path(folder, "bench", "profile", f"step-{steps:08}", "rank-0.json.gz"))
        return found | {"wall_seconds": round(time.monotonic() - began, 1)}


def execute(
    command: Sequence[str], seconds: float, *, tree: Path = ROOT, lines: str = ""
) -> "subprocess.CompletedProcess[str]":
    """Run a command in a checkout, with its titanlite. None of its processes outlives this call."""
    paths = os.pathsep.join(filter(None, (str(tree), os.environ.get("PYTHONPATH"))))
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    environment = os.environ | {"PYTHONPATH": paths}
    with subprocess.Popen(command, cwd=tree, env=environment, process_group=0, **pipes) as process:
        try:
            outputs = process.communicate(lines, timeout=seconds)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    return subprocess.CompletedProcess(command, process.returncode, *outputs)


def error_line(result: "subprocess.CompletedProcess[str]") -> str:
    """The last line with an error, of what a command that failed has printed."""
    lines = (result.stderr or result.stdout).strip().splitlines()
    if any("out of memory" in line for line in lines):
        return "out of memory"
    errors = [line.strip() for line in lines if "rror" in line]
    return errors[-1][:300] if errors else f"exit code {result.returncode}: {' '.join(lines[-1:])[:300]}"


def kernels_of(trace: Path) -> dict[str, Any]:
    """Milliseconds of the step that a profile has, and those of its kernels and copies: [ms, launches, name]."""
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    of_step = [event["dur"] for event in events if str(event.get("name")).startswith("ProfilerStep#")]
    by_name: dict[str, list[float]] = defaultdict(list)
    for event in events:
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
            by_name[event["name"]].append(event["dur"] / 1000)
    kernels = sorted(((round(sum(each), 3), len(each), name[:120]) for name, each in by_name.items()), reverse=True)
    total = round(sum(milliseconds for milliseconds, *_ in kernels), 1)
    return {"step_ms": max(of_step, default=0) / 1000, "kernels_ms": total, "kernels": kernels[:25]}


def train_words(case: Case, folder: str, words: Sequence[str], steps: int) -> list[str]:
    return [
        *(sys.executable, "-m", "titanlite", "train", case.config, *words),
        f"--job.dump_folder={folder}",
        f"--data.cache_folder={Path(tempfile.gettempdir(), 'titanlite-gpu-data')}",  # prepared once
        "--job.name=bench",
        f"--training.steps={steps}",
        "--lr_scheduler.warmup_steps=20",
        f"--metrics.log_freq={case.window}",
        "--validation.enable=false",
    ]


def profile_words(steps: int) -> list[str]:
    """Options that record the last step."""
    return ["--profiling.enable_profiling=true", f"--profiling.profile_freq={steps}"]


def plain_words(case: Case, folder: str, windows: int) -> list[str]:
    """The same model, and as many random tokens as a step reads."""
    from titanlite.models.llama3 import Llama3

    flavor, changed = case.shape
    args = replace(Llama3.flavors[flavor], **changed)
    fields = ("dim", "n_layers", "n_heads", "n_kv_heads", "hidden_dim", "vocab_size", "tied_head")
    shape = {key: getattr(args, key) for key in fields}
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
        "compile": COMPILE[0] in case.options,
        "mode": next((word.removeprefix("mode=") for word in case.options if word.startswith("mode=")), None),
        "turn": case.window,
        "turns": WARM_UP + windows,
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
