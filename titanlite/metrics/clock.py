"""Time of a run by phase: where its hours went, how long a step takes, and how long without waits for other ranks."""

import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from titanlite.observer import CurrentPhase, Phase, StepObserver
from titanlite.runtime.private_torch.compiler import compile_seconds

CATEGORIES: tuple[str, ...] = ("start", "compile", "compute", "data", "checkpoint", "validation")


def phase_seconds(phase: CurrentPhase) -> dict[str, float]:
    """Return the seconds of this start so far in each of `CATEGORIES`, on this rank."""
    return by_category(phase.seconds(), compiling=compile_seconds())


def by_category(seconds: Mapping[Phase, float], *, compiling: float) -> dict[str, float]:
    """Return seconds by `CATEGORIES`. Their sum is the time since the start began.

    The host's time counts. On a GPU, the host waits within the steps for what it has queued, so look at the sum of many
    steps.

    Args:
        seconds: of each `Phase`.
        compiling: seconds that torch.compile has taken, within steps.
    """
    found: dict[str, float] = dict.fromkeys(CATEGORIES, 0.0)
    for phase, spent in seconds.items():
        found[phase.category] += spent
    found["compile"] = min(compiling, found["compute"])
    found["compute"] -= found["compile"]
    return found


def format_phases(seconds: Mapping[str, float]) -> str:
    """Return one line: the whole time, and each phase's share, without those below 0.1 %."""
    whole = sum(seconds.values())
    parts = [f"{name} {spent / whole:.1%}" for name, spent in seconds.items() if whole and spent / whole >= 0.001]
    return f"{format_seconds(whole)}: {', '.join(parts)}"


def format_seconds(seconds: float) -> str:
    """Return a time in its two largest units: 45 s, 3 min 20 s, 2 h 05 min, 4 d 03 h."""
    whole = round(seconds)
    for large, unit, small, part in (("d", 86_400, "h", 3600), ("h", 3600, "min", 60), ("min", 60, "s", 1)):
        if whole >= unit:
            return f"{whole // unit} {large} {whole % unit // part:02} {small}"
    return f"{whole} s"


class StepClock(StepObserver):
    """Times of the steps since the last record, without validation, saves and traces.

    A rank's own time is that of its forward passes in which it does not wait for others. Step times are equal on all
    ranks, because a fast rank waits in collectives for the slowest one. Own time is measured in the steps that `begin`
    names, by events on the stream of a GPU, for which the host does not wait. Other steps cost next to nothing.
    """

    def __init__(self, phase: CurrentPhase, device: torch.device) -> None:
        self._phase, self._is_gpu = phase, device.type == "cuda"
        self._marks: list[tuple[int, Any]] = []
        """Beginnings (-1) and ends (1) of times that count; a time is that since the first mark, or an event."""
        self._is_measured = self._is_forward = self._is_waiting = False
        self.restart()

    def restart(self) -> None:
        """Begin a new window."""
        self.steps = 0
        self.data_wait = 0.0
        """Seconds of waiting for data."""
        self._before = self._phase.seconds()

    def elapsed(self) -> float:
        """Return the seconds of all steps in the window."""
        spent = self._phase.seconds()
        steps = [phase for phase in spent if phase.timeout == "step" and phase is not Phase.PROFILING]
        return sum(spent[phase] - self._before.get(phase, 0) for phase in steps)

    def begin(self, *, is_measured: bool) -> None:
        """Begin a step, when its data is there."""
        self.data_wait += self._phase.since()
        self._is_measured = is_measured
        self._marks, self._is_forward, self._is_waiting = [], False, False

    def phase(self, name: str) -> None:
        if self._is_measured and self._is_forward != (name == Phase.FORWARD):
            self._is_forward = not self._is_forward
            self._mark(-1 if self._is_forward else 1)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        self.begin_wait()
        yield
        self.end_wait()

    def begin_wait(self, *_: object) -> None:
        """Begin a wait for other ranks."""
        if self._is_forward and not self._is_waiting:
            self._is_waiting = True
            self._mark(1)

    def end_wait(self, *_: object) -> None:
        """End it."""
        if self._is_waiting:
            self._is_waiting = False
            self._mark(-1)

    def _mark(self, sign: int) -> None:
        if self._is_gpu:
            at = torch.cuda.Event(enable_timing=True)
            at.record()
        else:
            at = time.perf_counter()
        self._marks.append((sign, at))

    def own_seconds(self) -> float:
        """Return the own time of the last step; NaN if it was not measured. Call it when the device is done with the
        step."""
        if not self._marks or (self._is_gpu and not all(at.query() for _, at in self._marks)):
            return math.nan
        first = self._marks[0][1]
        return sum(sign * (first.elapsed_time(at) / 1e3 if self._is_gpu else at - first) for sign, at in self._marks)


def report_waits(model: nn.Module, clock: StepClock, *, is_compiled: bool = False) -> None:
    """Tell a clock of the waits for parameters in forward: they are between two hooks around that of an FSDP unit."""
    hooks: list[Any] = [clock.begin_wait, clock.end_wait]
    if is_compiled:  # like FSDP's own hooks, they stay outside of compiled code
        hooks = [torch.compiler.disable(hook) for hook in hooks]
    begin, end = hooks
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.register_forward_pre_hook(begin, prepend=True)
            module.register_forward_pre_hook(end)
