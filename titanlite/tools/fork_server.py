"""Fork server of run_train.sh: a process that has imported PyTorch once, and does nothing but fork others.

The check of the config, the ranks and their restarts are forks of it. It has one thread, has touched no GPU and belongs
to no process group, so that a fork of it is as good as a new process, and begins at once. Its pages are shared.
Python's own fork server would be the parent of the ranks, and report their ends; here the launcher is their parent, as
it is of new processes: it waits for them, and they notice its end. For the workers of a rank's data loader Python's
own is right, because each rank has one, as a fork of the rank (`fork_worker_server`).
"""

import ctypes
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from multiprocessing import forkserver, util
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

from titanlite.run.proc import state_of
from titanlite.runtime.signals import end_with, make_socket_folder, shielding_children

PR_SET_CHILD_SUBREAPER = 36
START_SECONDS = 60.0
"""Longest wait for a fork."""
STOPPED_SECONDS = 1.0
"""Time without an answer after which the server is looked at."""
POLL_SECONDS = 0.02

Handlers = Mapping[signal.Signals, Any]
"""{signal: its handler}, as a new process has them."""


class ForkedProcess:
    """Child process, with the methods of `subprocess.Popen` that torchelastic calls."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return the exit code, or -N after signal N; None while the process runs."""
        if self.returncode is None:
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:  # SIGCHLD is ignored, so that the system has forgotten the code
                self.returncode = 0
            else:
                self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end, and return the exit code.

        Raises:
            subprocess.TimeoutExpired: the process still runs.
        """
        began = time.monotonic()
        while (code := self.poll()) is None:
            if timeout is not None and time.monotonic() - began > timeout:
                raise subprocess.TimeoutExpired(str(self.pid), timeout)
            time.sleep(POLL_SECONDS)
        return code


class CannotFork(Exception):
    """A fork of this process would differ from a new process, with the reason."""


class ForkServer:
    """Server, forked from this process, which has imported what its forks need.

    Args:
        run: what a fork does.
        handlers: signal handlers of the forks; the server itself ignores these signals.

    Raises:
        CannotFork: a tracer or further threads run, or the GPU is in use.
    """

    def __init__(self, run: Callable[[], NoReturn], handlers: Handlers) -> None:
        if sys.platform != "linux":
            raise CannotFork("that needs Linux")
        if sys.gettrace() is not None:
            raise CannotFork("a debugger or a tracer runs")
        self._connection, theirs = multiprocessing.Pipe()
        launcher = os.getpid()
        try:
            if not (server := os.fork()):
                end_with(launcher)  # also where the server is stopped
                self._connection.close()
                _act(theirs, run, handlers)
            self._pid = server
            theirs.close()
            reason = "CUDA is in use already" if self._connection.recv() else ""
            if len(os.listdir("/proc/self/task")) > 1:  # those of OpenBLAS, which numpy starts, end before a fork
                reason = "there are threads already"
        except (EOFError, OSError) as error:
            reason = repr(error)
        if reason:
            self._connection.close()
            raise CannotFork(reason)

    def start(self, command: Sequence[str], environ: Mapping[str, str], *, new_session: bool = True) -> ForkedProcess:
        """Fork a child of this process, in place of a new process.

        Args:
            command: words of the new process: PYTHON -u -m titanlite ...
            environ: its whole environment.

        Raises:
            OSError, EOFError: the server cannot fork, or has ended.
        """
        prctl = ctypes.CDLL(None, use_errno=True).prctl
        prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # the fork's parent ends at once, and this process takes its place
        try:
            self._connection.send((list(command), dict(environ), new_session))
            self._await_answer()
            answer = self._connection.recv()
        finally:
            prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
        if isinstance(answer, OSError):
            raise answer
        return ForkedProcess(answer)

    def _await_answer(self) -> None:
        """Wait until the server has answered.

        Raises:
            TimeoutError: it does not, or is stopped. It is killed, and starts nothing later.
        """
        began = time.monotonic()
        while not self._connection.poll(STOPPED_SECONDS):
            is_stopped = state_of(self._pid) == "T"
            if is_stopped or time.monotonic() - began > START_SECONDS:
                os.kill(self._pid, signal.SIGKILL)
                os.waitpid(self._pid, 0)
                raise TimeoutError("it is stopped" if is_stopped else f"it has not answered for {START_SECONDS:g} s")


def fork_worker_server() -> None:
    """Start the process that the loader workers of this process are forked from, as a fork of this process.

    Call it as the first thing in a fork of the server: Python starts a new process for it later, which imports PyTorch.
    """
    make_socket_folder()
    with shielding_children():
        new_process, util.spawnv_passfds = util.spawnv_passfds, _fork_in_place_of
        try:
            forkserver.set_forkserver_preload([])  # all is imported
            forkserver.ensure_running()
        finally:
            util.spawnv_passfds = new_process


def _fork_in_place_of(python: bytes, command: Sequence[str], files: Sequence[int]) -> int:
    """Run the code of `python -c CODE` in a fork, which keeps only some open files. Return its process id."""
    if pid := os.fork():
        return pid
    try:
        _close_files(lambda file: file not in files)
        _show([os.fsdecode(python), "-m", forkserver.__name__])
        exec(command[-1], {})
    except SystemExit:
        os._exit(0)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


def _act(connection: Connection, run: Callable[[], NoReturn], handlers: Handlers) -> NoReturn:
    """Be the server; in its forks, what they are for."""
    try:
        for number in handlers:
            signal.signal(number, signal.SIG_IGN)
        _close_files(os.get_inheritable)  # those that the shell has opened: a new process would not get them
        _show([*sys.orig_argv[:1], "-m", __name__])
        from titanlite.runtime.private_torch.elastic import has_lost_cuda

        connection.send(has_lost_cuda())
        _serve(connection, handlers)
        run()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)  # no fork returns into the launcher's code


def _close_files(is_chosen: Callable[[int], bool]) -> None:
    """Close the chosen ones of this process's open files, but not the standard streams."""
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            if int(name) > 2 and is_chosen(int(name)):
                os.close(int(name))


def _serve(connection: Connection, handlers: Handlers) -> None:
    """Fork at each request. It returns in the forks, and never in the server."""
    while True:
        try:
            command, environ, new_session = connection.recv()
        except (EOFError, OSError):  # the launcher has ended
            os._exit(0)
        try:
            if not (helper := os.fork()):
                break
            os.waitpid(helper, 0)
        except OSError as error:
            connection.send(error)
    helper = os.getpid()
    try:
        if os.fork():
            os._exit(0)
    except OSError as error:
        connection.send(error)
        os._exit(1)
    if new_session:
        os.setsid()
    _become(command, environ, handlers)
    while os.getppid() == helper:  # until the launcher is the parent
        time.sleep(0.001)
    connection.send(os.getpid())
    connection.close()


def _become(command: Sequence[str], environ: Mapping[str, str], handlers: Handlers) -> None:
    """Give this process what a new process would have."""
    os.environ.clear()
    os.environ.update(environ)
    for number, handler in handlers.items():
        signal.signal(number, handler)
    sys.orig_argv = list(command)
    sys.argv = [str(Path(__file__).parents[1] / "__main__.py"), *command[command.index("titanlite") + 1 :]]
    sys.modules["__main__"] = import_module("titanlite.__main__")  # processes that this one spawns do not import it
    threading.main_thread()._set_native_id()  # pyright: ignore  # noqa: SLF001 (a fork keeps that of its parent)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()  # Python's own generator is seeded by each fork
    _show([*command, *([f"(rank {environ['RANK']})"] if "RANK" in environ else [])])


def _show(command: Sequence[str]) -> None:
    """Let ps show another command: overwrite the words with which this process began, as far as they reach."""
    begin, end = (int(field) for field in Path("/proc/self/stat").read_text().rpartition(")")[2].split()[45:47])
    words = b"".join(os.fsencode(word) + b"\0" for word in command)
    if 0 < begin < end:
        ctypes.memmove(begin, words[: end - begin - 1].ljust(end - begin, b"\0"), end - begin)
