"""Health of layers is the same on every layout."""

import json
import math

import pytest
import torch

from tests.helpers import TinyRun, run_ranks, train_on_this_rank

OPTIONS = ["--training.steps=2", "--metrics.layers.freq=2", "--checkpoint.enable=false"]


def _train(rank: int, world_size: int, tiny: TinyRun, options: list[str]) -> None:
    torch.set_num_threads(1)
    train_on_this_rank(tiny.config(*OPTIONS, *options, world_size=world_size), rank, world_size)


@pytest.mark.slow
def test_shards_and_replicas_count_once(tiny: TinyRun) -> None:
    run_ranks(_train, 1, tiny, ["--job.name=one"])
    run_ranks(_train, 4, tiny, ["--job.name=four", "--parallelism.data_parallel_replicate_degree=2"])
    files = [tiny.folder / "outputs" / name / "layers.jsonl" for name in ("one", "four")]
    one, four = (json.loads(file.read_text()) for file in files)
    assert one["step"] == 2
    for layer, kinds in one["layers"].items():
        for kind, values in kinds.items():
            for name, value in values.items():
                other = four["layers"][layer][kind][name]
                assert math.isclose(other, value, rel_tol=2e-5, abs_tol=1e-9), (layer, kind, name)
