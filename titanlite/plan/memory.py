"""From storages that come and go to the peak of each phase of a step; and from a model of few blocks to one of many.

Blocks are alike, so each further block adds the same to the peak of each phase: two models of few blocks, that differ
by one (or by the period in which blocks differ), tell how much. What is true of the first and last blocks and of all
that is not a block is taken from the larger of the two.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from titanlite.plan.recorder import CATEGORIES, Recorder

Breakdown = dict[str, int]
"""Bytes by cause: `recorder.CATEGORIES`."""


@dataclass(frozen=True)
class Profile:
    """Memory of one rank in one step."""

    phases: dict[str, Breakdown]
    """What there is at the peak of each phase, in the order of time. Of a phase that comes once a micro-batch, the
    highest."""
    blocks: int

    @property
    def peak_phase(self) -> str:
        return max(self.phases, key=lambda name: sum(self.phases[name].values()))

    @property
    def breakdown(self) -> Breakdown:
        """At the highest moment of all."""
        return self.phases[self.peak_phase]

    @property
    def peak(self) -> int:
        """Bytes."""
        return sum(self.breakdown.values())

    def most(self, cause: str) -> int:
        """Bytes of one cause at any phase's peak: all gradients are there when little else is."""
        return max(phase[cause] for phase in self.phases.values())


def profile(recorder: Recorder, blocks: int) -> Profile:
    """Of the recorded steps; what was before the first does not count."""
    phases: dict[str, Breakdown] = {}
    highest: dict[str, int] = {}
    now: Breakdown = dict.fromkeys(CATEGORIES, 0)
    total = 0
    for phase, changes in _changes(recorder):
        highest[phase] = max(highest.get(phase, 0), total)
        phases.setdefault(phase, dict(now))
        if total == highest[phase]:
            phases[phase] = dict(now)
        for difference, cause in changes:
            now[cause] += difference
            total += difference
            if total > highest[phase]:
                highest[phase], phases[phase] = total, dict(now)
    del phases["start"], phases["end"]
    return Profile(phases, blocks)


def _changes(recorder: Recorder) -> Iterator[tuple[str, list[tuple[int, str]]]]:
    """Each phase, with its changes of memory (bytes, cause) in the order of time."""
    events: list[tuple[int, int, str]] = []
    for storage in recorder.storages:
        before = 0
        for moment, size in storage.sizes:
            events.append((moment, size - before, storage.cause))
            before = size
    events.sort(key=lambda event: event[0])
    place = 0
    ends = [moment for moment, _ in recorder.phases[1:]] + [recorder.moment + 1]
    for (_, name), end in zip(recorder.phases, ends, strict=True):
        changes = []
        while place < len(events) and events[place][0] < end:
            changes.append(events[place][1:])
            place += 1
        yield name, changes


def extend(small: Profile, large: Profile, blocks: int, edge: int) -> Profile:
    """The profile of a model with `blocks` blocks, from two with fewer.

    Args:
        edge: so many blocks at the beginning and at the end are looked at; those between are no higher than both.
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
            cause: max(0, round(below[cause] + (above[cause] - below[cause]) * factor)) for cause in CATEGORIES
        }
    return Profile(phases, blocks)


def block_of(phase: str) -> int | None:
    """The number of the block that a phase is about."""
    _, _, unit = phase.partition(" layers.")
    return int(unit) if unit.isdigit() else None


def _renamed(phase: str, block: int) -> str:
    return f"{phase.partition(' ')[0]} layers.{block}"
