"""Accuracy of `titanlite plan`: predicted against measured memory and time.

    python benchmarks/plan_accuracy.py cpu          peak memory of runs on this machine's CPU, byte by byte
    python benchmarks/plan_accuracy.py axes         published measurements of further mesh axes, beside the plan
    python benchmarks/plan_accuracy.py published    measurements that torchtitan published, beside the plan
    python benchmarks/plan_accuracy.py null-gpu     memory that PyTorch's allocator gave on a null GPU (docs/plan.md)
    python benchmarks/plan_accuracy.py gpu          peak memory and step time that gpu.py measured on GPUs (below gpu/)

null-gpu: tests/null_gpu/recorded.json, which `./run_tests.sh null_gpu --record` measures. cpu: the allocator's own
record of real runs of several processes (measured_memory.py). --record FILE.jsonl appends ratios, and the largest
error, to a file.
"""

import argparse
import json
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from titanlite.batch import IGNORE
from titanlite.config.load import load
from titanlite.loss import TokenLoss
from titanlite.runtime.hardware import Hardware
from titanlite.schema import Config
from titanlite.tools.plan.estimate import Layout, Plan, plan
from titanlite.tools.plan.gpu_kernels import ranks_of_token
from titanlite.tools.plan.hardware import find_hardware

Ratios = dict[str, list[float]]
"""Predicted / what is, by the latter's name."""
AIMS = {
    "measured peak memory": "< 10 %", "measured time of a step": "< 25 %",
    "allocated memory": "< 1 %", "reserved memory": "< 3 %",
    "published tokens a second of further axes": "explained",
    "published memory": "explained", "published tokens a second": "explained",
}  # fmt: skip
GIB, MIB = 2**30, 2**20
ROOT = Path(__file__).parents[1]
DEBUG, LLAMA_8B = "train_configs/debug.toml", "train_configs/llama3_8b.toml"
SHAPE = [
    "--training.seq_len=256", "--training.mixed_precision_param=float32", "--model.args.dim=256",
    "--model.args.n_layers=6", "--model.args.n_heads=4", "--model.args.n_kv_heads=2", "--model.args.hidden_dim=704",
    "--model.args.vocab_size=2048",
]  # fmt: skip
PIPELINE = "--parallelism.pipeline_parallel_degree="
REPLICATE = "--parallelism.data_parallel_replicate_degree="
RESHARD = "--parallelism.fsdp_reshard_after_forward="
RECOMPUTE = "--activation_checkpoint.mode="
COMPILE = "--compile.enable=true"
LAYERS = "--activation_checkpoint.selective_ac_option="
TEACHER = ["--teacher.path=nowhere", f"--teacher.config={DEBUG}", "--distill.ratio=0.5"]
CPU_CASES: list[tuple[str, int, list[str]]] = [
    ("one process", 1, [*SHAPE, "--training.global_batch_size=4"]),
    ("FSDP, 2", 2, [*SHAPE, "--training.global_batch_size=8"]),
    ("FSDP, 4", 4, [*SHAPE, "--training.global_batch_size=16"]),
    ("HSDP, 2 x 2", 4, [*SHAPE, "--training.global_batch_size=16", REPLICATE + "2"]),
    ("DDP, 4", 4, [*SHAPE, "--training.global_batch_size=16", REPLICATE + "4"]),
    ("FSDP, 2, never resharded", 2, [*SHAPE, "--training.global_batch_size=8", RESHARD + "never"]),
    ("FSDP, 4, resharded to 2", 4, [*SHAPE, "--training.global_batch_size=16", RESHARD + "2"]),
    ("FSDP, 2, recompute op", 2, [*SHAPE, "--training.global_batch_size=8", RECOMPUTE + "selective"]),
    ("FSDP, 2, recompute every 2nd", 2,
     [*SHAPE, "--training.global_batch_size=8", RECOMPUTE + "selective", LAYERS + "2"]),
    ("FSDP, 2, recompute full", 2, [*SHAPE, "--training.global_batch_size=8", RECOMPUTE + "full"]),
    ("HSDP, 2 x 2, 2 micro-batches", 4,
     [*SHAPE, "--training.global_batch_size=16", "--training.local_batch_size=2", REPLICATE + "2"]),
    ("bfloat16 moments", 2, [*SHAPE, "--training.global_batch_size=8", "--optimizer.state_dtype=bfloat16"]),
    ("FSDP, 2, updates in backward", 2,
     [*SHAPE, "--training.global_batch_size=8", "--training.max_norm=0", "--optimizer.in_backward=true"]),
    ("HSDP, 2 x 2, updates in backward", 4,
     [*SHAPE, "--training.global_batch_size=16", REPLICATE + "2", "--training.max_norm=0",
      "--optimizer.in_backward=true"]),
    ("pipeline 2, 4 micro-batches", 2,
     [*SHAPE, "--training.global_batch_size=8", "--training.local_batch_size=2", PIPELINE + "2"]),
    ("pipeline 4, 8 micro-batches", 4,
     [*SHAPE, "--training.global_batch_size=16", "--training.local_batch_size=2", PIPELINE + "4"]),
    ("pipeline 2 x shard 2, interleaved", 4,
     [*SHAPE, "--training.global_batch_size=16", "--training.local_batch_size=2", PIPELINE + "2",
      "--parallelism.pipeline_parallel_schedule=Interleaved1F1B"]),
    ("pipeline 2, all forward passes first", 2,
     [*SHAPE, "--training.global_batch_size=8", "--training.local_batch_size=2", PIPELINE + "2",
      "--parallelism.pipeline_parallel_schedule=GPipe"]),
    ("vocabulary 32,768", 2, [*SHAPE, "--training.global_batch_size=4", "--model.args.vocab_size=32768"]),
    ("sequences of 1,024", 2, [*SHAPE, "--training.global_batch_size=2", "--training.seq_len=1024"]),
    ("documents", 1, [*SHAPE, "--training.global_batch_size=4", "--data.document_mask=true"]),
    ("OLMo 3, recompute op, documents, bfloat16", 1,
     ["--model.name=olmo3", "--model.args={dim=128,n_layers=2,n_heads=4,n_kv_heads=2,hidden_dim=352,vocab_size=2048,"
      "window=64,full_every=2}", "--training.seq_len=512", "--training.global_batch_size=4",
      "--training.mixed_precision_param=bfloat16", "--data.document_mask=true", RECOMPUTE + "selective"]),
    ("qwen3, tied head", 2, ["--model.name=qwen3", "--training.seq_len=256", "--training.global_batch_size=4",
                             "--training.mixed_precision_param=float32"]),
    ("qwen3_moe", 2, ["--model.name=qwen3_moe", "--training.seq_len=256", "--training.global_batch_size=4",
                      "--training.mixed_precision_param=float32"]),
    ("qwen3_next, recompute full", 2,
     ["--model.name=qwen3_next", "--training.seq_len=256", "--training.global_batch_size=4",
      "--training.mixed_precision_param=float32", RECOMPUTE + "full"]),
    ("Muon", 1, [*SHAPE, "--training.global_batch_size=4", "--optimizer.name=Muon",
                 '--optimizer.args.ns_dtype="float32"']),
    ("adapters", 2, [*SHAPE, "--training.global_batch_size=8", "--lora.rank=8", "--freeze.dtype=bfloat16"]),
    ("teacher", 2, [*SHAPE, "--training.global_batch_size=8", *TEACHER]),
    ("two predicted tokens, context 2", 2,
     [*SHAPE, "--training.global_batch_size=8", RECOMPUTE + "selective", "--training.multi_token_weight=0.3",
      "--parallelism.context_parallel_degree=2"]),
]  # fmt: skip

PUBLISHED_LOSS = f"--training.loss={Path(__file__).resolve()}:logits_in_full"
H100, A100, GB200 = find_hardware("H100"), find_hardware("A100-80"), find_hardware("GB200")
GRAND_TETON = replace(H100, memory=int(95 * GIB), memory_bandwidth=2.4e12, clock=0.86)
"""H100s of 96 GB HBM2e, run at 500 W instead of 700. Their clock and `CLOCK_SPREAD` are the two rates that were fitted
to published rows: to every second one of both tables, without those of experts. The second rate was fitted when one of
the GB200 rows, now held out, stood for a B200."""
FLOAT8 = [f"--quantize.linear.float8.{option}" for option in ("enable=true", "skip_small=false")]  # as torchtitan's
MXFP8 = "--quantize.linear.float8.recipe_name=mxfp8"
FLASH = "--training.attention_backend=flash"  # PyTorch's choice until 2025
OPTIONS = {"eager": [FLASH], "compiled": [COMPILE, FLASH], "compiled, float8": [COMPILE, *FLOAT8, FLASH]}
PUBLISHED: list[tuple[str, Hardware, int, str, int, float | None, float]] = [
    ("8 x H100, 500 W", GRAND_TETON, 8, "eager", 2, 82.4, 5762),
    ("8 x H100, 500 W", GRAND_TETON, 8, "compiled", 2, 77.0, 6667),
    ("8 x H100, 500 W", GRAND_TETON, 8, "compiled, float8", 2, 76.8, 8532),
    ("128 x H100, 500 W", GRAND_TETON, 128, "eager", 2, 67.0, 5605),
    ("128 x H100, 500 W", GRAND_TETON, 128, "compiled", 2, 62.0, 6514),
    ("128 x H100, 500 W", GRAND_TETON, 128, "compiled, float8", 2, 61.8, 8380),
    ("32 x H200", find_hardware("H200"), 32, "compiled, float8", 2, 47.96, 10938),
    ("64 x H200", find_hardware("H200"), 64, "compiled, float8", 2, 46.97, 10753),
    ("64 x A100-80", find_hardware("A100-80"), 64, "eager", 1, None, 2973),
]
"""Llama 3 8B by torchtitan, FSDP, sequences of 8,192, selective activation checkpointing: (which, hardware, GPUs, how,
local batch, GiB a GPU, tokens a second and GPU). H100: its benchmarks of December 2024. H200: those by Trainy of June
2025. A100: its docs/performance.md of 2024; it is not known whether it was compiled."""

CONTEXT = "--parallelism.context_parallel_degree="
TENSOR = "--parallelism.tensor_parallel_degree="
EXPERT = "--parallelism.expert_parallel_degree="
INTERLEAVED = "--parallelism.pipeline_parallel_schedule=Interleaved1F1B"
LAYERS_PER_STAGE = "--parallelism.pipeline_parallel_layers_per_stage=2"
ALL_EVEN = [
    "--parallelism.pipeline_parallel_first_stage_less_layers=0",
    "--parallelism.pipeline_parallel_last_stage_less_layers=0",
]
FULL, NO_AC = RECOMPUTE + "full", RECOMPUTE + "none"
FULL_FLOAT8 = [FULL, COMPILE, *FLOAT8]
BFLOAT16 = [COMPILE, "--training.dtype=bfloat16", "--optimizer.state_dtype=bfloat16"]
CUDNN_IN_PARTS = replace(H100, flash_efficiency=H100.attention_efficiency)
"""H100s whose attention to parts of sequences is cuDNN's."""


def neighbours(ranks: int, experts: int, active: int) -> Hardware:
    """H100s with a router whose choices for a token are all on one of the `ranks`, and not anywhere with equal
    chances."""
    return replace(H100, exchange_share=1 / ranks_of_token(ranks, experts, active))


def sizes(micro: int, whole: int) -> list[str]:
    return [f"--training.local_batch_size={micro}", f"--training.global_batch_size={whole}"]


STAGES = [TENSOR + "8", PIPELINE + "8", *FULL_FLOAT8, FLASH]
AXES: list[tuple[str, str, Hardware, int, list[str], float]] = [
    ("70B, FSDP 64", "llama3_70b", A100, 64, [*sizes(1, 64), FULL], 331),
    ("70B, FSDP 32 x context 2", "llama3_70b", CUDNN_IN_PARTS, 64,
     [CONTEXT + "2", *sizes(1, 128), FULL, COMPILE], 866.77),
    ("70B, FSDP 32 x tensor 8", "llama3_70b", GRAND_TETON, 256,
     [TENSOR + "8", *sizes(16, 512), FULL, COMPILE, FLASH], 597.3),
    ("70B, float8, FSDP 32 x tensor 8", "llama3_70b", GRAND_TETON, 256,
     [TENSOR + "8", *sizes(16, 512), *FULL_FLOAT8, FLASH], 829),
    ("405B, FSDP 16 x tensor 8", "llama3_405b", GRAND_TETON, 128, [TENSOR + "8", *sizes(2, 32), FULL, FLASH], 109),
    ("405B, float8, FSDP 16 x tensor 8", "llama3_405b", GRAND_TETON, 128,
     [TENSOR + "8", *sizes(2, 32), *FULL_FLOAT8, FLASH], 177),
    ("8B, FSDP 8 x tensor 8", "llama3_8b", GRAND_TETON, 64, [TENSOR + "8", *sizes(12, 96), COMPILE, FLASH], 4_378),
    ("8B, float8, FSDP 8 x tensor 8", "llama3_8b", GRAND_TETON, 64,
     [TENSOR + "8", *sizes(12, 96), COMPILE, *FLOAT8, FLASH], 5_078.1),
    ("405B, float8, FSDP 8 x tensor 8 x pipeline 8, 1F1B", "llama3_405b", GRAND_TETON, 512,
     [*sizes(4, 256), *STAGES], 100),
    ("405B, float8, FSDP 8 x tensor 8 x pipeline 8, interleaved", "llama3_405b", GRAND_TETON, 512,
     [*sizes(4, 256), INTERLEAVED, *STAGES], 128),
    *((f"405B, float8, FSDP {8 // degree} x context {degree} x tensor 8 x pipeline 8, {seq_len:,} tokens",
       "llama3_405b", GRAND_TETON, 512,
       [f"{CONTEXT}{degree}", *sizes(1, 64 // degree), f"--training.seq_len={seq_len}", *STAGES], speed)
      for degree, seq_len, speed in ((1, 32768, 76), (2, 65536, 47), (4, 131072, 31), (8, 262144, 16))),
    ("70B, float8, tensor 4 x pipeline 8 x 5 stages", "llama3_70b", H100, 64,
     [TENSOR + "4", PIPELINE + "8", INTERLEAVED, LAYERS_PER_STAGE, *ALL_EVEN, *sizes(1, 256), NO_AC, COMPILE, *FLOAT8],
     1_664),
    *((f"8B, float8, FSDP {8 // degree} x context {degree}, {seq_len:,} tokens", "llama3_8b", GRAND_TETON, 8,
       [f"{CONTEXT}{degree}", *sizes(1, 8 // degree), f"--training.seq_len={seq_len}", *FULL_FLOAT8, FLASH], speed)
      for degree, seq_len, speed in ((1, 32768, 3890), (2, 65536, 2540), (4, 131072, 1071), (8, 262144, 548))),
    ("30B-A3B, FSDP 8 x expert 8", "qwen3_30b_a3b", neighbours(8, 128, 8), 8,
     [EXPERT + "8", *sizes(4, 512), FULL, *BFLOAT16], 12_040),
    ("gpt-oss 20B, FSDP 8 x expert 8", "gpt_oss_20b", neighbours(8, 32, 4), 8,
     [EXPERT + "8", *sizes(2, 256), FULL, *BFLOAT16], 13_058),
    ("gpt-oss 120B, FSDP 64 x expert 64", "gpt_oss_20b", neighbours(64, 128, 4), 64,
     [EXPERT + "64", "--model.flavor=120B", *sizes(2, 512), NO_AC, *BFLOAT16], 7_626),
    ("DeepSeek-V3 671B, FSDP 64 x expert 64 x pipeline 4", "moonlight_16b_a3b", neighbours(64, 256, 8), 256,
     [EXPERT + "64", PIPELINE + "4", INTERLEAVED, LAYERS_PER_STAGE, "--model.flavor=671B",
      "--model.args.vocab_size=129280", *sizes(1, 512), FULL, *BFLOAT16], 1_002),
    ("8B, FSDP 4, GB200, 2,048 tokens", "llama3_8b", GB200, 4,
     ["--training.seq_len=2048", *sizes(32, 128), COMPILE], 21_919),
    ("Qwen3 8B, FSDP 4, GB200, 2,048 tokens", "qwen3_8b", GB200, 4,
     ["--training.seq_len=2048", *sizes(16, 64), COMPILE], 20_913),
    ("8B, MXFP8, FSDP 4, GB200, 2,048 tokens", "llama3_8b", GB200, 4,
     ["--training.seq_len=2048", *sizes(32, 128), COMPILE, *FLOAT8, MXFP8], 28_084),
    ("Qwen3 8B, MXFP8, FSDP 4, GB200, 2,048 tokens", "qwen3_8b", GB200, 4,
     ["--training.seq_len=2048", *sizes(16, 64), COMPILE, *FLOAT8, MXFP8], 27_587),
]  # fmt: skip
"""Published: (which, config, hardware, GPUs, options, tokens a second and GPU). Sequences have 8,192 tokens, and 4,096
of models with experts.

70B with context, and experts: NeMo AutoModel (docs/performance-summary of its repository, April 2026); recomputation,
dtypes, compilation and expert parallelism are those of examples/llm_benchmark there, and for experts those of
examples/benchmark/configs in October 2025, when their rows were published. 70B with stages: Megatron-Bridge 26.04.01,
whose recomputation is guessed. All others are torchtitan's: 405B on 128 GPUs and A100s in docs/performance.md of its
repository, 2024; 8B and 70B with a tensor axis in bfloat16, and 8B in float8, in
benchmarks/asyncTP_llama3_h100_2025-06_torchtitan.md there; GB200s in torchtitan/components/quantization/nvfp4.md, 2026,
which says Blackwell, and whose commit (bcc0929) says GB200 (which layers are MXFP8 is not said); the rest in
benchmarks/llama3_h100_202412_torchtitan.md, with asynchronous tensor parallelism where there are stages.
Pipelines had as many micro-batches as ranks (`pipeline_parallel_degree`), the default of that time."""

TORCHTITAN = {
    "8B, batch 1": "39.66, 47.38", "8B, batch 2": "67.06, 76.74",
    "8B, batch 1, compiled": "29.83, 38.99 in blocks", "8B, batch 2, compiled": "47.40, 55.11 in blocks",
    "float8 tensorwise, batch 2, compiled": "47.40, 53.03",
    "70B, 64 GPUs": "36.34, 52.53 in blocks",
}  # fmt: skip
"""GiB of torchtitan 0.2.2 at the same shapes on a null GPU, with expandable segments unless marked "in blocks". Source:
the calibration of docs/plan.md."""


def main() -> None:
    from record import add_record_option  # a script beside this one

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("cpu", "published", "axes", "null-gpu", "gpu"))
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--file", type=Path, help="of gpu: only this one")
    add_record_option(parser)
    options = parser.parse_args()
    torch.set_num_threads(1)
    found: Ratios = defaultdict(list)
    modes = {"cpu": on_cpu, "published": published, "axes": on_further_axes, "null-gpu": on_null_gpu}
    modes["gpu"] = partial(on_gpu, options.file)
    for line in modes[options.what](options.only, found):
        print(line, flush=True)
    note(options, found)


def note(options: argparse.Namespace, found: Ratios) -> None:
    """No ratio is better than 1, so what can get worse is the largest distance from it."""
    from record import record

    for what, ratios in found.items():
        name = f"predicted / {what}, cases of {options.what}{f': {options.only}' if options.only else ''}"
        errors = [100 * abs(ratio - 1) for ratio in ratios]
        low = (
            None if options.what in ("published", "axes") else min(errors)
        )  # nothing is measured there, so nothing varies
        record(options.record, name=name, values=ratios)
        record(
            options.record, name=f"{name}, largest error", value=max(errors), low=low, unit="%", better="lower",
            aim=AIMS[what],
        )  # fmt: skip


def row(*cells: object) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def planned(config: Config, world_size: int, hardware: Hardware, gpus_per_node: int) -> Plan:
    return plan(config, Layout(world_size, hardware, gpus_per_node))


def on_cpu(only: str, found: Ratios) -> Iterator[str]:
    from measured_memory import measure  # a script beside this one

    cpu = find_hardware("cpu")
    yield row("case", "plan MiB", "measured MiB", "ratio")
    yield row(*["---"] * 4)
    ratios = found["measured peak memory"]
    for name, processes, overrides in CPU_CASES:
        if only in name:
            config = load(DEBUG, overrides, world_size=processes)
            predicted = planned(config, processes, cpu, processes).peak
            measured = max(rank.peak for rank in measure(config, processes=processes))
            ratios.append(predicted / measured)
            yield row(name, f"{predicted / MIB:.1f}", f"{measured / MIB:.1f}", f"{ratios[-1]:.3f}")
    yield f"from {min(ratios):.3f} to {max(ratios):.3f}"


def published(only: str, found: Ratios) -> Iterator[str]:
    """The plan of the same config, also with a loss that holds all logits, as torchtitan's of 2024 did."""
    yield row("GPUs", "how", "published GiB", "plan, whole logits", "plan", "published tokens/s/GPU", "plan", "rates")
    yield row(*["---"] * 8)
    ratios: Ratios = defaultdict(list)
    for number, (name, hardware, world_size, how, batch, gib, speed) in enumerate(PUBLISHED):
        if only in f"{name} {how}":
            sizes = [f"--training.local_batch_size={batch}", f"--training.global_batch_size={batch * world_size}"]
            both = [
                planned(load(LLAMA_8B, [*OPTIONS[how], *sizes, *loss], world_size=world_size), world_size, hardware, 8)
                for loss in ([PUBLISHED_LOSS], [])
            ]
            peaks = [f"{plan.peak / GIB:.1f}" + (f" ({plan.peak / GIB / gib:.2f})" if gib else "") for plan in both]
            each = both[0].tokens_per_second / world_size
            if gib:
                found["published memory"].append(both[0].peak / GIB / gib)
            found["published tokens a second"].append(each / speed)
            ratios[half(number)].append(each / speed)
            yield row(name, how, gib or "-", *peaks, f"{speed:,}", f"{each:,.0f} ({each / speed:.2f})", half(number))
    yield from misses(ratios)


def half(number: int) -> str:
    """Return whether rates were fitted to a row."""
    return "held out" if number % 2 else "fitted"


def misses(ratios: Ratios) -> Iterator[str]:
    for which, found in ratios.items():
        far = [abs(ratio - 1) for ratio in found]
        yield f"{which}: {len(far)} rows, off by {statistics.mean(far):.1%} on average, {max(far):.1%} at most"


def on_further_axes(only: str, found: Ratios) -> Iterator[str]:
    """The plan of Llama 3 and Qwen3-MoE on meshes with further axes, beside published speeds."""
    yield row("config", "GPUs", "plan GiB", "published tokens/s/GPU", "plan", "rates")
    yield row(*["---"] * 6)
    ratios: Ratios = defaultdict(list)
    for number, (name, config, hardware, world_size, options, speed) in enumerate(AXES):
        if only in name:
            loaded = load(f"train_configs/{config}.toml", options, world_size=world_size)
            plan = planned(loaded, world_size, hardware, 8)
            each = plan.tokens_per_second / world_size
            found["published tokens a second of further axes"].append(each / speed)
            use = "experts" if hardware.exchange_share < 1 else "held out" if hardware is GB200 else half(number)
            ratios[use].append(each / speed)
            cells = f"{plan.peak / GIB:.1f}", f"{speed:,}", f"{each:,.0f} ({each / speed:.2f})", use
            yield row(name, world_size, *cells)
    yield from misses(ratios)


def on_null_gpu(only: str, found: Ratios) -> Iterator[str]:
    """The plan of rank 0 beside PyTorch's own allocator, and torchtitan 0.2.2 where it was measured on a null GPU."""
    sys.path.insert(0, str(ROOT))
    from tests.null_gpu.variants import VARIANTS

    recorded = json.loads((ROOT / "tests/null_gpu/recorded.json").read_text())
    yield row("config", "allocated GiB", "plan", "reserved GiB", "plan", "torchtitan 0.2.2: allocated, reserved")
    yield row(*["---"] * 6)
    for variant in VARIANTS:
        if only in variant.name and variant.name in recorded:
            overrides = [word for word in variant.words if word.startswith("--") and "." in word.split("=")[0]]
            config = load(f"train_configs/{variant.config}.toml", overrides, world_size=variant.world_size)
            predicted = plan(config, Layout(variant.world_size, find_hardware(variant.device), 8))
            cells = []
            for what, size in (("allocated", predicted.peak), ("reserved", predicted.reserved)):
                measured = recorded[variant.name][what]
                found[f"{what} memory"].append(size / GIB / measured)
                cells += [f"{measured:.2f}", f"{size / GIB:.2f} ({size / GIB / measured:.3f})"]
            yield row(variant.name, *cells, TORCHTITAN.get(variant.name, ""))


def logits_in_full(hidden_BLD: Tensor, weight_VD: Tensor, *, labels_BL: Tensor) -> TokenLoss:
    """Cross entropy of all logits at once, in float32."""
    logits = F.linear(hidden_BLD, weight_VD).flatten(0, 1).float()
    total = F.cross_entropy(logits, labels_BL.flatten(), ignore_index=IGNORE, reduction="sum")
    return TokenLoss(total, total.detach())


def on_gpu(file: Path | None, only: str, found: Ratios) -> Iterator[str]:
    """The plan beside the runs of a file that gpu.py wrote, or of each."""
    for path in [file] if file else sorted((ROOT / "benchmarks" / "gpu").rglob("*.json")):
        measured = json.loads(path.read_text())
        yield f"{measured['device']}, torch {measured['torch']}"
        yield row("case", "plan GiB", "measured GiB", "ratio", "plan s/step", "measured s/step", "ratio")
        yield row(*["---"] * 7)
        for name, case in measured["cases"].items():
            if only in name and "words" in case:
                config = load(f"train_configs/{case['config']}.toml", case["words"], world_size=1)
                predicted = planned(config, 1, find_hardware(measured["hardware"]), 1)
                tokens = config.training.global_batch_size * config.training.seq_len
                seconds = tokens / statistics.median(case["tokens_per_second"])
                memory = predicted.reserved / GIB, case["memory_gib"], predicted.reserved / GIB / case["memory_gib"]
                found["measured peak memory"].append(memory[2])
                found["measured time of a step"].append(predicted.time.total / seconds)
                values = (*memory, predicted.time.total, seconds, predicted.time.total / seconds)
                yield row(name, *(f"{value:.3f}" for value in values))


if __name__ == "__main__":
    main()
