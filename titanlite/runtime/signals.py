"""Signals that stop a run, and processes that must end with their parent."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import connection

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
"""Signals that ask a run to save and end: of schedulers, of a terminal, and of its end."""


@contextmanager
def shielding_children() -> Iterator[None]:
    """Let processes that start in this context never get the signals that stop a run.

    A terminal, a scheduler and torchrun send a signal to the whole process group. What it means is decided by the
    process that trains, and its workers are needed until then. Signals to this process arrive after the context.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def end_with_parent() -> None:
    """End this worker process as soon as the process that asked for it has ended, however that ended.

    A worker of a fork server has the server as its parent, and the server lives as long as any worker.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None

    def wait() -> None:
        connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=wait, name="parent watch", daemon=True).start()
