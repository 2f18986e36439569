"""Timeouts of collectives follow the phases of training."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from tests.support.helpers import TinyRun, train_on_this_rank
from titanlite.observer import Phase
from titanlite.run.timeouts import CHECKPOINT_GROUP, PhaseTimeouts
from titanlite.schema import Comm

COMM = Comm(
    init_timeout_seconds=100,
    train_timeout_seconds=10,
    validation_timeout_seconds=300,
    save_timeout_seconds=1000,
)


def timeout_of(group: dist.ProcessGroup) -> timedelta:
    return group._get_backend(torch.device("cpu")).options._timeout


def test_each_phase_has_its_timeout() -> None:
    calls: list[float | str] = []
    phase = PhaseTimeouts(COMM, set_seconds=calls.append, wait_for_all=lambda: calls.append("all"))
    assert calls == []  # there is no process group yet
    assert (str(phase), phase.timeout) == ("start", ("comm.init_timeout_seconds", 100))
    for name in (Phase.DATA_PREPARATION, Phase.MODEL, Phase.CHECKPOINT_LOAD):
        phase.enter(name)
    for step in range(6, 10):
        phase.begin_step(step)
        for name in (Phase.FORWARD, Phase.BACKWARD, Phase.UPDATE):
            phase.enter(name)
        if step in (6, 8):
            phase.enter(Phase.VALIDATION)
        if step == 8:
            phase.enter(Phase.CHECKPOINT)
    assert (str(phase), phase.timeout) == ("step 9, update", ("comm.train_timeout_seconds", 10))
    phase.enter(Phase.END)
    assert calls == [100, 300, 100, "all", 10, 300, 1000, 10, 1000]
    assert str(phase) == "step 9, end"


def test_a_short_run_keeps_the_timeout_of_the_start() -> None:
    calls: list[float] = []
    phase = PhaseTimeouts(COMM, set_seconds=calls.append, wait_for_all=lambda: pytest.fail("no rank waits"))
    for step in (1, 2):
        phase.begin_step(step)
    assert calls == [100]


class Phases(PhaseTimeouts):
    """Remembers every step and phase."""

    def __init__(self) -> None:
        super().__init__(COMM)
        self.heard: list[str] = []

    def begin_step(self, step: int) -> None:
        super().begin_step(step)
        self.heard.append(str(self))

    def on_phase(self, phase: Phase) -> None:
        super().on_phase(phase)
        self.heard.append(str(self))


@pytest.mark.long
@pytest.mark.usefixtures("single_process_group")
def test_a_whole_start_reports_its_phases_and_sets_all_timeouts_but_that_of_checkpoints(tiny: TinyRun) -> None:
    phases = Phases()
    options = [f"--comm.{name}={value}" for name, value in COMM.model_dump().items()]
    config = tiny.config("--training.steps=1", "--validation.enable", f"--validation.path={tiny.text}", *options)
    run = train_on_this_rank(config, 0, 1, observer=phases)
    steps = [f"step 1, {name}" for name in ("data", "forward", "backward", "update", "metrics")]
    ends = [f"step 1, {name}" for name in ("validation", "checkpoint", "end")]
    assert phases.heard == ["data preparation", "model", "sharding", "optimizer", "checkpoint load", *steps, *ends]
    checkpoints = run.checkpoints._saver.group
    assert checkpoints.group_desc == CHECKPOINT_GROUP
    assert timeout_of(run.train_step.world) == timeout_of(checkpoints) == timedelta(seconds=1000)  # at the end
    phases.enter(Phase.MODEL)
    assert timeout_of(run.train_step.world) == timedelta(seconds=100)
    assert timeout_of(checkpoints) == timedelta(seconds=1000)
