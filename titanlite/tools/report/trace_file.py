"""Traces of torch.profiler, as `[profiling]` writes them: Chrome's trace format, in JSON, compressed."""

import gzip
import json
import math
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from titanlite.runtime.errors import UserError

STEP = re.compile(r"step (\d+)")
DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
"""Categories of work on a GPU."""


class Event(NamedTuple):
    """One event of a trace: an operator, a range of the host, or work of a GPU. Times are in seconds."""

    name: str
    category: str
    begin: float
    end: float
    thread: tuple[str, str]
    """(process, thread); on a GPU (device, stream)."""
    operator: int | None
    """Identity of the operator; the work of a GPU has that of the operator that launched it."""
    collective: str
    """Name of the collective that a kernel belongs to, where PyTorch wrote it."""


@dataclass(frozen=True)
class Trace:
    """Trace of a window on one rank."""

    path: Path
    events: list[Event]
    """Sorted by begin; outer events before inner ones."""
    rank: int
    world_size: int
    device: str
    """Name of the GPU; cpu without one."""
    devices: int
    """GPUs of the machine; 0 without any."""

    @property
    def steps(self) -> list[Event]:
        """Ranges of the steps."""
        return [event for event in self.events if event.category == "user_annotation" and STEP.fullmatch(event.name)]

    @property
    def is_of_gpu(self) -> bool:
        return any(event.category == "kernel" for event in self.events)


def read_trace(path: Path) -> Trace:
    """Read a trace.

    Raises:
        UserError: the file cannot be read, is damaged, or has no steps of titanlite.
    """
    try:
        with gzip.open(path, "rt", encoding="utf-8", errors="replace") as file:
            tree = json.load(file, strict=False)
        about, properties = tree.get("titanlite", {}), tree.get("deviceProperties", [])
        trace = Trace(
            path,
            sorted(_events(tree["traceEvents"]), key=lambda event: (event.begin, -event.end)),
            rank=int(about.get("rank", 0)),
            world_size=int(about.get("world_size", 1)),
            device=str(properties[0]["name"]) if properties else "cpu",
            devices=len(properties),
        )
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from None
    except (EOFError, zlib.error, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise UserError(f"{path} is damaged: it is not a trace of torch.profiler ({_short(error)})") from None
    if not trace.steps:
        raise UserError(f"{path} has no ranges of steps: it is not a trace of titanlite")
    return trace


def _events(raw: list[dict[str, Any]]) -> Iterator[Event]:
    for event in raw:
        if event.get("ph") != "X" or event.get("cat") == "Trace":
            continue
        begin, duration, arguments = float(event["ts"]) / 1e6, float(event["dur"]) / 1e6, event.get("args") or {}
        if not (math.isfinite(begin) and duration >= 0):
            raise ValueError(f"event {event['name']!r} lasts from {begin} for {duration}")
        yield Event(
            str(event["name"]),
            str(event.get("cat", "")),
            begin,
            begin + duration,
            (str(event["pid"]), str(event["tid"])),
            arguments.get("External id"),
            str(arguments.get("Collective name", "")),
        )


def _short(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0][:120]
