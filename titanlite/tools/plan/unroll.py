"""Record of a step of many blocks, from two records that cost little: a step of a model with few blocks, and a step of
the whole model without its forward and backward passes.

Blocks are alike: after the first ones, each period of blocks (one block in most models) allocates, computes and sends
what the period before it did. The passes of the small model contain two such periods at least. They are compared with
each other, event by event, and if they are the same, the first of them is repeated for all further blocks. What comes
before and after the passes (parameters, states, the update) is of the whole model. So the result is the record of the
whole model, to the byte and in the same order, as PyTorch's allocator needs it.
"""

import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import NamedTuple

from titanlite.tools.plan.recorder import Operator, Recorder, Sent, Storage


class NotAlike(Exception):
    """Blocks differ in what they allocate, compute or send."""


class Blocks(NamedTuple):
    """Which blocks of a model the small one has."""

    total: int
    few: int
    """Blocks of the small model."""
    front: int
    """Blocks before the first period that is compared."""
    period: int

    @property
    def added(self) -> int:
        return self.total - self.few

    @property
    def last(self) -> int:
        """The last block before those that are repeated."""
        return self.front + self.period - 1

    def like(self, block: int) -> int:
        """Return the block of the small model that a block of the whole model is like."""
        if block <= self.last:
            return block
        return block - self.added if block > self.last + self.added else self.front + (block - self.front) % self.period

    def of_name(self, name: str) -> tuple[str, int | None, int | None]:
        """Return the small model's name of a parameter, and the numbers of its block there and in the whole model."""
        block = block_of(name)
        if block is None:
            return name, None, None
        return renamed(name, self.like(block)), self.like(block), block


@dataclass
class _Segment:
    """Events of a record within one phase: one direction of one FSDP unit."""

    phase: str
    """Empty if the phase began before."""
    block: int | None
    nth: int
    """Number of phases of this name before it."""
    begin: int
    end: int
    storages: range
    """Those that begin here."""
    changes: list[tuple[float, int, int]]
    """(time, storage, size)."""
    operators: Sequence[Operator]
    first_operator: int
    sent: list[Sent]
    further: Sequence[tuple[float, int, int, int]] = ()
    """(time, storage, size, distance of the repeated block from that of the storage)."""

    @property
    def name(self) -> tuple[str, int]:
        """What the same segments of other blocks have in common."""
        return self.phase.partition(" ")[0], self.nth


class _Record:
    """A record cut into segments."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self._births = [storage.sizes[0][0] for storage in recorder.storages]
        self._changes = sorted(
            (time, number, size) for number, storage in enumerate(recorder.storages) for time, size in storage.sizes
        )
        self._times = [operator.time for operator in recorder.operators]

    def segments(self, begin: int, end: int, sent: slice) -> Iterator[_Segment]:
        """Yield the segments between two times, of which the first and the last may be parts of phases.

        Args:
            sent: collectives between these times.
        """
        seen: Counter[str] = Counter()
        phases = self.recorder.phases
        ends = [time for time, _ in phases[1:]] + [self.recorder.time + 1]
        collectives = self.recorder.sent[sent]
        for number, ((start, phase), stop) in enumerate(zip(phases, ends, strict=True)):
            start, stop = max(start, begin), min(stop, end)
            if start >= stop:
                continue
            is_whole = start == phases[number][0]
            first, last = bisect_left(self._times, start), bisect_left(self._times, stop)
            changes = slice(bisect_left(self._changes, (start,)), bisect_left(self._changes, (stop,)))
            yield _Segment(
                phase if is_whole else "",
                block_of(phase) if is_whole else None,
                seen[phase],
                start,
                stop,
                range(bisect_left(self._births, start), bisect_left(self._births, stop)),
                self._changes[changes],
                self.recorder.operators[first:last],
                first,
                [one for one in collectives if one.phase == number],
            )
            seen[phase] += 1


def unrolled(few: Recorder, frame: Recorder, blocks: Blocks) -> Recorder:
    """Return the record of the whole model's step.

    Args:
        few: of a step of the small model.
        frame: of a step of the whole model without its passes, which `trace_step` has made with those of `few`.

    Raises:
        NotAlike: the blocks that would be repeated differ.
    """
    return _Unrolling(few, frame, blocks).made


class _Unrolling:
    def __init__(self, few: Recorder, frame: Recorder, blocks: Blocks) -> None:
        self.blocks, self.few, self.frame = blocks, few, frame
        self.made = copy(frame)
        self.made.time, self.made.phases, self.made.micro_batches = 0, [], few.micro_batches
        self.made.storages, self.made.operators, self.made.sent = [], [], []
        self._numbers: dict[Hashable, int] = {}
        begin, end = few.passes
        self._segments = [*_Record(few).segments(begin.time, end.time, slice(begin.sent, end.sent))]
        self._home = {number: segment for segment in self._segments for number in segment.storages}
        self._check_kept(end.time)
        self._reach = self._check()
        own, (begin, end) = _Record(frame), frame.passes
        for segment in own.segments(0, begin.time, slice(begin.sent)):
            self._add(segment, None, frame)
        for segment, block in self._in_order():
            self._add(segment, block, few)
        for segment in own.segments(end.time, frame.time + 1, slice(end.sent, None)):
            self._add(segment, None, frame)

    def _check_kept(self, end: int) -> None:
        """Check that of the passes' memory only gradients and losses last until the update.

        Raises:
            NotAlike: something else does, which the record of the whole model lacks.
        """
        handed, over = {one.storage for one in self.few.handed.values()}, self.few.phases[-1][0]
        for number in self._home.keys() - handed:
            if any(end <= time < over for time, _ in self.few.storages[number].sizes):
                raise NotAlike(f"storage {number} lasts")

    def _check(self) -> int:
        """Compare two periods, and return the largest distance of blocks that share a storage.

        Raises:
            NotAlike: the periods differ.
        """
        front, period, reach = self.blocks.front, self.blocks.period, 0
        for block in range(front, front + period):
            of_block, of_next = (
                [segment for segment in self._segments if segment.block == number] for number in (block, block + period)
            )
            if [*map(self._content, of_block)] != [*map(self._content, of_next)]:
                raise NotAlike(f"block {block} and block {block + period}")
            for segment in of_block:
                for number in {number for _, number, _ in segment.changes}:
                    home = self._home.get(number)
                    if home and home.block is not None:
                        reach = max(reach, abs(home.block - block))
        return reach

    def _content(self, segment: _Segment) -> str:
        """Return what happens in a segment of a block, by names that do not depend on the block."""
        block = segment.block
        assert block is not None

        def name(number: int) -> Hashable:
            home = self._home.get(number)
            if home is None or home.block is None:
                return number
            return home.name, number - home.storages.start, home.block - block

        storages = [(self.few.storages[n].category, self.few.storages[n].stream) for n in segment.storages]
        changes = [(time - segment.begin, name(number), size) for time, number, size in segment.changes]
        operators = [
            (o.time - segment.begin, o.name, o.kind, o.flops, o.dtype, o.category, [size for _, size in o.reads],
             [(name(number), size) for number, size in o.writes if number in self._home])
            for o in segment.operators
        ]  # fmt: skip
        sent = [
            (one.collective, one.bytes, one.axis, one.ranks, one.is_inside, (block_of(one.unit) or 0) - block)
            for one in segment.sent
        ]
        return repr((segment.name, storages, changes, operators, sent))

    def _in_order(self) -> Iterator[tuple[_Segment, int | None]]:
        """Yield the segments of the passes of the whole model, each with the number of its block."""
        run: list[_Segment] = []
        for segment in [*self._segments, None]:
            if segment is not None and segment.block is not None:
                run.append(segment)
                continue
            yield from self._repeated(run)
            run = []
            if segment:
                yield self._with_all_blocks(segment), None

    def _repeated(self, run: Sequence[_Segment]) -> Iterator[tuple[_Segment, int]]:
        """Yield the segments of a run through all blocks, from the first to the last or the other way round."""
        if not run:
            return
        last, added = self.blocks.last, self.blocks.added
        lower = [segment for segment in run if segment.block is not None and segment.block <= last]
        upper = [segment for segment in run if segment.block is not None and segment.block > last]
        copies = range(last + 1, last + 1 + added)
        if run == lower + upper:
            halves = lower, upper
        elif run == upper + lower:
            halves, copies = (upper, lower), reversed(copies)
        else:
            raise NotAlike("blocks take turns")
        first, second = ([(segment, self._place(segment.block)) for segment in half] for half in halves)
        yield from first
        for block in copies:
            yield from ((segment, block) for segment in lower if segment.block == self.blocks.like(block))
        yield from second

    def _with_all_blocks(self, segment: _Segment) -> _Segment:
        """Return a segment of no block, in which memory of all blocks may be freed one block after the other, with
        that of the repeated ones.

        Raises:
            NotAlike: the blocks differ, or an operator reads memory of each block.
        """
        first, last, period = self.blocks.front, self.blocks.last, self.blocks.period

        def of_blocks(begin: int, numbers: Iterable[int]) -> list[tuple[int, Hashable]]:
            homes = ((number, self._home.get(number)) for number in numbers)
            return [
                (home.block - begin, (home.name, number - home.storages.start))
                for number, home in homes
                if home and home.block is not None and begin <= home.block < begin + period
            ]

        touched = (number for operator in segment.operators for number, _ in (*operator.reads, *operator.writes))
        numbers = [number for _, number, _ in segment.changes]
        own, following = of_blocks(first, numbers), of_blocks(first + period, numbers)
        if own != following or of_blocks(first, touched):
            raise NotAlike(f"blocks in {segment.phase}")
        if not own:
            return segment
        homes = [home.block if (home := self._home.get(number)) else None for number in numbers]
        periods = range(1, self.blocks.added // period + 1)
        copied = [(number, size) for (_, number, size), home in zip(segment.changes, homes, strict=True)
                  if home is not None and first <= home <= last]  # fmt: skip
        places = [place for place, home in enumerate(homes) if home is not None and first <= home <= last]
        if homes.index(last) > homes.index(last + 1):
            time, periods = segment.changes[places[0]][0] - 1, reversed(periods)
        else:
            time = segment.changes[places[-1]][0]
        added = [(number, size, block * period) for block in periods for number, size in copied]
        times = (time + (place + 1) / (len(added) + 1) for place in range(len(added)))
        further = [(time, *change) for time, change in zip(times, added, strict=True)]
        return replace(segment, further=further)

    def _place(self, block: int | None) -> int:
        """Return the number in the whole model of a block of the small one."""
        assert block is not None
        return block if block <= self.blocks.last else block + self.blocks.added

    def _near(self, other: int, block: int | None, made: int | None) -> int:
        """Return the number in the whole model of the block that is `other` as seen from `block`, which became `made`.

        What is further away than blocks reach is the same block for all, as the first and the last are.
        """
        last = self.blocks.last
        if block is None or made is None:
            return self._place(other)
        is_copy = made != self._place(block)
        if is_copy or (other <= last) == (block <= last) or abs(other - block) <= self._reach:
            return made + other - block
        return self._place(other)

    def _of_few(self, number: int, block: int | None, made: int | None) -> Hashable:
        """Return the name of a storage of the small model, as seen from a block."""
        home = self._home.get(number)
        if home is None or home.block is None:
            return "few", number
        near = self._near(home.block, block, made)
        return home.name, number - home.storages.start, near

    def _of_frame(self, number: int) -> Hashable:
        handed = self.frame.handed_storages.get(number)
        return ("frame", number) if handed is None else self._of_few(*handed)

    def _add(self, segment: _Segment, block: int | None, source: Recorder) -> None:
        """Add a segment to the record.

        Args:
            block: its number in the whole model.
            source: record that the segment is of.
        """
        made, is_few = self.made, source is self.few
        shift = made.time - segment.begin
        if segment.phase:
            made.phases.append((made.time, segment.phase if block is None else renamed(segment.phase, block)))
        first, phase = len(made.operators), len(made.phases) - 1

        def number_of(number: int) -> int:
            key = self._of_few(number, segment.block, block) if is_few else self._of_frame(number)
            if key not in self._numbers:  # of the small model's parameters or tables; the whole model has its own
                self._numbers[key] = len(made.storages)
                own = source.storages[number]
                made.storages.append(
                    Storage(own.category, own.stream, [(0, max(size for _, size in own.sizes)), (0, 0), (0, 0)])
                )
            return self._numbers[key]

        for time, number, size in segment.changes:
            key = self._of_few(number, segment.block, block) if is_few else self._of_frame(number)
            if key not in self._numbers and number in segment.storages:
                own = source.storages[number]
                self._numbers[key] = len(made.storages)
                made.storages.append(Storage(own.category, own.stream))
            elif key not in self._numbers or not made.storages[self._numbers[key]].sizes[-1][0]:
                raise NotAlike(f"storage {number} in {segment.phase} has no beginning")
            made.storages[self._numbers[key]].sizes.append((time + shift, size))
        for time, number, size, distance in segment.further:
            home = self._home[number]
            key = home.name, number - home.storages.start, self._place(home.block) + distance
            made.storages[self._numbers[key]].sizes.append((time + shift, size))
        for operator in segment.operators:
            reads, writes = (
                tuple((number_of(number), size) for number, size in touched)
                for touched in (operator.reads, operator.writes)
            )
            made.operators.append(
                operator._replace(time=operator.time + shift, phase=phase, reads=reads, writes=writes)
            )
        for one in segment.sent:
            moved, unit = first - segment.first_operator, one.unit
            beside = slice(one.beside.start + moved, one.beside.stop + moved) if one.beside.start else one.beside
            if is_few and (other := block_of(unit)) is not None:
                unit = renamed(unit, self._near(other, segment.block, block))
            made.sent.append(one._replace(phase=phase, beside=beside, unit=unit))
        made.time = segment.end + shift


BLOCK = re.compile(r"(?<![\w.])layers\.(\d+)(?![^.])")
"""A block of the trained model, in the name of a phase, a unit or a parameter."""


def block_of(name: str) -> int | None:
    """Return the number of the block that a name is about; None for others."""
    found = BLOCK.search(name)
    return int(found[1]) if found else None


def renamed(name: str, block: int) -> str:
    return BLOCK.sub(f"layers.{block}", name)
