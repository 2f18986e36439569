"""Hangs of real jobs: what they are taken for, what the console has, and how they end."""

import os
import platform
import signal
import sys
from pathlib import Path

import pytest

from tests.support.helpers import TinyRun, mentions
from tests.support.processes import Job, started
from titanlite.run.proc import descendants, state_of

TRAIN = [sys.executable, "-m", "titanlite", "train"]
ENDLESS = "--training.steps=1000000", "--checkpoint.enable=false"


def logs(tiny: TinyRun) -> Path:
    return tiny.folder / "outputs" / "tiny" / "logs"


def report(job: Job) -> str:
    """Wait for the report of a hang, and return it."""
    job.wait_until(lambda: "seconds)" in job.text().rpartition("hang: ")[2])
    return next(line for line in reversed(job.text().splitlines()) if "hang: no step for " in line)


def wait_for_stacks(tiny: TinyRun, job: Job, rank: int, text: str) -> None:
    """Wait until the log of a rank has the stacks of its threads, with a text in them."""
    log = logs(tiny) / f"rank-{rank}.log"
    job.wait_until(lambda: text in log.read_text().partition("the main thread is 0x")[2])
    job.wait_until((logs(tiny) / f"collectives-rank-{rank}.json").exists)


def wait_for_next_step(job: Job) -> None:
    job.wait_for_step(max(job.steps(), default=0) + 2)


@pytest.mark.nightly
def test_a_stopped_rank_is_named_may_continue_and_ends_the_run(tiny: TinyRun) -> None:
    options = *ENDLESS, "--comm.train_timeout_seconds=30"
    with started(tiny.folder, f"--config={tiny.toml}", *options, NPROC="2") as job:
        job.wait_for_step(4)
        rank = job.ranks()[1]
        job.signal(rank, signal.SIGSTOP)
        line = report(job)
        assert f"rank 1 on {platform.node()} (process {rank}) sends no heartbeat" in line
        assert mentions(line, "state T", f"`kill -CONT {rank}`", "rank 0")
        wait_for_stacks(tiny, job, 0, "titanlite/step.py")
        job.signal(rank, signal.SIGCONT)
        job.wait_until(lambda: "hang is over: training continues" in job.text())
        wait_for_next_step(job)
        job.signal(rank, signal.SIGSTOP)
        assert job.end(150) == 1
        assert f"  hang: rank 1 on {platform.node()} (process {rank}) sends no heartbeat" in job.text()
        assert job.left(30) == {}


ASLEEP = """
import os, time
import torch.distributed as dist
from titanlite.loss import token_loss
calls = []
def loss(*args, **options):
    calls.append(1)
    if len(calls) == 4 and dist.get_rank() == 1:
        {waits}
    return token_loss(*args, **options)
"""


@pytest.mark.nightly
def test_a_stopped_data_worker_is_named_and_ends_the_run(tiny: TinyRun) -> None:
    options = *ENDLESS, "--comm.train_timeout_seconds=20", "--data.num_workers=1"
    with started(tiny.folder, f"--config={tiny.toml}", *options, NPROC="2") as job:
        job.wait_for_step(4)
        rank = job.ranks()[1]
        forked = [pid for pid, command in descendants(rank).items() if "multiprocessing.forkserver" in command]
        [worker] = [pid for pid in forked if not descendants(pid)]  # the other one is the server
        job.signal(worker, signal.SIGSTOP)
        line = report(job)
        assert f"rank 1 on {platform.node()} (process {rank}) waits for a data worker" in line
        assert f"(process {worker}, which is stopped) since " in line
        assert state_of(worker) == "T"
        wait_for_stacks(tiny, job, 1, "torchdata")
        assert job.end(150) == 1
        assert "  hang: rank 1 on " in job.text()
        assert job.left(30) == {}


@pytest.mark.slow
def test_a_file_system_that_blocks_is_named_and_the_process_is_ended(tiny: TinyRun) -> None:
    """A pipe that nobody writes to stands for a file: to read it blocks for ever. No collective would end it."""
    pipe = tiny.folder / "pipe"
    os.mkfifo(pipe)
    waits = f"os.read(os.open({str(pipe)!r}, os.O_RDWR), 1)"
    mine = ASLEEP.replace("{waits}", waits).replace("dist.get_rank() == 1", "True")
    (tiny.folder / "mine.py").write_text(mine)
    loss = f"--training.loss={tiny.folder / 'mine.py'}:loss"
    with started(
        tiny.folder, f"--config={tiny.toml}", loss, *ENDLESS, "--comm.train_timeout_seconds=20", command=TRAIN
    ) as job:
        line = report(job)
        assert f"waits for the file system ({pipe}) since " in line
        assert job.end(150) == 1
        assert f"waits for the file system ({pipe}) since 2" in job.text().splitlines()[-1]
        assert "comm.train_timeout_seconds = 20" in job.text()
        wait = (logs(tiny) / "rank-0.log").read_text()
        assert 'mine.py", line 9 in loss' in wait
        assert job.left(30) == {}
