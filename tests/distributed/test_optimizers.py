"""Optimizers on sharded parameters: the weights are those of one process, also after a resume."""

import shutil
from pathlib import Path

import pytest

from tests.support.helpers import TinyRun, mentions
from tests.support.layouts import job, trained, trained_on
from titanlite.runtime.errors import UserError

MIX = (
    '--optimizer.groups=[{match = ["layers.*.w?.weight"], name = "Muon", args.ns_dtype = "float32"}, '
    '{match = ["tok*", "head.output*"]}, '
    '{match = ["*norm*"], name = "SGD", lr = 0.03, args = {momentum = 0.9}}]'
)


@pytest.mark.usefixtures("single_process_group")
def test_another_optimizer_does_not_resume(tiny: TinyRun) -> None:
    trained(0, 1, tiny.config(MIX, "--training.steps=1", "--lr_scheduler.warmup_steps=1"))
    with pytest.raises(UserError) as error:
        trained(0, 1, tiny.config())
    missing = "optimizer.state.layers.0.attention.wq.weight.exp_avg [42, 42]"
    assert mentions(str(error.value), missing, "[optimizer]", "job.name")


SOAP = f"{Path(__file__).parents[2]}/examples/soap.py:SOAP"


@pytest.mark.slow
def test_runs_are_equal_on_every_layout_and_after_a_resume(tiny: TinyRun) -> None:
    """The state of SOAP has matrices of other shapes than the parameters', sharded like them."""
    options = [f"--optimizer.name={SOAP}", "--optimizer.args={frequency = 2, largest_side = 100}"]
    options += ["--training.global_batch_size=4", "--training.local_batch_size=1"]
    options += ["--debug.reproducible_layouts", "--checkpoint.interval=3"]
    layouts = [(1, 1), (1, 2), (2, 1)]
    trained_on(tiny, {"soap": options}, *layouts)
    expected, outputs = tiny.losses(job("soap", 1, 1)), tiny.folder / "outputs"
    assert expected[-1] < expected[0] - 0.5
    for layout in layouts[1:]:
        assert tiny.losses(job("soap", *layout)) == expected
    for layout in layouts:  # from what two shards have saved
        shutil.copytree(outputs / job("soap", 1, 2), outputs / job("resumed", *layout))
        shutil.rmtree(outputs / job("resumed", *layout) / "checkpoints" / "step-00000006")
    trained_on(tiny, {"resumed": options}, *layouts)
    for layout in layouts:
        assert [record["step"] for record in tiny.records(job("resumed", *layout))] == [1, 2, 3, 4, 5, 6]
        assert tiny.losses(job("resumed", *layout)) == expected
