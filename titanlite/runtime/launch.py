"""Start the processes of one machine with torchrun, and end as they end: what run_train.sh runs for several processes.

torchrun turns every exit code of its workers into 1 and prints tracebacks of its own. Here the first worker that ends
leaves its exit code in a file, and torchrun's exceptions become one line. A signal goes to every worker, which decides
what it means; this process waits for them.
"""

import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NoReturn

from titanlite.runtime.signals import STOP_SIGNALS, STOPPED, StopRequests

SHUTDOWN_SECONDS = 3600
"""Time that workers have to save a checkpoint after a signal, until torchrun kills them."""
GRACE_SECONDS = 10
"""Time that workers have to end after a second signal, until they are killed: a stopped one (SIGSTOP) never ends."""


class _Requests(StopRequests):
    """Signals to this process. Before there are workers it ends at once; then torchrun passes signals on to them."""

    def is_training(self) -> bool:
        return bool(_workers())


def main() -> NoReturn:
    """Check the config, run torchrun, and end with the exit code of the workers.

    Words of the command line: number of machines, processes on each, host:port of the first, arguments of training.
    """
    nodes, processes, endpoint, *words = sys.argv[1:]
    folder = Path(tempfile.mkdtemp(prefix="titanlite-"))
    with _Requests().listening(partial(_end_now, folder), lambda: False):
        try:
            code = _launch(int(nodes), int(processes), endpoint, words, folder / "code")
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code)


def _launch(nodes: int, processes: int, endpoint: str, words: list[str], exit_file: Path) -> int:
    sizes = {"WORLD_SIZE": str(nodes * processes), "LOCAL_WORLD_SIZE": str(processes)}
    check = subprocess.Popen([sys.executable, "-m", "titanlite", "check", *words], env={**os.environ, **sizes})
    from torch.distributed.elastic.multiprocessing import SignalException  # while the check runs
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    if code := check.wait():  # mistakes are reported once and at once, not by every process
        return code
    _set_environment(processes, exit_file)
    logging.disable(logging.ERROR)  # torchrun reports what is reported here
    ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN  # as nohup asks for
    signals = [it.name for it in (*STOP_SIGNALS, signal.SIGQUIT) if not (ignored and it == signal.SIGHUP)]
    failure = ""
    try:
        torchrun(
            [
                f"--nnodes={nodes}", f"--nproc_per_node={processes}", "--rdzv_backend=c10d",
                f"--rdzv_endpoint={endpoint}", f"--signals-to-handle={','.join(signals)}",
                "-m", "titanlite", "train", *words,
            ]
        )  # fmt: skip
        return 0
    except SignalException:
        code = STOPPED
    except ChildFailedError as error:
        rank, first = error.get_first_failure()
        failure = f"rank {rank} (process {first.pid}) {_ending(first.exitcode)}, without an error of its own"
        code = 1
    except Exception as error:
        failure, code = f"torchrun: {type(error).__name__}: {error}", 1
    if exit_file.exists():
        return int(exit_file.read_text())
    if failure:
        print(f"error: {failure}", file=sys.stderr, flush=True)
    return code


def _end_now(folder: Path, message: str, code: int) -> NoReturn:
    """End this process and all workers, which get some time to end by themselves."""
    print(message, file=sys.stderr, flush=True)
    deadline = time.monotonic() + GRACE_SECONDS
    while (workers := _workers()) and time.monotonic() < deadline:
        time.sleep(0.1)
    for pid in workers or _children():  # without workers, the check of the config
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL) if workers else os.kill(pid, signal.SIGKILL)
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(code)


def _children() -> list[int]:
    """Return the child processes of this process; nothing where the system has no /proc."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, parent = stat.read_text().rpartition(")")[2].split()[:2]
            if int(parent) == os.getpid() and state != "Z":
                found.append(int(stat.parent.name))
    return found


def _workers() -> list[int]:
    """Return the processes that torchrun has started: each leads a session of its own."""
    return [pid for pid in _children() if os.getpgid(pid) == pid]


def _set_environment(processes: int, exit_file: Path) -> None:
    """Set what torchrun and its workers read from the environment."""
    if "OMP_NUM_THREADS" not in os.environ:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        os.environ["OMP_NUM_THREADS"] = str(max(1, cores // processes))
    os.environ.setdefault("TORCHELASTIC_SHUTDOWN_TIMEOUT", str(SHUTDOWN_SECONDS))
    os.environ["TITANLITE_EXIT_FILE"] = str(exit_file)


def _ending(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    name = signal.Signals(-code).name
    hints = {
        "SIGBUS": " (a file of tokens became shorter while it was read, or /dev/shm is full)",
        "SIGKILL": " (by the system, if memory ran out: see dmesg)",
    }
    return f"was ended by {name}{hints.get(name, '')}"


if __name__ == "__main__":
    main()
