"""Optimizers on sharded parameters: the weights are those of one process, also after a resume."""

import shutil
from pathlib import Path

import pytest

from tests.helpers import TinyRun, mentions, run_in_turn, run_ranks
from tests.layouts import compare_with_one, degrees, job, trained, trained_on
from titanlite.runtime.errors import UserError

MIX = (
    '--optimizer.groups=[{match = ["layers.*.w?.weight"], name = "Muon", args.ns_dtype = "float32"}, '
    '{match = ["tok*", "head.output*"]}, '
    '{match = ["*norm*"], name = "SGD", lr = 0.03, args = {momentum = 0.9}}]'
)


@pytest.mark.usefixtures("single_process_group")
def test_another_optimizer_does_not_resume(tiny: TinyRun) -> None:
    trained(0, 1, tiny.config(MIX, "--training.steps=1", "--lr_scheduler.warmup_steps=1"))
    with pytest.raises(UserError, match="is of another optimizer") as error:
        trained(0, 1, tiny.config())
    missing = "optimizer.state.layers.0.attention.wq.weight.exp_avg [42, 42]"
    assert mentions(str(error.value), missing, "[optimizer]", "job.name")


LOW = ["--training.dtype=bfloat16", "--optimizer.state_dtype=bfloat16", "--training.mixed_precision_param=bfloat16"]


@pytest.mark.slow
def test_bfloat16_runs_are_equal_on_another_layout_and_after_a_resume(tiny: TinyRun) -> None:
    layouts = {"one": (1, 1), "two": (1, 2)}
    runs = {
        name: run_ranks(trained, r * s, tiny.config(f"--job.name={name}", *degrees(r, s), *LOW, world_size=r * s))
        for name, (r, s) in layouts.items()
    }
    assert tiny.losses("one")[-1] < tiny.losses("one")[0] - 1
    assert tiny.losses("two") == pytest.approx(tiny.losses("one"), rel=2e-3)
    halves = [tiny.config("--job.name=halves", *more, *LOW) for more in (["--training.steps=3"], [])]
    _, [resumed] = run_in_turn(trained, 1, halves)
    assert all((resumed[name] == value).all() for name, value in runs["one"][0].items())


@pytest.mark.slow
def test_a_parametrization_gives_the_same_losses_on_every_layout(tiny: TinyRun) -> None:
    """Factors follow the whole shapes, not those of shards."""
    shape = ["dim=64", "n_layers=2", "n_heads=4", "n_kv_heads=2", "hidden_dim=96", "vocab_size=260"]
    common = [*(f"--model.args.{it}" for it in shape), "--optimizer.parametrization=completep"]
    common += ["--optimizer.base_width=32", "--optimizer.base_depth=1"]
    muon = [*common, "--optimizer.name=Muon", "--optimizer.args.ns_dtype=float32"]
    compare_with_one(tiny, {"AdamW": common, "Muon": muon}, [(2, 1), (1, 2), (1, 1, 1, 2)], steps=8)


SOAP = f"{Path(__file__).parents[2]}/examples/soap.py:SOAP"
CASES = {
    "soap": [f"--optimizer.name={SOAP}", "--optimizer.args={frequency = 2, largest_side = 100}"],
    "mix": [MIX],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["soap", pytest.param("mix", marks=pytest.mark.nightly)])
def test_runs_are_equal_on_every_layout_and_after_a_resume(tiny: TinyRun, name: str) -> None:
    """The state of SOAP has matrices of other shapes than the parameters', sharded like them."""
    options = [*CASES[name], "--training.local_batch_size=1"]
    options += ["--debug.reproducible_layouts", "--checkpoint.interval=3"]
    layouts = [(1, 1), (1, 2), (2, 1)]
    trained_on(tiny, {name: options}, *layouts)
    expected, outputs = tiny.losses(job(name, 1, 1)), tiny.folder / "outputs"
    assert expected[-1] < expected[0] - 0.5
    for layout in layouts[1:]:
        assert tiny.losses(job(name, *layout)) == expected
    for layout in layouts:  # from what two shards have saved
        shutil.copytree(outputs / job(name, 1, 2), outputs / job("resumed", *layout))
        shutil.rmtree(outputs / job("resumed", *layout) / "checkpoints" / "step-00000006")
    trained_on(tiny, {"resumed": options}, *layouts)
    for layout in layouts:
        assert [record["step"] for record in tiny.records(job("resumed", *layout))] == [1, 2, 3, 4, 5, 6]
        assert tiny.losses(job("resumed", *layout)) == expected
