"""Recomputation of blocks that draw random numbers, and of those that declare that they draw none."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from titanlite.models.base import Model, ModelArgs
from titanlite.models.registry import resolve_model
from titanlite.parallelize.activation_checkpoint import apply_activation_checkpoint


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(64))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(x * self.weight, 0.5)


class Own(Model):
    """Model of a user that does not declare anything."""

    def __init__(self) -> None:
        super().__init__(ModelArgs(vocab_size=8, max_seq_len=8))
        self.layers = nn.ModuleList(Dropping() for _ in range(2))

    def forward(self, x: Tensor, *_: Any, **__: Any) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        for layer in self.layers:
            x = layer(x)
        return x


class Declared(Own):
    draws_random = False


class Derived(Declared):
    """Subclass that may have added dropout."""


def gradients(model: Model) -> list[Tensor]:
    torch.manual_seed(0)
    model(torch.arange(1.0, 65.0)).sum().backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.parametrize(("model_cls", "is_right"), [(Own, True), (Derived, True), (Declared, False)])
def test_random_numbers_are_drawn_again_unless_the_class_itself_declares_none(
    model_cls: type[Own], is_right: bool
) -> None:
    expected = gradients(model_cls())
    model = model_cls()
    apply_activation_checkpoint(model, ["full", "full"])
    assert all(map(torch.equal, gradients(model), expected)) == is_right


@pytest.mark.parametrize("name", ["llama3", "qwen3", "qwen3_moe"])
def test_built_in_families_draw_none(name: str) -> None:
    model_cls, _ = resolve_model(name, "debug", {})[:2]
    assert vars(model_cls)["draws_random"] is False
