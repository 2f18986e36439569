"""Tasks on a sharded model: the scores of one process."""

from typing import Any

import numpy as np

from tests.support.helpers import TinyRun, run_in_turn
from tests.support.layouts import built, degrees
from titanlite.schema import Config

TASKS = ["--validation.enable", "--validation.tasks=['python_cloze', 'number_choice']", "--training.seq_len=128"]
Scored = tuple[dict[str, Any], np.ndarray]


def scored(rank: int, world_size: int, config: Config) -> Scored:
    """Metrics and scores of the initial weights, which are the same on each layout."""
    run = built(rank, world_size, config)
    record = run.validator.run(run.model)
    scorer = run.validator.scorer
    assert record is not None
    assert scorer is not None
    return record["tasks"], scorer.scores.numpy()


def test_scores_have_the_same_bits_on_layouts(tiny: TinyRun) -> None:
    """Further axes have the same metrics: tests/matrix.py."""
    [[(metrics, scores)]] = run_in_turn(scored, 1, [tiny.config(*TASKS, "--job.name=one")])
    assert len({*scores[:, 0].tolist()}) > 200
    two = [
        tiny.config(*TASKS, *degrees(*layout), f"--job.name=on-{layout[0]}-{layout[1]}", world_size=2)
        for layout in ((2, 1), (1, 2))
    ]
    for results in run_in_turn(scored, 2, two):
        for its_metrics, its_scores in results:
            assert its_scores.tobytes() == scores.tobytes()
            assert its_metrics == metrics
