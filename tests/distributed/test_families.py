"""Families whose layers attend in different ways: every layout trains as one process."""

import pytest

from tests.helpers import TinyRun
from tests.layouts import compare_with_one

SIZES = "dim=48, n_layers=4, n_heads=4, n_kv_heads=2, hidden_dim=64, vocab_size=260"
OLMO = ["--model.name=olmo3", f"--model.args={{{SIZES}, window=5, rope_scaling_factor=8.0}}"]
GLM = [
    "--model.name=glm4_moe",
    f"--model.args={{{SIZES}, head_dim=12, n_experts=8, n_active_experts=3, n_groups=4, n_active_groups=2, "
    "dense_hidden_dim=96, routed_scaling_factor=2.5, qk_norm=true}",
]
SMOL = ["--model.name=smollm3", f"--model.args={{{SIZES}}}"]
MASK = ["--data.document_mask"]
FURTHER = {
    "olmo3, AC op": [*OLMO, *MASK, "--activation_checkpoint.mode=selective"],
    "olmo3, AC, compile": [*OLMO, "--activation_checkpoint.mode=full", "--compile.enable"],
    "olmo3, mask, compile": [*OLMO, *MASK, "--compile.enable", "--training.local_batch_size=1"],
    "smollm3, mask, AC": [*SMOL, *MASK, "--activation_checkpoint.mode=full"],
}


def test_two_ranks_train_as_one(tiny: TinyRun) -> None:
    compare_with_one(tiny, {"olmo3, mask": [*OLMO, *MASK]}, [(1, 2), (1, 1, 2), (1, 1, 1, 2)], steps=4)


@pytest.mark.slow
def test_experts_on_two_ranks(tiny: TinyRun) -> None:
    compare_with_one(tiny, {"glm4_moe, mask": [*GLM, *MASK]}, [(1, 1, 2), (1, 1, 1, 2), (1, 2, 1, 1, 2)], steps=4)


@pytest.mark.nightly
def test_experts_on_four_ranks(tiny: TinyRun) -> None:
    techniques = {"glm4_moe": GLM, "glm4_moe, mask, AC op": [*GLM, *MASK, "--activation_checkpoint.mode=selective"]}
    compare_with_one(tiny, techniques, [(1, 4, 1, 1, 2), (1, 2, 2, 1, 2), (1, 2, 1, 2, 2), (1, 1, 2, 2)])


@pytest.mark.nightly
def test_four_ranks(tiny: TinyRun) -> None:
    techniques = FURTHER | {"olmo3": OLMO, "smollm3": SMOL}
    compare_with_one(tiny, techniques, [(2, 2), (1, 1, 4), (1, 2, 2), (1, 2, 1, 2), (1, 1, 2, 2)])
