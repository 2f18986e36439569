"""Gradients that are reduced once a step: the same losses up to rounding, with fewer reduce-scatters and copies."""

import pytest

from tests.support.helpers import TinyRun, run_in_turn
from tests.support.layouts import CountOperators, built, degrees
from titanlite.schema import Config
from titanlite.train import finish, train

UNITS = 3
"""FSDP units of the tiny model: the embedding, a block and the head."""


def counted(rank: int, world_size: int, config: Config) -> int:
    """Train, and return the number of reduce-scatters, which are all-to-alls on CPUs."""
    run = built(rank, world_size, config)
    with CountOperators("alltoall_base") as reductions:
        ended = train(run)
    finish(run, ended)
    return reductions.count


@pytest.mark.slow
def test_losses_are_the_same_and_reductions_fewer(tiny: TinyRun) -> None:
    """Two micro-batches a step, on HSDP."""
    configs = [
        tiny.config(
            *degrees(2, 2), f"--job.name={when}", f"--parallelism.fsdp_reduce_gradients={when}",
            "--training.local_batch_size=1", "--training.steps=2", "--checkpoint.enable=false", world_size=4,
        )
        for when in ("each", "last")
    ]  # fmt: skip
    found = run_in_turn(counted, 4, configs)
    for ranks, expected in zip(found, [2, 1], strict=True):
        assert ranks == [expected * UNITS * 2] * 4
    each, last = tiny.records("each"), tiny.records("last")
    assert len(each) == len(last) == 2
    for one, other in zip(each, last, strict=True):
        assert other["loss"] == pytest.approx(one["loss"], rel=1e-6)
        assert other["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-5)


@pytest.mark.usefixtures("single_process_group")
def test_one_process_hands_gradients_over_once_a_step(tiny: TinyRun) -> None:
    """FSDP copies the gradients of a unit each time that it reduces them."""
    options = "--training.local_batch_size=1", "--training.steps=2", "--checkpoint.enable=false"
    options = *options, "--training.mixed_precision_param=bfloat16"  # else it has no units
    run = built(0, 1, tiny.config(*options))
    assert run.accumulation == 8
    with CountOperators("chunk_cat") as copies:
        ended = train(run)
    finish(run, ended)
    assert copies.count == UNITS * 2
