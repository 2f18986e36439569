"""Models of a user's own, one file for `model.file`: a dense one, and one with experts of its own."""

from collections.abc import Sequence
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titanlite.models.base import TensorPlan
from titanlite.models.initial import Constant, InitialValues
from titanlite.models.llama3 import Llama3
from titanlite.models.qwen3_moe import Experts, Qwen3Moe, Qwen3MoeArgs


class Wide(nn.Module):
    def __init__(self, dim: int, hidden_dim: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(dim, hidden_dim), nn.Linear(hidden_dim, dim, bias=False)
        self.scale = nn.Parameter(self.up.weight.new_empty(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)) * self.scale)


class Own(Llama3):
    """A model whose table splits less: a bias of columns, a whole parameter in a split module, a whole embedding."""

    draws_random = False
    tensor_plan: ClassVar[TensorPlan] = {
        "layers.*.feed_forward": "split", "*.up": "columns", "*.down": "rows", "head.output": "vocabulary",
    }  # fmt: skip

    def build_feed_forward(self, layer: int) -> nn.Module:
        return Wide(self.args.dim, self.args.hidden_dim)

    def init_weight(self, name: str, shape: torch.Size) -> InitialValues:
        ends = {"bias": Constant(0.1), "scale": Constant(0.5)}
        name = name.replace("up.", "w1.").replace("down.", "w2.")
        return ends.get(name.rpartition(".")[2]) or super().init_weight(name, shape)


class Ungated(Experts):
    stacks = ("w1", "w2")
    hidden_dims = (2, 1)

    def __init__(self, args: Qwen3MoeArgs) -> None:
        super().__init__(args)
        del self.w3

    def compute(self, x_SD: Tensor, ends_E: Tensor, weights: Sequence[Tensor]) -> Tensor:
        w1_EDF, w2_EFD = weights
        return self.kernels.grouped_mm(F.gelu(self.kernels.grouped_mm(x_SD, w1_EDF, ends_E)), w2_EFD, ends_E)


class OwnExperts(Qwen3Moe):
    draws_random = False

    def build_feed_forward(self, layer: int) -> nn.Module:
        return Ungated(self.args)
