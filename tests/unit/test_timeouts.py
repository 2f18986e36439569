"""Timeouts of collectives follow the phases of training."""

from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.helpers import TinyRun, train_on_this_rank
from titanlite.config.schema import Comm
from titanlite.runtime.flight_recorder import VARIABLES, keep_traces
from titanlite.runtime.timeouts import CHECKPOINT_GROUP, PhaseTimeouts

COMM = Comm(init_timeout_seconds=100, train_timeout_seconds=10, save_timeout_seconds=1000)


def timeout_of(group: dist.ProcessGroup) -> timedelta:
    return group._get_backend(torch.device("cpu")).options._timeout


def test_each_phase_has_its_timeout() -> None:
    calls: list[float | str] = []
    phase = PhaseTimeouts(COMM, set_seconds=calls.append, wait_for_all=lambda: calls.append("all"))
    for step in range(6, 10):
        phase.begin_step(step)
        for name in ("forward", "backward", "update"):
            phase.phase(name)
        if step in (6, 8):
            phase.phase("validation")
        if step == 8:
            phase.phase("checkpoint")
    phase.phase("end")
    assert calls == [100, "all", 10, 100, 1000, 10, 1000]
    assert str(phase) == "step 9, end"


def test_a_short_run_keeps_the_timeout_of_the_start() -> None:
    calls: list[float] = []
    phase = PhaseTimeouts(COMM, set_seconds=calls.append, wait_for_all=lambda: pytest.fail("no rank waits"))
    for step in (1, 2):
        phase.begin_step(step)
    assert calls == [100]


@pytest.mark.usefixtures("single_process_group")
def test_training_sets_the_timeouts_of_its_groups_but_not_that_of_checkpoints(tiny: TinyRun) -> None:
    options = [f"--comm.{name}={value}" for name, value in COMM.model_dump().items()]
    run = train_on_this_rank(tiny.config("--training.steps=4", "--checkpoint.enable=false", *options), 0, 1)
    checkpoints = run.checkpoints._group
    assert checkpoints.group_desc == CHECKPOINT_GROUP
    assert timeout_of(run.world) == timeout_of(checkpoints) == timedelta(seconds=1000)  # at the end
    PhaseTimeouts(COMM)
    assert timeout_of(run.world) == timedelta(seconds=100)
    assert timeout_of(checkpoints) == timedelta(seconds=1000)


def test_traces_of_a_timeout_are_kept_with_the_run(tmp_path: Path) -> None:
    environ: dict[str, str] = {}
    keep_traces(environ, tmp_path / "logs")
    assert environ == {"TORCH_FR_DUMP_TEMP_FILE": f"{tmp_path}/logs/nccl-rank-"}


@pytest.mark.parametrize("name", VARIABLES)
def test_files_of_traces_that_the_user_names_stay(name: str, tmp_path: Path) -> None:
    environ = {name: "/shared/trace-"}
    keep_traces(environ, tmp_path)
    assert environ == {name: "/shared/trace-"}
