"""Workload of each FSDP unit: kernels and collectives, from the operators of a traced step."""

from collections import Counter, defaultdict
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass

from titanlite.tools.plan.recorder import Operator, Recorder, Sent
from titanlite.tools.plan.time import Collective, Group, Kernel, Unit

Traffic = dict[tuple[str, str], int]
"""Bytes of whole tensors in a step, by (collective, mesh axis)."""


@dataclass(frozen=True)
class Workload:
    """Work of rank 0 in a step."""

    units: tuple[Unit, ...]
    """Units in the order of forward, with the cost of one micro-batch."""
    update: tuple[Kernel, ...]
    """Clipping and the optimizer."""
    whole: tuple[Collective, ...]
    """Collectives that belong to no unit."""


def workload_of(recorder: Recorder, *, fuse: bool, gpus_per_node: int) -> Workload:
    """Return the workload of the recorded step.

    Args:
        fuse: whether all operators between two matmuls of a block are one kernel, as a compiler makes it.
        gpus_per_node: ranks in a node.
    """
    last_read = {number: operator.time for operator in recorder.operators for number, _ in operator.reads}
    firsts = set(_first_of_each_name(recorder))
    operators: dict[str, list[Operator]] = defaultdict(list)
    for operator in recorder.operators:
        if operator.phase in firsts:
            operators[recorder.phases[operator.phase][1]].append(operator)
    sent: dict[str, list[Sent]] = defaultdict(list)
    reduced_once = _reduced_once(recorder)
    for call in recorder.sent:
        if call.phase in firsts or _is_once(call, reduced_once):
            sent[recorder.phases[call.phase][1] if call.is_inside else call.unit].append(call)

    def kernels(direction: str, unit: str, found: Sequence[Operator] | None = None) -> tuple[Kernel, ...]:
        found = operators[f"{direction} {unit}"] if found is None else found
        return tuple(_fused(found, last_read) if fuse and "layers." in unit else map(_kernel, found))

    def collectives(unit: str, op: str, *, forward: bool) -> tuple[Collective, ...]:
        return tuple(
            _collective(call, gpus_per_node)
            for call in sent[unit]
            if call.collective == op and recorder.phases[call.phase][1].startswith("forward") == forward
        )

    def waits(direction: str, unit: str) -> tuple[Collective, ...]:
        return tuple(
            _collective(call, gpus_per_node)._replace(beside=kernels(direction, unit, recorder.operators[call.beside]))
            for call in sent[f"{direction} {unit}"]
        )

    units = []
    for _, phase in recorder.phases:
        direction, _, name = phase.partition(" ")
        if direction != "forward" or any(unit.name == name for unit in units):
            continue
        units.append(
            Unit(
                name,
                forward=kernels("forward", name),
                backward=kernels("backward", name) + tuple(map(_kernel, operators[f"reduce {name}"])),
                gather=collectives(name, "all_gather", forward=True),
                gather_again=collectives(name, "all_gather", forward=False),
                reduce=() if name in reduced_once else collectives(name, "reduce_scatter", forward=False),
                all_reduce=(
                    *(collectives(name, "reduce_scatter", forward=False) if name in reduced_once else ()),
                    *collectives(name, "all_reduce", forward=False),
                ),
                forward_waits=waits("forward", name),
                backward_waits=waits("backward", name),
            )
        )
    update = tuple(map(_kernel, operators["update"]))
    return Workload(tuple(units), update, tuple(_collective(call, gpus_per_node) for call in sent[""]))


def traffic_of(recorder: Recorder, *, accumulation: int, gathers_once: bool = False) -> Traffic:
    """Return the bytes of a step with all its micro-batches.

    Args:
        accumulation: number of micro-batches in the step.
        gathers_once: whether parameters are gathered once a step, and not once a micro-batch.
    """
    total: Traffic = {}
    reduced_once = _reduced_once(recorder)
    for call in recorder.sent:
        each_micro_batch = call.is_inside or (call.unit and not gathers_once and not _is_once(call, reduced_once))
        size = call.bytes * accumulation // recorder.micro_batches if each_micro_batch else call.bytes
        total[call.collective, call.axis] = total.get((call.collective, call.axis), 0) + size
    return total


def _first_of_each_name(recorder: Recorder) -> Iterator[int]:
    """Yield the numbers of the phases of the first micro-batch, and of phases that come once."""
    seen: Counter[str] = Counter()
    for number, (_, name) in enumerate(recorder.phases):
        if not seen[name]:
            yield number
        seen[name] += 1


def _reduced_once(recorder: Recorder) -> set[str]:
    """Return the units whose gradients are not reduced after the first micro-batch, but after the last."""
    firsts = set(_first_of_each_name(recorder))
    reductions = [call for call in recorder.sent if call.collective == "reduce_scatter" and not call.is_inside]
    return {call.unit for call in reductions} - {call.unit for call in reductions if call.phase in firsts}


def _is_once(sent: Sent, reduced_once: Container[str]) -> bool:
    """Return whether a unit's collective runs in the last micro-batch only."""
    if sent.is_inside:
        return False
    return sent.collective == "all_reduce" or (sent.collective == "reduce_scatter" and sent.unit in reduced_once)


def _kernel(operator: Operator) -> Kernel:
    moved = sum(size for _, size in (*operator.reads, *operator.writes))
    return Kernel(operator.kind, operator.flops, moved, operator.dtype)


def _fused(operators: Sequence[Operator], last_read: dict[int, int]) -> Iterator[Kernel]:
    """Yield matmuls and operators of our own as they are, and one kernel for each run of operators between them."""
    run: list[Operator] = []
    for operator in operators:
        if operator.kind == "memory" and not operator.name.startswith("titanlite."):
            run.append(operator)
            continue
        yield from _one_kernel(run, last_read)
        yield _kernel(operator)
        run = []
    yield from _one_kernel(run, last_read)


def _one_kernel(run: Sequence[Operator], last_read: dict[int, int]) -> Iterable[Kernel]:
    """Yield a kernel that reads what the run does not make itself, and writes what is read later."""
    if not run:
        return
    written: dict[int, int] = {}
    inputs: dict[int, int] = {}
    for operator in run:
        for number, size in operator.reads:
            if number not in written:
                inputs[number] = max(size, inputs.get(number, 0))
        written.update(dict(operator.writes))
    outputs = sum(size for number, size in written.items() if last_read.get(number, 0) > run[-1].time)
    yield Kernel("memory", 0, sum(inputs.values()) + outputs, run[0].dtype)


def _collective(sent: Sent, gpus_per_node: int) -> Collective:
    on_one_node = max(Counter(rank // gpus_per_node for rank in sent.ranks).values())
    return Collective(sent.collective, sent.bytes, Group(len(sent.ranks), on_one_node))
