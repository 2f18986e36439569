"""Time of a window by its use: compute, collectives and how much of them is hidden, idle gaps, operators.

On a GPU, its kernels count: those of NCCL are collectives, all others are compute. Without a GPU, the operators of the
host are compute, and gloo's threads run the collectives. A collective is hidden while compute runs beside it.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from titanlite.tools.report.intervals import Interval, gaps, intersection, length, union
from titanlite.tools.report.trace_file import DEVICE, STEP, Event, Trace

COLLECTIVES = (
    ("all-gather", r"all_?gather"),
    ("reduce-scatter", r"reduce_?scatter|gloo:all_?to_?all"),  # FSDP's over gloo, see ops/cpu_collectives.py
    ("all-reduce", r"all_?reduce"),
    ("all-to-all", r"all_?to_?all"),
    ("broadcast", r"broadcast"),
    ("send and receive", r"send|recv"),
    ("barrier", r"barrier"),
)
"""Names of collectives, by what the names of kernels and of gloo's work contain."""
WAITS = re.compile(r"c10d::|record_param_comms|autograd::engine::|RegisterPostBackward|gloo:")
"""Operators of the host that launch or wait: their own time is no compute."""
LONGEST_GAPS = 5


@dataclass(frozen=True)
class Operator:
    """All calls of an operator in the window. Times are in seconds, without those of the operators that it calls."""

    name: str
    calls: int
    host: float
    device: float


@dataclass(frozen=True)
class Collective:
    """All collectives of one name in the window, in seconds."""

    name: str
    calls: int
    total: float
    hidden: float
    """Time in which compute runs beside them."""


@dataclass(frozen=True)
class Gap:
    """Time in which the device does nothing; without a GPU, in which the host runs no operator and no collective."""

    step: int
    since: float
    """Seconds from the begin of the step."""
    seconds: float
    phase: str
    """Phase of the host when the gap begins."""
    before: str
    """Work that ends when the gap begins."""
    after: str
    """Work that begins when the gap ends."""


@dataclass(frozen=True)
class Analysis:
    """Times of a window in seconds. total = compute + exposed + transfers + idle."""

    first: int
    last: int
    total: float
    compute: float
    communication: float
    """Time in which collectives run, hidden or not."""
    exposed: float
    """Time in which collectives run and compute does not."""
    transfers: float
    """Time in which the device copies or fills memory, and does nothing else."""
    idle: float
    phases: dict[str, float]
    """Time of the host by phase, in the order of their begin."""
    collectives: list[Collective]
    operators: list[Operator]
    """Sorted by their own time on the device, or on the host without one."""
    gaps: list[Gap]
    """The longest."""

    @property
    def steps(self) -> int:
        return self.last - self.first + 1

    @property
    def hidden_share(self) -> float | None:
        """Share of the time of collectives that is hidden; None without collectives."""
        return 1 - self.exposed / self.communication if self.communication else None


def analyse(trace: Trace) -> Analysis:
    """Return where the time of a trace's steps went."""
    steps = trace.steps
    work = [event for event in trace.events if event.category in DEVICE]
    begin, end = steps[0].begin, max(event.end for event in (*steps, *work))
    by_collective: dict[str, list[Interval]] = defaultdict(list)
    for event in trace.events:
        if name := collective_name(event):
            by_collective[name].append((max(begin, event.begin), min(end, event.end)))
    own = [*own_segments(event for event in trace.events if event.category == "cpu_op")]
    compute = union(_kernels(work) if trace.is_of_gpu else _host_compute(trace, own))
    compute = intersection(compute, [(begin, end)])
    communication = union(interval for intervals in by_collective.values() for interval in intervals)
    busy = union((*compute, *communication))
    everything = intersection(union((*busy, *((event.begin, event.end) for event in work))), [(begin, end)])
    idle = gaps(everything, begin, end)
    numbers = [int(STEP.fullmatch(step.name)[1]) for step in steps]  # pyright: ignore[reportOptionalSubscript]
    return Analysis(
        first=min(numbers),
        last=max(numbers),
        total=end - begin,
        compute=length(compute),
        communication=length(communication),
        exposed=length(communication) - length(intersection(communication, compute)),
        transfers=length(everything) - length(busy),
        idle=length(idle),
        phases=_phases(trace),
        collectives=[
            Collective(name, len(intervals), length(union(intervals)), length(intersection(union(intervals), compute)))
            for name, intervals in sorted(by_collective.items(), key=lambda item: -length(union(item[1])))
        ],
        operators=_operators(trace, own),
        gaps=_longest(trace, idle, work if trace.is_of_gpu else [event for event, _ in own]),
    )


def collective_name(event: Event) -> str:
    """Return the name of the collective that an event is the work of; "" for other events."""
    is_kernel = event.category == "kernel" and re.search("nccl|rccl", event.name, re.IGNORECASE)
    if not is_kernel and not event.name.startswith("gloo:"):
        return ""
    text = f"{event.collective} {event.name}"
    return next((name for name, pattern in COLLECTIVES if re.search(pattern, text, re.IGNORECASE)), "other")


def own_segments(events: Iterable[Event]) -> Iterator[tuple[Event, Interval]]:
    """Yield the times of each event without those of the events inside it, on its thread.

    Args:
        events: in order of begin; outer events before inner ones.
    """
    by_thread: dict[tuple[str, str], list[Event]] = defaultdict(list)
    for event in events:
        by_thread[event.thread].append(event)
    for of_thread in by_thread.values():
        open_events: list[Event] = []
        now = 0.0
        for event in of_thread:
            while open_events and open_events[-1].end <= event.begin:
                ended = open_events.pop()
                yield ended, (now, max(now, ended.end))
                now = max(now, ended.end)
            if open_events:
                yield open_events[-1], (now, max(now, event.begin))
            open_events.append(event)
            now = max(now, event.begin)
        while open_events:
            ended = open_events.pop()
            yield ended, (now, max(now, ended.end))
            now = max(now, ended.end)


def _kernels(work: Iterable[Event]) -> Iterator[Interval]:
    for event in work:
        if event.category == "kernel" and not collective_name(event):
            yield event.begin, event.end


def _host_compute(trace: Trace, own: Iterable[tuple[Event, Interval]]) -> Iterator[Interval]:
    """Yield the own times of the host's operators, without those that wait and those of gloo's threads."""
    of_gloo = {event.thread for event in trace.events if collective_name(event)}
    for event, segment in own:
        if event.thread not in of_gloo and not WAITS.search(event.name):
            yield segment


def _operators(trace: Trace, own: Iterable[tuple[Event, Interval]]) -> list[Operator]:
    names = {event.operator: event.name for event in trace.events if event.category == "cpu_op"}
    calls: dict[str, int] = defaultdict(int)
    host: dict[str, float] = defaultdict(float)
    device: dict[str, float] = defaultdict(float)
    for name in (event.name for event in trace.events if event.category == "cpu_op"):
        calls[name] += 1
    for event, (begin, end) in own:
        host[event.name] += end - begin
    for event in trace.events:
        if event.category in DEVICE:
            launched_by = names.get(event.operator) if event.operator is not None else None
            device[launched_by or event.name] += event.end - event.begin
            calls[event.name] += launched_by is None
    found = [Operator(name, calls[name], host[name], device[name]) for name in {*host, *device}]
    return sorted(found, key=lambda it: (-it.device, -it.host, it.name))


def _phases(trace: Trace) -> dict[str, float]:
    """Return the host's time by phase: the ranges directly inside those of the steps."""
    thread = trace.steps[0].thread
    ends: list[float] = []
    found: dict[str, float] = {}
    for event in trace.events:
        if event.thread != thread or event.category != "user_annotation":
            continue
        while ends and ends[-1] <= event.begin:
            ends.pop()
        if len(ends) == 1:
            found[event.name] = found.get(event.name, 0.0) + event.end - event.begin
        if ends or STEP.fullmatch(event.name):
            ends.append(event.end)
    return found


def _longest(trace: Trace, idle: Iterable[Interval], work: list[Event]) -> list[Gap]:
    found = []
    for begin, end in sorted(idle, key=lambda gap: gap[0] - gap[1])[:LONGEST_GAPS]:
        step = next(it for it in reversed(trace.steps) if it.begin <= begin)
        phases = _phases_at(trace, step, begin)
        before = max((event for event in work if event.end <= begin), key=lambda event: event.end, default=None)
        after = next((event for event in work if event.begin >= end), None)
        found.append(
            Gap(
                step=int(step.name.removeprefix("step ")),
                since=begin - step.begin,
                seconds=end - begin,
                phase=phases[0] if phases else "",
                before=before.name if before else "",
                after=after.name if after else "",
            )
        )
    return found


def _phases_at(trace: Trace, step: Event, time: float) -> list[str]:
    """Return the host's ranges within a step that are open at a time, the outer one first."""
    return [
        event.name
        for event in trace.events
        if event.category == "user_annotation" and event.thread == step.thread and event is not step
        and step.begin <= event.begin <= time < event.end
    ]  # fmt: skip
