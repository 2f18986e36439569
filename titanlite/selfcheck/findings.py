"""Results of tests that all ranks make together, and the table of them."""

import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch.distributed as dist

from titanlite.runtime.errors import UserError
from titanlite.runtime.process_group import Ranks
from titanlite.runtime.ranks import named_ranks

Status = Literal["ok", "warning", "FAILED"]


@dataclass(frozen=True)
class Result:
    """Result of a test on one rank, or of all ranks together."""

    value: str = ""
    """Measured value, for the table."""
    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    @property
    def status(self) -> Status:
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


def open_job(ranks: Ranks) -> Job:
    """Exchange host names. All ranks call this together.

    Raises:
        UserError: the hosts have different numbers of processes.
    """
    found = gather((platform.node(), ranks.local_world_size))
    if len({processes for _, processes in found}) > 1:
        counts = ", ".join(sorted({f"{host} {processes}" for host, processes in found}))
        raise UserError(f"the hosts have different numbers of processes ({counts}): start the same on each")
    return Job(ranks, [host for host, _ in found])


def gather(value: Any) -> list[Any]:
    """Return the values of all ranks."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def on_each(act: Callable[[], Any]) -> list[Any]:
    """Call a function on each rank, and return the results of all ranks. An exception is a result, too.

    The function must not communicate: the other ranks would wait for a rank that has failed.
    """
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
    return Result(
        next((one.value for one in mine if one.value), "") if value is None else value,
        _by_line([one.problems for one in mine], job),
        _by_line([one.warnings for one in mine], job),
    )


def describe(error: Exception) -> str:
    """Return an exception as one line."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return " ".join(str(error).split()) or type(error).__name__


def _by_line(lines: Sequence[list[str]], job: Job) -> list[str]:
    holders: dict[str, list[int]] = {}
    for rank, of_rank in enumerate(lines):
        for line in of_rank:
            holders.setdefault(line, []).append(rank)
    return [f"{named_ranks(ranks, job.hosts)}: {line}" for line, ranks in holders.items()]


def table_lines(name: str, result: Result) -> list[str]:
    """Return the lines of the table about one test."""
    first = f"{result.status:<8} {name:<18} {result.value}".rstrip()
    return [first, *(f"           {line}" for line in [*result.problems, *result.warnings])]


def size_text(count: float) -> str:
    """Return a number of bytes with a unit."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:,.4g} TiB"
