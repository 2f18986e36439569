"""Checkpoints of each axis of the mesh load on every other: the same bits, and the run continues alike."""

import shutil
from typing import Any

import pytest

from tests.support.helpers import TinyRun, run_in_turn
from tests.support.layouts import built, degrees, on_one, whole
from titanlite.models.qwen3_moe import Qwen3Moe
from titanlite.schema import Config
from titanlite.train import Run, finish, train

SIZES = "dim=36, n_layers=2, n_heads=6, n_kv_heads=2, head_dim=14, vocab_size=262"
"""Rows of the vocabulary and of the feed-forward layers do not divide by 4, nor do halves of them by 2."""
DENSE = [f"--model={{name='qwen3', args={{{SIZES}, hidden_dim=70, tied_head=false}}}}", "--optimizer.lr=1e-3"]
MOE = [f"--model={{name='qwen3_moe', flavor='debug', args={{{SIZES}, hidden_dim=24}}}}", "--optimizer.lr=1e-3"]
HYBRID = (
    "--model={name='qwen3_next', args={dim=36, n_layers=2, n_heads=4, n_kv_heads=4, head_dim=16, vocab_size=262, "
    "hidden_dim=24, full_every=2, n_linear_key_heads=4, n_linear_value_heads=12, linear_key_dim=6, "
    "linear_value_dim=10, n_experts=4, n_active_experts=2, shared_hidden_dim=20}}"
)
EXPERT = "--parallelism.expert_parallel_degree={}"
PLACES: dict[str, tuple[int, list[str]]] = {
    "one": (1, degrees(1, 1)),
    "4-1": (4, degrees(4, 1)),
    "1-4": (4, degrees(1, 4)),
    "context": (4, degrees(1, 2, 2)),
}
TENSOR = {"tensor": (4, degrees(1, 2, 1, 2)), "context-tensor": (4, degrees(1, 1, 2, 2))}
EXPERTS = {
    "expert-4": (4, [EXPERT.format(4), *degrees(1, 4)]),
    "expert-2": (4, [EXPERT.format(2), *degrees(1, 4)]),
    "context-expert": (4, [EXPERT.format(4), *degrees(1, 2, 2)]),
}


def values(run: Run) -> dict[str, Any]:
    """Return whole parameters, and the optimizer's whole state."""
    found = {}
    for name, parameter in run.model.named_parameters():
        found[name] = whole(parameter).numpy()
        found |= {f"{name}.{key}": whole(tensor).numpy() for key, tensor in run.optimizer.state[parameter].items()}
    return found


def continued(rank: int, world_size: int, config: Config) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the values that a run begins with, and those after it."""
    run = built(rank, world_size, config)
    before = values(run)
    finish(run, train(run))
    return before, values(run)


def unequal(ours: dict[str, Any], theirs: dict[str, Any]) -> list[str]:
    """Names of tensors that differ in a bit."""
    assert ours.keys() == theirs.keys()
    return [name for name in ours if not (ours[name] == theirs[name]).all()]


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("model", "savers", "places"),
    [
        pytest.param(DENSE, ["tensor", "context", "1-4"], PLACES | TENSOR, id="dense"),
        pytest.param(
            MOE, ["expert-4", "context", "1-4"], PLACES | EXPERTS | (TENSOR if Qwen3Moe.tensor_plan else {}), id="MoE"
        ),
        pytest.param(
            [HYBRID, "--optimizer.lr=1e-3"], ["tensor", "context", "1-4"], PLACES | TENSOR | EXPERTS, id="hybrid"
        ),
    ],
)
def test_saved_on_one_axis_and_loaded_on_each_other(
    tiny: TinyRun, model: list[str], savers: list[str], places: dict[str, tuple[int, list[str]]]
) -> None:
    """Initial values are the same bits, too. Losses after loading are those of a run that nobody has stopped."""

    def config(name: str, place: str, steps: int) -> Config:
        world_size, layout = places[place]
        words = [*model, *layout, "--data.document_mask", f"--training.steps={steps}", f"--job.name={name}"]
        return tiny.config(*words, world_size=world_size)

    saved = run_in_turn(continued, 4, [config(f"saved-{saver}", saver, 3) for saver in savers])
    pairs = [(saver, place) for saver in savers for place in places]
    for saver, place in pairs:
        shutil.copytree(tiny.folder / "outputs" / f"saved-{saver}", tiny.folder / "outputs" / f"{saver}-on-{place}")
    [(initial, _)] = on_one(continued, config("whole", "one", 6))
    for world_size in (1, 4):
        chosen = [(saver, place) for saver, place in pairs if places[place][0] == world_size]
        configs = [config(f"{saver}-on-{place}", place, 6) for saver, place in chosen]
        found = run_in_turn(continued, world_size, configs)
        for (saver, place), ranks in zip(chosen, found, strict=True):
            [(drawn, after), *_] = saved[savers.index(saver)]
            assert unequal(initial, {name: drawn[name] for name in initial}) == [], saver
            for loaded, _ in ranks:
                assert unequal(after, loaded) == [], (saver, place)
    expected = tiny.records("whole")
    assert len(expected) == 6
    for saver, place in pairs:
        records = tiny.records(f"{saver}-on-{place}")
        losses = [record["loss"] for record in expected]
        assert [record["loss"] for record in records] == pytest.approx(losses, rel=1e-5), (saver, place)
        assert [record["samples"] for record in records] == [record["samples"] for record in expected], (saver, place)
