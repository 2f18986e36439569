"""Health of layers is the same on every layout."""

import pytest

from tests.helpers import TinyRun
from tests.layouts import assert_same_health, job, trained_on

OPTIONS = ["--training.steps=2", "--metrics.layers.freq=2", "--checkpoint.enable=false"]
SIZES = ["dim=48", "n_layers=2", "n_heads=2", "n_kv_heads=2", "vocab_size=260"]


@pytest.mark.parametrize(
    ("layout", "sizes"),
    [
        pytest.param((2, 2), [], marks=pytest.mark.slow),
        pytest.param((1, 2, 2), SIZES, marks=pytest.mark.nightly),
        pytest.param((1, 1, 1, 2), SIZES, marks=pytest.mark.nightly),
    ],
    ids=["shards", "context", "tensor"],
)
def test_what_several_ranks_have_counts_once(tiny: TinyRun, layout: tuple[int, ...], sizes: list[str]) -> None:
    """Shards, replicas, and outputs of layers that ranks split."""
    trained_on(tiny, {"health": [*OPTIONS, *(f"--model.args.{it}" for it in sizes)]}, (1, 1), layout)
    assert_same_health(tiny, job("health", *layout), job("health", 1, 1))
