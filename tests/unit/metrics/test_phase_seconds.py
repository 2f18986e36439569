"""Time of a start by phase, with a clock of the test; records of the form that is documented."""

import json
import logging
import re
from dataclasses import fields
from pathlib import Path

import pytest

from tests.support.helpers import TinyRun, mentions, train_on_this_rank
from titanlite.guard import SkippedStep
from titanlite.metrics.clock import phase_seconds
from titanlite.metrics.durations import CATEGORIES, by_category, format_phases
from titanlite.metrics.recorder import step_line
from titanlite.observer import CurrentPhase, Phase
from titanlite.run.timeouts import PhaseTimeouts
from titanlite.schema import Comm


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_each_phase_has_the_time_until_the_next_begins() -> None:
    clock = Clock()
    phase = CurrentPhase(began=90.0, clock=clock)

    def move(seconds: float, name: str, step: int | None = None) -> None:
        clock.now += seconds
        phase.enter(Phase(name)) if step is None else phase.begin_step(step)

    for name in ("model", "checkpoint load"):
        move(2, name)
    for step in (1, 2):
        move(0.5, "", step)
        for name, seconds in (("forward", 1.0), ("backward", 4.0), ("update", 8.0), ("metrics", 0.25)):
            move(seconds, name)
    for name in ("validation", "checkpoint", "end"):
        move(16, name)
    clock.now += 3
    found = by_category(phase.seconds(), compiling=7.0)
    # start: 10 before the first phase, 2 + 2 and 0.5 until the first step. Data: 1 in each step. Compute: 4 + 8 + 0.25,
    # and until the next begins 0.5 in the first step, 16 in the second.
    assert found == {
        "start": 14.5,
        "compile": 7.0,
        "compute": 2 * 12.25 + 16.5 - 7,
        "data": 2.0,
        "checkpoint": 16 + 3,
        "validation": 16,
    }
    assert sum(found.values()) == clock.now - 90
    assert by_category({Phase.FORWARD: 2.0}, compiling=5.0)["compile"] == 2.0  # the rest was in validation
    line = format_phases({"start": 2, "compile": 0, "compute": 97.0, "data": 0.05, "checkpoint": 0.95})
    assert mentions(line, "1 min 40 s", "start 2.0%", "compute 97.0%", "checkpoint 0.9%")
    assert not mentions(line, "compile")
    assert not mentions(line, "data")


def test_compiling_of_an_earlier_run_in_the_process_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = [30.0]
    for module in ("titanlite.run.timeouts", "titanlite.metrics.clock"):
        monkeypatch.setattr(f"{module}.compile_seconds", lambda: compiled[0])
    phase = PhaseTimeouts(Comm())
    phase._spent = {Phase.FORWARD: 50.0}
    compiled[0] += 2
    found = phase_seconds(phase)
    assert (found["compile"], found["compute"]) == (2.0, 48.0)


@pytest.mark.long
@pytest.mark.usefixtures("single_process_group")
def test_the_fields_of_a_runs_records_are_documented(tiny: TinyRun, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "titanlite")
    validation = "--validation.enable=true", "--validation.freq=1", f"--validation.path={tiny.text}"
    health = "--metrics.layers.freq=1", "--debug.hash_freq=1"
    run = train_on_this_rank(tiny.config("--training.steps=2", "--checkpoint.interval=1", *validation, *health), 0, 1)
    sections = re.split(r"^## (\w+).*$", Path("docs/metrics.md").read_text(), flags=re.MULTILINE)[1:]
    documented = {
        name: {*re.findall(r"`(\w+)`", text)} for name, text in zip(sections[::2], sections[1::2], strict=True)
    }
    for name in ("metrics", "validation", "checkpoints", "layers", "hashes"):
        records = [json.loads(line) for line in run.folder.records(name).read_text().splitlines()]
        assert [record["step"] for record in records] == [1, 2]
        found = {field for record in records for field in record}
        named = [record[field] for record in records for field in ("sources", "layers") if field in record]
        while named:  # fields below the name of a source, or of a layer and of what is measured
            named = [value for by_name in named for value in by_name.values() if isinstance(value, dict)]
            found |= {field for value in named for field in value}
        assert found - documented[name] == set(), name
    assert {field.name for field in fields(SkippedStep)} | {"samples", "sequences"} <= documented["skipped"]
    assert mentions(caplog.text, "saves", "2 steps")
    assert "Ctrl-C" not in caplog.text, "nobody listens to signals here"
    last = json.loads(run.folder.records("metrics").read_text().splitlines()[-1])
    assert tuple(last["phase_seconds"]) == CATEGORIES
    # What other tests have compiled in this process counts as compile.
    assert last["phase_seconds"]["compile"] + last["phase_seconds"]["compute"] > 0 < last["phase_seconds"]["validation"]


LINE = {
    "step": 12345, "loss": 12.3456, "grad_norm": 0.1234, "tokens_per_second": 1234567.8, "memory_gib": 123.456,
    "step_seconds": 1.2345, "data_wait_seconds": 0.001, "mfu": 0.4567,
}  # fmt: skip


def test_the_line_of_a_step_fits_100_columns() -> None:
    line = step_line(LINE, steps=50_000)
    words = ("step 12345", "loss 12.3456", "grad_norm 0.123", "1,234,568 tokens/s", "123 GiB", "MFU 45.7%", "left")
    assert mentions(line, *words)
    assert len(line) <= 100
    assert not mentions(line, "data")
    assert not mentions(line, "s/step")
    line = step_line(LINE | {"mfu": None, "tokens_per_second": 12345.6}, steps=12345)
    assert mentions(line, "1.234 s/step")
    assert not mentions(line, "left")
    assert len(line) <= 100
    unusual = {"data_wait_seconds": 0.12345, "compile_seconds": 23.4, "recompiles": 1, "distill_loss": 0.5}
    assert mentions(
        step_line(LINE | unusual, steps=50_000), "data 10.0%", "compile 23.4 s", "recompiles 1", "distill 0.5000"
    )
