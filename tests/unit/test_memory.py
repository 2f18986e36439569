"""Memory by phase: what a run measures in its first steps."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.recorders import recorder, result_of
from titanlite.metrics.memory import Memory
from titanlite.observer import Phase


class ScriptedMemory(Memory):
    """An allocator whose values a test sets."""

    def __init__(self, *, measures_phases: bool = True) -> None:
        super().__init__(torch.device("cpu"), measures_phases=measures_phases)
        self.source = "allocator"
        self.allocated = self.peak_now = 0
        self.calls = 0

    def now(self) -> dict[str, int]:
        self.calls += 1
        return {"allocated": self.allocated, "peak": self.peak_now, "reserved": 4096}

    def restart_peak(self) -> None:
        self.peak_now = self.allocated

    def allocate(self, size: int) -> None:
        self.allocated += size
        self.peak_now = max(self.peak_now, self.allocated)


def start(memory: ScriptedMemory) -> tuple[list[nn.Parameter], torch.optim.Optimizer]:
    """Build a model of 12 float32 values and 2 bfloat16 values, and its optimizer."""
    memory.phase(Phase.MODEL)
    memory.phase(Phase.SHARDING)
    weights = [nn.Parameter(torch.ones(3, 4)), nn.Parameter(torch.ones(2, dtype=torch.bfloat16))]
    memory.allocate(52)
    memory.label(weights, "parameters")
    memory.label([torch.ones(100)], "other")
    memory.phase(Phase.OPTIMIZER)
    optimizer = torch.optim.Adam(weights)
    memory.follow(optimizer)
    memory.phase(Phase.CHECKPOINT_LOAD)
    return weights, optimizer


def step(memory: ScriptedMemory, weights: list[nn.Parameter], optimizer: Any, number: int) -> None:
    memory.begin_step(number)
    for activations in (700, 300):  # two micro-batches
        memory.phase(Phase.FORWARD)
        memory.allocate(activations)
        memory.phase(Phase.BACKWARD)
        for weight in weights:
            weight.grad = torch.ones_like(weight) if weight.grad is None else weight.grad
        memory.allocate(50)
        memory.allocate(-50 - activations)
    memory.phase(Phase.UPDATE)
    optimizer.step()
    optimizer.zero_grad()
    memory.phase(Phase.METRICS)


def test_bytes_of_tensors_and_peaks_of_each_phase() -> None:
    memory = ScriptedMemory()
    weights, optimizer = start(memory)
    step(memory, weights, optimizer, 1)
    assert memory.take(last=False) is None
    memory.phase(Phase.VALIDATION)  # not measured
    step(memory, weights, optimizer, 2)
    record = memory.take(last=False)
    assert record is not None
    none = {"parameters": 0, "gradients": 0, "optimizer": 0, "allocated": 0, "peak": 0, "reserved": 4096}
    here = none | {"parameters": 52, "allocated": 52, "peak": 52}
    states = here | {"optimizer": 2 * 52 + 2 * 4}  # two moments, and a count of steps for each weight
    assert record == {"source": "allocator", "phases": {
        "model": none, "sharding": here, "optimizer": here, "checkpoint load": here,
        "data": states,
        "forward": states | {"gradients": 52, "allocated": 352, "peak": 752},  # the first micro-batch has the peak
        "backward": states | {"gradients": 52, "peak": 802},
        "update": states,
    }}  # fmt: skip


def test_after_the_measured_steps_nothing_is_measured() -> None:
    memory = ScriptedMemory()
    weights, optimizer = start(memory)
    for number in (1, 2):
        step(memory, weights, optimizer, number)
    assert memory.take(last=False)
    calls = memory.calls
    step(memory, weights, optimizer, 3)
    assert memory.take(last=True) is None
    assert memory.calls == calls
    off = ScriptedMemory(measures_phases=False)
    step(off, *start(off), 1)
    assert off.take(last=True) is None
    assert off.calls == 0


def test_a_run_of_one_step_is_measured() -> None:
    memory = ScriptedMemory()
    step(memory, *start(memory), 1)
    record = memory.take(last=True)
    assert record is not None
    assert record["phases"]["backward"]["gradients"] == 52
    assert record["phases"]["data"]["optimizer"] == 0


def test_memory_of_this_process() -> None:
    memory = Memory(torch.device("cpu"), measures_phases=False)
    if not Path("/proc/self/statm").exists():
        assert memory.now() == {}
        return
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS:")]
    # The kernel counts pages in batches, so two readings differ by some.
    assert memory.now()["resident"] == pytest.approx(int(line.split()[1]) * 2**10, rel=0.2)
    assert memory.now()["resident"] < 1.1 * memory.peak() * 2**30


@pytest.mark.usefixtures("single_process_group")
def test_the_record_of_a_start(tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: Any) -> None:
    monkeypatch.setattr(logging.getLogger("titanlite"), "propagate", True)
    caplog.set_level(logging.INFO)
    memory = ScriptedMemory()
    metrics = recorder(tmp_path, step=10, memory=memory)
    weights, optimizer = start(memory)
    for number in (11, 12, 13):
        step(memory, weights, optimizer, number)
        metrics.end_step(number, result_of(1.0, 1.0), lr=0.1, samples=1, shares=dict, last=number == 13)
    metrics.close()
    [record] = [json.loads(line) for line in (tmp_path / "memory.jsonl").read_text().splitlines()]
    assert (record["step"], record["world_size"], record["source"]) == (12, 1, "allocator")
    assert record["phases"]["backward"]["peak"] == 802
    assert len([line for line in caplog.messages if line.startswith("memory   MiB of rank 0")]) == 1
