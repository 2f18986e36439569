"""The matrix of combinations: rows are models and techniques, columns are layouts, that is axes with their degrees.

A cell trains on gloo processes as one process does, or is refused with the option that is named. All runs on as many
processes are in one process group, because to start one takes longer than a tiny run.

    python -m tests.matrix 'Llama 3' gpt-oss    # trains these rows for 20 steps, and renews their cells
    python -m tests.matrix                      # the rows that are not written yet

docs/combinations.csv has the numbers, and docs/combinations.md a symbol for each row and axis.
"""

import csv
import io
import math
import re
import sys
import tempfile
import zlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from tests.support import own_models
from tests.support.faults import FAULTS
from tests.support.helpers import TinyRun, built, run_in_turn
from tests.support.layouts import trace_blocks, whole
from titanlite.checks.preflight import preflight
from titanlite.runtime.dtensor import sharded_axes
from titanlite.runtime.errors import ConfigError
from titanlite.runtime.private_torch.tensors import local_tensor
from titanlite.runtime.process_group import Ranks
from titanlite.schema import Config
from titanlite.state import flat
from titanlite.train import finish, train

PAGE = Path(__file__).parents[1] / "docs" / "combinations.md"
NUMBERS = PAGE.with_suffix(".csv")
AXES = {
    "r": "data_parallel_replicate", "s": "data_parallel_shard", "c": "context_parallel", "t": "tensor_parallel",
    "e": "expert_parallel", "p": "pipeline_parallel",
}  # fmt: skip
"""Options of the axes, by the letters of layouts: "s2 c2" is four processes, and "s4 e2" too."""

DATA, CONTEXT, EXPERT, TENSOR = "r2,s2,r2 s2,s4", "c2,c4,s2 c2,r2 c2", "s2 e2,s4 e2,s4 e4,r2 s2 e2", "t2,s2 t2,r2 t2"
PIPELINE = "p2,s2 p2,r2 p2,c2 p2,t2 p2"
WHOLE_MATRIX = f"{DATA},{CONTEXT},{TENSOR},c2 t2,{PIPELINE}"
WITH_EXPERTS = f"{EXPERT},s2 c2 e2,s2 c2 e4,s2 t2 e2,s2 e2 p2"
FAMILY = "r2 s2,c2,c4,s2 c2,t2,s2 t2,c2 t2,p2,s2 p2"
FAMILY_OF_EXPERTS = f"{FAMILY},s2 e2,s4 e2,s2 c2 e2,s2 t2 e2,s2 e2 p2"
ON_SPLIT = "s2,r2 s2,c2,s2 c2,t2,s2 t2,r2 t2,c2 t2,s2 e2"
TECHNIQUE = f"{ON_SPLIT},p2"
UNSPLIT, ON_STAGES = "s2,r2 s2,c2,s2 c2,s2 e2", f"{TECHNIQUE},s2 p2"
WITH_WORKERS = "r2 s2,r2 c2,r2 t2,r2 s2 e2"
ON_FOUR, SPLIT_EXPERTS = "r2 s2,c4,s2 c2,s2 t2,c2 t2", "s4 e2,s2 t2,c2 t2,s2 c2 e2,s2 t2 e2"
ROUGH, ROUNDED = 1e-5, 2e-3
"""Largest relative differences of losses where rounding is amplified, and where tensors are rounded to fewer bits."""

# Models. Rows of layers and of the vocabulary do not divide by 4, nor do halves of them by 2: shards are uneven.
LLAMA = "--model.args={dim=36,n_layers=2,n_heads=6,n_kv_heads=2,hidden_dim=70,vocab_size=262}"
SPARSE = (
    "--model={name='qwen3_moe',flavor='debug',"
    "args={dim=32,n_layers=2,n_heads=2,n_kv_heads=2,head_dim=16,hidden_dim=24,vocab_size=260}}"
)
SIZES = "dim=48,n_layers=2,n_heads=4,n_kv_heads=2,hidden_dim=64,vocab_size=260"
SCALED, GROUPS = "window=5,rope_scaling_factor=8.0", "n_experts=8,n_groups=4,n_active_groups=2"
QWEN3 = "--model.name=qwen3 --model.args.head_dim=14 --model.args.tied_head=false"
DEEPSEEK = (
    "--model.name=deepseek_v3 --model.args={dim=48,n_layers=2,n_heads=4,n_kv_heads=4,hidden_dim=16,vocab_size=260,"
    "rope_scaling_factor=8.0,q_rank=24,kv_rank=16,nope_dim=12,rope_dim=8,v_dim=10,"
    f"{GROUPS},n_active_experts=2,n_dense_layers=1,dense_hidden_dim=64}}"
)
GLM = (
    f"--model.name=glm4_moe --model.args={{{SIZES},head_dim=12,{GROUPS},n_active_experts=3,dense_hidden_dim=96,"
    "routed_scaling_factor=2.5,qk_norm=true}"
)
QWEN_NEXT = (
    f"--model.name=qwen3_next --model.args={{{SIZES},head_dim=16,full_every=2,n_linear_key_heads=2,"
    "n_linear_value_heads=4,linear_key_dim=8,linear_value_dim=10,n_experts=4,n_active_experts=2,shared_hidden_dim=16}"
)
SMOL = f"--model.name=smollm3 --model.args={{{SIZES},tied_head=false}}"
OLMO2 = (
    "--model={name='transformers',path='olmo2',args={num_hidden_layers=2,hidden_size=32,intermediate_size=48,"
    "num_attention_heads=4,num_key_value_heads=2}}"
)
OWN_LOSS = "tests.support.layouts:smoothed_loss"
ULYSSES = "--parallelism.context_parallel_method=ulysses"
OWN = f"--model.file={own_models.__file__} --model.name="
VARIANTS = f"--model={{name='Variants',flavor='debug',file='{own_models.__file__}'}}"

# Techniques.
EACH, PAIRS = "--training.local_batch_size=1", "--training.local_batch_size=2"
FULL, OP, COMPILE = "--activation_checkpoint.mode=full", "--activation_checkpoint.mode=selective", "--compile.enable"
MESH = "--parallelism."
TOGETHER, REDUCED_ONCE = f"{MESH}fsdp_min_unit_params=1000000", f"{EACH} {MESH}fsdp_reduce_gradients=last"
SCHEDULE = f"--model.args.n_layers=4 {MESH}pipeline_parallel_schedule="
SCHEDULES = ["1F1B", "GPipe", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"]
QUICK = "1F1B", "Interleaved1F1B", "ZBVZeroBubble", "DualPipeV"
"""One of each kind: one stage and several on a process, halves of the backward pass, and stages that turn around."""
UNUSED_ALONE = f"{MESH}pipeline_parallel_schedule=", f"{MESH}context_parallel_method="
"""Options without an effect on one process, whose runs several rows are then compared with."""
OF_CONTEXT, OF_TENSOR, OF_STAGES = (f"parallelism.{axis}_parallel_degree" for axis in ("context", "tensor", "pipeline"))
MUON = "--optimizer.name=Muon --optimizer.args.ns_dtype=float32"
IN_BACKWARD = "--optimizer.in_backward --training.max_norm=0"
SEVERAL = (
    "--model.args.tied_head=true --optimizer.state_dtype=bfloat16 --training.enable_cpu_offload --training.max_norm=0 "
    "--optimizer.groups=[{match=['layers.*']},{match=['tok*','head*'],name='SGD',args={momentum=0.9}}]"
)
COMPLETEP = (
    f"--model.args={{{SIZES}}} --optimizer.parametrization=completep --optimizer.base_width=24 --optimizer.base_depth=1"
)
RESUMED, AVERAGE, OUTER = "--checkpoint.enable=true", "--average.decay=0.75", "--outer.every=3 --optimizer.eps=1e-4"
WORKERS = "--outer.over_replicas --optimizer.eps=1e-4"
OFFLOAD, ON_HOST = "--training.enable_cpu_offload", "--activation_checkpoint.offload"
SPIKES = f"{RESUMED} --checkpoint.interval=2 --guard.spike_sigma=1 --guard.on_spike=rollback --guard.max_rollbacks=100"
DISK = f"{OFFLOAD} --offload.parameters=disk --offload.optimizer=disk"
LORA = "--lora.rank=3 --lora.alpha=6 --training.max_norm=0 --optimizer.lr=0.01"
DROPOUT = "--training.dropout=0.2"
SLOWLY, FURTHER = "--optimizer.lr=1e-3", "--training.multi_token_weight=0.3"
BALANCED, PADDED = "--model.args.balance_loss=0.1", "--data.packing=best_fit"
FROZEN = "--freeze.parameters=['tok*','layers.0.attention.*']"
FROZEN_EXPERTS = "--freeze.parameters=['layers.0.feed_forward.w?','layers.1.feed_forward.router']"
TEACHER = "--teacher.path={folder}/outputs/teacher --distill.ratio=0.5"
BFLOAT16 = "--training.mixed_precision_param=bfloat16"
NARROW = f"{BFLOAT16} --training.dtype=bfloat16 --optimizer.state_dtype=bfloat16"
NARROWEST = f"{NARROW} --training.mixed_precision_reduce=bfloat16"
REDUCED = "--training.max_norm=0 --training.mixed_precision_reduce=bfloat16"
FLOAT8 = "--quantize.linear.float8.enable --quantize.linear.float8.emulate --quantize.linear.float8.skip_small=false"
MXFP8 = "--quantize.linear.float8.recipe_name=mxfp8"
GATHERED = "--quantize.linear.float8.enable_fsdp_float8_all_gather"
EVEN = f"--model.args.dim=48 --model.args.hidden_dim=64 {EACH}"
EXACT, PARTS = f"--debug.reproducible_layouts {EACH} --debug.hash_freq=1", "--debug.reproducible_context_degree=4"
MOE = f"{SPARSE} {EVEN}"
SAME, FREE = "Llama 3", "without clipping"


class Row(NamedTuple):
    """A model or a technique.

    Args:
        words: options. A technique is used with Llama 3, and with Qwen3-MoE on layouts with experts.
        layouts: on which it trains.
        quick: those of the default tests, for a few steps.
        slow: those of CI, for as few.
        tolerance: largest relative difference of losses and gradient norms to those of one process. 0: the same bits.
        like: row whose bits it has on each layout; it is compared with that instead.
        base: layout that it is compared with; empty: one process.
        refused: layouts with the key of the problem.
    """

    words: str
    layouts: str
    quick: str = ""
    slow: str = ""
    tolerance: float = 1e-6
    like: str = ""
    base: str = ""
    refused: Mapping[str, str] = {}


def rows(layouts: str, words: Mapping[str, str], **options: Any) -> dict[str, Row]:
    """Return rows of the same layouts, by their names."""
    return {name: Row(its, layouts, **options) for name, its in words.items()}


MODELS = {
    "Llama 3": Row("", f"{WHOLE_MATRIX},p4,s2 c2 t2,s2 c2 p2,s2 t2 p2", quick="s2,c2"),
    "Llama 3, sequences without a mask": Row("--data.document_mask=false", TECHNIQUE, slow="c2"),
    "Qwen3": Row(QWEN3, FAMILY),
    "Qwen3, an odd dim": Row("--model.name=qwen3 --model.args.head_dim=14 --model.args.dim=35", "s2 t2,c2 t2"),
    "Qwen3-MoE": Row(SPARSE, f"{WHOLE_MATRIX},{WITH_EXPERTS},s2 c2 t2 e2", quick="s2 e2", slow="t2"),
    "Qwen3-MoE, 6 experts": Row(SPARSE.replace("dim=32", "dim=42,n_experts=6,n_active_experts=2"), DATA),
    "DeepSeek-V3": Row(DEEPSEEK, FAMILY_OF_EXPERTS),
    "DeepSeek-V3, two predicted tokens": Row(
        f"{DEEPSEEK} {OP} {FURTHER}", f"{FAMILY_OF_EXPERTS},c2 p2,t2 p2", slow="c2,t2,s2 e2,p2",
    ),
    "GLM-4.5": Row(GLM, FAMILY_OF_EXPERTS, slow="t2"),
    "GLM-4.5, two predicted tokens": Row(f"{GLM} {FURTHER}", "c2,t2,s2 t2,s2 e2,s2 t2 e2,p2"),
    "Gemma 3": Row(
        f"--model.name=gemma3 --model.args={{{SIZES},head_dim=14,query_pre_attn_scalar=10,full_every=2,"
        f"tied_head=false,{SCALED}}}", FAMILY, quick="s2,c2,t2",
    ),
    "OLMo 3": Row(
        f"--model.name=olmo3 --model.args={{{SIZES},full_every=2,{SCALED}}}", FAMILY, quick="s2,c2,t2",
    ),
    "SmolLM3": Row(SMOL, FAMILY),
    "gpt-oss": Row(
        f"--model.name=gpt_oss --model.args={{{SIZES},head_dim=14,n_experts=4,n_active_experts=2,{SCALED}}}",
        FAMILY_OF_EXPERTS, slow="c2",
    ),
    "Qwen3-Next": Row(
        QWEN_NEXT, "r2 s2,c2,s2 c2,t2,s2 t2,p2,s2 p2,s2 e2,s4 e2,s4 e4,s2 c2 e2,s2 t2 e2,s2 e2 p2",
        slow="c2,t2", tolerance=ROUGH, refused={"c4": OF_CONTEXT, "c2 t2": OF_CONTEXT},
    ),
    "Qwen3-Next, three values for each key": Row(
        QWEN_NEXT.replace("key_heads=2", "key_heads=4").replace("value_heads=4", "value_heads=12"),
        "c2,c4,s2 c2,t2,c2 t2", tolerance=ROUGH,
    ),
    "a model of one's own": Row(f"{OWN}Own", "s2,c2,s2 c2,t2,s2 t2,c2 t2"),
    "experts of one's own": Row(f"{SPARSE} {OWN}OwnExperts", "s2 e2"),
    "experts with all variants": Row(
        VARIANTS, "t2,s2 e2,s2 t2,c2 t2,s4 e2,s2 c2 e2,s2 t2 e2", slow="t2,s2 e2",
    ),
    "biases, sinks, half of each head rotated": Row(
        f"{OWN}Biased --model.args.head_dim=14 --model.args.tied_head=false {OP} --training.z_loss=1e-3",
        TECHNIQUE.replace(",s2 e2", ""), slow="t2",
    ),
    "GPT-2 of examples/": Row(
        f"--model.file={PAGE.parents[1]}/examples/my_model/gpt2.py "
        "--model.args={dim=42,n_layers=3,n_heads=3,vocab_size=259}", f"{DATA},{CONTEXT}", tolerance=ROUGH,
    ),
    "OLMo 2 of transformers": Row(OLMO2, "s2,r2 s2"),
}  # fmt: skip
FAMILIES = ("DeepSeek-V3", "GLM-4.5", "Gemma 3", "OLMo 3", "SmolLM3", "gpt-oss")
SAME_BITS = {
    **rows(ON_STAGES, {
        "weights gathered again in backward": f"{MESH}fsdp_reshard_after_forward=always",
        "weights kept": f"{MESH}fsdp_reshard_after_forward=never",
        "CPU offload": OFFLOAD,
        "trained beside an average": AVERAGE,
    }, like=SAME, slow="s2"),
    **rows(ON_STAGES, {
        "every second block recomputed": f"{OP} --activation_checkpoint.selective_ac_option=2",
        "stopped and resumed": RESUMED,
        "an outer optimizer that changes nothing": "--outer.every=3 --outer.lr=1 --outer.momentum=0",
    }, like=SAME),
    "float8, trained beside an average": Row(
        f"{EVEN} {FLOAT8} {GATHERED} {AVERAGE}", "s2", like="float8, gathered in float8"
    ),
    "prefetch": Row(
        f"{MESH}fsdp_forward_prefetch=2 {MESH}fsdp_backward_prefetch=2", ON_SPLIT, like=SAME, slow="s2",
        refused={"p2": f"{MESH[2:]}fsdp_forward_prefetch, {MESH[2:]}fsdp_backward_prefetch"},
    ),
    "weights and moments on disk": Row(DISK, ON_SPLIT, like=SAME, slow="s2", refused={"p2": "offload"}),
    "every block recomputed": Row(FULL, ON_STAGES, like=SAME, slow="c2"),
    "recomputed but for matmuls": Row(OP, ON_STAGES, like=SAME, quick="c2"),
    "activations on the host": Row(ON_HOST, ON_STAGES, like=SAME, quick="s2"),
    "activations on the host, every block recomputed": Row(f"{ON_HOST} {FULL}", ON_STAGES, like=SAME),
    "activations on the host, compiled": Row(f"{ON_HOST} {COMPILE} {OP}", "s2,c2,t2", like="compiled, recomputed"),
    "weights gathered by two processes": Row(
        f"{MESH}fsdp_reshard_after_forward=2", "s4,s2 c2", like=SAME,
        refused=dict.fromkeys(("s4 e2", "s2 t2"), "parallelism.fsdp_reshard_after_forward"),
    ),
    "small blocks gathered together": Row(
        TOGETHER, "s2,r2 s2,c2,s2 c2,t2,s2 t2", like=SAME, refused={"s2 e2": "parallelism.fsdp_min_unit_params"}
    ),
    "a worker that reads": Row("--data.num_workers=1", "s2,s4", like=SAME),
    "updates in backward": Row(IN_BACKWARD, ON_SPLIT, like=FREE, slow="s2", refused={"p2": "optimizer.in_backward"}),
    "updates in backward of several optimizers": Row(
        f"{SEVERAL} {IN_BACKWARD}", "s2,r2 s2", like="several optimizers"
    ),
    "updates in backward, bfloat16 reduced": Row(
        f"{REDUCED} {IN_BACKWARD} {FULL}", "r2,r2 s2", like="bfloat16 reduced"
    ),
    "an outer optimizer, stopped and resumed": Row(
        f"{RESUMED} {OUTER}", ON_STAGES, like="an outer optimizer", slow="s2"
    ),
    "rounds of two workers, stopped and resumed": Row(
        f"{RESUMED} --outer.every=2 {WORKERS}", "r2,r2 s2", like="rounds of two workers"
    ),
    "stopped and resumed, bfloat16": Row(f"{RESUMED} {NARROW}", TECHNIQUE, like="bfloat16 weights"),
    **{f"{family}, recomputed": Row(f"{MODELS[family].words} {OP}", ON_FOUR, like=family) for family in FAMILIES},
    "Qwen3-Next, recomputed": Row(f"{QWEN_NEXT} {FULL}", "r2 s2,c2,t2,s2 e2,s4 e4", like="Qwen3-Next"),
    "all variants, recomputed": Row(f"{VARIANTS} {OP}", SPLIT_EXPERTS, like="experts with all variants"),
    **rows("c2,t2,s2 e2", {
        "balance loss, recomputed": f"{SPARSE} {BALANCED} {FULL}",
        "balance loss, recomputed but for matmuls": f"{SPARSE} {BALANCED} {OP}",
    }, like="balance loss"),
    **rows("s2", {
        "OLMo 2, recomputed": f"{OLMO2} {FULL}", "OLMo 2, recomputed but for matmuls": f"{OLMO2} {OP}",
        "OLMo 2, CPU offload": f"{OLMO2} {OFFLOAD}",
    }, like="OLMo 2 of transformers"),
}  # fmt: skip
SAME_BITS |= {
    f"small blocks gathered together, {row}": Row(f"{TOGETHER} {SAME_BITS[row].words}", "s2", like=row)
    for row in (
        "every block recomputed",
        "recomputed but for matmuls",
        "weights kept",
        "prefetch",
        "updates in backward",
    )
}
TECHNIQUES = {
    **rows(TECHNIQUE, {
        FREE: "--training.max_norm=0", "accumulation": EACH, "z-loss": "--training.z_loss=1e-3",
    }),
    "accumulation, reduced once": Row(REDUCED_ONCE, ON_STAGES),
    "frozen parameters": Row(FROZEN, TECHNIQUE),
    "average of weights": Row(AVERAGE, TECHNIQUE, slow="t2"),
    **rows("s2,r2", {
        "average of weights, updates in backward": f"{AVERAGE} {IN_BACKWARD}",
        "average of weights, CPU offload": f"{AVERAGE} {OFFLOAD}",
        "average of weights on the host": f"{AVERAGE} --average.enable_cpu_offload",
        "average of weights, moments on disk": f"{AVERAGE} --offload.optimizer=disk",
        "average of weights, LoRA": f"{AVERAGE} {LORA}",
    }, tolerance=ROUGH),
    "average of weights, bfloat16 weights": Row(f"{AVERAGE} {NARROW}", "s2", tolerance=ROUNDED),
    "an outer optimizer": Row(OUTER, TECHNIQUE, slow="t2,p2"),
    **rows("s2,r2", {
        "an outer optimizer, updates in backward": f"{OUTER} {IN_BACKWARD}",
        "an outer optimizer, CPU offload": f"{OUTER} {OFFLOAD}",
        "an outer optimizer, moments on disk": f"{OUTER} --offload.optimizer=disk",
        "an outer optimizer, LoRA": f"{OUTER} {LORA}",
        "an outer optimizer, an average of weights": f"{OUTER} {AVERAGE}",
    }, tolerance=ROUGH),
    "an outer optimizer, bfloat16 weights": Row(f"{OUTER} {NARROW}", "s2", tolerance=ROUNDED),
    "an outer optimizer, float8": Row(
        f"{OUTER} {EVEN} {FLOAT8} {GATHERED}", "s2", tolerance=ROUNDED
    ),
    "rounds of two workers": Row(
        f"--outer.every=2 {WORKERS}", WITH_WORKERS, base="r2", refused={"r2 p2": "outer.over_replicas"}
    ),
    **rows("r2 s2", {
        "rounds of two workers, CPU offload": f"--outer.every=2 {WORKERS} {OFFLOAD}",
        "rounds of two workers, LoRA": f"--outer.every=2 {WORKERS} {LORA} {SLOWLY}",
    }, base="r2", tolerance=ROUGH),
    "rounds of two workers, bfloat16 weights": Row(
        f"--outer.every=2 {WORKERS} {NARROW}", "r2 s2", base="r2", tolerance=ROUNDED
    ),
    "tied head": Row("--model.args.tied_head=true", ON_SPLIT, slow="t2", refused={"p2": OF_STAGES}),
    "Muon": Row(MUON, f"{TECHNIQUE},{WITH_EXPERTS}", slow="p2"),
    "Muon, and AdamW for the rest": Row(
        "--optimizer.groups=[{match=['layers.*.w?.weight'],name='Muon',args.ns_dtype='float32'},"
        "{match=['tok*','head*','*norm*']}]", "c2,s2 c2"
    ),
    "several optimizers": Row(SEVERAL, "s2,r2 s2", tolerance=ROUNDED),
    "bfloat16 reduced": Row(REDUCED, "r2,r2 s2,s2 p2", tolerance=ROUNDED),
    **rows("r2,s2,t2", {"completep": COMPLETEP, "completep, Muon": f"{COMPLETEP} {MUON}"}),
    "completep, two predicted tokens": Row(f"{COMPLETEP} {FURTHER}", "s2,c2,t2,p2"),
    "frozen router and experts": Row(f"{SPARSE} {FROZEN_EXPERTS}", "s2,s2 e2"),
    "gpt-oss, all frozen but sinks": Row(
        f"{MODELS['gpt-oss'].words} --freeze.parameters=['tok*','head*','*.w?.*','*norm*','*feed_forward*']",
        "t2,s2 t2,c2", slow="t2",
    ),
    **rows("s2,r2", {
        "frozen parameters, recomputed": f"{FROZEN} {FULL}", "frozen parameters, on disk": f"{FROZEN} {DISK}",
        "frozen parameters, updates in backward": f"{FROZEN} {IN_BACKWARD}",
        "frozen parameters, Muon": f"{FROZEN} {MUON} {EACH}",
    }),
    "frozen parameters, bfloat16 weights": Row(f"{FROZEN} {NARROW}", "s2", tolerance=ROUNDED),
    "Qwen3-Next, frozen parameters": Row(f"{QWEN_NEXT} {FROZEN}", "r2 s2,s4 e4", tolerance=ROUGH),
    **rows(UNSPLIT, {
        "frozen, bfloat16": "--freeze.parameters=['tok*','layers.0.*'] --freeze.dtype=bfloat16",
        "LoRA, bfloat16": f"{LORA} --freeze.dtype=bfloat16",
        "LoRA, recomputed, reduced once": f"{LORA} {OP} {REDUCED_ONCE}",
        "LoRA, updates in backward": f"{LORA} {IN_BACKWARD}", "LoRA, on disk": f"{LORA} {DISK} {SLOWLY}",
    }, tolerance=ROUGH),
    "LoRA": Row(LORA, f"{UNSPLIT},s4,p2", tolerance=ROUGH, refused={"t2": OF_TENSOR}),
    "LoRA of Qwen3-Next, recomputed": Row(
        f"{QWEN_NEXT} {LORA} {OP} {SLOWLY}", "s2,s2 e2", tolerance=ROUGH
    ),
    "a loss of one's own": Row(f"--training.loss={OWN_LOSS}", UNSPLIT, refused={"t2": OF_TENSOR}),
    "a loss of one's own, two predicted tokens": Row(
        f"--training.loss={OWN_LOSS} {FURTHER}", "s2,c2,p2"
    ),
    "a teacher": Row(TEACHER, "s2,c2,s2 c2", refused={"t2": OF_TENSOR, "p2": "teacher.path"}),
    "OLMo 2 of transformers, LoRA": Row(
        f"{OLMO2} {LORA} {SLOWLY} --lora.targets=['layers.*.self_attn.*_proj']", "s2,r2 s2", tolerance=ROUGH
    ),
    **rows("s2,r2 s2", {
        "OLMo 2 of transformers, frozen parameters": f"{OLMO2} --freeze.parameters=['*embed*','layers.0.*']",
        "OLMo 2 of transformers, a teacher": f"{OLMO2.replace('num_h', 'vocab_size=262,num_h', 1)} {TEACHER}",
    }),
    "a teacher, two predicted tokens": Row(f"{TEACHER} {FURTHER}", "s2,c2,s2 c2"),
    "health of layers": Row(
        "--metrics.layers.freq=2", "s2,r2 s2,c2,s2 c2,t2,s2 e2", slow="t2", refused={"p2": "metrics.layers.freq"}
    ),
    "ramps of length and batch": Row(
        "--training.seq_len_ramp=[{until_tokens=512,seq_len=16}] "
        f"--training.batch_ramp=[{{until_tokens=1024,global_batch_size=4}}] {EACH}", "s2,r2 s2,c2,t2,p2",
    ),
    "tasks": Row("--validation.tasks=['number_choice']", "s2,c2,t2,p2"),
    "back over spikes": Row(SPIKES, ON_STAGES, slow="p2"),
    "stopped and resumed, experts": Row(
        f"{SPARSE} --model.args.balance_rate=0.05 {RESUMED}", EXPERT, slow="s2 e2"
    ),
    "balance loss": Row(
        f"{SPARSE} {BALANCED}", f"{ON_SPLIT},{SPLIT_EXPERTS}", slow="t2", refused={"p2": OF_STAGES}
    ),
    **rows("r2 s2,s2 c2 e2,s2 t2 e2", {
        "balance loss, DeepSeek-V3, two predicted tokens": f"{DEEPSEEK} {BALANCED} {FURTHER}",
        "balance loss, gpt-oss": f"{MODELS['gpt-oss'].words} {BALANCED}",
        "balance loss, updates in backward": f"{SPARSE} {BALANCED} {IN_BACKWARD}",
        "balance loss, stopped and resumed": f"{SPARSE} {BALANCED} {RESUMED}",
    }),
    "padding and experts": Row(f"{SPARSE} {PADDED}", "c2,p2,s2 p2,s4 e2", slow="p2"),
    "padding and a balance loss": Row(
        f"{SPARSE} {BALANCED} {PADDED}", f"{ON_SPLIT},{SPLIT_EXPERTS}", slow="c2,s2 t2 e2"
    ),
    "all variants, Muon": Row(f"{VARIANTS} {MUON}", SPLIT_EXPERTS),
    "two predicted tokens": Row(FURTHER, ON_STAGES),
    "heads for tokens": Row(
        ULYSSES, "c2,s2 c2,r2 c2,c2 p2", quick="c2", refused={"c4": OF_CONTEXT, "c2 t2": OF_CONTEXT}
    ),
    **rows("c2,s2 c2", {
        "heads for tokens, recomputed": f"{ULYSSES} {FULL}", "heads for tokens, compiled": f"{ULYSSES} {COMPILE} {OP}",
        "heads for tokens, two predicted tokens": f"{ULYSSES} {FURTHER}",
    }),
    **rows("c2,c4,c2 t2", {
        f"heads for tokens, {family}": f"{MODELS[family].words} {ULYSSES}"
        for family in ("Gemma 3", "OLMo 3", "gpt-oss", "DeepSeek-V3", "GLM-4.5")
    }),
    "heads for tokens, SmolLM3": Row(f"{SMOL} {ULYSSES}", "c2,c4,c2 t2"),
    "heads for tokens, Qwen3-MoE": Row(f"{SPARSE} {ULYSSES}", "c2,s2 c2 e2"),
    "heads for tokens, Qwen3-Next": Row(f"{QWEN_NEXT} {ULYSSES}", "c2,s2 c2", tolerance=ROUGH),
    "dropout": Row(f"{DROPOUT} {EACH}", UNSPLIT, slow="s2", refused=dict.fromkeys(("t2", "p2"), "training.dropout")),
    **rows("s2,c2", {
        "dropout, recomputed": f"{DROPOUT} {EACH} {FULL}",
        "dropout, stopped and resumed": f"{DROPOUT} {EACH} {RESUMED}",
    }, like="dropout"),
    **rows("s2,c2", {
        "dropout, compiled": f"{DROPOUT} {COMPILE} {OP}", "dropout, Gemma 3": f"{MODELS['Gemma 3'].words} {DROPOUT}",
        "dropout, OLMo 3": f"{MODELS['OLMo 3'].words} {DROPOUT}",
    }),
    **rows("s2,r2 s2,c2,t2", {
        f"two predicted tokens, {title}": f"{SMOL} {FURTHER} {words}"
        for title, words in {
            "tied head": "--model.args.tied_head=true", "reduced once": REDUCED_ONCE, "compiled": COMPILE,
            "updates in backward": IN_BACKWARD, "CPU offload": f"{FULL} {OFFLOAD}",
            "health of layers": "--metrics.layers.freq=2",
        }.items()
    }),
    **rows("s2", {
        "OLMo 2, updates in backward": f"{OLMO2} {IN_BACKWARD}", "OLMo 2, compiled": f"{OLMO2} {COMPILE}",
        "OLMo 2, without a mask": f"{OLMO2} {EACH} --data.document_mask=false",
    }),
}  # fmt: skip
STAGES = {
    "a frozen stage": Row(
        f"{SCHEDULE}Interleaved1F1B --freeze.parameters=['tok*','layers.0.*']", "p2,s2 p2", slow="p2"
    ),
    **{
        f"schedule {name}": Row(f"{SCHEDULE}{name}", f"{PIPELINE},s2 e2 p2", quick="p2" if name in QUICK else "")
        for name in SCHEDULES
    },
    **rows("p4,s2 p2", {
        f"schedule {name}, 8 blocks recomputed": f"{SCHEDULE}{name} --model.args.n_layers=8 {FULL}"
        for name in SCHEDULES
    }),
    **rows("p2", {f"schedule {name}, two predicted tokens": f"{SCHEDULE}{name} {FURTHER}" for name in SCHEDULES}),
    **rows("p2", {f"schedule {name}, compiled": f"{SCHEDULE}{name} {COMPILE}" for name in SCHEDULES[1:4]}),
    **rows("s2 p2", {
        f"schedule {name}, reduced once": f"{SCHEDULE}{name} {MESH}fsdp_reduce_gradients=last" for name in SCHEDULES
    }),
    "schedule ZBVZeroBubble, recomputed": Row(f"{SCHEDULE}ZBVZeroBubble {FULL}", "p2,s2 p2", slow="p2"),
    "schedule Interleaved1F1B, recomputed": Row(f"{SCHEDULE}Interleaved1F1B {FULL}", "p2,t2 p2", slow="t2 p2"),
    "schedule DualPipeV, recomputed": Row(f"{SCHEDULE}DualPipeV {FULL}", "p2,s2 p2,s2 e2 p2"),
}  # fmt: skip
COMPILED = {
    "compiled": Row(COMPILE, TECHNIQUE, slow="p2"),
    "compiled, recomputed": Row(f"{COMPILE} {FULL}", "s2,c2,s2 c2,s2 t2,c2 t2,p2"),
    **rows("c2,t2", {
        "Gemma 3, compiled": f"{MODELS['Gemma 3'].words} {COMPILE} {EACH}",
        "OLMo 3, compiled, recomputed": f"{MODELS['OLMo 3'].words} {COMPILE} {FULL}",
        "gpt-oss, compiled": f"{MODELS['gpt-oss'].words} {COMPILE} {EACH}",
    }),
    "DeepSeek-V3, compiled": Row(f"{DEEPSEEK} {COMPILE}", "c2,t2,s2 e2"),
    "all variants, compiled": Row(f"{VARIANTS} {COMPILE}", "s4 e2,s2 t2 e2"),
    **rows("s2,c2,t2,s2 e2", {
        "balance loss, compiled": f"{SPARSE} {BALANCED} {COMPILE}",
        "balance loss, compiled, recomputed": f"{SPARSE} {BALANCED} {COMPILE} {FULL}",
    }),
    "a model of one's own, compiled": Row(f"{OWN}Own {LLAMA} {COMPILE}", "t2"),
    "Qwen3-Next, compiled": Row(f"{QWEN_NEXT} {COMPILE} {EACH}", "s2"),
    "Qwen3-Next, compiled, split": Row(f"{QWEN_NEXT} {COMPILE} {EACH}", "c2,t2", tolerance=ROUGH),
    **rows("s2", {
        "LoRA, compiled": f"{LORA} {COMPILE}",
        "LoRA, compiled, recomputed": f"{LORA} {COMPILE} {FULL}",
    }),
}  # fmt: skip
LESS_PRECISE = {
    **rows(TECHNIQUE, {
        "bfloat16": f"{BFLOAT16} {EACH}", "bfloat16 moments": "--optimizer.state_dtype=bfloat16",
    }, tolerance=ROUNDED),
    "bfloat16 weights": Row(NARROW, TECHNIQUE, tolerance=ROUNDED, slow="s2"),
    "float8": Row(f"{EVEN} {FLOAT8}", f"{UNSPLIT},p2", tolerance=ROUNDED),
    "float8 of split layers": Row(
        f"--model.args={{{SIZES.replace('48', '64')}}} {EACH} {FLOAT8} {GATHERED}", "t2,s2 t2,t2 p2", tolerance=ROUNDED
    ),
    "float8, MXFP8": Row(
        f"--model.args={{{SIZES.replace('48', '64').replace('kv_heads=2', 'kv_heads=4')}}} {EACH} {FLOAT8} {MXFP8}",
        "s2,c2,t2,s2 t2,p2,t2 p2", tolerance=ROUNDED,
    ),
    "float8, gathered in float8": Row(
        f"{EVEN} {FLOAT8} {GATHERED}", f"{UNSPLIT},p2", tolerance=ROUNDED
    ),
}  # fmt: skip
REPRODUCIBLE = {
    **rows("r2,s2,r4,r2 s2,s4,r2 s4", {
        "reproducible Llama 3": EXACT, "reproducible Llama 3, bfloat16": f"{EXACT} {BFLOAT16}",
        "reproducible Qwen3": f"{QWEN3} {EXACT}", "reproducible Qwen3, bfloat16": f"{QWEN3} {EXACT} {BFLOAT16}",
        "reproducible Qwen3-MoE": f"{MOE} {EXACT}",
    }, tolerance=0),
    "reproducible Qwen3-MoE, bfloat16": Row(
        f"{MOE} {EXACT} {BFLOAT16}", f"{DATA},{EXPERT}", tolerance=0, slow="r2 s2 e2"
    ),
    **rows("r2 s2", {
        f"reproducible, {title}": f"{EXACT} {words}"
        for title, words in {
            "recomputed": FULL, "Muon": "--optimizer.name=Muon", "LoRA": "--lora.rank=4", "CPU offload": OFFLOAD,
            "compiled": COMPILE, "bfloat16 weights": NARROWEST, "a teacher": TEACHER, "pairs": f"{MOE} {PAIRS}",
            "two predicted tokens": FURTHER, "dropout": DROPOUT, "an outer optimizer": OUTER,
        }.items()
    }, tolerance=0),
    **rows("s2 e2,s4 e4", {
        f"reproducible experts{title}": f"{MOE} {EXACT} {words}"
        for title, words in {
            "": "", ", pairs": PAIRS, ", recomputed": FULL, ", Muon": MUON, ", CPU offload": OFFLOAD, ", frozen":
            FROZEN_EXPERTS, ", bfloat16 weights": NARROWEST, ", padding": PADDED,
        }.items()
    }, tolerance=0),
    **rows(CONTEXT, {
        f"reproducible sequences, {title}": f"{words} {EXACT} {PARTS}"
        for title, words in {
            "Llama 3": FULL, "Qwen3": f"{QWEN3} {FULL}", "Qwen3-MoE": f"{MOE} {FULL}", "bfloat16": BFLOAT16,
            "Qwen3-MoE, bfloat16": f"{MOE} {BFLOAT16}", "LoRA": "--lora.rank=4", "Muon": f"--optimizer.name=Muon {OP}",
            "gpt-oss, bfloat16": f"{MODELS['gpt-oss'].words} {BFLOAT16}",
        }.items()
    }, tolerance=0),
}  # fmt: skip
TABLES = {
    "Models": MODELS,
    "What changes no bit": SAME_BITS,
    "What changes the training": TECHNIQUES,
    "Schedules of pipelines": STAGES,
    "Compiled": COMPILED,
    "Fewer bits": LESS_PRECISE,
    "Reproducible layouts": REPRODUCIBLE,
}
"""Rows by the headings of the page."""
ROWS = {name: row for table in TABLES.values() for name, row in table.items()}


Cell = tuple[str, str]
"""A row and a layout."""


class Found(NamedTuple):
    """What one process has after training."""

    values: dict[str, np.ndarray]
    """Whole tensors of a checkpoint: weights, buffers, moments and averages, of which it has a part."""
    parts: dict[tuple[Any, ...], int]
    """Checksums of its parts, by the name and the place of the part: equal on all processes that have it."""
    frozen: set[str]
    """Names of parameters."""


class Difference(NamedTuple):
    """Largest relative differences, and what else differs."""

    loss: float
    validation: float
    grad_norm: float
    value: float
    """Of tensors of the checkpoint, to their largest element."""
    others: list[str]


def degrees(layout: str) -> dict[str, int]:
    return {axis[0]: int(axis[1:]) for axis in layout.split()}


def size_of(layout: str) -> int:
    """Return the number of processes of a layout."""
    return math.prod(degree for axis, degree in degrees(layout).items() if axis != "e")


def cells_of(chosen: str, *names: str) -> list[Cell]:
    """Return the cells of a set, of some rows or of all: quick, slow, or all that train."""
    found = []
    for name in names or ROWS:
        row = ROWS[name]
        of_set = {"quick": row.quick, "slow": row.slow, "all": f"{row.layouts},{row.quick},{row.slow}"}[chosen]
        found += [(name, layout) for layout in dict.fromkeys(of_set.split(",")) if layout]
    return found


def words_of(row: Row, layout: str) -> list[str]:
    """Return the options of a cell that one process has, too."""
    axes = degrees(layout)
    has_sizes = re.search(r"--model(\.args)?=\{", row.words)
    model = "" if has_sizes else SPARSE if "e" in axes else LLAMA
    blocks = "--model.args.n_layers=4" if axes.get("p", 1) > 2 else ""
    return f"--data.document_mask --optimizer.lr=1e-3 {model} {blocks} {row.words}".split()


def on_layout(layout: str) -> list[str]:
    """Return the options of a layout. A pipeline has as many micro-batches as it can."""
    axes = {"r": 1, "s": 1} | degrees(layout)
    return [*(f"--parallelism.{AXES[axis]}_degree={axes[axis]}" for axis in axes), *([EACH] if "p" in axes else [])]


def in_folder(tiny: TinyRun, words: Sequence[str]) -> list[str]:
    """Return options with the folder that they name, where the teacher is trained if they name one."""
    if TEACHER.split()[0] in words and not (tiny.folder / "outputs/teacher").exists():
        teacher = tiny.config(*LLAMA.split(), "--job.name=teacher", "--training.steps=4")
        run_in_turn(trained, 1, [([teacher], "")])
    return [word.replace("{folder}", str(tiny.folder)) for word in words]


def trained(rank: int, world_size: int, job: tuple[Sequence[Config], str], *, compiles: bool = True) -> Found:
    """Train a run in one or more starts, with a fault."""
    run, frozen = None, dict[str, int]()
    for config in job[0]:
        del run  # which leaves the folder to the next start
        with ExitStack() as stack:
            if not compiles:
                stack.enter_context(patch("titanlite.parallelize.compile_blocks", trace_blocks))
            stack.enter_context(patch("titanlite.guard.SPIKE_WINDOW", 2))  # a rise is a spike where the rule is used
            if job[1]:
                stack.enter_context(FAULTS[job[1]].planted())
            run = built(rank, world_size, config)
            if not run.position.progress.step:
                raise_sensitivity(run.model)
            frozen = {
                name: checksum(parameter)
                for name, parameter in run.model.named_parameters()
                if not parameter.requires_grad
            }
            finish(run, train(run))
    assert run is not None
    found = Found({}, {}, {*frozen})
    for name, tensor in flat(run.checkpoints.state.tensors()).items():
        place = tensor.device_mesh.get_coordinate() if isinstance(tensor, DTensor) else None
        found.parts[name, *((axis, place and place[axis]) for axis in sharded_axes(tensor))] = checksum(tensor)
        found.values[name] = whole(tensor).float().numpy()
    assert frozen == {name: checksum(run.model.get_parameter(name)) for name in frozen}
    assert not [key for key in found.values if key.startswith("optimizer.") and any(name in key for name in frozen)]
    return found


def checksum(tensor: torch.Tensor) -> int:
    """Return the checksum of this process's part."""
    return zlib.crc32(local_tensor(tensor).detach().float().numpy().tobytes())


@torch.no_grad()
def raise_sensitivity(model: torch.nn.Module) -> None:
    """Make the initial values larger. With those of a new model, attention is uniform and branches are small: wrong
    positions and a part of the norm that is left out would hardly show."""
    for name, parameter in model.named_parameters():
        if not name.endswith("_scale") and (part := local_tensor(parameter)).is_floating_point():
            part.mul_(5) if part.ndim > 1 else part.add_(0.25)


class Job(NamedTuple):
    """A run: options, the number of processes, and a fault that is planted in them."""

    words: tuple[str, ...]
    size: int
    fault: str = ""


class Matrix:
    """Cells that train in a folder, each run once.

    Args:
        steps: of each run.
        compiles: whether blocks are compiled to machine code, or only traced.
    """

    def __init__(self, tiny: TinyRun, *, steps: int, compiles: bool = True) -> None:
        self.tiny, self.steps, self.compiles = tiny.with_short_documents(), steps, compiles
        self.found: dict[Job, list[Found]] = {}

    def differences(self, cells: Iterable[Cell], *, faults: Sequence[str] = ()) -> list[Difference]:
        """Train cells, which are rows with a layout, and compare each with one process, or with the row it is like.

        Args:
            faults: of `FAULTS`, one for each cell. Default: none.
        """
        pairs = []
        for (name, layout), fault in zip_longest(cells, faults, fillvalue=""):
            row = ROWS[name]
            like, where = (ROWS[row.like], layout) if row.like else (row, row.base)
            its_words = [w for w in words_of(like, layout) if size_of(where) > 1 or not w.startswith(UNUSED_ALONE)]
            pairs.append((
                Job((*words_of(row, layout), *on_layout(layout)), size_of(layout), fault),
                Job((*its_words, *on_layout(where)), size_of(where)),
            ))  # fmt: skip
        new = [job for job in dict.fromkeys(job for pair in pairs for job in pair) if job not in self.found]
        for size in sorted({job.size for job in new}):
            jobs = [job for job in new if job.size == size]
            first = len(self.found)
            starts = [(self._starts(job, f"run-{first + n}"), job.fault) for n, job in enumerate(jobs)]
            train = partial(trained, compiles=self.compiles)
            self.found |= dict(zip(jobs, run_in_turn(train, size, starts), strict=True))
        return [self._compare(*pair) for pair in pairs]

    def _starts(self, job: Job, name: str) -> list[Config]:
        tiny, end, words = self.tiny, self.steps, job.words
        common = ["--checkpoint.enable=false", "--validation.enable", f"--validation.path={tiny.text}"]
        common += ["--validation.sequences=5", f"--validation.freq={end}", f"--job.name={name}"]
        own = in_folder(tiny, words)
        ends = [end // 2, end] if "--checkpoint.enable=true" in words else [end]
        return [tiny.config(*common, *own, f"--training.steps={steps}", world_size=job.size) for steps in ends]

    def _compare(self, job: Job, other: Job) -> Difference:
        name, reference = (f"run-{[*self.found].index(one)}" for one in (job, other))
        ours, its = (self.tiny.records(run) for run in (name, reference))
        values, wanted = (
            {key: value for found in self.found[one] for key, value in found.values.items()} for one in (job, other)
        )
        parts = Counter(key for key, _ in {pair for found in self.found[job] for pair in found.parts.items()})
        frozen = {name for found in self.found[other] for name in found.frozen}
        ends, its_ends = (self.tiny.records(run, file="validation.jsonl")[-1:] for run in (name, reference))
        others = ["names"] * (not wanted.keys() <= values.keys())
        for key, *both in (("samples", ours, its), ("busiest_expert", ours, its), ("tasks", ends, its_ends)):
            others += [key] * ([record.get(key) for record in both[0]] != [record.get(key) for record in both[1]])
        others += [f"replicas of {key}" for key, values in parts.items() if values > 1]
        others += [name for name in frozen if not np.array_equal(values[f"model.{name}"], wanted[f"model.{name}"])]
        for file, key in (("layers.jsonl", "layers"), ("hashes.jsonl", "hash")):
            if (self.tiny.folder / "outputs" / reference / file).exists():
                both = [
                    tree_leaves([record[key] for record in self.tiny.records(run, file=file)])
                    for run in (name, reference)
                ]
                near = pytest.approx(both[1], rel=1e-3, abs=1e-6) if key == "layers" else both[1]
                others += [file] * (both[0] != near)
        return Difference(
            relative(
                *([record[key] for record in records for key in LOSSES if key in record] for records in (ours, its))
            ),
            relative([end["loss"] for end in ends], [end["loss"] for end in its_ends]),
            relative([record["grad_norm"] for record in ours], [record["grad_norm"] for record in its]),
            max(abs(values[key] - value).max() / (abs(value).max() + 1e-9) for key, value in wanted.items()),
            others,
        )


def relative(ours: Sequence[float], its: Sequence[float]) -> float:
    """Return the largest relative difference; infinity if there are not as many values."""
    if len(ours) != len(its):
        return math.inf
    return max(abs(mine - value) / abs(value) for mine, value in zip(ours, its, strict=True))


def beyond(name: str, found: Difference) -> list[str]:
    """Return what of a cell differs by more than its row allows."""
    row = ROWS[name]
    loss = 0.0 if row.like else row.tolerance
    grad_norm, value = (0.1, math.inf) if loss == ROUNDED else (loss, 200 * loss)
    others = [
        metric for metric in found.others if metric != "busiest_expert" or loss < ROUNDED
    ]  # some go to other experts
    limits = loss, max(loss, 1e-6), grad_norm, value
    of = zip(found._fields, found, limits, strict=False)
    return [*others, *(f"{key} {most:.1e}" for key, most, limit in of if not most <= limit)]  # pyright: ignore[reportOperatorIssue]


def refusal(tiny: TinyRun, name: str, layout: str) -> set[str]:
    """Return the keys of the problems that a start finds."""
    words, size = [*words_of(ROWS[name], layout), *on_layout(layout)], size_of(layout)
    try:
        preflight(tiny.config(*words, world_size=size), Ranks(0, size, 0, size), torch.device("cpu"))
    except ConfigError as error:
        return {problem.key for problem in error.problems}
    return set()


LOSSES = "loss", "multi_token_loss", "balance_loss"
STEPS, FEW = 20, 4
"""Of every cell, and of those that the default tests and CI run."""


class Written(NamedTuple):
    """A line of docs/combinations.csv."""

    row: str
    compared_with: str
    layout: str
    difference: str
    """Largest relative difference of losses, or nothing."""
    refused: str
    """Options that the check names, or nothing."""
    tests: str
    """Which tests train it, those that run most often: default, CI or nightly."""


def lines_of(name: str, differences: Mapping[str, str]) -> list[Written]:
    """Return the lines of a row.

    Args:
        differences: of losses, on each layout that trains.
    """
    row = ROWS[name]
    base = row.base or "one process"
    other = row.like or (base if row.tolerance == 1e-6 else f"{base}, within {row.tolerance:.0e}")
    other = other.replace("within 0e+00", "the same bits")
    tests = {cell: tests for tests, chosen in (("CI", "slow"), ("default", "quick")) for cell in cells_of(chosen, name)}
    return [
        *(
            Written(name, other, layout, loss, "", tests.get((name, layout), "nightly"))
            for layout, loss in differences.items()
        ),
        *(Written(name, other, layout, "", keys, "default") for layout, keys in row.refused.items()),
    ]


def symbol(name: str, lines: Sequence[Written]) -> str:
    """Return what the page shows of a row and an axis."""
    row = ROWS[name]
    if any(line.refused for line in lines):
        return "✗" if all(line.refused for line in lines) else "◐"
    return ("=" if row.like or not row.tolerance else "≈" if row.tolerance == ROUNDED else "✓") if lines else ""


def page(written: Mapping[str, Sequence[Written]]) -> str:
    """Return the text of docs/combinations.md, with the tables of what is written."""
    text = PAGE.read_text()
    text = text[: text.index(f"## {next(iter(TABLES))}\n")]
    for heading, table in TABLES.items():
        text += f"## {heading}\n\n| | replicate, shard | context | expert | tensor | pipeline |\n{'|---' * 6}|\n"
        for name in (row for row in table if row in written):
            by_axis: dict[str, list[Written]] = {axis: [] for axis in ("", "c", "e", "t", "p")}
            for line in written[name]:
                by_axis[next((axis for axis in "petc" if axis in line.layout), "")].append(line)
            text += f"| {name} | {' | '.join(symbol(name, lines) for lines in by_axis.values())} |\n"
        text += "\n"
    return text.rstrip() + "\n"


def numbers(written: Mapping[str, Sequence[Written]]) -> str:
    """Return the text of docs/combinations.csv, in the order of the rows."""
    file = io.StringIO()
    lines = (line for name in ROWS for line in written.get(name, ()))
    csv.writer(file, lineterminator="\n").writerows([[field.replace("_", " ") for field in Written._fields], *lines])
    return file.getvalue()


def read_numbers() -> dict[str, list[Written]]:
    """Return the lines of docs/combinations.csv by their rows."""
    written: dict[str, list[Written]] = {}
    for fields in [*csv.reader(NUMBERS.read_text().splitlines())][1:]:
        written.setdefault(fields[0], []).append(Written(*fields))
    return written


def main(*names: str) -> None:
    """Train every cell of some rows, or of those that are not written, and write them.

    Raises:
        SystemExit: a cell differs, or there is no such row.
    """
    if unknown := sorted({*names} - {*ROWS}):
        raise SystemExit(f"no such rows: {', '.join(unknown)}")
    for name in names or [row for row in ROWS if row not in read_numbers()]:
        cells = cells_of("all", name)
        with tempfile.TemporaryDirectory() as folder:
            found = Matrix(TinyRun(Path(folder)), steps=STEPS).differences(cells)
        if red := [
            (layout, problems) for (_, layout), one in zip(cells, found, strict=True) if (problems := beyond(name, one))
        ]:
            raise SystemExit(f"{name}: {red}")
        losses = {layout: max(one.loss, one.validation) for (_, layout), one in zip(cells, found, strict=True)}
        written = read_numbers()
        written[name] = lines_of(name, {layout: f"{loss:.0e}" if loss else "0" for layout, loss in losses.items()})
        NUMBERS.write_text(numbers(written))
        PAGE.write_text(page(written))


if __name__ == "__main__":
    main(*sys.argv[1:])
