"""From operators and messages to the work of each unit: what the time model takes."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from titanlite.plan.recorder import Operator, Recorder, Sent
from titanlite.plan.time import Group, Kernel, Message, Unit


@dataclass(frozen=True)
class Work:
    """Of rank 0 in a step."""

    units: tuple[Unit, ...]
    """In the order of forward, with what a micro-batch costs them."""
    update: tuple[Kernel, ...]
    """Clipping and the optimizer."""
    whole: tuple[Message, ...]
    """Messages that are about no unit."""


def work_of(recorder: Recorder, *, fuse: bool, gpus_per_node: int) -> Work:
    """Args:
    fuse: as the compiler does it within blocks: what lies between two products is one kernel.
    gpus_per_node: ranks in a node.
    """
    last_read = {number: operator.moment for operator in recorder.operators for number, _ in operator.reads}
    firsts = set(_first_of_each_name(recorder))
    operators: dict[str, list[Operator]] = defaultdict(list)
    for operator in recorder.operators:
        if operator.phase in firsts:
            operators[recorder.phases[operator.phase][1]].append(operator)
    sent: dict[str, list[Sent]] = defaultdict(list)
    for message in recorder.sent:
        if message.phase in firsts or message.collective == "all_reduce":
            sent[message.unit].append(message)

    def kernels(kind: str, unit: str) -> tuple[Kernel, ...]:
        found = operators[f"{kind} {unit}"]
        return tuple(_fused(found, last_read) if fuse and unit.startswith("layers.") else map(_kernel, found))

    def messages(unit: str, collective: str, *, forward: bool) -> tuple[Message, ...]:
        return tuple(
            _message(it, gpus_per_node)
            for it in sent[unit]
            if it.collective == collective and recorder.phases[it.phase][1].startswith("forward") == forward
        )

    units = []
    for _, phase in recorder.phases:
        kind, _, name = phase.partition(" ")
        if kind != "forward" or any(unit.name == name for unit in units):
            continue
        units.append(
            Unit(
                name,
                forward=kernels("forward", name),
                backward=kernels("backward", name) + tuple(map(_kernel, operators[f"reduce {name}"])),
                gather=messages(name, "all_gather", forward=True),
                gather_again=messages(name, "all_gather", forward=False),
                reduce=messages(name, "reduce_scatter", forward=False),
                all_reduce=messages(name, "all_reduce", forward=False),
            )
        )
    return Work(
        tuple(units), tuple(map(_kernel, operators["update"])), tuple(_message(it, gpus_per_node) for it in sent[""])
    )


def _first_of_each_name(recorder: Recorder) -> Iterator[int]:
    """Numbers of the phases of the first micro-batch, and of those that come once."""
    seen: Counter[str] = Counter()
    for number, (_, name) in enumerate(recorder.phases):
        if not seen[name]:
            yield number
        seen[name] += 1


def _kernel(operator: Operator) -> Kernel:
    moved = sum(size for _, size in (*operator.reads, *operator.writes))
    return Kernel(operator.kind, operator.flops, moved, operator.dtype)


def _fused(operators: Sequence[Operator], last_read: dict[int, int]) -> Iterator[Kernel]:
    """Products as they are; of what lies between two of them only what comes in and what is needed later."""
    run: list[Operator] = []
    for operator in operators:
        if operator.kind == "memory":
            run.append(operator)
            continue
        yield from _one_kernel(run, last_read)
        yield _kernel(operator)
        run = []
    yield from _one_kernel(run, last_read)


def _one_kernel(run: Sequence[Operator], last_read: dict[int, int]) -> Iterable[Kernel]:
    if not run:
        return
    written: dict[int, int] = {}
    comes_in: dict[int, int] = {}
    for operator in run:
        for number, size in operator.reads:
            if number not in written:
                comes_in[number] = max(size, comes_in.get(number, 0))
        written.update(dict(operator.writes))
    needed = sum(size for number, size in written.items() if last_read.get(number, 0) > run[-1].moment)
    yield Kernel("memory", 0, sum(comes_in.values()) + needed, run[0].dtype)


def _message(sent: Sent, gpus_per_node: int) -> Message:
    on_first_node = sum(rank < gpus_per_node for rank in sent.ranks)
    return Message(sent.collective, sent.bytes, Group(len(sent.ranks), on_first_node))
