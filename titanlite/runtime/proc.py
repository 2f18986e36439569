"""Linux's /proc: states of processes, and files that a blocked thread waits for. Elsewhere nothing is found."""

import os
import platform
import signal
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

PAGE = 4096
FD, FIRST_PATH, SECOND_PATH = "file descriptor", "first path", "second path"
CALLS: dict[str, dict[int, tuple[str, str]]] = {
    "x86_64": {
        0: ("read", FD), 1: ("write", FD), 2: ("open", FIRST_PATH), 3: ("close", FD), 4: ("stat", FIRST_PATH),
        5: ("fstat", FD), 6: ("lstat", FIRST_PATH), 17: ("read", FD), 18: ("write", FD), 19: ("read", FD),
        20: ("write", FD), 21: ("access", FIRST_PATH), 73: ("flock", FD), 74: ("fsync", FD), 75: ("fdatasync", FD),
        77: ("ftruncate", FD), 78: ("readdir", FD), 82: ("rename", FIRST_PATH), 83: ("mkdir", FIRST_PATH),
        84: ("rmdir", FIRST_PATH), 87: ("unlink", FIRST_PATH), 137: ("statfs", FIRST_PATH), 217: ("readdir", FD),
        257: ("open", SECOND_PATH), 258: ("mkdir", SECOND_PATH), 262: ("stat", SECOND_PATH),
        263: ("unlink", SECOND_PATH), 264: ("rename", SECOND_PATH), 269: ("access", SECOND_PATH),
        285: ("fallocate", FD), 316: ("rename", SECOND_PATH), 326: ("copy", FD), 332: ("stat", SECOND_PATH),
        437: ("open", SECOND_PATH), 439: ("access", SECOND_PATH),
    },
    "aarch64": {
        32: ("flock", FD), 34: ("mkdir", SECOND_PATH), 35: ("unlink", SECOND_PATH), 38: ("rename", SECOND_PATH),
        43: ("statfs", FIRST_PATH), 46: ("ftruncate", FD), 47: ("fallocate", FD), 48: ("access", SECOND_PATH),
        56: ("open", SECOND_PATH), 57: ("close", FD), 61: ("readdir", FD), 63: ("read", FD), 64: ("write", FD),
        65: ("read", FD), 66: ("write", FD), 67: ("read", FD), 68: ("write", FD), 79: ("stat", SECOND_PATH),
        80: ("fstat", FD), 82: ("fsync", FD), 83: ("fdatasync", FD), 276: ("rename", SECOND_PATH),
        285: ("copy", FD), 291: ("stat", SECOND_PATH), 437: ("open", SECOND_PATH), 439: ("access", SECOND_PATH),
    },
}  # fmt: skip
"""System calls that wait for a file system: {machine: {number: (name, where the file is named)}}."""

STATES = {"T": "is stopped", "t": "is in a debugger", "D": "waits for a disk", "Z": "has ended"}
"""States of a process that explain why it does nothing (proc_pid_stat(5))."""


class BlockedCall(NamedTuple):
    """System call on a file in which a thread is."""

    name: str
    path: str
    fd: int | None

    def __str__(self) -> str:
        return f"{self.name} of {self.path}"


def state_of(pid: int) -> str:
    """Return the letter of a process's state; "" if there is no such process, or no /proc."""
    with suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return ""


def blocked_call(pid: int, thread: int) -> BlockedCall | None:
    """Return the system call on a file in which a thread is now; None if it is in no such call.

    Paths of the file system and pipes count. Sockets do not.
    """
    try:
        number, *arguments = Path(f"/proc/{pid}/task/{thread}/syscall").read_text().split()
        call = CALLS.get(platform.machine(), {}).get(int(number))  # "running" is no number
        if call is None:
            return None
        name, place = call
        first, second = int(arguments[0], 16), int(arguments[1], 16)
        if place == FD:
            path = os.readlink(f"/proc/{pid}/fd/{first}")
            return BlockedCall(name, path, first) if path.startswith(("/", "pipe:")) else None
        return BlockedCall(name, _text_at(pid, first if place == FIRST_PATH else second), None)
    except (OSError, ValueError, IndexError):
        return None


def _text_at(pid: int, address: int) -> str:
    """Return the text at an address of a process, to the end of its page at most."""
    memory = os.open(f"/proc/{pid}/mem", os.O_RDONLY)
    try:
        return os.pread(memory, PAGE - address % PAGE, address).partition(b"\0")[0].decode(errors="replace")
    finally:
        os.close(memory)


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
