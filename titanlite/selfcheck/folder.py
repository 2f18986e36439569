"""Checkpoint folder: each host writes as a save does, reads its own file and that of another host, and deletes it."""

import os
import time
import uuid
import zlib
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from titanlite.checkpoint.storage import Storage, open_storage
from titanlite.runtime.ranks import named_ranks
from titanlite.selfcheck.findings import Job, Result, describe, merge, on_each, size_text

BYTES = 2**26
WAIT = 20.0
"""Seconds in which a file of one host must be seen on the others: network file systems list folders with a delay."""
FILE = "data"


def check_folder(url: str, job: Job, *, size: int = BYTES, wait: float = WAIT) -> Result:
    """Write, sync, rename, list, read and delete in the checkpoint folder, on every host at the same time.

    Args:
        url: folder or URL of the checkpoints.
        size: bytes that each host writes.
        wait: longest time until a file is seen on other hosts.
    """
    token = on_each(lambda: uuid.uuid4().hex[:8])[0]
    made = on_each(lambda: _missing_folders(url))[job.ranks.rank]
    names = {leader: f"check-{token}-{leader}" for leader in job.leaders}
    try:
        storage = open_storage(url, owner=token)
        results = _test(storage, names, job, size=size, wait=wait)
    except (ImportError, ValueError) as error:  # of the URL, which all ranks share
        return Result(problems=[describe(error)])
    on_each(lambda: _delete(storage, names[job.ranks.rank], made) if job.leads_host else None)
    return results


def _test(storage: Storage, names: dict[int, str], job: Job, *, size: int, wait: float) -> Result:
    rank = job.ranks.rank
    data = os.urandom(min(size, 2**20)) * max(1, size // 2**20)
    written = on_each(lambda: _write(storage, names[rank], data) if job.leads_host else None)
    if any(isinstance(one, Exception) for one in written):
        return merge([one if isinstance(one, Exception) else Result() for one in written], job, value=storage.url)
    checksums = on_each(lambda: zlib.crc32(data))
    others = [leader for leader in job.leaders if leader > rank] + [leader for leader in job.leaders if leader < rank]

    def look() -> tuple[Result, float, float]:
        waited = _wait_until_seen(storage, [names[other] for other in others], wait)
        missing = [] if waited is not None else _missing(storage, names, others)
        if missing:
            return Result(problems=[_not_shared(storage, job, missing)]), 0.0, 0.0
        other = others[0] if others else rank
        began = time.perf_counter()
        for place in {rank, other}:
            if zlib.crc32(storage.read(f"{names[place]}/{FILE}")) != checksums[place]:
                where = storage.url_of(f"{names[place]}/{FILE}")
                return Result(problems=[f"{where} was read with other content than was written"]), 0.0, 0.0
        seconds = time.perf_counter() - began
        return Result(), len({rank, other}) * len(data) / max(seconds, 1e-9), waited or 0.0

    found = on_each(lambda: look() if job.leads_host else None)
    results = [one if isinstance(one, Exception) else one[0] if one else Result() for one in found]
    merged = merge(results, job, value=storage.url)
    if merged.problems:
        return merged
    write, read = (sum(rates) / 1e9 for rates in ([one for one in written if one], [one[1] for one in found if one]))
    seen = f", seen by the other hosts after {max(one[2] for one in found if one):.1f} s" if job.nodes > 1 else ""
    each = f"{size_text(len(data))} by each of {job.nodes} hosts: " if job.nodes > 1 else f"{size_text(len(data))}: "
    return Result(f"{storage.url}: {each}written at {write:.3g} GB/s, read at {read:.3g} GB/s{seen}")


def _write(storage: Storage, name: str, data: bytes) -> float:
    """Write a folder as a save does, and return the bytes a second."""
    began = time.perf_counter()
    staging = storage.begin(name)
    try:
        with storage.create(f"{staging}/{FILE}") as file:
            for start in range(0, len(data), 2**24):
                file.write(data[start : start + 2**24])
        storage.publish(name, b"{}")
    except BaseException:
        with suppress(OSError):
            storage.discard(name)
        raise
    return len(data) / (time.perf_counter() - began)


def _wait_until_seen(storage: Storage, names: Sequence[str], wait: float) -> float | None:
    """Return the seconds until the folders of other hosts were listed; None if they were not in time."""
    began = time.monotonic()
    while True:
        listing = storage.list()
        if all(FILE in listing.get(name, {}) for name in names):
            return time.monotonic() - began
        if time.monotonic() - began > wait:
            return None
        time.sleep(0.1)


def _missing(storage: Storage, names: dict[int, str], others: Sequence[int]) -> list[int]:
    listing = storage.list()
    return [other for other in others if FILE not in listing.get(names[other], {})]


def _not_shared(storage: Storage, job: Job, missing: Sequence[int]) -> str:
    writers = named_ranks(sorted(missing), job.hosts)
    return (
        f"{storage.url} does not show what {writers} wrote there: it is not shared. Name a folder on a shared file "
        "system, or a URL, in checkpoint.folder"
    )


def _missing_folders(url: str) -> list[Path]:
    """Return the folders that a write would make, the deepest first."""
    if "://" in url:
        return []
    path = Path(url).expanduser().absolute()
    return [place for place in (path, *path.parents) if not place.exists()]


def _delete(storage: Storage, name: str, made: Sequence[Path]) -> None:
    """Delete a folder of the test, and the folders above it that were made for it and are empty."""
    with suppress(OSError):
        storage.delete(name)
    with suppress(OSError):  # another host's files are there still, or a run has begun
        for place in made:
            place.rmdir()
