"""Predicted memory against what PyTorch's allocator gave to real processes."""

from dataclasses import replace

import pytest

from benchmarks.measured_memory import measure
from benchmarks.plan_accuracy import CPU_CASES, DEBUG, planned
from titanlite.config.load import load
from titanlite.tools.plan.hardware import find_hardware


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("FSDP, 2, recompute op", marks=pytest.mark.slow),
        pytest.param("HSDP, 2 x 2, updates in backward", marks=pytest.mark.nightly),
        pytest.param("HSDP, 2 x 2, 2 micro-batches", marks=pytest.mark.nightly),
        pytest.param("adapters", marks=pytest.mark.nightly),
        pytest.param("adapters on 8 bits, recompute full", marks=pytest.mark.nightly),
        pytest.param("teacher", marks=pytest.mark.nightly),
        pytest.param("teacher, never resharded", marks=pytest.mark.nightly),
    ],
)
def test_predicted_peak_is_the_measured_one(name: str) -> None:
    processes, overrides = next((processes, overrides) for case, processes, overrides in CPU_CASES if case == name)
    config = load(DEBUG, overrides, world_size=processes)
    predicted = planned(config, processes, replace(find_hardware("H100"), measured=True), processes)
    for rank in measure(config, processes=processes):
        assert predicted.peak == pytest.approx(rank.peak, rel=0.02)
        assert predicted.most("parameters") == rank.breakdown["parameters"]
        kept = processes if "never resharded" in name else 1  # what is gathered is not of this category
        assert rank.breakdown.get("teacher", 0) == kept * predicted.most("teacher")
