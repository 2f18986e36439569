"""Signals to real jobs: what they save, what they return, and that no process is left."""

import signal
import sys

import pytest

from tests.helpers import TinyRun
from tests.processes import started

TRAIN = [sys.executable, "-m", "titanlite", "train"]


@pytest.mark.slow
def test_workers_of_the_loader_end_with_a_killed_trainer(tiny: TinyRun) -> None:
    options = "--data.num_workers=3", "--training.steps=1000000"
    with started(tiny.folder, f"--config={tiny.toml}", *options, command=TRAIN) as job:
        job.wait_for_step(2)
        assert len(job.pids()) == 1 + 3 + 2  # trainer, workers, fork server and resource tracker
        job.process.send_signal(signal.SIGKILL)
        job.end()
        assert job.left() == {}
