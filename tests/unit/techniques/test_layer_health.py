"""Health of layers against plain sums over whole tensors, on one rank and on shards."""

import math

import pytest
import torch

from tests.support.helpers import THREE_BLOCKS, TinyRun, train_on_this_rank
from tests.support.layouts import built
from titanlite.observer import Phase
from titanlite.runtime.private_torch.tensors import local_tensor
from titanlite.techniques.layer_health.names import NAMES
from titanlite.tools.report.compare import read_dump, record

OPTIONS = [
    THREE_BLOCKS,
    "--training.steps=4",
    "--metrics.layers.freq=2",
    "--training.max_norm=0",
    "--checkpoint.enable=false",
]


def check(found: dict[str, float], values: torch.Tensor) -> None:
    assert found["norm"] == pytest.approx(float(values.double().norm()), rel=1e-6)
    assert found["rms"] == pytest.approx(float(values.double().square().mean().sqrt()), rel=1e-6)
    assert found["max"] == float(values.abs().max())
    assert found["zeros"] == float((values == 0).double().mean())
    assert found["nonfinite"] == 0.0


@pytest.mark.long
@pytest.mark.usefixtures("single_process_group")
def test_values_are_those_of_the_whole_tensors(tiny: TinyRun) -> None:
    """Those of a dump of the same step: of both micro-batches, and not of the recomputation."""
    config = tiny.config(*OPTIONS, "--activation_checkpoint.mode=full", "--training.local_batch_size=4")
    record(built(0, 1, config), folder=tiny.folder / "values", step=2)
    values = read_dump(tiny.folder / "values").values
    [found] = tiny.records(file="layers.jsonl")
    layers = found["layers"]
    assert (found["step"], list(layers)) == (2, ["tok_embeddings", "layers.0", "layers.1", "layers.2", "head"])
    check(layers["layers.1"]["activations"], values["forward output layers.1"])
    names = [key for key in values if key.startswith("before parameter layers.1.")]
    before, gradients, updates = (
        torch.cat([values[key.replace("before", kind)].flatten() for key in names])
        for kind in ("before", "gradient", "update")
    )
    check(layers["layers.1"]["gradients"], gradients)
    check(layers["layers.1"]["updates"], updates)
    check(layers["layers.1"]["parameters"], before + updates)
    assert "activations" not in layers["head"]  # its output is the loss
    assert layers["tok_embeddings"]["gradients"]["zeros"] > 0.1  # tokens that the batch has not


@pytest.mark.long
@pytest.mark.usefixtures("single_process_group")
def test_other_steps_have_no_hooks_and_a_value_that_is_not_finite_is_counted(tiny: TinyRun) -> None:
    run = train_on_this_rank(tiny.config(*OPTIONS, "--training.steps=3", "--metrics.layers.freq=2"), 0, 1)
    [health] = run.position.observers
    hooks = [len(layer._forward_hooks) for layer in run.model.layers]
    health.begin_step(3)
    assert [len(layer._forward_hooks) for layer in run.model.layers] == hooks
    health.begin_step(4)
    assert [len(layer._forward_hooks) for layer in run.model.layers] == [count + 1 for count in hooks]
    weight = run.model.layers[0].attention.wq.weight
    size = sum(parameter.numel() for parameter in run.model.layers[0].parameters())
    with torch.no_grad():
        local_tensor(weight).flatten()[:3] = torch.tensor([math.nan, math.inf, 0.0])
    for name in ("forward", "backward", "update", "metrics"):
        health.on_phase(Phase(name))
    assert [len(layer._forward_hooks) for layer in run.model.layers] == hooks
    parameters = tiny.records(file="layers.jsonl")[-1]["layers"]["layers.0"]["parameters"]
    assert (parameters["nonfinite"], parameters["zeros"]) == (pytest.approx(2 / size), pytest.approx(1 / size))
    assert math.isfinite(parameters["norm"])
    assert set(NAMES.values()) == {"parameters", "gradients", "updates", "activations"}
