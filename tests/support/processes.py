"""Runs as processes of their own, to be signalled, and the processes that they leave."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.support.helpers import TinyRun
from titanlite.checkpoint import manifest as manifests
from titanlite.storage.storage import LocalStorage

SCRIPT = Path(__file__).parents[2] / "run_train.sh"


def processes_with(mark: bytes) -> dict[int, str]:
    """Return {process: command line} of every process that is alive and has a mark in its environment."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if mark in (folder / "environ").read_bytes():
                command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                if command:  # a zombie has none
                    found[int(folder.name)] = command
        except OSError:  # gone meanwhile
            continue
    return found


def rank_of(pid: int, command: str) -> int | None:
    """Return the rank of a process: a fork shows it in its command line, a new process has it in its environment."""
    if found := re.search(r"\(rank (\d+)\)", command):
        return int(found[1])
    environ = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return next((int(entry[5:]) for entry in environ if entry.startswith(b"RANK=")), None)


def trainers(pids: Mapping[int, str]) -> list[int]:
    """Return the processes that train, by rank.

    Args:
        pids: {process: command line}.
    """
    training = {pid: command for pid, command in pids.items() if "titanlite train" in command}
    ranks = {rank: pid for pid, command in training.items() if (rank := rank_of(pid, command)) is not None}
    return [pid for _, pid in sorted(ranks.items())]


def processes_left(mark: bytes, seconds: float) -> dict[int, str]:
    """Return {process: command line} of the processes with a mark that are alive after some time."""
    deadline = time.monotonic() + seconds
    while (pids := processes_with(mark)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return pids


def kill_all(pids: Iterable[int]) -> None:
    """End processes at once."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


class Job:
    """A run_train.sh or titanlite train with all its processes, found by a mark in their environment."""

    def __init__(self, process: "subprocess.Popen[bytes]", mark: str, output: Path) -> None:
        self.process = process
        self.mark = mark.encode()
        self.output = output

    def pids(self) -> dict[int, str]:
        """Return {process: command line} of every process of the job that is alive."""
        return processes_with(self.mark)

    def ranks(self) -> list[int]:
        """Return the processes that train, by rank."""
        return trainers(self.pids())

    def text(self) -> str:
        return self.output.read_text()

    def steps(self) -> list[int]:
        """Return the steps that the console shows."""
        return [int(step) for step in re.findall(r"^step +(\d+)  loss", self.text(), re.M)]

    def signal(self, pid: int, sign: signal.Signals) -> None:
        os.kill(pid, sign)

    def wait_until(self, condition: Callable[[], bool], seconds: float = 300) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert self.process.poll() is None, f"ended with {self.process.returncode}: {self.text()}"
            assert time.monotonic() < deadline, f"not in time: {self.text()}"
            time.sleep(0.02)

    def wait_for_step(self, step: int) -> None:
        self.wait_until(lambda: max(self.steps(), default=0) >= step)

    def end(self, seconds: float = 60) -> int:
        """Wait for the end of the job, and return its exit code."""
        return self.process.wait(seconds)

    def left(self, seconds: float = 15) -> dict[int, str]:
        """Return the processes that are alive after some time."""
        return processes_left(self.mark, seconds)


@contextmanager
def started(folder: Path, *words: str, command: Sequence[str] | None = None, **environ: str) -> Iterator[Job]:
    """Start a job in a session of its own, with its output in a file. No process is left when the context ends.

    Args:
        words: arguments of run_train.sh.
        command: a command to start instead.
    """
    mark = f"TITANLITE_TEST_JOB={os.getpid()}-{time.monotonic_ns()}"
    name, value = mark.split("=")
    environment = {key: text for key, text in os.environ.items() if key != "RANK"}
    environment |= {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1", **environ}
    output = folder / f"output-{value}.txt"
    hangup = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # a run that inherits nohup's ignores it
    try:
        with open(output, "wb") as file:
            process = subprocess.Popen(
                [*(command or [str(SCRIPT)]), *words],
                stdout=file,
                stderr=subprocess.STDOUT,
                env=environment | {name: value},
                cwd=folder,
                start_new_session=True,
            )
    finally:
        signal.signal(signal.SIGHUP, hangup)
    job = Job(process, mark, output)
    try:
        yield job
    finally:
        kill_all(job.pids())
        process.wait()


UNHURRIED = """
import time
from titanlite.loss import token_loss

def loss(*args, **options):
    time.sleep(0.05)
    return token_loss(*args, **options)
"""


def unhurried(tiny: TinyRun) -> str:
    """Return an option that lets each micro-batch sleep: an endless job leaves its cores to other tests."""
    (tiny.folder / "unhurried.py").write_text(UNHURRIED)
    return f"--training.loss={tiny.folder / 'unhurried.py'}:loss"


def newest(tiny: TinyRun, *, killed: bool = False) -> int:
    """Return the newest step that is saved, after checking that every checkpoint is complete and nothing else is.

    Args:
        killed: the job was killed, which may leave the hidden folder of a save that never counts.
    """
    storage = LocalStorage(f"{tiny.folder}/outputs/tiny/checkpoints", "")
    listing = storage.list()
    steps = manifests.committed_steps(listing)
    assert [*map(manifests.folder_name, steps)] == sorted(
        name for name in listing if not (killed and name.startswith(".staging-"))
    ), "a partial checkpoint"
    for folder in map(manifests.folder_name, steps):
        manifests.verify(storage, folder, listing[folder])
    return max(steps, default=0)
