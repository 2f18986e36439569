"""Lifetimes of tensors in compiled blocks, where a compiler fuses operators.

A trace runs compiled blocks operator by operator. The compiler (inductor) differs in two ways. A tensor that only
elementwise operators and reductions read is never stored: each kernel that needs it computes it from tensors that are.
And operators that read the same tensors become one kernel, as late as the last of them, which allocates all its outputs
while its inputs are there. A tensor that takes many operations is stored all the same, and so is the sum of a whole
tensor. Of several orders of the operators, the compiler takes the one that needs least memory: gradients of weights can
come last.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from titanlite.tools.plan.recorder import Operator, Recorder

SCALAR = 8
"""Most bytes of a scalar."""
LONGEST = 30
"""Most loads, constants and operations of a result that the compiler recomputes for each reader. It stores longer
ones: `realize_opcount_threshold` of torch/_inductor/config.py."""
WITH_CONSTANT = ("aten.mul", "aten.add", "aten.sub", "aten.rsub", "aten.div", "aten.clamp", "aten.pow")
"""Operators with a number in place of a second tensor."""

Sizes = list[tuple[float, int]]
"""(time, bytes from then on) of a storage."""


@dataclass
class _Kernel:
    """A fused kernel."""

    time: float
    outputs: set[int]
    sources: set[int]
    """Stored tensors that it reads."""
    after: set[int]
    """Tensors that are there before it runs: it depends on them through another kernel."""
    reduces: bool
    """Whether one of the operators sums over a dim."""
    whole: bool
    """Whether its only outputs are sums over whole tensors."""


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
        matmuls = [op for op in operators if op.kind != "memory"]
        self._read_by_matmuls = {number for matmul in matmuls for number, _ in matmul.reads}
        reductions = [op for op in operators if op.kind == "memory" and self._is_reduction(op)]
        self._reductions = {number for reduction in reductions for number, _ in reduction.writes}
        self._whole = {number for reduction in reductions for number, size in reduction.writes if size <= SCALAR}
        """Reductions of whole tensors, such as scales. No kernel that makes one can also read it."""
        self._sources: dict[int, set[int]] = {}
        """Stored tensors that each result of elementwise operators and reductions is computed from."""
        self._steps: dict[int, set[int | str]] = {}
        """Loads, constants and operations that compute a result from stored tensors."""
        self._long: set[int] = set()
        """Results with more than LONGEST of them."""
        self._kernels: list[_Kernel] = []
        self._fuse()

    def sizes(self) -> dict[int, Sizes]:
        """Return the sizes of storages in the order of operators that takes less memory, as the compiler chooses it
        (`reorder_for_peak_memory` of torch/_inductor/config.py): as they are written, or gradients of weights last."""
        orders = self._sizes_in({}), self._sizes_in(self._gradients_last())
        return min(orders, key=self._peak)

    def _gradients_last(self) -> dict[int, float]:
        """Return a time at the end of the graph for each matmul whose result the graph returns, the smallest first.

        The keys are the times of the matmuls.
        """
        matmuls = [op for op in self._operators if op.kind != "memory"]
        late = [op for op in matmuls if op.writes and all(self._outlives(number) for number, _ in op.writes)]
        late.sort(key=lambda op: sum(size for _, size in op.writes))
        return {op.time: self._end + (i + 1) / (len(late) + 1) for i, op in enumerate(late)}

    def _outlives(self, number: int) -> bool:
        """Return whether a storage is there after the graph."""
        last = self._storages[number].sizes[-1]
        return last[1] > 0 or last[0] > self._end + 1

    def _peak(self, changed: dict[int, Sizes]) -> int:
        """Return the most bytes in the graph: of these storages, and of others that begin in it, such as scratch."""
        begin, steps = self._operators[0].time, dict[float, int]()
        for number, storage in enumerate(self._storages):
            before = 0
            if number in changed or begin <= storage.sizes[0][0] <= self._end:
                for time, size in changed.get(number, storage.sizes):
                    steps[time] = steps.get(time, 0) + size - before
                    before = size
        total = most = 0
        for time in sorted(steps):
            total += steps[time]
            most = max(most, total) if time <= self._end + 1 else most
        return most

    def _sizes_in(self, moved: dict[int, float]) -> dict[int, Sizes]:
        """Return the sizes of storages.

        Args:
            moved: later times of operators, by their times.
        """
        changed: dict[int, Sizes] = {}
        last_read: dict[int, float] = {}
        delayed = {}
        for kernel in self._kernels:
            for number in kernel.sources:
                last_read[number] = max(last_read.get(number, 0), kernel.time)
            delayed |= dict.fromkeys(kernel.outputs, kernel.time)
        for operator in self._operators:
            if operator.kind != "memory":
                ready = [delayed[n] + 0.75 for n, _ in operator.reads if n in delayed]  # after the kernel that makes it
                time = max(moved.get(operator.time, operator.time), *ready, 0)
                read = time - 0.49 if operator.time in moved else time  # freed before the next operator
                for number, _ in operator.reads:
                    last_read[number] = max(last_read.get(number, 0), read)
                delayed |= {number: time for number, _ in operator.writes if time > operator.time}
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
        reduced: set[int] = set()
        after = self._find_dependencies()
        for operator in self._operators:
            if operator.kind != "memory":
                continue
            sources, reduces = self._sources_of(operator, reduced)
            reduces |= self._is_reduction(operator)
            self._count_steps(operator)
            for number, _ in operator.writes:
                reduced |= {number} if reduces else set()
                if self._storages[number].sizes[0][0] != operator.time:
                    continue  # changed in place
                self._sources[number] = sources
                if self._is_stored(number):
                    whole = number in self._whole
                    self._join(_Kernel(operator.time, {number}, set(sources), after[number], reduces, whole))

    def _find_dependencies(self) -> dict[int, set[int]]:
        """Return the tensors that must be complete before the kernel of each result begins."""
        needs: dict[int, set[int]] = {}
        after: dict[int, set[int]] = {}
        for operator in self._operators:
            reads = {number for number, _ in operator.reads}
            upstream = reads.union(*(needs.get(number, ()) for number in reads))
            before = upstream
            if operator.kind == "memory":
                before = set().union(*(after.get(number, ()) for number in reads))
                before = before.union(*(needs[number] | {number} for number in reads & self._whole))
            for number, _ in operator.writes:
                needs[number], after[number] = upstream, before
        return after

    def _count_steps(self, operator: Operator) -> None:
        steps: set[int | str] = {-operator.time}
        for number, _ in operator.reads:
            is_load = number in self._reductions or self._is_stored(number)
            steps |= {number} if is_load else self._steps[number]
        if len(operator.reads) == 1 and operator.name.startswith(WITH_CONSTANT):
            steps.add(operator.name)
        for number, _ in operator.writes:
            self._steps[number] = steps
            if len(steps) > LONGEST and number not in self._reductions:
                self._long.add(number)

    def _sources_of(self, operator: Operator, reduced: set[int]) -> tuple[set[int], bool]:
        """Return the stored tensors that a kernel of these inputs reads, and whether it reduces one of them first.

        A kernel can reduce what it reads anyway, as a norm does. Else another kernel has stored the result.
        """
        reads = {number for number, _ in operator.reads}
        computed = {number for number in reads if not self._is_stored(number)}
        most = max(size for _, size in (*operator.reads, *operator.writes))
        small = {number for number in computed & reduced if 16 * self._storages[number].sizes[0][1] < most}
        sources = (reads - computed).union(*(self._sources[number] for number in computed - small))
        inner = {number for number in small if sources & self._sources[number]}
        return sources.union(*(self._sources[number] for number in inner)), bool(inner or (computed - small) & reduced)

    def _join(self, new: _Kernel) -> None:
        for kernel in self._kernels:
            shared = any(self._storages[n].sizes[0][1] > 2**20 for n in (kernel.sources | kernel.outputs) & new.sources)
            both_reduce = kernel.reduces and new.reduces and not new.whole
            if shared and kernel.whole == new.whole and not kernel.outputs & new.after and not both_reduce:
                kernel.reduces |= new.reduces
                kernel.time = max(kernel.time, new.time)
                kernel.outputs |= new.outputs
                kernel.sources |= new.sources - kernel.outputs
                kernel.after |= new.after
                return
        self._kernels.append(new)

    def _is_reduction(self, operator: Operator) -> bool:
        return 16 * sum(size for _, size in operator.writes) < max((size for _, size in operator.reads), default=0)

    def _is_stored(self, number: int) -> bool:
        """Return whether a tensor has memory: it was there before, a matmul or a later graph reads it, or the compiler
        stores it because recomputing it takes long."""
        if number not in self._sources or any(
            number in ids for ids in (self._read_by_matmuls, self._whole, self._long)
        ):
            return True
        return self._outlives(number)
