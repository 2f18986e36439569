"""`titanlite check --machines`: tests of all processes of a job, before it is paid for. One line of a table each.

All ranks make each test together, and every rank knows the result of all. A test must not communicate while a rank may
fail alone: what may fail runs in `on_each`.
"""

import hashlib
import json
import os
import platform
import statistics
import time
import uuid
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Literal

import torch
import torch.distributed as dist

from titanlite.run.versions import compare, facts_of, versions_of
from titanlite.runtime.errors import UserError
from titanlite.runtime.files import write_all
from titanlite.runtime.process_group import Ranks, process_group
from titanlite.runtime.ranks import gather, host_names, named_ranks
from titanlite.schema import Config
from titanlite.storage.storage import Storage, open_storage
from titanlite.tools.plan.calibrate import COLLECTIVES, Call, bandwidth_at

TIMEOUT = 120
"""Seconds that a rank waits for the others in one test."""
SIZES = {"cpu": (2**16, 2**24), "cuda": (2**20, 2**28)}
"""Bytes of a collective: of a short one, whose values alone are compared, and of a long one."""
FILE = "data"
"""Name of the file that each host writes into the checkpoint folder."""
WAIT = 20.0
"""Seconds in which a file of one host must be seen on the others: network file systems list folders with a delay."""


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
    def leads_host(self) -> bool:
        """Return whether this rank is the one of its host that tests what the host's ranks share."""
        return self.ranks.local_rank == 0

    @property
    def leaders(self) -> list[int]:
        """Return the first rank of each host."""
        return [*range(0, self.ranks.world_size, self.ranks.local_world_size)]


def main(config: Config, ranks: Ranks, device: torch.device) -> None:
    """Run all tests on all ranks, and print the table on rank 0.

    Raises:
        UserError: a test failed. The error has no text, because the table has it.
    """
    with warnings.catch_warnings(), process_group(ranks, device, timeout_seconds=TIMEOUT):
        warnings.simplefilter("ignore", FutureWarning)  # of names of collectives that PyTorch 2.13 replaces
        job = open_job(ranks)
        began = time.perf_counter()
        failed = run(machine_tests(config, job, device), print if ranks.rank == 0 else lambda line: None)
        if ranks.rank == 0:
            took = timedelta(seconds=round(time.perf_counter() - began))
            end = f"{len(failed)} FAILED: {', '.join(failed)}" if failed else "no test failed"
            print(f"{end} (processes: {ranks.world_size}, hosts: {len(job.leaders)}, time: {took})", flush=True)
    if failed:
        raise UserError("")


def run(tests: Mapping[str, Callable[[], Result]], report: Callable[[str], object]) -> list[str]:
    """Run tests, report their lines, and return the names of those that failed.

    Raises:
        UserError: a test ended with an error on this rank, such as a collective that a rank never joined.
    """
    failed = []
    for name, test in tests.items():
        try:
            result = test()
        except Exception as error:
            where = f"rank {os.environ.get('RANK', 0)} on {platform.node()}"
            raise UserError(f"{name}: {where}: {describe(error)}") from error
        report(f"{result.status:<8} {name:<18} {result.value}".rstrip())
        for line in [*result.problems, *result.warnings]:
            report(f"           {line}")
        failed += [name] if result.status == "FAILED" else []
    return failed


def machine_tests(config: Config, job: Job, device: torch.device) -> dict[str, Callable[[], Result]]:
    """Return the tests by name, in their order. All ranks run each together."""
    facts = facts_of(config.model_dump(mode="json"), device)
    tests: dict[str, Callable[[], Result]] = {"versions, config": partial(check_software, facts, device)}
    if job.ranks.world_size > 1:
        tests["collectives"] = partial(check_values, device, job)
        tests["bandwidths"] = partial(check_bandwidths, device)
    if config.checkpoint.enable:
        url = config.checkpoint.folder or f"{config.job.dump_folder}/{config.job.name}/checkpoints"
        tests["checkpoint folder"] = partial(check_folder, url, job)
    return tests


def open_job(ranks: Ranks) -> Job:
    """Exchange host names. All ranks call this together.

    Raises:
        UserError: the hosts have different numbers of processes.
    """
    found = gather((platform.node(), ranks.local_world_size))
    if len({processes for _, processes in found}) > 1:
        counts = ", ".join(sorted({f"{host} {processes}" for host, processes in found}))
        raise UserError(f"the hosts have different numbers of processes ({counts}): start the same on each")
    return Job(ranks, host_names(_world()))


def _world() -> dist.ProcessGroup:
    world = dist.group.WORLD
    assert world is not None
    return world


def on_each(act: Callable[[], Result], job: Job) -> Result:
    """Call a function on each rank, and return one result of all. An exception is a problem of its rank.

    A line that several ranks have in common comes once, with their names. The value is that of the lowest rank.
    """
    try:
        mine = act()
    except Exception as error:  # any test may fail in any way, and the others are still of use
        mine = Result(problems=[describe(error)])
    every = gather(mine)

    def by_line(of_ranks: Sequence[list[str]]) -> list[str]:
        holders: dict[str, list[int]] = {}
        for rank, lines in enumerate(of_ranks):
            for line in lines:
                holders.setdefault(line, []).append(rank)
        return [f"{named_ranks(ranks, job.hosts)}: {line}" for line, ranks in holders.items()]

    return Result(
        every[0].value, by_line([result.problems for result in every]), by_line([result.warnings for result in every])
    )


def describe(error: Exception) -> str:
    """Return an exception as one line."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    text = " ".join(str(error).split())
    return text if isinstance(error, UserError) else f"{type(error).__name__}: {text}"


# Versions, collectives


def check_software(facts: Mapping[str, str], device: torch.device) -> Result:
    """Compare versions and config of all ranks."""
    versions = ", ".join(f"{name} {version}" for name, version in versions_of(device).items())
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:12]
    return Result(f"{versions}; config {digest}", compare(facts))


def check_values(device: torch.device, job: Job, calls: Mapping[str, Call] = COLLECTIVES) -> Result:
    """Compare the result of each collective with its exact value, at two sizes."""
    wrong = []
    for size in SIZES[device.type]:
        for name, call in calls.items():
            wrong += _wrong_values(name, call, max(1, size // 4 // job.ranks.world_size), device, job)
    sizes = " and ".join(f"{size:,}" for size in SIZES[device.type])
    return on_each(lambda: Result(f"{', '.join(calls)} at {sizes} bytes", wrong), job)


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


def check_bandwidths(device: torch.device) -> Result:
    """Measure the bandwidth of each long collective over all ranks."""
    size = SIZES[device.type][-1]
    found = gather({name: bandwidth_at(name, _world(), device, size, calls=3) for name in COLLECTIVES})
    medians = {name: statistics.median(of_rank[name] for of_rank in found) for name in COLLECTIVES}
    return Result(", ".join(f"{name} {rate / 1e9:.3g}" for name, rate in medians.items()) + " GB/s")


# Checkpoint folder


def check_folder(url: str, job: Job, *, wait: float = WAIT) -> Result:
    """Write, sync, rename, list, read and delete in the checkpoint folder, on every host at the same time.

    Args:
        url: folder or URL of the checkpoints.
        wait: longest time until a file is seen on other hosts.
    """
    token = gather(uuid.uuid4().hex[:8])[0]
    names = {leader: f"check-{token}-{leader}" for leader in job.leaders}
    try:
        storage = open_storage(url, owner=token)
    except (ImportError, ValueError) as error:  # the URL is wrong, on every rank alike
        return Result(problems=[describe(error)])

    def of_host(act: Callable[[], None]) -> Result:
        def once() -> Result:
            if job.leads_host:
                act()
            return Result(storage.url)

        return on_each(once, job)

    def write() -> None:
        name = names[job.ranks.rank]
        try:
            with storage.create(f"{storage.begin(name)}/{FILE}") as file:
                write_all(file, name.encode())
            storage.publish(name, b"{}")
        except BaseException:
            with suppress(OSError):
                storage.discard(name)
            raise

    written = of_host(write)
    found = written if written.problems else of_host(lambda: _read_all(storage, names, job, wait))
    of_host(lambda: _delete(storage, names[job.ranks.rank]))
    return found


def _read_all(storage: Storage, names: Mapping[int, str], job: Job, wait: float) -> None:
    """Read what the first rank of each host wrote.

    Raises:
        UserError: a file is not seen in time, or has other content.
    """
    deadline = time.monotonic() + wait
    while unseen := [*_unseen(storage, names)]:
        if time.monotonic() > deadline:
            writers = named_ranks(unseen, job.hosts)
            remedy = "Name a folder on a shared file system, or a URL, in checkpoint.folder"
            raise UserError(f"{storage.url} does not show what {writers} wrote there: it is not shared. {remedy}")
        time.sleep(0.1)
    for name in names.values():
        if storage.read(f"{name}/{FILE}") != name.encode():
            raise UserError(f"{storage.url_of(f'{name}/{FILE}')} was read with other content than was written")


def _unseen(storage: Storage, names: Mapping[int, str]) -> Iterator[int]:
    """Yield the ranks whose files are not listed yet."""
    listing = storage.list()
    yield from (rank for rank, name in names.items() if FILE not in listing.get(name, {}))


def _delete(storage: Storage, name: str) -> None:
    """Delete a folder of the test."""
    with suppress(OSError):
        storage.delete(name)
