"""Two hosts of a soak, with a link between them that can be cut: tests/support/hosts.py makes them."""

from collections.abc import Sequence
from contextlib import ExitStack

import repository  # noqa: F401

from tests.support.hosts import Network, NotPermitted, open_network

NAMES = ("node0", "node1")
ENDPOINT = f"{NAMES[0]}:29500"


class Hosts:
    """Hosts of a soak. They end with this process.

    Raises:
        OSError, NotPermitted: the system makes no namespaces.
    """

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._network = self._start()

    def _start(self) -> Network:
        return self._stack.enter_context(open_network(*NAMES))

    def prefix(self, host: int, folder: str) -> list[str]:
        """Return the command that runs a command on a host."""
        return self._network.hosts[host].inside("env", f"--chdir={folder}")

    def cut(self) -> None:
        self._network.tell("cut")

    def restore(self) -> None:
        self._network.tell("restore")

    def kill_one(self) -> None:
        """Kill the second host with all its processes."""
        self._network.hosts[1].kill()

    def rebuild(self) -> None:
        """Make both hosts anew."""
        self.close()
        self._network = self._start()

    def close(self) -> None:
        self._stack.close()


def environ() -> dict[str, str]:
    """Return the variables with which run_train.sh finds the other host."""
    return {"NNODES": str(len(NAMES)), "RDZV_ENDPOINT": ENDPOINT}


def open_hosts(wanted: Sequence[str]) -> tuple[Hosts | None, str]:
    """Return hosts if any fault wants them, and the reason if there are none."""
    if not wanted:
        return None, "not asked for"
    try:
        return Hosts(), ""
    except (OSError, NotPermitted) as reason:
        return None, f"namespaces are not permitted here: {reason}"
