"""Processes, and what the main thread of this one waits for. States and files are known on Linux, by /proc."""

import os
import platform
import signal
import sys
import sysconfig
import threading
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

STATES = {"T": "is stopped", "t": "is in a debugger", "D": "waits for a disk", "Z": "has ended"}
"""States of a process that explain why it does nothing (proc_pid_stat(5))."""
DATA, FILES, COLLECTIVE, DEBUGGER, CODE = "data", "files", "collective", "debugger", "code"
"""Kinds of what a thread waits for."""
BUSY_SHARE = 0.1
"""Share of a core above which a process works."""
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


def machine() -> str:
    """Return what names this machine, as long as it runs, and its space of process numbers (a container has its own).

    Machines may have the same host name. Without /proc, it is the host name.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{platform.node()} {boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return platform.node()


def state_of(pid: int) -> str:
    """Return the letter of a process's state; "" if there is no such process, or no /proc."""
    with suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return ""


def blocked_file(pid: int, thread: int) -> str:
    """Return the file or pipe of the system call in which a thread is now; "" if there is none, or none is known.

    A file descriptor is a call's first argument. A call that takes a path, as open's, is in the stacks of the log.
    """
    try:
        first = int(Path(f"/proc/{pid}/task/{thread}/syscall").read_text().split()[1], 16)
        path = os.readlink(f"/proc/{pid}/fd/{first}") if first > 2 else ""
    except (OSError, ValueError, IndexError):  # the thread runs, and is in no system call
        return ""
    return path if path.startswith(("/", "pipe:")) and not path.startswith("/dev/") else ""


def descendants(pid: int) -> dict[int, str]:
    """Return {process: command line} of all processes that a process has started, directly or through others."""
    reached, waiting = {pid}, [pid]
    while waiting:
        for children in Path(f"/proc/{waiting.pop()}/task").glob("*/children"):
            with suppress(OSError):
                new = {int(child) for child in children.read_text().split()} - reached
                reached |= new
                waiting += new
    found: dict[int, str] = {}
    for child in sorted(reached - {pid}):
        with suppress(OSError):
            found[child] = Path(f"/proc/{child}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    return found


def kill_stopped_descendants() -> None:
    """Kill the processes that this one has started and that are stopped (SIGSTOP). They cannot notice its end."""
    for pid in descendants(os.getpid()):
        if state_of(pid) == "T":
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)


def work_done(pid: int) -> tuple[float, int]:
    """Return the CPU seconds of a process, and the bytes that it has read and written. 0 without /proc."""
    seconds, moved = 0.0, 0
    with suppress(OSError, IndexError, ValueError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        seconds = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    with suppress(OSError, IndexError, ValueError):
        lines = dict(line.split(": ") for line in Path(f"/proc/{pid}/io").read_text().splitlines())
        moved = int(lines["rchar"]) + int(lines["wchar"])
    return seconds, moved


class Waiting(NamedTuple):
    """What a thread waits for."""

    kind: str
    text: str
    """Predicate of a sentence about the process."""


def main_thread_waits_for(*, is_alone: bool = False) -> Waiting:
    """Return what the main thread of this process waits for, or the save that it waits for.

    Args:
        is_alone: no other rank could be waited for in a collective.
    """
    main = threading.main_thread()
    frames = _frames(main)
    if any(file.endswith(("/bdb.py", "/pdb.py")) or "/debugpy/" in file or "pydevd" in file for file, _, _ in frames):
        return Waiting(DEBUGGER, "is in a debugger")
    waiting = _waits_for(main, frames, is_alone)
    if waiting.kind == CODE and frames and "/titanlite/checkpoint/" in _last_own_frame(frames)[0]:
        for thread in threading.enumerate():
            if thread.name.startswith("checkpoint"):
                waiting = _waits_for(thread, _frames(thread), is_alone)
    return waiting


def _frames(thread: threading.Thread) -> list[tuple[str, int, str]]:
    """Return the file, line and function of each frame of a thread, from the innermost to the outermost."""
    frame = sys._current_frames().get(thread.ident or 0)  # noqa: SLF001, documented
    walk = traceback.walk_stack(frame) if frame else ()
    return [(frame.f_code.co_filename, line, frame.f_code.co_name) for frame, line in walk]


def _waits_for(thread: threading.Thread, frames: list[tuple[str, int, str]], is_alone: bool) -> Waiting:
    path = blocked_file(os.getpid(), thread.native_id or 0)
    if path and not path.startswith("pipe:"):
        return Waiting(FILES, f"waits for the file system ({path})")
    if not frames:
        return Waiting(CODE, "runs no Python code")
    file, line, function = _last_own_frame(frames)
    if "/torch/utils/data/" in file or "/torchdata/" in file:
        return Waiting(DATA, f"waits for a data worker{_worker()}")
    is_collective = "/torch/distributed/" in file and "/torch/distributed/checkpoint/" not in file
    if not is_alone and (is_collective or file.endswith("/titanlite/parallelize/reductions.py")):
        return Waiting(COLLECTIVE, "is in a collective")
    if file.endswith("/titanlite/storage/retry.py"):
        return Waiting(FILES, "waits for an object store, which fails or does not answer")
    folders = [str(Path(__file__).parents[2]), sysconfig.get_paths()["purelib"]]
    with suppress(FileNotFoundError):  # it was deleted
        folders.insert(0, os.getcwd())
    for folder in folders:
        file = file.removeprefix(f"{folder}/")
    return Waiting(CODE, f"is in its own code ({file}:{line}, {function})")


def _last_own_frame(frames: list[tuple[str, int, str]]) -> tuple[str, int, str]:
    """Return the innermost frame that is not of the standard library or a mere caller in PyTorch."""
    for frame in frames:
        file = frame[0]
        is_standard = file.startswith(STANDARD_LIBRARY) and "/site-packages/" not in file
        if not is_standard and not file.startswith("<") and not any(part in file for part in SKIPPED):
            return frame
    return frames[0]


def _worker() -> str:
    """Describe the data worker that explains a wait: one that is stopped, in a debugger, or waits for a file."""
    forked = "multiprocessing.forkserver"
    workers = [pid for pid, command in descendants(os.getpid()).items() if forked in command]
    for pid in workers:
        if state_of(pid) in STATES:
            return f" (process {pid}, which {STATES[state_of(pid)]})"
    for pid in workers:
        path = blocked_file(pid, pid)
        if path and not path.startswith("pipe:"):
            return f" (process {pid}, which waits for the file {path})"
    return ""


class Starvation:
    """Time for which this process could run, and got no core. Without /proc/PID/task/TID/schedstat, it is none."""

    def __init__(self) -> None:
        self._waited: dict[int, float] = {}

    def since_last(self) -> float:
        """Return the seconds since the last call for which the thread that had to wait longest has waited for a core.

        Python's own threads other than the main one do not count: they serve, as the watchdog does.
        """
        servants = {thread.native_id for thread in threading.enumerate() if thread is not threading.main_thread()}
        waited: dict[int, float] = {}
        with suppress(OSError):
            for thread in map(int, os.listdir("/proc/self/task")):
                with suppress(OSError, IndexError, ValueError):  # the thread has ended, or the kernel has no schedstat
                    if thread not in servants:
                        text = Path(f"/proc/self/task/{thread}/schedstat").read_text()
                        waited[thread] = int(text.split()[1]) / 1e9
        last, self._waited = self._waited, waited
        return max((seconds - last[thread] for thread, seconds in waited.items() if thread in last), default=0.0)


class Activity:
    """Whether this process and its children work: they compute, or read and write."""

    def __init__(self) -> None:
        self._at: float | None = None
        self._done = 0.0, 0
        self._was_busy = False

    def is_busy(self, now: float) -> bool:
        """Return whether there was work since the last call; False where that was long ago, as in the first one.

        The calling thread's own work does not count.

        Args:
            now: a clock's time in seconds.
        """
        before = self._at
        if before is not None and now - before < 1:
            return self._was_busy
        done = [work_done(pid) for pid in (os.getpid(), *descendants(os.getpid()))]
        last, self._at = self._done, now
        self._done = sum(work[0] for work in done) - time.thread_time(), sum(work[1] for work in done)
        if before is None or now - before > 10:
            self._was_busy = False
            return False
        seconds, moved = ((new - old) / (now - before) for new, old in zip(self._done, last, strict=True))
        self._was_busy = seconds > BUSY_SHARE or moved > BUSY_BYTES
        return self._was_busy
