"""Starts of a run in run.json: how each one ended, and a stop of restarts that make no progress. Imports no torch.

A restart is automatic if torchrun, Slurm or Kubernetes made it. A start by hand is never refused.
"""

import json
import os
import platform
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, ClassVar

from titanlite.run.proc import machine
from titanlite.runtime.errors import RunError
from titanlite.runtime.files import read_small, write_atomically

COUNTERS = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT", "JOBSET_RESTART_ATTEMPT")
"""Environment variables that count the automatic restarts of a job. `run.slurm` has set Slurm's from the job itself."""
LAST_END = "TITANLITE_LAST_END"
"""Environment variable of run_train.sh: reason for which the processes before were ended, on the first machine."""
KILLED = "ended without a reason: killed, or its machine failed"
WRITING_SECONDS = 2.0
"""Longest time that a process which ends at once waits for its record."""
MOST_CHARACTERS = 300

Start = dict[str, Any]
"""Record of one start in run.json."""


class CrashLoop(RunError):
    """A job that was restarted again and again, and made no progress."""

    exit_code: ClassVar[int] = 3


def is_automatic(environ: Mapping[str, str]) -> bool:
    """Return whether this start is a restart that nobody asked for by hand."""
    counts = (environ.get(name, "") for name in COUNTERS)
    return any(count.isdecimal() and int(count) > 0 for count in counts)


def begin_start(environ: Mapping[str, str]) -> Start:
    """Return the record of a start that begins now in this process. Its step is not known yet."""
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "host": platform.node(),
        "machine": machine(),
        "process": os.getpid(),
        "automatic": is_automatic(environ),
        "step": None,
    }


def is_own(starts: Sequence[Start]) -> bool:
    """Return whether the last record is that of this process, and has no end yet."""
    own = {"machine": machine(), "process": os.getpid()}
    return bool(starts) and starts[-1].items() >= own.items() and "end" not in starts[-1]


def are_starts(value: object) -> bool:
    """Return whether a value of run.json is a list of records of starts, with the entries that code relies on."""
    return isinstance(value, list) and all(
        isinstance(start, dict)
        and isinstance(start.get("step"), int | None)
        and isinstance(end := start.get("end", {}), dict)
        and isinstance(end.get("code"), int | None)
        for start in value
    )


def end_last(starts: Sequence[Start], environ: Mapping[str, str]) -> None:
    """Complete the record of the last start with what run_train.sh knows of its end.

    The first process that failed is known there. A record by rank 0 may only have what followed from it.
    """
    if starts and environ.get(LAST_END):
        end = starts[-1].setdefault("end", {"code": 1, "step": None})
        end["reason"] = environ[LAST_END][:MOST_CHARACTERS]


def check_progress(
    starts: Sequence[Start], *, environ: Mapping[str, str], limit: int, newest_step: Callable[[], int], logs: Path
) -> None:
    """Refuse an automatic restart if those before it made no progress.

    Args:
        starts: records of all starts before this one.
        limit: restarts in a row that may end without a newer checkpoint, also by a signal; 0 for no limit.
        newest_step: returns the step of the run's newest checkpoint, or 0.
        logs: folder of the run's logs.

    Raises:
        CrashLoop: as many as `limit` have.
    """
    if not limit or not is_automatic(environ) or len(_failed(starts, None)) < limit:
        return
    step = newest_step()
    failed = _failed(starts, step)
    if len(failed) < limit:
        return
    reasons = Counter(str(start.get("end", {}).get("reason", KILLED)) for start in reversed(failed))
    texts = [f"{reason} ({count} times)" if count > 1 else reason for reason, count in reasons.items()]
    raise CrashLoop(
        f"{len(failed)} restarts in a row from step {step} have saved no newer checkpoint, and job.max_failed_restarts "
        f"is {limit}: {'; '.join(texts)}. Logs: {logs}/rank-*.log. Remove the cause, and start the command by hand"
    )


def _failed(starts: Sequence[Start], newest_step: int | None) -> list[Start]:
    """Return the last automatic restarts that made no progress in a row, newest first.

    Args:
        newest_step: step of the newest checkpoint; None: not known. Starts from an older step have made progress. So
            have those from an older step than a later start, which resumed from local copies.
    """
    found = []
    for start in reversed(starts):
        step, code = start.get("step", -1), start.get("end", {}).get("code")  # records of older versions have no step
        progressed = step is not None and (step < 0 or (newest_step is not None and step < newest_step))
        if not start.get("automatic") or progressed or code == 0:
            break
        found.append(start)
        if step is not None:
            newest_step = max(step, newest_step or 0)
    return found


class RunEnd:
    """Record of how this start ends, in run.json. Rank 0 writes it; a process that is killed leaves none."""

    def __init__(self) -> None:
        self._run: Path | None = None
        self._phase_seconds: Callable[[], dict[str, float]] = dict

    @contextmanager
    def recorded(
        self, run: Path, *, rank: int, step: Callable[[], int], phase_seconds: Callable[[], dict[str, float]] = dict
    ) -> Iterator[None]:
        """Record how this context ends.

        Args:
            run: folder of the run.
            step: returns the step at which training is.
            phase_seconds: returns the seconds of this start by phase.
        """
        self._run, self._phase_seconds = run if rank == 0 else None, phase_seconds
        try:
            yield
        except CrashLoop:  # this start has begun nothing
            raise
        except Exception as error:
            notes = ", ".join(getattr(error, "__notes__", []))
            text = str(error).partition("\n")[0]
            reason = text if isinstance(error, RunError | ValueError) else f"{type(error).__name__}: {text}"
            self._write(getattr(error, "exit_code", 1), f"{reason} ({notes})" if notes else reason, step())
            raise
        else:
            self._write(0, "done", step())

    def write_soon(self, code: int, reason: str) -> None:
        """Record an end at once by a signal. It does not wait for a file system that does not answer."""
        writer = threading.Thread(target=self._write, args=(code, reason, None), daemon=True)
        writer.start()
        writer.join(WRITING_SECONDS)

    def _write(self, code: int, reason: str, step: int | None) -> None:
        if self._run is None:
            return
        record = self._run / "run.json"
        with suppress(OSError, ValueError, KeyError, TypeError):  # a record that cannot be written must not end the run
            run = json.loads(read_small(record))
            starts = run["starts"]
            if not is_own(starts):
                return
            if code == 2 and starts[-1]["step"] is None:
                starts.pop()  # a refused command has started nothing
            else:
                starts[-1]["end"] = {"code": code, "reason": reason[:MOST_CHARACTERS], "step": step}
                if seconds := self._phase_seconds():
                    starts[-1]["phase_seconds"] = {name: round(time, 3) for name, time in seconds.items()}
            write_atomically(record, json.dumps(run, indent=1), mode=0o600)
