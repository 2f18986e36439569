"""Stop of a run by signals and by the clock, and processes that must end with their parent. Imports no torch.

A signal asks one process to stop, and all ranks must stop after the same step. So each rank adds a flag to the
all-reduce of every step (`step.py`), and a rank that reads a sum above 0 knows that every other rank reads it too.
"""

import ctypes
import math
import multiprocessing
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from multiprocessing import connection, resource_tracker
from typing import Any

from titanlite.runtime.errors import RunStopped, whole_number

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)
"""Signals that ask a run to save and end: of schedulers (SIGUSR2 of submitit), of a terminal, and of its end."""
SAME_SECONDS = 2.0
"""Time within which SIGINT is the same request: a terminal signals every process, and the launcher repeats it."""
SLURM_MARGIN = 300.0
"""Seconds before the end of a Slurm job at which a run stops, so that its checkpoint is written in time."""
STOPPED = 75
"""Exit code of a run that was asked to stop (EX_TEMPFAIL of sysexits.h): start it again."""
PR_SET_PDEATHSIG = 1
SOCKETS = "tlws-"
"""How the name of a temporary folder of sockets begins: no longer than Python's own, since a path of a socket has 107
bytes at most."""
START_SECONDS = 10.0
"""Longest time for which the end of a process waits for the start of its children."""
STARTING_CHILDREN = threading.RLock()
"""Held while a child process starts."""


EndNow = Callable[[str, int], object]


class StoppedBySignal(RunStopped):
    """A run that was asked to stop. Every rank raises it after the same step."""

    exit_code = STOPPED


class StopRequests:
    """Requests to stop a run: signals to this process, and the end of its time.

    Until the first step of this start is complete, a signal ends the process at once with 128 + its number: nothing
    would be lost, and nothing was won. From then on it is a request, which `requested` returns. Schedulers repeat
    their signals (Slurm: at the end of a grace time, half a minute before SIGKILL), so only a later SIGINT, which a
    person sends, ends the process at once.
    """

    def __init__(self) -> None:
        self.end, self.planned = math.inf, ""
        """Time of `time.monotonic` from which on the run must stop, and the reason. The time of day may be set."""
        self._signal: str | None = None
        self._since = 0.0
        self._trains = False

    def plan(self, max_seconds: float | None, environ: Mapping[str, str], *, started: float, since_1970: float) -> None:
        """Plan the end of this start: after a time, and before the end of a Slurm job.

        Args:
            max_seconds: `training.max_duration`.
            environ: `use_own_job` has seen it. Empty on other ranks than the first: all stop if one is asked to.
            started: time of `time.monotonic` at which this start began.
            since_1970: time of day less that of `time.monotonic`.

        Raises:
            UserError: SLURM_JOB_END_TIME is not a number.
        """
        ends = [] if max_seconds is None else [(started + max_seconds, "training.max_duration")]
        if end := whole_number(environ, "SLURM_JOB_END_TIME", 0):
            margin = min(SLURM_MARGIN, max(end - since_1970 - started, 0) / 10)  # a job of minutes trains, too
            ends.append((end - since_1970 - margin, "the end of the Slurm job"))
        self.end, self.planned = min(ends, default=(math.inf, ""))

    def requested(self) -> bool:
        """Return whether this process knows a reason to stop."""
        return self._signal is not None or time.monotonic() >= self.end

    @property
    def reason(self) -> str:
        """Reason for the stop, as far as this process knows."""
        if self._signal is None and time.monotonic() >= self.end:
            return self.planned
        return self._signal or "a signal to another process"

    def is_training(self) -> bool:
        """Return whether a signal is a request, not the end."""
        return self._trains

    def begin_training(self) -> None:
        """Take a first signal as a request from now on. Call it when the first step is complete."""
        self._trains = True

    def stopped(self, step: int) -> StoppedBySignal:
        """Return the error that ends the run after a step."""
        return StoppedBySignal(f"stopped after step {step} by {self.reason}", taken=step)

    @contextmanager
    def listening(self, end_now: EndNow, has_failed: Callable[[], bool]) -> Iterator[None]:
        """Receive signals in this context. Only the main thread of a process can; elsewhere this does nothing.

        A thread waits for them, since the main thread may be in a collective that never returns.

        Args:
            end_now: prints a line and ends the process with an exit code.
            has_failed: whether another process of this machine has ended. Then torchrun ends this one, too.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        inbox, outbox = socket.socketpair()
        outbox.setblocking(False)
        ignored = [number for number in (signal.SIGHUP,) if signal.getsignal(number) == signal.SIG_IGN]  # nohup
        numbers = [number for number in STOP_SIGNALS if number not in ignored]
        handlers = {number: signal.signal(number, lambda *_: None) for number in numbers}
        previous = signal.set_wakeup_fd(outbox.fileno(), warn_on_full_buffer=False)

        def listen() -> None:
            while received := inbox.recv(1):
                if received[0] in numbers:
                    self.receive(signal.Signals(received[0]), end_now, has_failed)

        thread = threading.Thread(target=listen, name="signals", daemon=True)
        thread.start()
        try:
            yield
        finally:
            signal.set_wakeup_fd(previous)
            for number, handler in handlers.items():
                signal.signal(number, handler)
            outbox.close()  # ends the thread
            thread.join()
            inbox.close()

    def receive(self, number: signal.Signals, end_now: EndNow, has_failed: Callable[[], bool]) -> None:
        """Act on a signal."""
        if number == signal.SIGTERM and has_failed():
            end_now("", 1)
        elif not self.is_training():
            end_now(f"stopped by {number.name} before a step was complete: nothing is lost", 128 + number)
        elif self._signal is None:
            self._signal, self._since = number.name, time.monotonic()
        elif number == signal.SIGINT and time.monotonic() - self._since > SAME_SECONDS:
            end_now(f"stopped at once by a further signal, {number.name}: no checkpoint was saved", 128 + number)


# Processes and their parents


def describe_end(code: int) -> str:
    """Return words for the end of a process: its exit code, or -N after signal N."""
    if code >= 0:
        return f"ended with exit code {code}"
    name = signal.Signals(-code).name
    hints = {
        "SIGBUS": " (a file of tokens became shorter while it was read, or /dev/shm is full)",
        "SIGKILL": " (by the system, if memory ran out: see dmesg)",
    }
    return f"was ended by {name}{hints.get(name, '')}"


def stop_with_launcher() -> None:
    """Let this process get SIGTERM when torchrun ends, however it ended. Nobody would end a rank without it."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)


def end_with(starter: int) -> None:
    """Let this process be killed when the process that started it ends, however that ended.

    Args:
        starter: its id. Its thread that started this process must live as long.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != starter:  # it has ended already
        os._exit(1)


@contextmanager
def shielding_children() -> Iterator[None]:
    """Let processes that start in this context never get the signals that stop a run.

    A terminal, a scheduler and torchrun send a signal to the whole process group. What it means is decided by the
    process that trains, and its workers are needed until then. `kill_workers` waits for the end of this context.
    """
    with STARTING_CHILDREN:
        before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        try:
            with _without_warnings(os.environ):  # of what a process leaves that ends at once
                resource_tracker.ensure_running()  # its first start unblocks SIGTERM and SIGINT
            signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


def make_socket_folder() -> None:
    """Make the folder of the sockets by which this process talks to its workers, which inherit it.

    Python's own would be removed by finalizers, which a process of the command does not run, or be that of a process
    which has started this one by `multiprocessing`.
    """
    config = _process_config()
    if not os.path.basename(config.get("tempdir") or "").startswith(SOCKETS):
        config["tempdir"] = tempfile.mkdtemp(prefix=SOCKETS)


def remove_sockets() -> None:
    """Remove the folder that `make_socket_folder` has made in this process, or in the one that has started it."""
    folder = _process_config().get("tempdir") or ""
    if os.path.basename(folder).startswith(SOCKETS):
        shutil.rmtree(folder, ignore_errors=True)


def _process_config() -> dict[str, Any]:
    return multiprocessing.current_process()._config  # pyright: ignore  # noqa: SLF001 (nothing else sets this folder)


def kill_workers() -> None:
    """Kill the worker processes of this one, which ends next. No further one starts.

    A worker that has just begun still reads from this process, and would print a traceback.
    """
    STARTING_CHILDREN.acquire(timeout=START_SECONDS)  # and never released
    for worker in multiprocessing.active_children():
        worker.kill()


@contextmanager
def _without_warnings(environ: MutableMapping[str, str]) -> Iterator[None]:
    """Let Python processes that start in this context print no warnings."""
    before = environ.get("PYTHONWARNINGS")
    environ["PYTHONWARNINGS"] = "ignore"
    try:
        yield
    finally:
        if before is None:
            del environ["PYTHONWARNINGS"]
        else:
            environ["PYTHONWARNINGS"] = before


def end_with_parent() -> None:
    """End this worker process as soon as the process that asked for it has ended, however that ended.

    A worker of a fork server has the server as its parent, and the server lives as long as any worker.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None

    def wait() -> None:
        connection.wait([parent.sentinel])
        remove_sockets()  # those of the parent, if it was killed
        os._exit(1)

    threading.Thread(target=wait, name="parent watch", daemon=True).start()
