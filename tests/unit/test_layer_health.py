"""Health of layers against plain sums over whole tensors, on one rank and on shards."""

import math
from typing import Any

import pytest
import torch

from tests.helpers import THREE_BLOCKS, TinyRun, train_on_this_rank
from titanlite.observer import Phase
from titanlite.step import Step
from titanlite.techniques.layer_health.measurement import KINDS

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
def test_values_are_those_of_the_whole_tensors(tiny: TinyRun, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: dict[str, Any] = {}
    call = Step.__call__

    def kept_step(step: Step, batches: Any, **options: Any) -> Any:
        model: Any = step.model
        before = {name: parameter.full_tensor().clone() for name, parameter in model.named_parameters()}
        seen: list[torch.Tensor] = []
        hook = model.layers[1].register_forward_hook(lambda module, inputs, output: seen.append(output.detach()))
        gradients: dict[str, torch.Tensor] = {}
        update = step.optimizer.step

        def kept_update(*args: Any, **more: Any) -> Any:
            for name, parameter in model.named_parameters():
                gradients[name] = parameter.grad.full_tensor().clone()
            return update(*args, **more)

        with monkeypatch.context() as patch:
            patch.setattr(step.optimizer, "step", kept_update)
            result = call(step, batches, **options)
        hook.remove()
        after = {name: parameter.full_tensor().clone() for name, parameter in model.named_parameters()}
        kept.update(before=before, after=after, outputs=torch.cat(seen), gradients=gradients)
        return result

    monkeypatch.setattr(Step, "__call__", kept_step)
    config = tiny.config(*OPTIONS, "--activation_checkpoint.mode=full", "--training.local_batch_size=4")
    train_on_this_rank(config, 0, 1)
    found = tiny.records(file="layers.jsonl")
    assert [record["step"] for record in found] == [2, 4]
    layers = found[-1]["layers"]
    assert list(layers) == ["tok_embeddings", "layers.0", "layers.1", "layers.2", "head"]
    check(layers["layers.1"]["activations"], kept["outputs"])  # of both micro-batches, and not of the recomputation
    names = [name for name in kept["after"] if name.startswith("layers.1.")]
    for kind, of in {
        "parameters": lambda name: kept["after"][name],
        "gradients": lambda name: kept["gradients"][name],
        "updates": lambda name: kept["after"][name] - kept["before"][name],
    }.items():
        check(layers["layers.1"][kind], torch.cat([of(name).flatten() for name in names]))
    assert "activations" not in layers["head"]  # its output is the loss
    assert layers["tok_embeddings"]["gradients"]["zeros"] > 0.1  # tokens that the batch has not


@pytest.mark.long
@pytest.mark.usefixtures("single_process_group")
def test_other_steps_have_no_hooks_and_a_value_that_is_not_finite_is_counted(tiny: TinyRun) -> None:
    run = train_on_this_rank(tiny.config(*OPTIONS, "--training.steps=3", "--metrics.layers.freq=2"), 0, 1)
    [health] = run.observers
    hooks = [len(layer._forward_hooks) for layer in run.model.layers]
    health.begin_step(3)
    assert [len(layer._forward_hooks) for layer in run.model.layers] == hooks
    health.begin_step(4)
    assert [len(layer._forward_hooks) for layer in run.model.layers] == [count + 1 for count in hooks]
    weight = run.model.layers[0].attention.wq.weight
    size = sum(parameter.numel() for parameter in run.model.layers[0].parameters())
    with torch.no_grad():
        weight.to_local().flatten()[:3] = torch.tensor([math.nan, math.inf, 0.0])
    for name in ("forward", "backward", "update", "metrics"):
        health.phase(Phase(name))
    assert [len(layer._forward_hooks) for layer in run.model.layers] == hooks
    parameters = tiny.records(file="layers.jsonl")[-1]["layers"]["layers.0"]["parameters"]
    assert (parameters["nonfinite"], parameters["zeros"]) == (pytest.approx(2 / size), pytest.approx(1 / size))
    assert math.isfinite(parameters["norm"])
    assert set(KINDS) == {"parameters", "gradients", "updates", "activations"}
