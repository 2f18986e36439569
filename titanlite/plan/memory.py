"""Peak memory of each phase of a step, from recorded storages; and of a model of many blocks, from models of few.

Blocks are alike, so each further block adds the same to the peak of each phase. Two models of few blocks, that differ
by one block (or by the period after which blocks repeat), give the difference. The first and last blocks, and
everything that is not a block, are taken from the larger model.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from titanlite.plan.recorder import CATEGORIES, Recorder

Breakdown = dict[str, int]
"""Bytes by category: `recorder.CATEGORIES`."""


@dataclass(frozen=True)
class Profile:
    """Memory of one rank in one step."""

    phases: dict[str, Breakdown]
    """Memory at the peak of each phase, in the order of time. Of a phase that comes once a micro-batch, the highest."""
    blocks: int

    @property
    def peak_phase(self) -> str:
        return max(self.phases, key=lambda name: sum(self.phases[name].values()))

    @property
    def breakdown(self) -> Breakdown:
        """Memory at the peak of the step."""
        return self.phases[self.peak_phase]

    @property
    def peak(self) -> int:
        """Bytes."""
        return sum(self.breakdown.values())

    def most(self, category: str) -> int:
        """Return the most bytes of one category at any phase's peak: gradients peak when little else is there."""
        return max(phase[category] for phase in self.phases.values())


def profile(recorder: Recorder, blocks: int) -> Profile:
    """Return the memory profile of the recorded steps, without what was recorded before the first one."""
    phases: dict[str, Breakdown] = {}
    highest: dict[str, int] = {}
    now: Breakdown = dict.fromkeys(CATEGORIES, 0)
    total = 0
    for phase, changes in _changes(recorder):
        highest[phase] = max(highest.get(phase, 0), total)
        phases.setdefault(phase, dict(now))
        if total == highest[phase]:
            phases[phase] = dict(now)
        for difference, category in changes:
            now[category] += difference
            total += difference
            if total > highest[phase]:
                highest[phase], phases[phase] = total, dict(now)
    del phases["start"], phases["end"]
    return Profile(phases, blocks)


def _changes(recorder: Recorder) -> Iterator[tuple[str, list[tuple[int, str]]]]:
    """Yield each phase, with its changes of memory (bytes, category) in the order of time."""
    events: list[tuple[int, int, str]] = []
    for storage in recorder.storages:
        before = 0
        for time, size in storage.sizes:
            events.append((time, size - before, storage.category))
            before = size
    events.sort(key=lambda event: event[0])
    place = 0
    ends = [time for time, _ in recorder.phases[1:]] + [recorder.time + 1]
    for (_, name), end in zip(recorder.phases, ends, strict=True):
        changes = []
        while place < len(events) and events[place][0] < end:
            changes.append(events[place][1:])
            place += 1
        yield name, changes


def extend(small: Profile, large: Profile, blocks: int, edge: int) -> Profile:
    """Return the profile of a model with `blocks` blocks, from two models with fewer.

    Args:
        edge: number of blocks at the beginning and at the end that are looked at. Blocks between are not higher.
    """
    phases: dict[str, Breakdown] = {}
    for name, above in large.phases.items():
        place = block_of(name)
        if place is None or place < edge:
            at_small, at_blocks = name, name
        elif place >= large.blocks - edge:
            at_small = _renamed(name, place - large.blocks + small.blocks)
            at_blocks = _renamed(name, place - large.blocks + blocks)
        else:
            continue
        below, factor = small.phases[at_small], (blocks - small.blocks) / (large.blocks - small.blocks)
        phases[at_blocks] = {
            category: max(0, round(below[category] + (above[category] - below[category]) * factor))
            for category in CATEGORIES
        }
    return Profile(phases, blocks)


def block_of(phase: str) -> int | None:
    """Return the number of the block that a phase is about; None for other phases."""
    _, _, unit = phase.partition(" layers.")
    return int(unit) if unit.isdigit() else None


def _renamed(phase: str, block: int) -> str:
    return f"{phase.partition(' ')[0]} layers.{block}"
