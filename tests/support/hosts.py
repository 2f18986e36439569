"""Several hosts on one machine, joined by a network that a test can cut, delay and make lossy (wire.py)."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import SCRIPT, Job, started

WIRE = Path(__file__).with_name("wire.py")
NAMESPACES = {"net": "net", "uts": "uts", "mount": "mnt", "pid": "pid_for_children"}
"""Namespaces of a host: {option of nsenter: file in /proc/PID/ns}."""


class Host:
    """A host: namespaces of network, host name, processes and mounts.

    Args:
        pid: process whose namespaces are the host's.
    """

    def __init__(self, name: str, pid: int) -> None:
        self.name = name
        self.pid = pid

    def inside(self, *command: str) -> list[str]:
        """Return a command that runs a command on this host."""
        namespaces = [f"--{name}=/proc/{self.pid}/ns/{file}" for name, file in NAMESPACES.items()]
        user = [] if os.geteuid() == 0 else [f"--user=/proc/{self.pid}/ns/user", "--preserve-credentials"]
        return ["nsenter", *user, *namespaces, *command]

    def has(self, pid: int) -> bool:
        """Return whether a process runs on this host."""
        return os.readlink(f"/proc/{pid}/ns/uts") == os.readlink(f"/proc/{self.pid}/ns/uts")

    def run(self, *command: str) -> str:
        return subprocess.run(self.inside(*command), check=True, capture_output=True, text=True, timeout=60).stdout

    def kill(self) -> None:
        """Kill all processes of the host at once. Linux closes their connections, and then removes its network."""
        os.kill(self.pid, signal.SIGKILL)


class Network:
    """Hosts and the wire between them."""

    def __init__(self, process: "subprocess.Popen[str]", hosts: list[Host]) -> None:
        self.process = process
        self.hosts = hosts

    def tell(self, *words: object) -> None:
        """Give the wire a command (tests/support/wire.py has them), and wait until it holds."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(" ".join(map(str, words)) + "\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "done\n"

    @contextmanager
    def job(self, folder: Path, *words: str, **environ: str) -> Iterator[list[Job]]:
        """Start run_train.sh on each host; yield a job for each. The first host has the rendezvous."""
        variables: dict[str, Any] = {
            "NNODES": str(len(self.hosts)), "RDZV_ENDPOINT": f"{self.hosts[0].name}:29500", **environ,
        }  # fmt: skip
        chosen = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"  # by training in this process
        own = [f"--unset={name}" for name in chosen]
        commands = [host.inside("env", *own, f"--chdir={folder}", str(SCRIPT)) for host in self.hosts]
        with ExitStack() as stack:
            yield [stack.enter_context(started(folder, *words, command=command, **variables)) for command in commands]


class NotPermitted(Exception):
    """A system that lets nobody make hosts; the message is its reason."""


@contextmanager
def open_network(*names: str) -> Iterator[Network]:
    """Make hosts with these names. They end with the context, and with this process.

    Raises:
        NotPermitted: the system makes no namespaces.
    """
    user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    pipe = subprocess.PIPE
    command = ["unshare", *user, "--net", sys.executable, str(WIRE), *names]
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        pids = process.stdout.readline().split()
        if not pids:
            raise NotPermitted((process.stderr.read().strip() or "no output").splitlines()[-1])
        try:
            yield Network(process, [Host(name, int(pid)) for name, pid in zip(names, pids, strict=True)])
        finally:
            process.stdin.close()
            process.wait(30)


@contextmanager
def network(*names: str) -> Iterator[Network]:
    """Make hosts as `open_network` does. Skips the test where the system permits none, with the system's reason."""
    with ExitStack() as stack:
        try:
            made = stack.enter_context(open_network(*names))
        except (OSError, NotPermitted) as reason:
            pytest.skip(f"namespaces of hosts are not permitted here: {reason}")
        yield made
