"""Tasks on a sharded model: the scores of one process, on every axis of the mesh."""

from typing import Any

import numpy as np
import pytest

from tests.helpers import TinyRun, run_in_turn
from tests.layouts import built, degrees
from titanlite.schema import Config

TASKS = ["--validation.enable", "--validation.tasks=['python_cloze', 'number_choice']", "--training.seq_len=128"]
SPLIT = [*TASKS, "--model.args={dim=48, n_layers=2, n_heads=4, n_kv_heads=2, hidden_dim=64, vocab_size=260}"]
EXPERTS = [
    *TASKS,
    "--model={name='qwen3_moe', flavor='debug', args={dim=32, n_layers=2, n_heads=2, n_kv_heads=2, head_dim=16, "
    "hidden_dim=24, vocab_size=260}}",
]
Scored = tuple[dict[str, Any], np.ndarray]


def scored(rank: int, world_size: int, config: Config) -> Scored:
    """Metrics and scores of the initial weights, which are the same on each layout."""
    run = built(rank, world_size, config)
    record = run.validator.run(run.model)
    scorer = run.validator.scorer
    assert record is not None
    assert scorer is not None
    return record["tasks"], scorer.scores.numpy()


def on_layouts(tiny: TinyRun, options: list[str], *layouts: tuple[int, ...]) -> dict[tuple[int, ...], list[Scored]]:
    found: dict[tuple[int, ...], list[Scored]] = {}
    for world_size in sorted({int(np.prod(layout[:4])) for layout in layouts}):
        own = [layout for layout in layouts if np.prod(layout[:4]) == world_size]
        configs = [
            tiny.config(
                *options, *degrees(*it), f"--job.name=on-{'-'.join(map(str, it))}-{len(options)}", world_size=world_size
            )
            for it in own
        ]
        found |= dict(zip(own, run_in_turn(scored, world_size, configs), strict=True))
    return found


def test_scores_have_the_same_bits_on_layouts(tiny: TinyRun) -> None:
    found = on_layouts(tiny, TASKS, (1, 1), (2, 1), (1, 2))
    [(metrics, scores)] = found[1, 1]
    assert len({*scores[:, 0].tolist()}) > 200
    for results in found.values():
        for its_metrics, its_scores in results:
            assert its_scores.tobytes() == scores.tobytes()
            assert its_metrics == metrics


@pytest.mark.nightly
def test_scores_are_equal_on_further_axes(tiny: TinyRun) -> None:
    context, tensor, both, experts = (1, 1, 2), (1, 1, 1, 2), (1, 1, 2, 2), (1, 2, 1, 1, 2)
    for options, layouts in ((SPLIT, [context, tensor, both]), (EXPERTS, [experts])):
        found = on_layouts(tiny, options, (1, 1), *layouts)
        [(metrics, scores)] = found[1, 1]
        for layout in layouts:
            for its_metrics, its_scores in found[layout]:
                assert its_scores[:, 0] == pytest.approx(scores[:, 0], rel=1e-5), layout
                assert (its_scores[:, 1] == scores[:, 1]).all(), layout
                assert its_metrics["number_choice"] == pytest.approx(metrics["number_choice"], abs=0.02), layout
