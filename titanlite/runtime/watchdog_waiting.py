"""Waits of a process: for a data worker, the file system, a collective, or its own code."""

import os
import sys
import sysconfig
import threading
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

from titanlite.runtime.proc import STATES, blocked_call, descendants, state_of, work_done

DATA, FILES, OUTPUT, COLLECTIVE, DEBUGGER, CODE = "data", "files", "output", "collective", "debugger", "code"
"""Kinds of waits."""

BUSY_SHARE = 0.1
"""Share of a core above which a process works."""
LEAST_SECONDS = 1.0
"""Shortest time over which work is measured."""
BUSY_BYTES = 2**20
"""Bytes read and written in a second above which a process works."""
STANDARD_LIBRARY = sysconfig.get_paths()["stdlib"]
SKIPPED = (
    "/torch/_ops.py",
    "/torch/multiprocessing/",
    "/torch/utils/_contextlib.py",
    "/torch/_tensor.py",
    "/torch/autograd/",
)
"""Files of PyTorch that call for others."""


@dataclass(frozen=True)
class Waiting:
    """Wait of a process, and its cause."""

    kind: str
    text: str
    """Predicate of a sentence about the process."""


def main_thread_waits_for() -> Waiting:
    """Return what the main thread of this process waits for, or the save that it waits for."""
    main = threading.main_thread()
    frames = _frames(main)
    if any(_is_debugger(file) for file, _, _ in frames):
        return Waiting(DEBUGGER, "is in a debugger")
    waiting = _blocked(main) or _by_frames(frames)
    if waiting.kind == CODE and frames and "/titanlite/checkpoint/" in _last_own_frame(frames)[0]:
        for thread in threading.enumerate():
            if thread.name.startswith("checkpoint"):
                waiting = _blocked(thread) or _by_frames(_frames(thread))
    return waiting


def _frames(thread: threading.Thread) -> list[tuple[str, int, str]]:
    """Return the file, line and function of each frame of a thread, from the innermost to the outermost."""
    frame = sys._current_frames().get(thread.ident or 0)
    return (
        [(it.f_code.co_filename, line, it.f_code.co_name) for it, line in traceback.walk_stack(frame)] if frame else []
    )


def _blocked(thread: threading.Thread) -> Waiting | None:
    call = blocked_call(os.getpid(), thread.native_id or 0)
    if call is None:
        return None
    if call.fd in (1, 2) and call.name == "write":
        return Waiting(OUTPUT, "writes to its output, which nobody reads")
    if call.path.startswith("pipe:"):
        return None
    return Waiting(FILES, f"waits for the file system ({call})")


def _by_frames(frames: list[tuple[str, int, str]]) -> Waiting:
    if not frames:
        return Waiting(CODE, "runs no Python code")
    file, line, function = _last_own_frame(frames)
    if "/torch/utils/data/" in file or "/torchdata/" in file:
        return Waiting(DATA, f"waits for a data worker{_worker()}")
    if "/torch/distributed/" in file and "/torch/distributed/checkpoint/" not in file:
        return Waiting(COLLECTIVE, "is in a collective")
    if file.endswith("/titanlite/cpu/collectives.py"):
        return Waiting(COLLECTIVE, "is in a collective")
    return Waiting(CODE, f"is in its own code ({_short(file)}:{line}, {function})")


def _last_own_frame(frames: list[tuple[str, int, str]]) -> tuple[str, int, str]:
    """Return the innermost frame that is not of the standard library or a mere caller in PyTorch."""
    for frame in frames:
        file = frame[0]
        is_standard = file.startswith(STANDARD_LIBRARY) and "/site-packages/" not in file
        if not is_standard and not file.startswith("<") and not any(part in file for part in SKIPPED):
            return frame
    return frames[0]


def _is_debugger(file: str) -> bool:
    return file.endswith(("/bdb.py", "/pdb.py")) or "/debugpy/" in file or "pydevd" in file


def _short(file: str) -> str:
    """Return a path relative to the present folder, or to the folder of the packages."""
    for folder in (str(Path.cwd()), str(Path(__file__).parents[2]), sysconfig.get_paths()["purelib"]):
        if file.startswith(f"{folder}/"):
            return file[len(folder) + 1 :]
    return file


def _worker() -> str:
    """Describe the data worker that explains a wait: one that is stopped, in a debugger, or waits for a file."""
    forked = "multiprocessing.forkserver"
    workers = [pid for pid, command in descendants(os.getpid()).items() if forked in command]
    for pid in workers:
        if state_of(pid) in STATES:
            return f" (process {pid}, which {STATES[state_of(pid)]})"
    for pid in workers:
        call = blocked_call(pid, pid)
        if call and not call.path.startswith("pipe:"):
            return f" (process {pid}, {call})"
    return ""


class Activity:
    """Measurement of whether a process and its children work: they compute, or read and write."""

    def __init__(self) -> None:
        self._at: float | None = None
        self._done = 0.0, 0
        self._was_busy = False

    def forget(self) -> None:
        """Forget the last measurement."""
        self._at, self._was_busy = None, False

    def is_busy(self, now: float) -> bool:
        """Return whether there was work since the last measurement; False in the first one.

        The calling thread's own work does not count.

        Args:
            now: a clock's time in seconds.
        """
        if self._at is not None and now - self._at < LEAST_SECONDS:
            return self._was_busy
        done = [work_done(pid) for pid in (os.getpid(), *descendants(os.getpid()))]
        seconds = sum(it[0] for it in done) - time.thread_time()
        moved = sum(it[1] for it in done)
        before, self._at = self._at, now
        (last_seconds, last_moved), self._done = self._done, (seconds, moved)
        if before is None:
            return False
        elapsed = now - before
        self._was_busy = (seconds - last_seconds) / elapsed > BUSY_SHARE or (moved - last_moved) / elapsed > BUSY_BYTES
        return self._was_busy
