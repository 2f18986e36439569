"""Free disk, files and host memory of each host against the needs of the run."""

import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from titanlite.runtime.hardware import host_memory
from titanlite.selfcheck.findings import Job, Result, merge, on_each, size_text
from titanlite.selfcheck.needs import Need

SPARE = 1.2
"""Free space in terms of the need below which there is a warning."""


class Free(NamedTuple):
    """Free space of a file system."""

    device: int
    """Number that tells file systems of a host apart."""
    bytes: int
    files: int | None
    """None where the file system has no limit."""


def free_at(place: str) -> Free:
    """Return the free space of the file system that a path is on, or would be on."""
    path = Path(place).expanduser().absolute()
    there = next(one for one in (path, *path.parents) if one.exists())
    counts = os.statvfs(there)
    return Free(os.stat(there).st_dev, shutil.disk_usage(there).free, counts.f_favail if counts.f_files else None)


def check_disk(needs: Callable[[], Sequence[Need]], job: Job, free: Callable[[str], Free] = free_at) -> Result:
    """Compare the free space of each host's file systems with what the run writes there.

    Args:
        needs: returns the needs of this host.
        free: returns the free space at a path.
    """
    found = on_each(lambda: _room(needs(), free) if job.leads_host else Result())
    return merge(found, job)


def _room(needs: Sequence[Need], free: Callable[[str], Free]) -> Result:
    places = [(free(need.place), need) for need in needs]
    values, problems, warnings = [], [], []
    for device in dict.fromkeys(at.device for at, _ in places):
        at = next(at for at, _ in places if at.device == device)
        here = [need for other, need in places if other.device == device]
        total, files = sum(need.bytes for need in here), sum(need.files for need in here)
        certain = sum(need.bytes for need in here if not need.is_estimate)
        what = ", ".join(f"{need.what} in {need.place}" for need in here)
        line = f"the run writes {size_text(total)} and {size_text(at.bytes)} are free ({what})"
        values.append(f"{size_text(total)} of {size_text(at.bytes)} free at {here[0].place}")
        if certain > at.bytes:
            problems.append(f"{line}: free the disk, or lower checkpoint.keep_latest_k")
        elif total * SPARE > at.bytes:
            warnings.append(line)
        if at.files is not None and files > at.files:
            problems.append(f"{files:,} files of {here[0].what}, and the file system takes {at.files:,} more (inodes)")
    return Result("; ".join(values) or "nothing is written to a disk", problems, warnings)


def check_memory(
    needed: Callable[[], tuple[float, float]], job: Job, available: Callable[[], int] | None = None
) -> Result:
    """Compare the available memory of each host with what the run takes of it.

    Args:
        needed: returns the bytes of (training's state, the copy of it for background saves).
        available: returns the bytes that a host has left.
    """

    def compare() -> Result:
        state, staging = needed()
        total, left = state + staging, (available or available_memory)()
        value = f"{size_text(total)} of {size_text(left)} available"
        parts = f"{size_text(total)} of memory ({size_text(staging)} of it for background saves)"
        line = f"needs {parts}, and has {size_text(left)}"
        if total > left:
            remedy = 'set checkpoint.async_mode = "disabled", or end' if staging else "end"
            return Result(value, [f"{line}: {remedy} other programs"])
        return Result(value, warnings=[line] if total * SPARE > left else [])

    return merge(on_each(lambda: compare() if job.leads_host else Result()), job)


def available_memory() -> int:
    """Return the bytes that programs may still take of the host's memory, or of its container's."""
    lines = Path("/proc/meminfo").read_text().splitlines() if Path("/proc/meminfo").is_file() else []
    found = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    return min([*found, host_memory()])
