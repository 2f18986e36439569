"""The `titanlite profile` command: how much of the time of collectives is hidden, and when nothing runs.

It reads a trace that `[profiling]` wrote. On a GPU its kernels count: those of NCCL are collectives, all others and
copies are compute. Without a GPU the operators of the host are compute, and gloo's threads run the collectives. A
collective is hidden while compute runs beside it. Operators are in torch.profiler's table, which stands beside the
trace.
"""

import gzip
import json
import math
import re
import zlib
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titanlite.checkpoint.manifest import step_of
from titanlite.runtime.errors import UserError
from titanlite.techniques.profiling.profiler import PROFILE

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
"""Operators of the host that launch or wait, which are no compute."""
STEP = re.compile(r"step (\d+)")
DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
"""Categories of work on a GPU."""
Interval = tuple[float, float]
"""Begin and end, in seconds."""


@dataclass(frozen=True)
class Collective:
    """All collectives of one name in a window, in seconds."""

    calls: int
    total: float
    hidden: float
    """Time in which compute runs beside them."""


@dataclass(frozen=True)
class Profile:
    """Times of a window on one rank in seconds. total = compute + exposed + idle."""

    rank: int
    world_size: int
    device: str
    """Name of the GPU; cpu without one."""
    first: int
    last: int
    total: float
    compute: float
    communication: float
    """Time in which collectives run, hidden or not."""
    exposed: float
    """Time in which collectives run and compute does not."""
    idle: float
    """Time in which the device does nothing; without a GPU, in which the host runs no operator and no collective."""
    collectives: dict[str, Collective]

    @property
    def steps(self) -> int:
        return self.last - self.first + 1


def profile(path: Path) -> None:
    """Print where the time of a profiled step went.

    Read a trace that training with --profiling.enable_profiling wrote: compute, collectives and how much of them is
    hidden, idle time, operators. docs/see_the_run.md explains each line.

    Args:
        path (RUN_OR_TRACE): folder of the run, for rank 0 in its newest window; or a trace in its folder profile

    Raises:
        UserError: there is no such profile, or its trace is damaged.

    Example:
        outputs/debug
        outputs/llama3_8b/profile/step-00000200/rank-7.json.gz
    """
    trace = find_trace(path)
    print("\n".join(profile_lines(trace, read_profile(trace))))
    operators = trace.with_name(trace.name.removesuffix(".json.gz") + ".txt")
    if operators.is_file():
        print(f"\noperators: {operators}\n{operators.read_text(encoding='utf-8', errors='replace')}", end="")


def find_trace(path: Path) -> Path:
    """Return the path of a trace: the newest one of rank 0 in the folder of a run, or the named file.

    Raises:
        UserError: there is none.
    """
    if path.is_file():
        return path
    if not path.is_dir():
        raise UserError(f"no folder {path}: name the folder of a run, for example outputs/debug")
    steps = {step_of(trace.parent.name): trace for trace in path.glob(f"{PROFILE}/step-*/rank-0.json.gz")}
    known = [step for step in steps if step is not None]
    if not known:
        raise UserError(
            f"{path} has no profile of rank 0: train with --profiling.enable_profiling, or name a trace "
            "(docs/see_the_run.md)"
        )
    return steps[max(known)]


def read_profile(path: Path) -> Profile:
    """Return where the time of a trace's steps went.

    Raises:
        UserError: the file cannot be read, is damaged, or has no steps of titanlite.
    """
    try:
        with gzip.open(path, "rt", encoding="utf-8", errors="replace") as file:
            tree = json.load(file, strict=False)
        about, properties = tree.get("titanlite", {}), tree.get("deviceProperties", [])
        return _analyse(
            path,
            [event for event in tree["traceEvents"] if event.get("ph") == "X" and event.get("cat") != "Trace"],
            rank=int(about.get("rank", 0)),
            world_size=int(about.get("world_size", 1)),
            device=str(properties[0]["name"]) if properties else "cpu",
        )
    except UserError:
        raise
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from None
    except (EOFError, zlib.error, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        short = f"{type(error).__name__}: {error}".partition("\n")[0][:120]
        raise UserError(f"{path} is damaged: it is not a trace of torch.profiler ({short})") from None


def _analyse(path: Path, events: list[dict[str, Any]], *, rank: int, world_size: int, device: str) -> Profile:
    times = [_time(event) for event in events]
    of_device = [event for event in events if event.get("cat") in DEVICE]
    steps = [event for event in events if event.get("cat") == "user_annotation" and STEP.fullmatch(event["name"])]
    if not steps:
        raise UserError(f"{path} has no ranges of steps: it is not a trace of titanlite")
    numbers = [int(event["name"].removeprefix("step ")) for event in steps]
    begin = min(_time(event)[0] for event in steps)
    end = max(_time(event)[1] for event in (*steps, *of_device))
    of_gloo = {event["tid"] for event in events if event["name"].startswith("gloo:")}
    compute: list[Interval] = []
    collectives: dict[str, list[Interval]] = defaultdict(list)
    for event, (first, last) in zip(events, times, strict=True):
        interval = max(first, begin), min(last, end)
        if name := _collective_of(event):
            collectives[name].append(interval)
        elif event.get("cat") in DEVICE if of_device else _is_compute(event, of_gloo):
            compute.append(interval)
    communication = [interval for intervals in collectives.values() for interval in intervals]
    computed, active = covered(compute), covered(compute + communication)
    found = {
        name: Collective(len(of), covered(of), covered(of) + computed - covered(of + compute))
        for name, of in sorted(collectives.items(), key=lambda item: -covered(item[1]))
    }
    return Profile(
        rank=rank,
        world_size=world_size,
        device=device,
        first=min(numbers),
        last=max(numbers),
        total=end - begin,
        compute=computed,
        communication=covered(communication),
        exposed=active - computed,
        idle=end - begin - active,
        collectives=found,
    )


def covered(intervals: list[Interval]) -> float:
    """Return the time in which at least one interval lasts."""
    total, until = 0.0, -math.inf
    for begin, end in sorted(intervals):
        total += max(0.0, end - max(begin, until))
        until = max(until, end)
    return total


def _time(event: dict[str, Any]) -> Interval:
    begin, duration = float(event["ts"]) / 1e6, float(event["dur"]) / 1e6
    if not (math.isfinite(begin) and duration >= 0):
        raise ValueError(f"event {event['name']!r} lasts from {begin} for {duration}")
    return begin, begin + duration


def _is_compute(event: dict[str, Any], of_gloo: set[int]) -> bool:
    """Return whether an operator of the host is none of gloo's threads, and does not wait."""
    return event.get("cat") == "cpu_op" and event["tid"] not in of_gloo and not WAITS.search(event["name"])


def _collective_of(event: dict[str, Any]) -> str:
    """Return the name of the collective that an event is the work of; "" for other events."""
    is_kernel = event.get("cat") == "kernel" and re.search("nccl|rccl", event["name"], re.IGNORECASE)
    if not is_kernel and not event["name"].startswith("gloo:"):
        return ""
    text = f"{(event.get('args') or {}).get('Collective name', '')} {event['name']}"
    return next((name for name, pattern in COLLECTIVES if re.search(pattern, text, re.IGNORECASE)), "other")


def profile_lines(path: Path, found: Profile) -> Iterator[str]:
    """Yield the lines of a summary, in times of one step."""
    window = f"step {found.last}" if found.steps == 1 else f"steps {found.first} to {found.last}"
    yield f"{window}, rank {found.rank} of {found.world_size} on {found.device}: {path}"
    yield ""
    yield "a step"
    rows = [
        ("time", found.total),
        ("compute", found.compute),
        ("collectives", found.communication),
        ("  not hidden", found.exposed),
        ("idle", found.idle),
    ]
    for name, seconds in rows:
        yield f"  {name:22}{_ms(seconds / found.steps)}"
    if found.communication:
        yield f"  {'collectives hidden':22}{1 - found.exposed / found.communication:10.1%}"
        yield ""
        yield f"{'collectives of a step':24}{'calls':>8}{'time':>11}{'hidden':>9}{'not hidden':>12}"
    for name, it in found.collectives.items():
        share = it.hidden / it.total if it.total else 0.0
        exposed = _ms((it.total - it.hidden) / found.steps)
        yield f"  {name:22}{it.calls / found.steps:8.0f}{_ms(it.total / found.steps)}{share:9.1%}{exposed:>12}"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:7.2f} ms"
