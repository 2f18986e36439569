"""Shards on disk: each rank has its own files, and results are those of memory."""

import sys
from typing import Any

import pytest

from tests.helpers import TinyRun, run_in_turn, train_on_this_rank
from tests.layouts import whole
from titanlite.config.schema import Config

DISK = ["--offload.optimizer=disk"]
EVERYTHING = [*DISK, "--offload.parameters=disk", "--training.enable_cpu_offload"]
IN_BACKWARD = ["--optimizer.in_backward", "--training.max_norm=0"]


def trained(rank: int, world_size: int, config: Config) -> dict[str, Any]:
    from titanlite.optim import rounding

    rounding.DISK_SLICE = 512
    run = train_on_this_rank(config, rank, world_size)
    names = {parameter: name for name, parameter in run.model.named_parameters()}
    return {names[p]: [whole(p).numpy(), *(whole(it).numpy() for it in run.optimizer.state[p].values())] for p in names}


def assert_same_bits(expected_of_ranks: list[dict[str, Any]], found_of_ranks: list[dict[str, Any]]) -> None:
    for expected, found in zip(expected_of_ranks, found_of_ranks, strict=True):
        assert expected.keys() == found.keys()
        for name, values in expected.items():
            for one, other in zip(values, found[name], strict=True):
                assert (one == other).all(), name


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")
def test_shards_on_disk_train_as_in_memory(tiny: TinyRun) -> None:
    """Rows do not divide evenly, so that the last rank's parts are padded. Saved by two, it resumes in memory."""
    turns = [
        ["--job.name=memory"],
        ["--job.name=moments", *DISK],
        ["--job.name=everything", *EVERYTHING],
        ["--job.name=turns", "--training.steps=3", *EVERYTHING],
        ["--job.name=turns"],
    ]
    configs = [tiny.config(*options, world_size=2) for options in turns]
    memory, moments, everything, _, resumed = run_in_turn(trained, 2, configs)
    for results in (moments, everything, resumed):
        assert_same_bits(memory, results)
    assert tiny.losses("moments") == tiny.losses("everything") == tiny.losses("memory") == tiny.losses("turns")
    assert [*(tiny.folder / "outputs" / "everything" / "offload").iterdir()] == []


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")
def test_updates_in_backward_of_shards_on_disk(tiny: TinyRun) -> None:
    turns = [["--job.name=memory"], ["--job.name=moments", *DISK], ["--job.name=everything", *EVERYTHING]]
    configs = [tiny.config(*options, *IN_BACKWARD, world_size=2) for options in turns]
    memory, moments, everything = run_in_turn(trained, 2, configs)
    assert_same_bits(memory, moments)
    assert_same_bits(memory, everything)
    assert tiny.losses("moments") == tiny.losses("everything") == tiny.losses("memory")
