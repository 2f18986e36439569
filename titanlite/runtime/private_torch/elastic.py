"""torchelastic, which is torchrun's, and forks: how workers start, and what their launcher logs."""

import ctypes
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler


def start_workers_by(start: Callable[[tuple[str, ...], dict[str, str]], Any]) -> None:
    """Let torchelastic start its workers by a function, which returns an object like that of `subprocess.Popen`.

    Workers whose output torchelastic redirects, and those that it starts under numactl, are new processes as before.

    Args:
        start: gets the words of the command, and the whole environment.
    """
    new_process = SubprocessHandler._popen

    def popen(self: SubprocessHandler, args: tuple[str, ...], env: dict[str, str]) -> Any:
        is_plain = args[0] == sys.executable and not self._stdout and not self._stderr
        return start(args, env) if is_plain else new_process(self, args, env)

    SubprocessHandler._popen = popen


def read_log_level() -> None:
    """Let PyTorch's C++ code read TORCH_CPP_LOG_LEVEL again, which it reads when it is imported."""
    with suppress(OSError, AttributeError):
        library = ctypes.CDLL(str(Path(torch.__file__).with_name("lib") / "libc10.so"))
        library._ZN3c1011initLoggingEv()


def has_lost_cuda() -> bool:
    """Return whether this process is the fork of one that had used CUDA. Then it cannot use CUDA itself."""
    return torch.cuda._is_in_bad_fork()
