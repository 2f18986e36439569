"""Signals to real jobs: what they save, what they return, and that no process is left."""

import json
import multiprocessing
import os
import platform
import re
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from tests.support.helpers import TinyRun, built, mentions, run_ranks, titanlite, wait_until
from tests.support.processes import newest, started, unhurried
from titanlite.runtime.signals import SAME_SECONDS, StopRequests
from titanlite.schema import Config
from titanlite.tools import cli
from titanlite.train import finish, train

TRAIN = [sys.executable, "-m", "titanlite", "train"]
LONG = ("--training.steps=1000000", "--checkpoint.interval=1000000")
BEFORE = "before training began: nothing is lost", "before a step was complete: nothing is lost"


class Asked(StopRequests):
    """Requests of one rank, from some question on."""

    def __init__(self, asked: bool) -> None:
        super().__init__()
        self.questions = 3 if asked else 10**9

    def requested(self) -> bool:
        self.questions -= 1
        return self.questions < 0


def stop_one_rank(rank: int, world_size: int, config: Config) -> int:
    run = built(rank, world_size, config)
    requests = Asked(rank == world_size - 1)
    stopped = train(run, requests)
    finish(run, stopped)
    assert stopped is not None
    return stopped.taken


def train_with_console(console: Connection, words: Sequence[str]) -> None:
    """Train like `python -m titanlite`, with a pipe as the console."""
    os.dup2(console.fileno(), 1)
    os.dup2(console.fileno(), 2)
    sys.argv = ["titanlite", "train", *words]
    cli.main()


def test_a_console_that_nobody_reads_holds_up_no_step_and_no_stop(tiny: TinyRun) -> None:
    """The pipe is full before the job prints its first line, and stays so after its end."""
    context = multiprocessing.get_context("forkserver")
    reader, writer = context.Pipe(duplex=False)
    os.set_blocking(writer.fileno(), False)
    with suppress(BlockingIOError):
        while os.write(writer.fileno(), b"x" * 1024):
            pass
    os.set_blocking(writer.fileno(), True)
    metrics = tiny.folder / "outputs" / "tiny" / "metrics.jsonl"

    def written() -> int:
        """Return the number of whole records; the last line may be half written."""
        return metrics.read_bytes().count(b"\n") if metrics.exists() else 0

    small = "--training.global_batch_size=2", "--training.seq_len=8"  # lines in a hurry
    words = f"--config={tiny.toml}", *LONG, unhurried(tiny), *small, "--metrics.log_freq=1", "--metrics.loggers=[]"
    job = context.Process(target=train_with_console, args=(writer, words))
    job.start()
    try:
        wait_until(lambda: written() >= 5, 300)
        step = written()
        wait_until(lambda: written() > step + 15, 300)
        assert job.pid is not None
        os.kill(job.pid, signal.SIGTERM)
        job.join(30)
        assert job.exitcode == 75
    finally:
        job.kill()
    saved = newest(tiny)
    assert saved >= step
    assert [record["step"] for record in tiny.records()] == [*range(1, saved + 1)]
    log = (tiny.folder / "outputs" / "tiny" / "logs" / "rank-0.log").read_text()
    assert "Ctrl-C" in log
    assert f"stopped after step {saved} by SIGTERM; step {saved} is saved in" in log
    assert re.findall(r" step +(\d+)  loss", log) == [str(number) for number in range(1, saved + 1)]
    reader.close()


def test_one_rank_is_asked_and_all_stop_after_the_same_step(tiny: TinyRun) -> None:
    assert run_ranks(stop_one_rank, 2, tiny.config(world_size=2)) == [4, 4]
    assert newest(tiny) == 4


@pytest.mark.slow
def test_workers_of_the_loader_end_with_a_killed_trainer(tiny: TinyRun) -> None:
    """They leave no sockets, as a trainer that ends by itself."""
    (temporary := tiny.folder / "t").mkdir()
    options = f"--config={tiny.toml}", "--data.num_workers=2", "--training.steps=1000000", unhurried(tiny)
    with started(tiny.folder, *options, command=TRAIN, TMPDIR=str(temporary)) as job:
        job.wait_for_step(2)
        assert len(job.pids()) == 1 + 2 + 2  # trainer, workers, fork server and resource tracker
        assert len([*temporary.glob("tlws-*")]) == 1
        job.process.send_signal(signal.SIGKILL)
        job.end()
        assert job.left() == {}
    assert not sockets_in(temporary)
    assert titanlite("train", *options[:2], "--training.steps=2", TMPDIR=str(temporary))[0] == 0
    assert not sockets_in(temporary)


def sockets_in(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_socket() or path.name.startswith("pymp-")]


def has(tiny: TinyRun, pattern: str) -> bool:
    """Return whether there is such a file or folder of the run."""
    return any((tiny.folder / "outputs" / "tiny").glob(pattern))


SAVING = "checkpoints/.staging-*"
PHASES = {
    "save": ("--checkpoint.interval=1 --checkpoint.async_mode=disabled", SAVING),
    "save in the background": ("--checkpoint.interval=1", SAVING),
    "validation": ("--validation.enable=true --validation.freq=1 --validation.path={text}", "validation.jsonl"),
    "export": ("--training.steps=2 --checkpoint.last_save_in_hf=true", "logs/export-*"),
}
"""Options, and what is there once the phase has begun."""


@pytest.mark.parametrize(
    ("phase", "sign"),
    [
        pytest.param("save", signal.SIGTERM, marks=pytest.mark.slow),
        pytest.param("validation", signal.SIGTERM, marks=pytest.mark.nightly),
        pytest.param("export", signal.SIGTERM, marks=pytest.mark.nightly),
        pytest.param("save in the background", signal.SIGINT, marks=pytest.mark.nightly),
    ],
)
def test_a_signal_in_each_phase(tiny: TinyRun, phase: str, sign: signal.Signals) -> None:
    """One complete checkpoint of the last step, exit code 75, and nothing half written."""
    words, sign_of_phase = PHASES[phase]
    options = *LONG, unhurried(tiny), "--data.num_workers=1", *words.format(text=tiny.text).split()
    with started(tiny.folder, f"--config={tiny.toml}", *options, command=TRAIN) as job:
        job.wait_for_step(2)
        job.wait_until(lambda: has(tiny, sign_of_phase))
        step = max(job.steps())
        job.process.send_signal(sign)
        assert job.end() == 75, job.text()
        saved = newest(tiny)
        assert step <= saved <= max(job.steps()) + 1
        assert job.left() == {}
        assert "Traceback" not in job.text()
        folder = tiny.folder / "outputs" / "tiny"
        if phase == "export":
            assert re.search(r"step 2\b.*checkpoint export ", job.text())
            assert [*(folder / "exports").glob("*")] == []
        else:
            assert saved == max(job.steps())
    start = json.loads((folder / "run.json").read_text())["starts"][0]
    assert start["end"] == {"code": 75, "reason": f"stopped after step {saved} by {sign.name}", "step": saved}


@pytest.mark.nightly
@pytest.mark.parametrize(
    "signals",
    [
        (("torchrun", signal.SIGINT), ("rank 1", signal.SIGTERM)),
        (("torchrun", signal.SIGUSR1), ("torchrun", signal.SIGKILL)),
    ],
    ids=["to a rank", "to the launcher"],
)
def test_signals_to_several_processes(tiny: TinyRun, signals: Sequence[tuple[str, signal.Signals]]) -> None:
    """Each start resumes what the one before has saved: torchrun or one rank is signalled, or torchrun is killed."""
    saved = 0
    for target, sign in signals:
        what = f"{sign.name} to {target}"
        with started(tiny.folder, f"--config={tiny.toml}", *LONG, "--data.num_workers=1", NPROC="2") as job:
            job.wait_for_step(saved + 2)
            before = max(job.steps())
            job.signal(job.process.pid if target == "torchrun" else job.ranks()[1], sign)
            assert job.end() == (-signal.SIGKILL if sign == signal.SIGKILL else 75), what
            assert job.left(30) == {}, what
            saved = newest(tiny)
            assert saved >= before, what
            assert f"step {saved} is saved in" in job.text(), what
            assert "Traceback" not in job.text(), what


@pytest.mark.slow
def test_before_the_first_step_a_signal_ends_a_job_at_once(tiny: TinyRun) -> None:
    """In the preparation of data."""
    (tiny.text / "long.txt").write_text("one two three four five " * 1_000_000)
    cache = tiny.folder / "outputs" / "data_cache"
    with started(tiny.folder, f"--config={tiny.toml}", *LONG, NPROC="1") as job:
        job.wait_until(cache.exists)
        job.signal(job.process.pid, signal.SIGTERM)
        began = time.monotonic()
        assert job.end() == 128 + signal.SIGTERM
        assert time.monotonic() - began < 20
        assert job.left() == {}
        assert any(text in job.text() for text in BEFORE), job.text()
        assert "Traceback" not in job.text()


@pytest.mark.nightly
def test_a_second_ctrl_c_ends_a_job_that_hangs_in_a_save(tiny: TinyRun) -> None:
    """A stopped rank answers no signal. A scheduler's second is the same request, and interrupts no wait."""
    saving = "--checkpoint.interval=1", "--checkpoint.async_mode=disabled", "--checkpoint.keep_latest_k=0"
    with started(tiny.folder, f"--config={tiny.toml}", *LONG, *saving, NPROC="2") as job:
        job.wait_for_step(2)
        stopped = job.ranks()[1]
        job.wait_until(lambda: has(tiny, SAVING))
        job.signal(stopped, signal.SIGSTOP)
        job.signal(job.process.pid, signal.SIGTERM)
        for sign in (signal.SIGTERM, signal.SIGUSR1, signal.SIGTERM):
            time.sleep(SAME_SECONDS + 1)
            assert job.process.poll() is None
            job.signal(job.process.pid, sign)
        time.sleep(1)
        assert job.process.poll() is None
        job.signal(job.process.pid, signal.SIGINT)
        assert job.end(30) == 128 + signal.SIGINT
        assert job.left() == {}
        assert newest(tiny, killed=True) in (max(job.steps()) - 1, max(job.steps()))
        assert re.search("further signal.*SIGINT", job.text())


LOSS = """
import os
import torch.distributed as dist
from titanlite.loss import token_loss
calls = []
def loss(*args, **options):
    calls.append(1)
    if len(calls) == 2 and dist.get_rank() == 1:
        print("printed")
        os.write(2, b"from a library\\n")
    if len(calls) == 3 and dist.get_rank() == 1:
        raise ValueError("planted")
    return token_loss(*args, **options)
"""


@pytest.mark.nightly
def test_an_exception_on_one_rank_is_a_dozen_lines(tiny: TinyRun) -> None:
    (tiny.folder / "mine.py").write_text(LOSS)
    options = f"--config={tiny.toml}", f"--training.loss={tiny.folder / 'mine.py'}:loss", "--data.num_workers=1"
    with started(tiny.folder, *options, NPROC="2") as job:
        job.wait_for_step(2)
        began = time.monotonic()
        assert job.end() == 1
        assert time.monotonic() - began < 30
        assert job.left() == {}
        lines = job.text().splitlines()
        [at] = [number for number, line in enumerate(lines) if line.startswith("error: ")]
        assert mentions(lines[at], f"rank 1 on {platform.node()}", "step 3", "forward", "ValueError: planted")
        assert len(lines) - at <= 12, job.text()
        assert "Traceback" not in job.text()
    logs = tiny.folder / "outputs" / "tiny" / "logs"
    log = (logs / "rank-1.log").read_text().splitlines()
    assert [line for line in log if line in ("printed", "from a library")] in (
        ["printed", "from a library"],
        ["from a library", "printed"],
    )
    assert {"printed", "from a library"} <= {*lines}, "the console has them too"
    assert any("ValueError: planted" in line for line in log)
    assert (logs / "rank-0.log").read_text().count("step     2  loss") == 1
