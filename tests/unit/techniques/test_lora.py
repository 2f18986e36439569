"""Adapters of linear layers: what is trained, what a layer computes, what a step needs, and what is refused."""

import re
from pathlib import Path
from typing import Any

import pytest
import tomli
import torch
from torch import Tensor, nn

from tests.support.adapted import FROZEN_BASE, TOKENS, adapted, filled
from tests.support.helpers import TinyRun
from tests.support.kept_matmuls import KeptMatmuls
from titanlite.checkpoint.resume import resume_settings
from titanlite.checks.memory import bytes_per_parameter
from titanlite.models.base import Model, ModelArgs, added_parameters, trainable_parameters, unique_parameters
from titanlite.models.initial import InitialValues, Normal
from titanlite.models.registry import resolve_model
from titanlite.optim.groups import parameter_groups
from titanlite.parallelize.activation_checkpoint import apply_activation_checkpoint
from titanlite.schema import Config, Freeze, Lora
from titanlite.techniques import choose_trained
from titanlite.tools.plan.estimate import Layout, plan
from titanlite.tools.plan.hardware import find_hardware

GUIDE = Path("docs/finetune.md")


def test_adapters_alone_are_trained_and_the_base_keeps_its_names_and_values() -> None:
    base, model = filled(adapted(rank=None)), filled(adapted())
    found = {name: parameter.detach() for name, parameter in unique_parameters(model)}
    for name, value in unique_parameters(base):
        assert torch.equal(found.pop(name), value), name
    assert found.keys() == trainable_parameters(model).keys() == added_parameters(model).keys()
    shapes = {name: tuple(value.shape) for name, value in found.items() if name.startswith("layers.1.")}
    sizes = {"attention.wq": (48, 48), "attention.wk": (12, 48), "attention.wv": (12, 48), "attention.wo": (48, 48),
             "feed_forward.w1": (80, 48), "feed_forward.w2": (48, 80), "feed_forward.w3": (80, 48)}  # fmt: skip
    assert shapes == {
        f"layers.1.{name}.{part}": (4, columns) if part == "lora_a" else (rows, 4)
        for name, (rows, columns) in sizes.items()
        for part in ("lora_a", "lora_b")
    }
    for name, value in found.items():
        if name.endswith("lora_b"):
            assert not value.any(), name
        else:  # uniform within 1 / sqrt(in), as in PEFT
            bound = value.shape[1] ** -0.5
            assert 0.9 * bound < value.abs().max() <= bound
            assert value.std() == pytest.approx(bound / 3**0.5, rel=0.15)
    assert not torch.equal(found["layers.0.attention.wq.lora_a"], found["layers.1.attention.wq.lora_a"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama3", "qwen3_moe"])
def test_the_first_step_computes_what_the_base_does_bit_for_bit(family: str, dtype: torch.dtype) -> None:
    base, model = filled(adapted(family, rank=None), dtype), filled(adapted(family), dtype)
    with torch.no_grad():
        assert torch.equal(model(TOKENS), base(TOKENS))


def test_targets_choose_layers_and_the_base_can_be_bfloat16() -> None:
    model = adapted(targets=["layers.1.attention.w[qv]", "layers.0.*.w2"], freeze=Freeze(dtype="bfloat16"))
    layers = {name.rpartition(".")[0] for name in trainable_parameters(model)}
    assert layers == {"layers.1.attention.wq", "layers.1.attention.wv", "layers.0.feed_forward.w2"}
    dtypes = {name: parameter.dtype for name, parameter in unique_parameters(model)}
    assert {name for name, dtype in dtypes.items() if dtype == torch.float32} == trainable_parameters(model).keys()
    experts = adapted("qwen3_moe")
    assert {name.split(".")[2] for name in trainable_parameters(experts)} == {"attention"}


class Own(Model):
    """Model of a user, who knows nothing of adapters."""

    def __init__(self) -> None:
        super().__init__(ModelArgs(vocab_size=8, max_seq_len=8))
        self.embedding = nn.Embedding(8, 16)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(2))
        self.head = nn.Linear(16, 8)

    def forward(self, tokens: Tensor, *_: Any, **__: Any) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)

    def init_weight(self, name: str, shape: torch.Size) -> InitialValues:
        assert "lora" not in name
        return Normal(std=1.0)


def test_a_model_of_the_users_own_gets_adapters_too() -> None:
    with torch.device("meta"):
        base, model = Own(), Own()
    choose_trained(model, Config(freeze=FROZEN_BASE, lora=Lora(rank=2)))
    assert [*trainable_parameters(model)] == [f"layers.{i}.0.lora_{part}" for i in range(2) for part in "ab"]
    for one in (base, model):
        filled(one)
    torch.testing.assert_close(model(TOKENS % 8), base(TOKENS % 8))
    model(TOKENS % 8).sum().backward()
    assert model.layers[1][0].lora_b.grad.abs().max() > 0  # pyright: ignore
    assert {name for name, p in unique_parameters(model) if p.grad is not None} == trainable_parameters(model).keys()


@pytest.mark.parametrize(("is_compiled", "kept"), [(False, [4, 6]), (True, [1, 5, 7])])
def test_policy_op_keeps_the_same_matmuls_with_adapters_as_without(is_compiled: bool, kept: list[int]) -> None:
    """Matmuls of each layer: the base's, A's, B's."""
    for rank, stride in ((None, 1), (4, 3)):
        model = filled(adapted(rank=rank, n_layers=1))
        for parameter in model.parameters():  # else nothing is kept without adapters
            parameter.requires_grad_(parameter.is_floating_point())
        apply_activation_checkpoint(model, ["op"], is_compiled=is_compiled)
        with KeptMatmuls() as mode:
            _ = model(TOKENS)
        expected = [1 + stride * (place - 1) for place in kept]
        assert [place for place in mode.places() if place <= 7 * stride] == expected


def test_operations_gradients_and_moments_are_counted_for_adapters_only(tiny: TinyRun) -> None:
    seq_len = 16
    base, frozen, model = adapted(rank=None), adapted(rank=None, freeze=Freeze(parameters=["layers.*"])), adapted()
    adapters = sum(parameter.numel() for parameter in trainable_parameters(model).values())
    weights = sum(p.numel() for name, p in unique_parameters(base) if name.startswith("layers.") and p.ndim == 2)
    assert frozen.flops_per_token(seq_len) == base.flops_per_token(seq_len) - 2 * weights
    head = 2 * base.args.dim * base.args.vocab_size  # its gradient, which a frozen base has none of either
    assert model.flops_per_token(seq_len) == frozen.flops_per_token(seq_len) - head + 6 * adapters

    config = tiny.config("--lora.rank=4", "--freeze.dtype=bfloat16")
    whole = sum(parameter.numel() for parameter in model.parameters())
    in_memory, on_disk = bytes_per_parameter(model, config)
    assert in_memory * whole == pytest.approx(16 * adapters + 2 * (whole - adapters))
    assert on_disk == 0
    [group] = parameter_groups(config.optimizer, model)
    assert (group.name, group.weight_decay, len(group.parameters)) == ("AdamW", 0.1, 2 * 7 * 2)


@pytest.mark.long
def test_a_plan_does_not_take_one_block_for_all(tiny: TinyRun) -> None:
    """Plans of models with many blocks trace a few, if all are alike."""
    config = tiny.config("--model.args.n_layers=6", '--freeze.parameters=["layers.[!5].*"]')
    model = resolve_model("llama3", None, config.model.args).build()
    choose_trained(model, config)
    trained = sum(parameter.numel() for parameter in trainable_parameters(model).values())
    planned = plan(config, Layout(1, find_hardware("H100"), 8))
    assert planned.most("gradients") == 4 * trained


def test_examples_of_the_guide_are_valid() -> None:
    examples = [tomli.loads(example) for example in re.findall(r"```toml\n(.*?)```", GUIDE.read_text(), re.DOTALL)]
    assert len(examples) == 2
    for example in examples:
        model = resolve_model("llama3", "debug", {}).build()
        freeze = Freeze.model_validate(example["freeze"])
        choose_trained(model, Config(freeze=freeze, lora=Lora.model_validate(example.get("lora", {}))))
        assert 0 < len(trainable_parameters(model)) < len([*unique_parameters(model)])


@pytest.mark.parametrize("rank", [None, 4])
def test_a_frozen_router_keeps_its_bias(rank: int | None) -> None:
    """Balancing changes the bias of experts without a gradient."""
    model = filled(adapted("qwen3_moe", rank=rank))
    model(TOKENS)
    metrics = model.end_step(torch.tensor(True))
    biases = torch.stack([experts.bias_E for experts in model.experts()])  # pyright: ignore
    assert biases.any() == (rank is None)
    assert metrics["busiest_expert"] > 1
    assert not any(counter.any() for counter in model.counters())


def test_other_adapters_are_another_experiment(tiny: TinyRun) -> None:
    args = resolve_model("llama3", "debug", {}).args
    [plain, one, other] = [
        resume_settings(tiny.config(*options), model_args=args, inputs={})
        for options in ([], ["--lora.rank=4"], ["--lora.rank=4", "--lora.alpha=8.0"])
    ]
    added = {"lora.rank": 4, "lora.alpha": 16.0, "lora.targets": []}
    assert (one, other) == (plain | added, plain | added | {"lora.alpha": 8.0})
