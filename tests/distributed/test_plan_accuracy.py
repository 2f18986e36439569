"""Predicted memory against what PyTorch's allocator gave to real processes, and plans against runs on GPUs."""

import json
import statistics
from dataclasses import replace
from typing import Any

import pytest

from benchmarks.measured_memory import measure
from benchmarks.plan_accuracy import AXES, CPU_CASES, DEBUG, PIPELINE, ROOT, planned
from titanlite.config.load import load
from titanlite.runtime.hardware import Hardware
from titanlite.tools.plan.hardware import find_hardware


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("OLMo 3, recompute op, documents, bfloat16", marks=pytest.mark.slow),
        pytest.param("FSDP, 2, recompute op", marks=pytest.mark.nightly),
        pytest.param("HSDP, 2 x 2, updates in backward", marks=pytest.mark.nightly),
        pytest.param("HSDP, 2 x 2, 2 micro-batches", marks=pytest.mark.nightly),
        pytest.param("qwen3_next, recompute full", marks=pytest.mark.nightly),
        pytest.param("adapters", marks=pytest.mark.nightly),
        pytest.param("teacher", marks=pytest.mark.nightly),
        pytest.param("two predicted tokens, context 2", marks=pytest.mark.nightly),
    ],
)
def test_predicted_peak_is_the_measured_one(name: str) -> None:
    processes, overrides = next((processes, overrides) for case, processes, overrides in CPU_CASES if case == name)
    config = load(DEBUG, overrides, world_size=processes)
    predicted = planned(config, processes, replace(find_hardware("H100"), measured=True), processes)
    for rank in measure(config, processes=processes):
        assert predicted.peak == pytest.approx(rank.peak, rel=0.02)
        assert predicted.most("parameters") == rank.breakdown["parameters"]
        assert rank.breakdown.get("teacher", 0) == predicted.most("teacher")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["pipeline 2, 4 micro-batches"])
def test_each_stage_needs_what_is_planned(name: str) -> None:
    """The first stage has more micro-batches in flight, and the last one the head."""
    processes, overrides = next((processes, overrides) for case, processes, overrides in CPU_CASES if case == name)
    config = load(DEBUG, overrides, world_size=processes)
    hardware = replace(find_hardware("H100"), measured=True)
    measured = [rank.peak for rank in measure(config, processes=processes)]
    stages = planned(config, processes, hardware, processes).stages
    assert [stage.allocated for stage in stages] == pytest.approx(measured, rel=0.02)


GPUS = [json.loads((ROOT / "benchmarks" / "gpu" / f"{name}.json").read_text()) for name in ("h100", "h200")]
SLOWER = {"document mask": 0.81, "Muon": 0.88, "reproducible layouts": 0.86, "micro-batches of one": 0.86}
"""Planned / measured time of techniques whose kernels the plan does not know, or not those of torch 2.11."""


@pytest.mark.parametrize(
    ("hardware", "name", "case"),
    [
        pytest.param(
            gpu["hardware"],
            name,
            case,
            id=f"{gpu['hardware']}, {name}",
            marks=[] if name == "8B, 6 layers, 1 x 8192: eager" else pytest.mark.nightly,
        )
        for gpu in GPUS
        for name, case in gpu["cases"].items()
        if "words" in case
    ],
)
def test_the_plan_is_near_a_run_on_a_gpu(hardware: str, name: str, case: dict[str, Any]) -> None:
    """`benchmarks/gpu.py` measured these runs."""
    config = load(f"train_configs/{case['config']}.toml", case["words"], world_size=1)
    predicted = planned(config, 1, find_hardware(hardware), 1)
    seconds = config.training.global_batch_size * config.training.seq_len / statistics.median(case["tokens_per_second"])
    assert predicted.reserved / 2**30 == pytest.approx(case["memory_gib"], rel=0.05)
    least = next((ratio for technique, ratio in SLOWER.items() if technique in name), 0.91)
    assert least < predicted.time.total / seconds < 1.09


@pytest.mark.nightly
@pytest.mark.parametrize("row", [row for row in AXES if PIPELINE not in "".join(row[4])], ids=lambda row: row[0])
def test_the_plan_is_near_what_was_published(row: tuple[str, str, Hardware, int, list[str], float]) -> None:
    name, config, hardware, world_size, options, speed = row
    loaded = load(f"train_configs/{config}.toml", options, world_size=world_size)
    most = 1.25 if "gpt-oss" in name else 1.19
    assert 0.88 < planned(loaded, world_size, hardware, 8).tokens_per_second / world_size / speed < most
