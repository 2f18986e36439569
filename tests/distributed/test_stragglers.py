"""A rank that lags is named with what it does, although the steps of all ranks take as long."""

import logging

import pytest

from tests.support.helpers import TinyRun, run_in_turn, train_on_this_rank
from tests.support.layouts import degrees
from titanlite.schema import Config

LATE = 1.0
CODE = f"""
import time
import numpy as np
import torch.distributed as dist
from titanlite.loss import token_loss

def late_on_2(*arguments, **options):
    time.sleep({LATE} if dist.get_rank() == 2 else 0)
    return token_loss(*arguments, **options)

def late_everywhere(*arguments, **options):
    time.sleep({LATE})
    return token_loss(*arguments, **options)

class LateOn1:
    def __init__(self, seq_len):
        self.seq_len = seq_len

    def __len__(self):
        return 1000

    def __getitem__(self, index):
        time.sleep({LATE} / 2 if dist.get_rank() == 1 else 0)  # 2 sequences a step
        return np.full(self.seq_len + 1, index % 250)
"""


def _train(rank: int, world_size: int, config: Config) -> list[str]:
    """Return the warnings about own times."""
    warnings: list[str] = []

    class Kept(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            warnings.append(record.getMessage())

    logger, handler = logging.getLogger("titanlite"), Kept(logging.WARNING)
    logger.addHandler(handler)
    train_on_this_rank(config, rank, world_size)
    logger.removeHandler(handler)
    return [text for text in warnings if "own time" in text]


@pytest.mark.nightly
def test_the_rank_that_others_wait_for_is_named(tiny: TinyRun) -> None:
    code = tiny.folder / "late.py"
    code.write_text(CODE)

    def config(name: str, *options: str) -> Config:
        common = ["--training.steps=5", "--checkpoint.enable=false", "--lr_scheduler.warmup_steps=0"]
        return tiny.config(f"--job.name={name}", *common, "--data.num_workers=0", *options, world_size=4)

    configs = [
        config("compute", f"--training.loss={code}:late_on_2", *degrees(2, 2)),
        config("data", f"--data.path=python://{code}:LateOn1", *degrees(1, 4)),
        config("none", f"--training.loss={code}:late_everywhere", *degrees(1, 4)),
    ]
    compute, data, none = run_in_turn(_train, 4, configs)
    for name, lines, rank, kind in (("compute", compute, 2, "compute"), ("data", data, 1, "the wait for data")):
        [line] = lines[0]
        assert line.startswith(f"rank {rank} of host ")
        assert " lags, and all others wait: " in line
        assert f"Most of the difference is {kind} (" in line
        assert lines[1:] == [[]] * 3, "rank 0 speaks for all"
        for record in tiny.records(name)[2:]:
            assert record["slowest_rank"] == rank
            assert record["slowest_host"] in line
            assert record["own_seconds_slowest"] > 0.9 * LATE
            assert record["own_seconds_slowest"] - record["own_seconds_median"] > LATE / 2
            assert record["step_seconds"] > 0.9 * LATE, "rank 0 takes as long, and waits"
    assert none == [[]] * 4
    assert all(record["own_seconds_median"] > 0.9 * LATE for record in tiny.records("none"))
