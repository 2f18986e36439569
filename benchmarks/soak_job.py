"""A job of a soak: run_train.sh with all its processes, on one host or on two, and what it leaves in files."""

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from repository import ROOT

from tests.support.processes import kill_all, processes_left, processes_with, trainers

MARK = "TITANLITE_SOAK_JOB"
REGULAR = re.compile(r"^(step +\d+ |saved checkpoint |rank \d+ of host .* lags|\[W\d+ |\s*$)")
"""Lines of a run in which nothing happens, and warnings of PyTorch's C++ code. On a busy machine some rank lags."""
IMPORTANT = ("hang: no", "restart 1 of", "error:", "stopped", "damaged", "cannot be written", "warning:", "not finite")
"""Parts of lines that explain, the best first."""


class Layout(NamedTuple):
    """Processes of a job."""

    ranks: int = 2
    hosts: int = 1
    max_restarts: int = 0


@dataclass
class Attempt:
    """One start of the ranks: the step that they resumed from, and the time of each further step."""

    resumed: int
    began: float = 0.0
    """Time at which it had read the checkpoint."""
    steps: list[tuple[int, float]] = field(default_factory=list)

    @property
    def last(self) -> int:
        return self.steps[-1][0] if self.steps else self.resumed


class Ended(Exception):
    """A job that has ended, or that is late, where it should train."""


class Job:
    """Job that was started, found by a mark in the environment of its processes.

    Args:
        name: of its files.
        words: arguments of run_train.sh.
        prefixes: for each host, the command that runs a command on it.
        more: variables of the environment.
    """

    def __init__(
        self,
        folder: Path,
        name: str,
        layout: Layout,
        words: Sequence[str],
        prefixes: Sequence[Sequence[str]] = ((),),
        **more: str,
    ) -> None:
        self.layout, self.name = layout, name
        self.hooks = folder / "hooks" / name
        self.hooks.mkdir(parents=True)
        self._mark = f"{MARK}={os.getpid()}-{time.monotonic_ns()}"
        environ = {key: text for key, text in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "NPROC")}
        environ |= {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}",
            "OMP_NUM_THREADS": "1",
            "NPROC": str(layout.ranks // layout.hosts),
            "TITANLITE_SOAK_HOOKS": str(self.hooks),
            MARK: self._mark.partition("=")[2],
            **more,
        }
        if layout.max_restarts:
            environ["MAX_RESTARTS"] = str(layout.max_restarts)
        self.outputs = [folder / "console" / f"{name}-host-{host}.txt" for host in range(layout.hosts)]
        self.outputs[0].parent.mkdir(parents=True, exist_ok=True)
        self.started = time.monotonic()
        self.processes = [
            subprocess.Popen(
                [*prefix, str(ROOT / "run_train.sh"), *words],
                stdout=output.open("wb"),
                stderr=subprocess.STDOUT,
                env=environ,
                cwd=folder,
                start_new_session=True,
            )
            for prefix, output in zip(prefixes, self.outputs, strict=True)
        ]

    def pids(self) -> dict[int, str]:
        """Return {process: command line} of every process of the job that is alive."""
        return processes_with(self._mark.encode())

    def ranks(self) -> list[int]:
        """Return the processes that train, by rank."""
        return trainers(self.pids()) or [self.processes[0].pid]

    def launchers(self) -> list[int]:
        """Return the processes that run_train.sh has become, one a host."""
        found = [pid for pid, command in self.pids().items() if "titanlite.tools.launch" in command]
        return [pid for pid in sorted(found) if "nsenter" not in self.pids().get(pid, "")] or self.ranks()

    def printed(self) -> tuple[int, ...]:
        """Return how many bytes each host has printed."""
        return tuple(output.stat().st_size for output in self.outputs)

    def text(self, since: Sequence[int] = ()) -> str:
        """Return the console of all hosts, one after the other.

        Args:
            since: what to leave out, `printed` of an earlier time.
        """
        starts = since or [0] * len(self.outputs)
        parts = [output.read_bytes()[start:] for output, start in zip(self.outputs, starts, strict=True)]
        return b"".join(parts).decode(errors="replace")

    def notable(self, since: Sequence[int] = ()) -> list[str]:
        """Return lines of the console that are not of every run."""
        return [line for line in self.text(since).splitlines() if not REGULAR.match(line)]

    def attempts(self) -> list[Attempt]:
        return [read_attempt(path) for path in sorted(self.hooks.glob("*/steps"))]

    def last_step(self) -> int:
        """Return the last step that was done; 0 if there is none."""
        return max((attempt.last for attempt in self.attempts()), default=0)

    def trains(self) -> bool:
        """Return whether the newest attempt has done a step."""
        return any(attempt.steps for attempt in self.attempts()[-1:])

    def ended(self) -> bool:
        return all(process.poll() is not None for process in self.processes)

    def codes(self) -> list[int | None]:
        return [process.poll() for process in self.processes]

    def wait_until(self, condition: Callable[[], bool], seconds: float, *, pause: float = 0.01) -> None:
        """Wait for something that a job does while it trains.

        Raises:
            Ended: the job has ended, or it is late.
        """
        deadline = time.monotonic() + seconds
        while not condition():
            if self.ended() and not condition():
                raise Ended(f"ended with {self.codes()}: {one_line(self.notable())}")
            if time.monotonic() > deadline:
                raise Ended(f"not in {seconds:.0f} s")
            time.sleep(pause)

    def wait_for_end(self, seconds: float, look: Callable[[], object] = lambda: None) -> None:
        """Wait until run_train.sh has ended on every host.

        Args:
            look: called again and again until then.

        Raises:
            Ended: it is late.
        """
        deadline = time.monotonic() + seconds
        while not self.ended():
            look()
            if time.monotonic() > deadline:
                raise Ended(f"did not end in {seconds:.0f} s ({self.codes()}): {one_line(self.notable())}")
            time.sleep(0.01)

    def left(self) -> dict[int, str]:
        """Return the processes that are alive after some time."""
        return processes_left(self._mark.encode(), 15)

    def kill(self) -> None:
        """End every process of the job at once."""
        kill_all(self.pids())
        for process in self.processes:
            process.wait()


def read_attempt(path: Path) -> Attempt:
    """Return an attempt from its file `steps`. A line that is being written does not count."""
    attempt = Attempt(0)
    for line in path.read_text().splitlines(keepends=True):
        if line.endswith("\n"):
            event, step, clock = line.split()
            if event == "resumed":
                attempt.resumed, attempt.began = int(step), float(clock)
            else:
                attempt.steps.append((int(step), float(clock)))
    return attempt


def one_line(lines: Sequence[str]) -> str:
    """Return the line that explains most: an error, else a stop, else what else is important, else the last one."""
    for sign in IMPORTANT:
        if found := [line for line in lines if sign in line.lower()]:
            return found[0].strip()
    return lines[-1].strip() if lines else ""
