"""Peak memory of each phase of a step, and what PyTorch's allocator reserves, from recorded storages."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from titanlite.tools.plan.allocator import Change, PoolName, PoolSize, replay, reserved
from titanlite.tools.plan.fusion import Sizes, fused_sizes
from titanlite.tools.plan.recorder import CATEGORIES, Recorder

Breakdown = dict[str, int]
"""Bytes by category: `recorder.CATEGORIES`."""
WORKSPACES = 2 * 32 * 2**20
"""Bytes that PyTorch allocates on Hopper for cuBLAS: a workspace for each thread that launches matmuls, that of forward
and that of backward. Other GPUs have 8 MiB each. PyTorch 2.15 returns them to its pool after each matmul, so less is
allocated at most peaks, and as much is reserved. Source: aten/src/ATen/cuda/CublasHandlePool.cpp."""


@dataclass(frozen=True)
class Profile:
    """Memory of one rank in one step."""

    phases: dict[str, Breakdown]
    """Memory at the peak of each phase, in the order of time. Of a phase that comes once a micro-batch, the highest."""
    pools: dict[PoolName, PoolSize] = field(default_factory=dict)
    """Pools of PyTorch's caching allocator. A CPU has none."""

    @property
    def reserved(self) -> int:
        """Bytes that PyTorch reserves on the device."""
        return reserved(self.pools) if self.pools else self.peak

    @property
    def peak_phase(self) -> str:
        return max(self.phases, key=lambda name: sum(self.phases[name].values()))

    @property
    def breakdown(self) -> Breakdown:
        """Memory at the peak of the step."""
        return self.phases[self.peak_phase]

    @property
    def peak(self) -> int:
        """Allocated bytes at the peak of the step."""
        return sum(self.breakdown.values())

    def most(self, category: str) -> int:
        """Return the most bytes of one category at any phase's peak: gradients peak when little else is there."""
        return max(phase[category] for phase in self.phases.values())


def profile(recorder: Recorder, *, gpu: bool = False, compiled: bool = False, hidden: Sequence[str] = ()) -> Profile:
    """Return the memory profile of the recorded steps, without what was recorded before the first one.

    Args:
        gpu: whether PyTorch's caching allocator reserves the memory.
        compiled: whether a compiler fuses operators of blocks.
        hidden: categories that are not in the device's memory. The phases have them all the same.
    """
    changes = _changes(recorder, fused_sizes(recorder) if compiled else {})
    phases: dict[str, Breakdown] = {}
    highest: dict[str, int] = {}
    now: Breakdown = dict.fromkeys(CATEGORIES, 0)
    total = now["other"] = WORKSPACES if gpu else 0
    place = 0
    ends = [time for time, _ in recorder.phases[1:]] + [recorder.time + 1]
    for (_, phase), end in zip(recorder.phases, ends, strict=True):
        highest[phase] = max(highest.get(phase, 0), total)
        phases.setdefault(phase, dict(now))
        if total == highest[phase]:
            phases[phase] = dict(now)
        while place < len(changes) and changes[place].time < end:
            _, number, before, after = changes[place]
            place += 1
            now[recorder.storages[number].category] += after - before
            total += after - before
            if total > highest[phase]:
                highest[phase], phases[phase] = total, dict(now)
    del phases["start"], phases["end"]
    return Profile(phases, replay(_history(recorder, changes, hidden)) if gpu else {})


class _Resized(NamedTuple):
    time: float
    storage: int
    before: int
    after: int


def _changes(recorder: Recorder, fused: Mapping[int, Sizes]) -> list[_Resized]:
    """Return all changes of storages in the order of time.

    Args:
        fused: sizes over time of some storages, in place of the recorded ones.
    """
    changes: list[_Resized] = []
    for number, storage in enumerate(recorder.storages):
        before = 0
        for time, size in fused.get(number, storage.sizes):
            changes.append(_Resized(time, number, before, size))
            before = size
    return sorted(changes)


def _history(recorder: Recorder, changes: Sequence[_Resized], hidden: Sequence[str]) -> Iterator[Change]:
    """Yield the changes of device memory in training: parameters, the optimizer's states, and two steps."""
    begin = next(time for time, name in recorder.phases if name == "step")
    end = recorder.phases[-1][0]
    before = {change.storage: change.after for change in changes if change.time < begin}
    for number, size in before.items():
        if size and recorder.storages[number].category not in hidden:
            yield Change(number, 0, size)
    yield Change(-1, 0, WORKSPACES)
    in_steps = [change for change in changes if begin <= change.time < end]
    in_steps = [change for change in in_steps if recorder.storages[change.storage].category not in hidden]
    made = len(recorder.storages)
    for first in (True, False):
        alive: set[int] = set()
        for change in in_steps:
            number = change.storage if change.storage in before else change.storage + made * (1 + first)
            yield Change(number, recorder.storages[change.storage].stream, change.after)
            alive.add(number) if change.after else alive.discard(number)
        yield from (Change(number, 0, 0) for number in alive if number >= made)
