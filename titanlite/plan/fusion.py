"""Lifetimes of tensors in compiled blocks, where a compiler fuses operators.

A trace runs compiled blocks operator by operator. The compiler (inductor) differs in two ways. A tensor that only
elementwise operators and reductions read is never stored: each kernel that needs it computes it from tensors that are.
And operators that read the same tensors become one kernel, as late as the last of them, which allocates all its outputs
while its inputs are there.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from titanlite.plan.recorder import Operator, Recorder

Sizes = list[tuple[float, int]]
"""(time, bytes from then on) of a storage."""


@dataclass
class _Kernel:
    """A fused kernel."""

    time: float
    outputs: set[int]
    sources: set[int]
    """Stored tensors that it reads."""
    needs: set[int]
    """Tensors that it depends on, directly or through others."""
    reduces: bool
    """Presence of a sum over a dim among the operators."""


def fused_sizes(recorder: Recorder) -> dict[int, Sizes]:
    """Return the sizes over time of the storages whose lifetime fusion changes, by number."""
    changed: dict[int, Sizes] = {}
    for operators in _graphs(recorder):
        changed |= _Graph(recorder, operators).sizes()
    return changed


def _graphs(recorder: Recorder) -> Iterator[list[Operator]]:
    """Yield the operators of each compiled graph: forward or backward of a block."""
    found: dict[int, list[Operator]] = {}
    for operator in recorder.operators:
        direction, _, unit = recorder.phases[operator.phase][1].partition(" ")
        if direction in ("forward", "backward") and unit.startswith("layers.") and not operator.category:
            found.setdefault(operator.phase, []).append(operator)
    yield from found.values()


class _Graph:
    def __init__(self, recorder: Recorder, operators: Sequence[Operator]) -> None:
        self._storages = recorder.storages
        self._operators = operators
        self._end = operators[-1].time
        matmuls = [it for it in operators if it.kind != "memory"]
        self._read_by_matmuls = {number for it in matmuls for number, _ in it.reads}
        self._sources: dict[int, set[int]] = {}
        """Stored tensors that each result of elementwise operators and reductions is computed from."""
        self._kernels: list[_Kernel] = []
        self._fuse()

    def sizes(self) -> dict[int, Sizes]:
        changed: dict[int, Sizes] = {}
        last_read: dict[int, float] = {}
        delayed = {}
        for kernel in self._kernels:
            for number in kernel.sources:
                last_read[number] = max(last_read.get(number, 0), kernel.time)
            delayed |= dict.fromkeys(kernel.outputs, kernel.time)
        for operator in self._operators:
            if operator.kind != "memory":
                ready = [delayed[it] + 0.75 for it, _ in operator.reads if it in delayed]  # after that kernel
                time = max(operator.time, *ready, 0)
                for number, _ in operator.reads:
                    last_read[number] = max(last_read.get(number, 0), time)
                delayed |= {it: time for it, _ in operator.writes if time > operator.time}
        for number in self._sources:
            if not self._is_stored(number):
                changed[number] = []
        for number in last_read.keys() | delayed.keys():
            first, *others = self._storages[number].sizes
            if others and (len(others) > 1 or others[0][1]):
                continue  # gathered parameters
            begin = max(first[0], delayed.get(number, 0))
            changed[number] = [(begin, first[1])]
            for freed, _ in others:
                is_here = freed <= self._end + 1
                changed[number].append((max(freed, begin, last_read.get(number, 0) + 0.5 if is_here else 0), 0))
        return changed

    def _fuse(self) -> None:
        """Find the kernels: elementwise operators and reductions that read the same tensors."""
        needs: dict[int, set[int]] = {}
        reduced: set[int] = set()
        for operator in self._operators:
            reads = {number for number, _ in operator.reads}
            upstream = set().union(reads, *(needs.get(it, ()) for it in reads))
            if operator.kind != "memory":
                for number, _ in operator.writes:
                    needs[number] = upstream
                continue
            sources = set().union(*(self._sources.get(it, {it}) if not self._is_stored(it) else {it} for it in reads))
            reduces = self._is_reduction(operator) or any(it in reduced and not self._is_stored(it) for it in reads)
            for number, _ in operator.writes:
                needs[number] = upstream
                reduced |= {number} if reduces else set()
                if self._storages[number].sizes[0][0] != operator.time:
                    continue  # changed in place
                self._sources[number] = sources
                if self._is_stored(number):
                    self._join(_Kernel(operator.time, {number}, set(sources), upstream, reduces))

    def _join(self, new: _Kernel) -> None:
        for kernel in self._kernels:
            shared = any(
                self._storages[it].sizes[0][1] > 2**20 for it in (kernel.sources | kernel.outputs) & new.sources
            )
            through_matmul = kernel.outputs & self._read_by_matmuls & new.needs
            if shared and not through_matmul and not (kernel.reduces and new.reduces):
                kernel.reduces |= new.reduces
                kernel.time = max(kernel.time, new.time)
                kernel.outputs |= new.outputs
                kernel.sources |= new.sources - kernel.outputs
                return
        self._kernels.append(new)

    def _is_reduction(self, operator: Operator) -> bool:
        return 16 * sum(size for _, size in operator.writes) < max((size for _, size in operator.reads), default=0)

    def _is_stored(self, number: int) -> bool:
        """Return whether a tensor has memory: it was there before, or a matmul or a later graph reads it."""
        if number not in self._sources or number in self._read_by_matmuls:
            return True
        last = self._storages[number].sizes[-1]
        return last[1] > 0 or last[0] > self._end + 1
