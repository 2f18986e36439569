"""Families whose layers attend in different ways: every layout trains as one process."""

from functools import partial

import pytest
import torch
from torch.distributed.fsdp import FSDPModule

from tests import own_models
from tests.helpers import TinyRun, built, run_in_turn
from tests.layouts import LORA, compare_with_one, degrees, job, one_step
from titanlite.loss import token_loss
from titanlite.runtime.private_torch.fsdp import fsdp_param_group
from titanlite.schema import Config

SIZES = "dim=48, n_layers=4, n_heads=4, n_kv_heads=2, hidden_dim=64, vocab_size=260"
OLMO = ["--model.name=olmo3", f"--model.args={{{SIZES}, window=5, rope_scaling_factor=8.0}}"]
GLM = [
    "--model.name=glm4_moe",
    f"--model.args={{{SIZES}, head_dim=12, n_experts=8, n_active_experts=3, n_groups=4, n_active_groups=2, "
    "dense_hidden_dim=96, routed_scaling_factor=2.5, qk_norm=true}",
]
GEMMA = [
    "--model.name=gemma3",
    f"--model.args={{{SIZES}, head_dim=14, query_pre_attn_scalar=10, window=5, full_every=3, rope_scaling_factor=8.0}}",
]
GPT_OSS = [
    "--model.name=gpt_oss",
    f"--model.args={{{SIZES}, head_dim=14, window=5, n_experts=4, n_active_experts=2, rope_scaling_factor=8.0}}",
]
SMOL = ["--model.name=smollm3", f"--model.args={{{SIZES}}}"]
LATENT = "q_rank=24, kv_rank=16, nope_dim=12, rope_dim=8, v_dim=10"
EXPERTS = "n_experts=8, n_active_experts=2, n_groups=4, n_active_groups=2, n_dense_layers=1, dense_hidden_dim=64"
DEEPSEEK = [
    "--model.name=deepseek_v3",
    "--model.args={dim=48, n_layers=2, n_heads=4, n_kv_heads=4, hidden_dim=16, vocab_size=260, "
    f"rope_scaling_factor=8.0, {LATENT}, {EXPERTS}}}",
]
QWEN_NEXT = [
    "--model.name=qwen3_next",
    f"--model.args={{{SIZES}, head_dim=16, full_every=2, n_linear_key_heads=2, n_linear_value_heads=4, "
    "linear_key_dim=8, linear_value_dim=10, n_experts=4, n_active_experts=2, shared_hidden_dim=16}",
]
CAPPED = [f"--model.file={own_models.__file__}", "--model.name=Capped", f"--model.args={{{SIZES}}}"]
TWO_TOKENS = ["--training.multi_token_weight=0.3", "--optimizer.lr=0.001"]  # a higher rate amplifies rounding
MASK = ["--data.document_mask"]
FURTHER = {
    "deepseek, AC op": [*DEEPSEEK, "--activation_checkpoint.mode=selective"],
    "smollm3, mask, AC": [*SMOL, *MASK, "--activation_checkpoint.mode=full"],
    "olmo3, AC op": [*OLMO, *MASK, "--activation_checkpoint.mode=selective"],
    "gemma3, AC op": [*GEMMA, "--activation_checkpoint.mode=selective"],
    "gpt-oss, AC op": [*GPT_OSS, "--activation_checkpoint.mode=selective"],
}
COMPILED = {
    "olmo3, AC, compile": [*OLMO, "--activation_checkpoint.mode=full", "--compile.enable"],
    "gemma3, mask, compile": [*GEMMA, *MASK, "--compile.enable", "--training.local_batch_size=1"],
    "deepseek, mask, compile": [*DEEPSEEK, *MASK, "--compile.enable"],
    "capped, mask, compile": [*CAPPED, *MASK, "--compile.enable", "--training.local_batch_size=1"],
    "gpt-oss, mask, compile": [*GPT_OSS, *MASK, "--compile.enable", "--training.local_batch_size=1"],
}


def test_two_ranks_train_as_one(tiny: TinyRun) -> None:
    techniques = {"olmo3, mask": [*OLMO, *MASK], "gemma3, mask": [*GEMMA, *MASK]}
    compare_with_one(tiny, techniques, [(1, 2), (1, 1, 2), (1, 1, 1, 2)], steps=4)


@pytest.mark.slow
def test_two_ranks_train_experts_as_one(tiny: TinyRun) -> None:
    layouts = [(1, 2), (1, 1, 2), (1, 1, 1, 2), (1, 2, 1, 1, 2)]
    techniques = {"deepseek, mask": [*DEEPSEEK, *MASK], "gpt-oss, mask": [*GPT_OSS, *MASK]}
    compare_with_one(tiny, techniques, layouts, steps=4)


@pytest.mark.slow
def test_two_ranks_train_layers_with_a_state_as_one(tiny: TinyRun) -> None:
    techniques = {
        "qwen3-next, mask": [*QWEN_NEXT, *MASK],
        "qwen3-next, AC op, LoRA": [*QWEN_NEXT, *LORA, "--activation_checkpoint.mode=selective"],
    }
    compare_with_one(tiny, techniques, [(1, 2), (1, 2, 1, 1, 2)], steps=4)


@pytest.mark.slow
def test_two_ranks_train_a_soft_cap_and_a_gate_as_one(tiny: TinyRun) -> None:
    compare_with_one(tiny, {"capped, mask": [*CAPPED, *MASK]}, [(1, 2), (1, 1, 2), (1, 1, 1, 2)], steps=4)


@pytest.mark.slow
def test_two_ranks_predict_two_tokens_as_one(tiny: TinyRun) -> None:
    techniques = {"deepseek": [*DEEPSEEK, *MASK, *TWO_TOKENS, "--activation_checkpoint.mode=selective"]}
    compare_with_one(tiny, techniques, [(1, 2), (1, 2, 1, 1, 2)], steps=4)
    first = tiny.records(job("deepseek", 1, 1))[0]
    assert first["added_loss"] == pytest.approx(0.3 * first["multi_token_loss"])
    assert first["multi_token_loss"] == pytest.approx(5.56, abs=0.3)  # ln 260


@pytest.mark.slow
def test_experts_on_two_ranks(tiny: TinyRun) -> None:
    compare_with_one(tiny, {"glm4_moe, mask": [*GLM, *MASK]}, [(1, 1, 2), (1, 1, 1, 2), (1, 2, 1, 1, 2)], steps=4)


@pytest.mark.nightly
def test_experts_on_four_ranks(tiny: TinyRun) -> None:
    techniques = {"glm4_moe": GLM, "glm4_moe, mask, AC op": [*GLM, *MASK, "--activation_checkpoint.mode=selective"]}
    compare_with_one(tiny, techniques, [(1, 4, 1, 1, 2), (1, 2, 2, 1, 2), (1, 2, 1, 2, 2), (1, 1, 2, 2)])


@pytest.mark.nightly
def test_four_ranks(tiny: TinyRun) -> None:
    """At the rate of the tests' config, OLMo 3's losses jump, and rounding grows beyond the tolerance."""
    techniques = {name: [*options, "--optimizer.lr=1e-3"] for name, options in FURTHER.items()}
    compare_with_one(tiny, techniques, [(2, 2), (1, 1, 4), (1, 2, 2), (1, 2, 1, 2), (1, 1, 2, 2)], steps=10)
    compare_with_one(tiny, {"gpt-oss, e2": GPT_OSS}, [(1, 2, 1, 1, 2)], steps=10)


FAMILIES = {
    "olmo3": OLMO, "gemma3": GEMMA, "smollm3": SMOL, "gpt_oss": GPT_OSS, "glm4_moe": GLM, "deepseek_v3": DEEPSEEK,
    "qwen3_next": QWEN_NEXT,
}  # fmt: skip


@pytest.mark.nightly
@pytest.mark.parametrize("family", FAMILIES)
def test_twenty_steps(tiny: TinyRun, family: str) -> None:
    """With document masks, at a rate that does not amplify rounding."""
    layouts = [(2, 2), *([] if family == "qwen3_next" else [(1, 1, 2), (1, 1, 1, 2)])]
    layouts += [(1, 2, 1, 1, 2)] if "n_experts" in FAMILIES[family][1] else []
    techniques = {family: [*FAMILIES[family], *MASK, "--optimizer.lr=1e-3"]}
    compare_with_one(tiny, techniques, layouts, loss=1e-6)


@pytest.mark.nightly
def test_layers_with_a_state_on_four_ranks(tiny: TinyRun) -> None:
    """At a higher rate the loss falls below 0.5, and rounding grows beyond the tolerance."""
    full = ["--activation_checkpoint.mode=full", "--optimizer.lr=1e-3"]
    frozen = ["--freeze.parameters=['tok_embeddings.*', 'layers.0.*']", "--optimizer.lr=1e-3"]
    techniques = {"qwen3-next, mask": [*QWEN_NEXT, *MASK, *full], "qwen3-next, frozen": [*QWEN_NEXT, *frozen]}
    compare_with_one(tiny, techniques, [(2, 2), (1, 4, 1, 1, 2)])


@pytest.mark.nightly
def test_compiled_layers_with_a_state(tiny: TinyRun) -> None:
    compare_with_one(tiny, {"qwen3-next": [*QWEN_NEXT, *MASK, "--compile.enable"]}, [(1, 2)], steps=6)


@pytest.mark.nightly
@pytest.mark.parametrize("technique", COMPILED)
def test_compiled_blocks_on_two_ranks(tiny: TinyRun, technique: str) -> None:
    compare_with_one(tiny, {technique: COMPILED[technique]}, [(1, 1, 2), (1, 1, 1, 2)], steps=6)


def gathered(rank: int, world_size: int, config: Config) -> list[str]:
    """Names of the units whose weights are gathered, or being gathered, after a pass without gradients."""
    run = built(rank, world_size, config)
    one_step(run)
    batch = next(iter(run.batches))
    with torch.no_grad():
        run.model(batch["tokens"], loss=partial(token_loss, labels_BL=batch["labels"]))
    units = [(name, fsdp_param_group(it)) for name, it in run.model.named_modules() if isinstance(it, FSDPModule)]
    return [name for name, it in units if it and (it.is_unsharded or it._all_gather_result is not None)]


@pytest.mark.slow
def test_passes_without_gradients_leave_no_weights_of_the_module(tiny: TinyRun) -> None:
    options = [*SMOL, *TWO_TOKENS, *degrees(1, 2), "--parallelism.fsdp_forward_prefetch=2"]
    sizes = ["--parallelism.fsdp_min_unit_params=0", "--parallelism.fsdp_min_unit_params=1000000"]
    names = run_in_turn(gathered, 2, [tiny.config(*options, it, world_size=2) for it in sizes])
    assert [found for of_config in names for found in of_config] == [["tok_embeddings", "head"]] * 4


@pytest.mark.nightly
def test_four_ranks_predict_two_tokens_as_one(tiny: TinyRun) -> None:
    techniques = {
        name: [*SMOL, *TWO_TOKENS, *options]
        for name, options in {
            "tied head": ["--model.args.tied_head=true"],
            "accumulated": ["--training.local_batch_size=1", "--parallelism.fsdp_reduce_gradients=last"],
            "always": ["--parallelism.fsdp_reshard_after_forward=always"],
            "in backward": ["--optimizer.in_backward", "--training.max_norm=0"],
            "offload": ["--training.enable_cpu_offload"],
            "mask, compile": [*MASK, "--compile.enable"],
        }.items()
    }
    compare_with_one(tiny, techniques, [(2, 2)])
