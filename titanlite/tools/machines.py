"""`titanlite check --machines`: tests of all processes of a job, before it is paid for. One line of a table each.

All ranks make each test together, and every rank knows the result of all. A test must not communicate while a rank may
fail alone: what may fail runs in `on_each`.
"""

import hashlib
import json
import math
import os
import platform
import shutil
import statistics
import time
import uuid
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist

from titanlite.checkpoint import manifest as manifests
from titanlite.checks.memory import weight_bytes
from titanlite.checks.preflight import ResolvedConfig
from titanlite.models.base import Model, unique_parameters
from titanlite.optim.state_size import state_bytes
from titanlite.run.versions import Facts, compare, facts_of
from titanlite.runtime.dtypes import DTYPES
from titanlite.runtime.errors import UserError
from titanlite.runtime.process_group import Ranks, process_group
from titanlite.runtime.ranks import host_names, named_ranks
from titanlite.schema import Checkpoint, Config
from titanlite.storage.storage import Storage, open_storage
from titanlite.techniques import choose_trained
from titanlite.tools.plan.calibrate import COLLECTIVES, Call, bandwidth_at

TIMEOUT = 120
"""Seconds that a rank waits for the others in one test."""
CPU_SIZES, GPU_SIZES = (2**16, 2**20, 2**24), (2**20, 2**24, 2**28)
"""Bytes of a collective."""
LONGEST = 1.0
"""Seconds of a collective after which larger sizes are left out: a slow network would take minutes."""
SLOW = 0.5
"""Share of the median bandwidth below which a host is slow."""
ROUNDS, MOST_APART = 5, 1.0
"""Round trips that compare two clocks, and seconds of difference above which there is a warning."""
BYTES, FILE = 2**26, "data"
"""Size and name of the file that each host writes into the checkpoint folder."""
WAIT = 20.0
"""Seconds in which a file of one host must be seen on the others: network file systems list folders with a delay."""
SPARE = 1.2
"""Free space in terms of the need below which there is a warning."""


@dataclass(frozen=True)
class Result:
    """Result of a test on one rank, or of all ranks together."""

    value: str = ""
    """Measured value, for the table."""
    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    @property
    def status(self) -> Literal["ok", "warning", "FAILED"]:
        return "FAILED" if self.problems else "warning" if self.warnings else "ok"


@dataclass(frozen=True)
class Job:
    """All ranks of the job, and this one."""

    ranks: Ranks
    hosts: list[str]
    """Name of the host of each rank."""

    @property
    def nodes(self) -> int:
        return self.ranks.world_size // self.ranks.local_world_size

    @property
    def leads_host(self) -> bool:
        """Return whether this rank is the one of its host that tests what the host's ranks share."""
        return self.ranks.local_rank == 0

    @property
    def leaders(self) -> list[int]:
        """Return the first rank of each host."""
        return [*range(0, self.ranks.world_size, self.ranks.local_world_size)]


Tests = Iterator[tuple[str, Callable[[], Result]]]


# The command


def main(config: Config, resolved: ResolvedConfig, ranks: Ranks, device: torch.device) -> None:
    """Run all tests on all ranks, and print the table on rank 0.

    Raises:
        UserError: a test failed. The error has no text, because the table has it.
    """
    with warnings.catch_warnings(), process_group(ranks, device, timeout_seconds=TIMEOUT):
        warnings.simplefilter("ignore", FutureWarning)  # of names of collectives that PyTorch 2.13 replaces
        job = open_job(ranks)
        began = time.perf_counter()
        failed = run(machine_tests(config, resolved, job, device), print if ranks.rank == 0 else lambda line: None)
        if ranks.rank == 0:
            took = timedelta(seconds=round(time.perf_counter() - began))
            end = f"{len(failed)} FAILED: {', '.join(failed)}" if failed else "no test failed"
            print(f"{end} (processes: {ranks.world_size}, hosts: {job.nodes}, time: {took})", flush=True)
    if failed:
        raise UserError("")


def run(all_tests: Tests, report: Callable[[str], object]) -> list[str]:
    """Run tests, report their lines, and return the names of those that failed.

    Raises:
        UserError: a test ended with an error on this rank, such as a collective that a rank never joined.
    """
    failed = []
    for name, test in all_tests:
        try:
            result = test()
        except Exception as error:
            where = f"rank {os.environ.get('RANK', 0)} on {platform.node()}"
            raise UserError(f"{name}: {where}: {type(error).__name__}: {describe(error)}") from error
        report(f"{result.status:<8} {name:<18} {result.value}".rstrip())
        for line in [*result.problems, *result.warnings]:
            report(f"           {line}")
        failed += [name] if result.status == "FAILED" else []
    return failed


def machine_tests(config: Config, resolved: ResolvedConfig, job: Job, device: torch.device) -> Tests:
    """Return the tests by name, in their order. All ranks run each together."""
    model = resolved.model.build()
    choose_trained(model, config)
    url = config.checkpoint.folder or f"{config.job.dump_folder}/{config.job.name}/checkpoints"

    yield "versions, config", partial(check_software, facts_of(config.model_dump(mode="json"), device, os.environ))
    if job.ranks.world_size > 1:
        yield "collectives", partial(check_values, device, job)
        yield "bandwidths", partial(check_bandwidths, device, job)
    yield "clocks", partial(check_clocks, job)
    if config.checkpoint.enable:
        yield "checkpoint folder", partial(check_folder, url, job)
    yield "disk", partial(check_disk, lambda: disk_needs(config, model), job)


def open_job(ranks: Ranks) -> Job:
    """Exchange host names. All ranks call this together.

    Raises:
        UserError: the hosts have different numbers of processes.
    """
    found = gather((platform.node(), ranks.local_world_size))
    if len({processes for _, processes in found}) > 1:
        counts = ", ".join(sorted({f"{host} {processes}" for host, processes in found}))
        raise UserError(f"the hosts have different numbers of processes ({counts}): start the same on each")
    world = dist.group.WORLD
    assert world is not None
    return Job(ranks, host_names(world))


# Results of all ranks


def gather(value: Any) -> list[Any]:
    """Return the values of all ranks."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def on_each(act: Callable[[], Any]) -> list[Any]:
    """Call a function on each rank, and return the results of all ranks. An exception is a result, too."""
    try:
        value = act()
    except Exception as error:  # any test may fail in any way, and the others are still of use
        value = error if isinstance(error, UserError | OSError) else RuntimeError(f"{type(error).__name__}: {error}")
    return gather(value)


def merge(results: Sequence[Result | Exception], job: Job, *, value: str | None = None) -> Result:
    """Return one result of those of all ranks. A line that several ranks have in common comes once, with their names.

    Args:
        results: by rank.
        value: measured value of all ranks; default: that of the lowest rank that has one.
    """
    mine = [Result(problems=[describe(one)]) if isinstance(one, Exception) else one for one in results]

    def by_line(of_ranks: Sequence[list[str]]) -> list[str]:
        holders: dict[str, list[int]] = {}
        for rank, lines in enumerate(of_ranks):
            for line in lines:
                holders.setdefault(line, []).append(rank)
        return [f"{named_ranks(ranks, job.hosts)}: {line}" for line, ranks in holders.items()]

    first = next((one.value for one in mine if one.value), "") if value is None else value
    return Result(first, by_line([one.problems for one in mine]), by_line([one.warnings for one in mine]))


def describe(error: Exception) -> str:
    """Return an exception as one line."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return " ".join(str(error).split()) or type(error).__name__


def size_text(count: float) -> str:
    """Return a number of bytes with a unit."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:,.4g} TiB"


# Versions, collectives, clocks


def check_software(facts: Facts) -> Result:
    """Compare versions, config and environment of all ranks."""
    versions = ", ".join(f"{name} {version}" for name, version in facts.versions.items())
    digest = hashlib.sha256(json.dumps(facts.config, sort_keys=True).encode()).hexdigest()[:12]
    return Result(f"{versions}; config {digest}", *(compare(facts) or ([], [])))


def check_values(device: torch.device, job: Job, calls: Mapping[str, Call] = COLLECTIVES) -> Result:
    """Compare the result of each collective with its exact value, at several sizes.

    Args:
        calls: collectives, by name.
    """
    sizes = CPU_SIZES if device.type == "cpu" else GPU_SIZES[:2]
    wrong = []
    for size in sizes:
        for name, call in calls.items():
            wrong += _wrong_values(name, call, max(1, size // 4 // job.ranks.world_size), device, job)
    value = f"{', '.join(calls)} right at {', '.join(f'{size:,}' for size in sizes)} bytes"
    return merge(gather(Result(problems=wrong)), job, value="wrong values" if any(gather(bool(wrong))) else value)


def _wrong_values(name: str, call: Call, length: int, device: torch.device, job: Job) -> list[str]:
    """Return a line if a collective over `length` float32 values a rank is wrong on this rank.

    Values are small integers, so that sums are exact in any order.
    """
    world, rank = job.ranks.world_size, job.ranks.rank
    factors = [other % 8 + 1 for other in range(world)]
    pattern = torch.arange(length * world).remainder_(16).add_(1).float()
    whole = (pattern * factors[rank]).to(device)
    part = (pattern[rank * length : (rank + 1) * length] * factors[rank]).to(device)
    expected = pattern * sum(factors)
    if name == "all_gather":
        expected = pattern * torch.tensor(factors).repeat_interleave(length)
        whole.zero_()
    call(whole, part, _world())
    found = part if name == "reduce_scatter" else whole
    expected = expected[rank * length : (rank + 1) * length] if name == "reduce_scatter" else expected
    found = found.cpu()  # the device may be at fault, and compare wrongly
    places = (found != expected).nonzero().flatten()
    if not len(places):
        return []
    first = int(places[0])
    return [
        f"{name} of {whole.nbytes:,} bytes gives wrong values: {len(places):,} of {len(found):,}, the first "
        f"{found[first]:g} instead of {expected[first]:g}: a faulty link, device or driver"
    ]


def _world() -> dist.ProcessGroup:
    world = dist.group.WORLD
    assert world is not None
    return world


def check_bandwidths(device: torch.device, job: Job) -> Result:
    """Measure the bandwidth of each collective over all ranks, and, of several hosts, within each host.

    A slow link slows all of the ranks that it connects: a slow host is one whose own ranks are slower than others'.
    """
    value = f"over all {_rates(gather(_measure(_world(), device)))}"
    if job.nodes == 1 or job.ranks.local_world_size == 1:
        return Result(value)
    within = job.ranks.local_world_size
    groups = [dist.new_group(range(first, first + within)) for first in job.leaders]
    mine = groups[job.ranks.rank // within]
    assert isinstance(mine, dist.ProcessGroup)
    found = gather(_measure(mine, device))
    hosts = {job.hosts[first]: found[first]["all_reduce"] for first in job.leaders}
    rates = {host: by_size[max(by_size)] for host, by_size in hosts.items()}
    usual = statistics.median(rates.values())
    slow = [
        f"{host}: {rate / 1e9:.3g} GB/s in all_reduce within the host, the median is {usual / 1e9:.3g}"
        for host, rate in rates.items()
        if rate < SLOW * usual
    ]
    return Result(f"{value}; in a host {_rates(found)}", warnings=slow)


def _measure(group: dist.ProcessGroup, device: torch.device) -> dict[str, dict[int, float]]:
    """Return {collective: {bytes: bytes a second}} of a group. All groups of the job measure at the same time."""
    found: dict[str, dict[int, float]] = {name: {} for name in COLLECTIVES}
    for size in CPU_SIZES if device.type == "cpu" else GPU_SIZES:
        began = time.perf_counter()
        for name, rates in found.items():
            rates[size] = bandwidth_at(name, group, device, size, calls=3)
        if max(gather(time.perf_counter() - began)) > LONGEST * len(COLLECTIVES) * 4:
            break
    return found


def _rates(of_ranks: Sequence[dict[str, dict[int, float]]]) -> str:
    """Return the medians over the ranks."""
    sizes = [*of_ranks[0]["all_reduce"]]
    parts = []
    for name in COLLECTIVES:
        medians = [statistics.median(of_rank[name][size] for of_rank in of_ranks) for size in sizes]
        parts.append(f"{name} {'/'.join(f'{rate / 1e9:.3g}' for rate in medians)}")
    return f"{', '.join(parts)} GB/s at {'/'.join(f'{size / 2**20:g}' for size in sizes)} MiB"


def check_clocks(job: Job, clock: Callable[[], float] = time.time) -> Result:
    """Compare the clock of each host with that of rank 0. Times in logs and ages of files depend on it.

    Args:
        clock: returns the time of this host in seconds.
    """
    mine: dict[int, tuple[float, float]] = {}
    for leader in job.leaders[1:]:
        if job.ranks.rank == 0:
            mine[leader] = _difference(leader, clock)
        elif job.ranks.rank == leader:
            for _ in range(ROUNDS):
                dist.recv(torch.zeros(1, dtype=torch.float64), 0)
                dist.send(torch.full((1,), clock(), dtype=torch.float64), 0)
    found: dict[int, tuple[float, float]] = gather(mine)[0]
    if not found:
        return Result("one host: nothing to compare")
    farthest, (ahead, error) = max(found.items(), key=lambda item: abs(item[1][0]))
    apart = [
        f"{job.hosts[leader]} is {abs(seconds):.3g} s {'ahead of' if seconds > 0 else 'behind'} {job.hosts[0]}: set "
        "their clocks with NTP (chrony, systemd-timesyncd)"
        for leader, (seconds, _) in found.items()
        if abs(seconds) > MOST_APART
    ]
    return Result(f"at most {abs(ahead):.2g} s apart ({job.hosts[farthest]}, +- {error:.1g} s)", warnings=apart)


def _difference(leader: int, clock: Callable[[], float]) -> tuple[float, float]:
    """Return (seconds that another rank's clock is ahead, half of the round trip), of the fastest of some round trips.

    The other clock is read between sending and receiving, and is compared with the middle of the two.
    """
    found = []
    for _ in range(ROUNDS):
        there = torch.zeros(1, dtype=torch.float64)
        began, sent = time.perf_counter(), clock()
        dist.send(there, leader)
        dist.recv(there, leader)
        trip = time.perf_counter() - began
        found.append((trip / 2, float(there) - (sent + trip / 2)))
    half_trip, ahead = min(found)
    return ahead, half_trip


# Checkpoint folder


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
        result = _test_folder(storage, names, job, size=size, wait=wait)
    except (ImportError, ValueError) as error:  # of the URL, which all ranks share
        return Result(problems=[describe(error)])
    on_each(lambda: _delete(storage, names[job.ranks.rank], made) if job.leads_host else None)
    return result


def _test_folder(storage: Storage, names: dict[int, str], job: Job, *, size: int, wait: float) -> Result:
    rank = job.ranks.rank
    data = os.urandom(min(size, 2**20)) * max(1, size // 2**20)
    written = on_each(lambda: _write(storage, names[rank], data) if job.leads_host else 0.0)
    if any(isinstance(one, Exception) for one in written):
        return merge([one if isinstance(one, Exception) else Result() for one in written], job, value=storage.url)
    checksums = on_each(lambda: zlib.crc32(data))
    others = [leader for leader in job.leaders if leader > rank] + [leader for leader in job.leaders if leader < rank]

    def look() -> tuple[Result, float]:
        """Return (problems, bytes a second)."""
        if missing := _missing(storage, names, others, wait):
            writers = named_ranks(sorted(missing), job.hosts)
            remedy = "Name a folder on a shared file system, or a URL, in checkpoint.folder"
            line = f"{storage.url} does not show what {writers} wrote there: it is not shared. {remedy}"
            return Result(problems=[line]), 0.0
        places, began = {rank, *others[:1]}, time.perf_counter()
        for place in places:
            if zlib.crc32(storage.read(f"{names[place]}/{FILE}")) != checksums[place]:
                where = storage.url_of(f"{names[place]}/{FILE}")
                return Result(problems=[f"{where} was read with other content than was written"]), 0.0
        return Result(), len(places) * len(data) / max(time.perf_counter() - began, 1e-9)

    found = on_each(lambda: look() if job.leads_host else (Result(), 0.0))
    merged = merge([one if isinstance(one, Exception) else one[0] for one in found], job, value=storage.url)
    if merged.problems:
        return merged
    write, read = sum(written) / 1e9, sum(rate for _, rate in found) / 1e9
    each = f"{size_text(len(data))} by each of {job.nodes} hosts" if job.nodes > 1 else size_text(len(data))
    return Result(f"{storage.url}: {each}: written at {write:.3g} GB/s, read at {read:.3g} GB/s")


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


def _missing(storage: Storage, names: dict[int, str], others: Sequence[int], wait: float) -> list[int]:
    """Return the ranks whose files are not listed in time."""
    deadline = time.monotonic() + wait
    while True:
        listing = storage.list()
        missing = [other for other in others if FILE not in listing.get(names[other], {})]
        if not missing or time.monotonic() > deadline:
            return missing
        time.sleep(0.1)


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


# Disk


@dataclass(frozen=True)
class Need:
    """Space that one part of a run takes in one place."""

    what: str
    place: str
    bytes: float
    is_estimate: bool = False
    """Too little space is a warning only."""


def checkpoint_bytes(model: Model, config: Config) -> int:
    """Return the bytes of a checkpoint: parameters, frozen ones too, and optimizer states.

    Args:
        model: with its frozen parameters frozen.
    """
    return weight_bytes(model, config) + state_bytes(config.optimizer, model, dtype=config.training.dtype)


def kept_checkpoints(checkpoint: Checkpoint, steps: int) -> int:
    """Return the largest number of checkpoints that exist at the same time, with the one that is being written."""
    saves = math.ceil(steps / checkpoint.interval)
    if not checkpoint.keep_latest_k:
        return saves
    further = steps // math.lcm(checkpoint.interval, checkpoint.keep_every) if checkpoint.keep_every else 0
    return min(saves, checkpoint.keep_latest_k + further + 1)


def disk_needs(config: Config, model: Model) -> list[Need]:
    """Return what the run still writes, beyond the checkpoints that it has."""
    checkpoint, run = config.checkpoint, f"{config.job.dump_folder}/{config.job.name}"
    if not checkpoint.enable:
        return []
    needs = []
    steps = config.training.steps  # with training.epochs, the number is known when the data is open
    url, each = checkpoint.folder or f"{run}/checkpoints", checkpoint_bytes(model, config)
    if "://" not in url:
        count = kept_checkpoints(checkpoint, steps)
        there = [sum(files.values()) for name, files in open_storage(url).list().items() if manifests.step_of(name)]
        text = f"{count:,} checkpoints of {size_text(each)}" + (f", {len(there)} of them are there" if there else "")
        needs.append(Need(text, url, max(0, count * each - sum(there)), config.training.epochs is not None))
    exports = f"{checkpoint.folder}/exports" if checkpoint.folder else f"{run}/exports"
    if checkpoint.last_save_in_hf and "://" not in exports:
        size = sum(p.numel() for _, p in unique_parameters(model)) * DTYPES[checkpoint.export_dtype].size
        needs.append(Need(f"an export of {size_text(size)}", exports, size))
    return needs


class Free(NamedTuple):
    """Free space of a file system."""

    device: int
    """Number that tells file systems of a host apart."""
    bytes: int


def free_at(place: str) -> Free:
    """Return the free space of the file system that a path is on, or would be on."""
    path = Path(place).expanduser().absolute()
    there = next(one for one in (path, *path.parents) if one.exists())
    return Free(os.stat(there).st_dev, shutil.disk_usage(there).free)


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
        total = sum(need.bytes for need in here)
        certain = sum(need.bytes for need in here if not need.is_estimate)
        what = ", ".join(f"{need.what} in {need.place}" for need in here)
        line = f"the run writes {size_text(total)} and {size_text(at.bytes)} are free ({what})"
        values.append(f"{size_text(total)} of {size_text(at.bytes)} free at {here[0].place}")
        if certain > at.bytes:
            problems.append(f"{line}: free the disk, or lower checkpoint.keep_latest_k")
        elif total * SPARE > at.bytes:
            warnings.append(line)
    return Result("; ".join(values) or "nothing is written to a disk", problems, warnings)
