"""A run with all at once: loader workers, a small /dev/shm that they share with local copies, rollbacks, and kills.

Each of the two ranks is a machine, whose /dev/shm is a file system of its own, of a given size.
"""

import ctypes
import os
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from tests.support.crash import train
from tests.support.local_crash import LocalCrashRun
from titanlite.tools.fork_server import fork_worker_server

CLONE_NEWNS, MS_REC, MS_PRIVATE, MS_BIND = 0x20000, 0x4000, 1 << 18, 0x1000
BAD_STEP, WINDOW = 6, 8
"""The step that reads the only Z, and the steps in the mean that a spike is compared with."""
LOSS = """
import time
from titanlite.loss import TokenLoss, token_loss

def loss(hidden_BLD, weight_VD, *, labels_BL):
    time.sleep(0.02)
    found = token_loss(hidden_BLD, weight_VD, labels_BL=labels_BL)
    factor = 1000 if bool((labels_BL == ord("Z")).any()) else 1
    return TokenLoss(found.total * factor, found.cross_entropy * factor)
"""
OPTIONS = (
    "--data.num_workers=1", "--data.shuffle=false", "--guard.spike_sigma=20", "--guard.on_spike=rollback",
    "--comm.train_timeout_seconds=60",
)  # fmt: skip


class Storm(LocalCrashRun):
    """A run in an empty folder.

    Args:
        room: bytes of each machine's /dev/shm.
    """

    def __init__(self, folder: Path, *, seed: int, room: int) -> None:
        (folder / "odd.py").write_text(LOSS)
        super().__init__(folder, seed=seed, options=(*OPTIONS, f"--training.loss={folder / 'odd.py'}:loss"))
        text = bytearray((self.tiny.text / "a.txt").read_bytes())
        text[(8 * (BAD_STEP - 1) + 3) * 32 + 9] = ord("Z")
        (self.tiny.text / "a.txt").write_bytes(text)
        self._room = room

    @contextmanager
    def _started(self, name: str, steps: int) -> Iterator[tuple[list[Any], Path]]:
        """Give the run without faults the room that it wants."""
        homes, self.homes = self.homes, [home.with_name(f"{name}-{home.name}") for home in self.homes]
        self.homes = self.homes if name == "whole" else homes
        for home in self.homes:
            home.mkdir(exist_ok=True)
        try:
            with super()._started(name, steps) as started:
                yield started
        finally:
            self.homes = homes

    @staticmethod
    def train(rank: int, output: Path, port: int, command: list[str], environ: dict[str, str]) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        assert libc.unshare(CLONE_NEWNS) == 0
        assert libc.mount(None, b"/", None, MS_REC | MS_PRIVATE, None) == 0
        assert libc.mount(environ["HOME"].encode(), b"/dev/shm", None, MS_BIND, None) == 0
        fork_worker_server()
        with patch("titanlite.guard.SPIKE_WINDOW", WINDOW):
            train(rank, output, port, command, environ)

    @contextmanager
    def machines(self) -> Iterator[None]:
        """Mount the memory of the machines; skip the test where that is not permitted."""
        with ExitStack() as stack:
            for home in self.homes:
                mount = ["mount", "-t", "tmpfs", "-o", f"size={self._room}", "tmpfs", str(home)]
                if os.geteuid() != 0 or subprocess.run(mount, check=False, capture_output=True).returncode:
                    pytest.skip("file systems cannot be mounted here")
                stack.callback(subprocess.run, ["umount", "-l", str(home)], check=True)
            yield
