"""Windows of steps that torch.profiler records."""

import gzip
import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import record_function

from tests.support.helpers import TinyRun, mentions, train_on_this_rank
from titanlite.observer import Phase
from titanlite.runtime.process_group import Ranks
from titanlite.schema import Profiling
from titanlite.techniques.profiling.profiler import Profiler, save_memory_snapshot
from titanlite.tools.plan.out_of_memory import snapshot_lines

ON = "--profiling.enable_profiling=true"
ONE = Ranks(0, 1, 0, 1)


def read(path: Path) -> dict[str, Any]:
    with gzip.open(path, "rt") as file:
        return json.load(file)


def ranges(trace: dict[str, Any]) -> list[str]:
    """Names of the ranges that code opened, in the order of their begin."""
    found = [event for event in trace["traceEvents"] if event.get("cat") == "user_annotation"]
    return [event["name"] for event in sorted(found, key=lambda event: (event["ts"], -event["dur"]))]


def windows(config: Profiling, folder: Path, *, steps: int, first: int = 1) -> dict[str, list[str]]:
    """Run the hooks of steps without a model. Returns the names of steps and phases in each window, by folder."""
    waits: list[str] = []

    @contextmanager
    def not_training() -> Iterator[None]:
        waits.append("")
        yield

    profiler = Profiler(
        config, run=folder, ranks=ONE, steps=steps, device=torch.device("cpu"), not_training=not_training
    )
    for step in range(first, steps + 1):
        profiler.begin_step(step)
        for phase in (Phase.FORWARD, Phase.UPDATE, Phase.METRICS):
            profiler.on_phase(phase)
            with record_function(f"work {step}"):
                torch.ones(2).add_(1)
        if step % 2 == 0:
            profiler.on_phase(Phase.VALIDATION)
    profiler.close()
    found = {path.parent.name: ranges(read(path)) for path in sorted(folder.rglob("rank-0.json.gz"))}
    assert (len(waits) > 0) == bool(found)
    return found


def step_ranges(step: int) -> list[str]:
    work = f"work {step}"
    return [f"ProfilerStep#{step}", "data", "forward", work, "update", work, "metrics", work]


def test_windows_end_with_multiples_of_the_frequency(tmp_path: Path) -> None:
    """A window has its steps with their phases in order, and nothing of other steps. The third would end after the
    run."""
    config = Profiling(enable_profiling=True, profile_freq=4, profiler_active=2, profiler_warmup=1)
    found = windows(config, tmp_path / "a", steps=10)
    assert found == {
        "step-00000004": [*step_ranges(3), *step_ranges(4)],
        "step-00000008": [*step_ranges(7), *step_ranges(8)],
    }


def test_validation_within_a_window_is_a_range_and_a_resumed_run_opens_the_rest(tmp_path: Path) -> None:
    config = Profiling(enable_profiling=True, profile_freq=3, profiler_active=3, profiler_warmup=0)
    found = windows(config, tmp_path / "a", steps=3)
    assert found == {"step-00000003": [*step_ranges(1), *step_ranges(2), "validation", *step_ranges(3)]}
    assert windows(config, tmp_path / "b", steps=3, first=3) == {"step-00000003": step_ranges(3)}


def test_a_run_that_stops_within_a_window_leaves_no_part_of_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = Profiling(enable_profiling=True, profile_freq=4, profiler_active=2, profiler_warmup=0)
    profiler = build(config, tmp_path)
    with caplog.at_level(logging.INFO, "titanlite"):
        for step in (2, 3):
            profiler.begin_step(step)
            profiler.on_phase(Phase.METRICS)
        profiler.close()
    assert mentions(caplog.text, "step 3")
    assert not list(tmp_path.rglob("*.gz"))
    assert windows(config, tmp_path / "next", steps=4).keys() == {"step-00000004"}, "the next one is not disturbed"


def build(config: Profiling, folder: Path) -> Profiler:
    return Profiler(config, run=folder, ranks=ONE, steps=8, device=torch.device("cpu"), not_training=nullcontext)


def test_a_full_disk_is_reported_and_training_continues(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "profile").write_text("a file where the folder should be")
    profiler = build(Profiling(enable_profiling=True, profile_freq=1, profiler_warmup=0), tmp_path)
    profiler.begin_step(1)
    profiler.on_phase(Phase.METRICS)
    profiler.begin_step(2)
    assert mentions(caplog.text, tmp_path / "profile")
    profiler.close()


def test_a_run_by_epochs_that_is_too_short_warns(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The number of its steps is known when the data is open, which is too late for the check of the config."""
    config = Profiling(enable_profiling=True, profile_freq=50)
    options: dict[str, Any] = {"run": tmp_path, "ranks": ONE, "device": torch.device("cpu")}
    Profiler(config, steps=49, not_training=nullcontext, **options)
    assert mentions(caplog.text, "profiling.profile_freq", 49)
    caplog.clear()
    Profiler(config, steps=50, not_training=nullcontext, **options)
    assert caplog.text == ""


@pytest.mark.long
@pytest.mark.usefixtures("single_process_group")
def test_a_run_with_windows_has_the_same_losses(tiny: TinyRun, caplog: pytest.LogCaptureFixture) -> None:
    """Bit for bit. Off means: no observer in the loop."""
    common = "--training.steps=3", "--training.mixed_precision_param=bfloat16"  # with FSDP units
    caplog.set_level(logging.INFO, "titanlite")
    on = train_on_this_rank(
        tiny.config(*common, ON, "--profiling.profile_freq=3", "--profiling.profiler_warmup=2", "--job.name=on"), 0, 1
    )
    off = train_on_this_rank(tiny.config(*common, "--job.name=off"), 0, 1)
    assert tiny.losses("on") == tiny.losses("off")
    assert (len(on.position.observers), off.position.observers) == (1, [])
    assert not (tiny.folder / "outputs/off/profile").exists()
    shown = [record.getMessage() for record in caplog.records if "  profile  " in record.getMessage()]
    assert shown == [f"  profile      {tiny.folder / 'outputs/on/profile'}"]
    trace = read(tiny.folder / "outputs/on/profile/step-00000003/rank-0.json.gz")
    assert [event["name"] for event in trace["traceEvents"] if str(event.get("name")).startswith("ProfilerStep")] == [
        "ProfilerStep#3"
    ]
    names = ranges(trace)
    phases = ["ProfilerStep#3", "data", "forward", "backward", "update", "metrics"]
    assert [name for name in names if name in phases] == phases
    units = ["tok_embeddings", "layers.0", "head"]
    ends = [name for name in names if name.startswith("FSDP::post_backward_reduce (")]
    assert ends == [f"FSDP::post_backward_reduce ({unit})" for unit in units[::-1]]


def test_out_of_memory_leaves_a_snapshot_of_the_rank(tiny: TinyRun) -> None:
    config = tiny.config("--profiling.enable_memory_snapshot=true", "--profiling.profile_freq=2")
    rank_3 = Ranks(3, 4, 3, 4)

    def save(folder: Path, rank: int) -> Path:
        return save_memory_snapshot(folder, rank, dump=lambda path: path.write_text("snapshot"))

    def fail(folder: Path, rank: int) -> Path:
        raise OSError("No space left on device")

    path = tiny.folder / "outputs/tiny/profile/out-of-memory/memory-rank-3.pickle"
    [line] = snapshot_lines(config, rank_3, save)
    assert mentions(line, path)
    assert path.read_text() == "snapshot"
    [line] = snapshot_lines(config, rank_3, fail)
    assert mentions(line, "No space left on device")
    assert [*snapshot_lines(tiny.config(), rank_3, fail)] == []
