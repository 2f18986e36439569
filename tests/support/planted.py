"""A user's model with one planted error, for `titanlite parity --where`. `[model] file` names this file."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from titanlite.models.base import ModelArgs
from titanlite.models.layers import Attention, AttentionMask, Linear
from titanlite.models.llama3 import Llama3, Llama3Args


@dataclass(frozen=True, kw_only=True)
class PlantedArgs(Llama3Args):
    mistake: str = ""
    """mask, or one of `LINEARS`."""
    at_block: int = 1


class WrongMask(Attention):
    """Attention that sees the last four tokens only."""

    def forward(self, x_BLD: Tensor, cos_LH: Tensor, sin_LH: Tensor, mask: AttentionMask | None = None) -> Tensor:
        L = x_BLD.shape[1]
        return super().forward(x_BLD, cos_LH, sin_LH, torch.ones(1, 1, L, L, dtype=torch.bool).tril().triu(-3))


class StaleWeight(Linear):
    """Linear layer that computes with the weight of its first step."""

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "first"):
            self.first = [self.weight.detach().clone()]  # in a list: it is no state of the model
        return self.kernels.linear(x, self.weight - self.weight.detach() + self.first[0])


class WrongDtype(Linear):
    """Linear layer that computes in bfloat16, whatever the config asks for."""

    def forward(self, x: Tensor) -> Tensor:
        return x.bfloat16() @ self.weight.bfloat16().T


class HalfGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] / 2


class WrongInputGradient(Linear):
    """Linear layer whose input gets half of its gradient."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(HalfGradient.apply(x))


class WrongWeightGradient(Linear):
    """Linear layer whose weight gets half of its gradient."""

    def forward(self, x: Tensor) -> Tensor:
        return self.kernels.linear(x, HalfGradient.apply(self.weight))


LINEARS: dict[str, tuple[str, type[Linear]]] = {
    "weight": ("attention.wq", StaleWeight),
    "dtype": ("feed_forward.w2", WrongDtype),
    "input gradient": ("feed_forward.w2", WrongInputGradient),
    "weight gradient": ("feed_forward.w2", WrongWeightGradient),
}


class Planted(Llama3):
    flavors: ClassVar[dict[str, ModelArgs]] = {
        "debug": PlantedArgs(dim=42, n_layers=3, n_heads=3, n_kv_heads=1, hidden_dim=70, rope_scaling_factor=1.0)
    }

    def __init__(self, args: PlantedArgs) -> None:
        super().__init__(args)
        block = self.layers[args.at_block]
        if args.mistake == "mask":
            block.add_module("attention", WrongMask(args.dim, args.n_heads, args.n_kv_heads, args.head_size))
        elif args.mistake:
            name, wrong = LINEARS[args.mistake]
            right = block.get_submodule(name)
            assert isinstance(right, nn.Linear)
            block.set_submodule(name, wrong(right.in_features, right.out_features))
