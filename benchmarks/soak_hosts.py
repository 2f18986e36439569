"""Two hosts as network namespaces, with a link between them that can be cut: tests/wire.py forwards the frames."""

import os
import signal
import subprocess
import sys
from collections.abc import Sequence

from soak_job import ROOT

NAMES = ("node0", "node1")
ENDPOINT = f"{NAMES[0]}:29500"
NAMESPACES = {"net": "net", "uts": "uts", "mount": "mnt", "pid": "pid_for_children"}
"""{option of nsenter: file in /proc/PID/ns}"""


class NotPermitted(Exception):
    """A system that lets nobody make hosts; the message is its reason."""


class Hosts:
    """Hosts of a soak. They end with this process.

    Raises:
        NotPermitted: the system makes no namespaces.
    """

    def __init__(self) -> None:
        self._pids: list[int] = []
        self._wire = self._start()

    def _start(self) -> "subprocess.Popen[str]":
        user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
        command = ["unshare", *user, "--net", sys.executable, str(ROOT / "tests" / "wire.py"), *NAMES]
        pipe = subprocess.PIPE
        try:
            wire = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
        except OSError as error:
            raise NotPermitted(str(error)) from None
        assert wire.stdout is not None
        assert wire.stderr is not None
        self._pids = [int(pid) for pid in wire.stdout.readline().split()]
        if not self._pids:
            raise NotPermitted((wire.stderr.read().strip() or "no namespaces").splitlines()[-1])
        return wire

    def prefix(self, host: int, folder: str) -> list[str]:
        """Return the command that runs a command on a host."""
        pid = self._pids[host]
        namespaces = [f"--{name}=/proc/{pid}/ns/{file}" for name, file in NAMESPACES.items()]
        user = [] if os.geteuid() == 0 else [f"--user=/proc/{pid}/ns/user", "--preserve-credentials"]
        return ["nsenter", *user, *namespaces, "env", f"--chdir={folder}"]

    def cut(self) -> None:
        self._command("cut")

    def restore(self) -> None:
        self._command("restore")

    def kill_one(self) -> None:
        """Kill the second host with all its processes."""
        os.kill(self._pids[1], signal.SIGKILL)

    def rebuild(self) -> None:
        """Make both hosts anew."""
        self.close()
        self._wire = self._start()

    def close(self) -> None:
        assert self._wire.stdin is not None
        self._wire.stdin.close()
        self._wire.wait(30)

    def _command(self, *words: str) -> None:
        assert self._wire.stdin is not None
        assert self._wire.stdout is not None
        self._wire.stdin.write(" ".join(words) + "\n")
        self._wire.stdin.flush()
        assert self._wire.stdout.readline() == "done\n"


def environ() -> dict[str, str]:
    """Return the variables with which run_train.sh finds the other host."""
    return {"NNODES": str(len(NAMES)), "RDZV_ENDPOINT": ENDPOINT}


def open_hosts(wanted: Sequence[str]) -> tuple[Hosts | None, str]:
    """Return hosts if any fault wants them, and the reason if there are none."""
    if not wanted:
        return None, "not asked for"
    if not (ROOT / "tests" / "wire.py").exists():
        return None, "tests/wire.py is not there"
    try:
        return Hosts(), ""
    except NotPermitted as reason:
        return None, f"namespaces are not permitted here: {reason}"
