"""Models of a user's own, one file for `model.file`: a dense one, and two with experts."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titanlite.models.base import ModelArgs, TensorPlan
from titanlite.models.experts import DecoderOfExperts, ExpertArgs, ExpertOptions
from titanlite.models.initial import Constant, InitialValues, Normal
from titanlite.models.layers import Linear
from titanlite.models.llama3 import Llama3
from titanlite.models.qwen3 import Qwen3, Qwen3Args
from titanlite.models.qwen3_moe import Experts, Qwen3Moe, Qwen3MoeArgs
from titanlite.ops.functions import clamped_swiglu


class Wide(nn.Module):
    def __init__(self, dim: int, hidden_dim: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(dim, hidden_dim), Linear(hidden_dim, dim, bias=True)
        self.scale = nn.Parameter(self.up.weight.new_empty(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)) * self.scale)


class Own(Llama3):
    """A model whose table splits less: biases, a whole parameter in a split module, a whole embedding."""

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


class HalfRotated(Qwen3Args):
    @property
    def rotary_dims(self) -> int:
        return self.head_dim // 4 * 2


class Biased(Qwen3):
    """Attention with biases and sinks, of which positions rotate half of each head, with scores of another scale."""

    draws_random = False
    flavors: ClassVar[dict[str, ModelArgs]] = {"debug": HalfRotated(**vars(Qwen3.flavors["debug"]))}

    def attention_options(self) -> dict[str, Any]:
        return {**super().attention_options(), "biases": "qkvo", "scale": 0.5, "has_sinks": True}

    def init_weight(self, name: str, shape: torch.Size) -> InitialValues:
        return Constant(0.1) if name.endswith("bias") else super().init_weight(name, shape)


class Ungated(Experts):
    stacks = ("w1", "w2")
    hidden_dims = (2, 1)

    def __init__(self, args: Qwen3MoeArgs) -> None:
        super().__init__(args)
        del self.w3

    def compute(self, x_SD: Tensor, weights_S: Tensor, ends_E: Tensor, stacks: Sequence[Tensor]) -> Tensor:
        w1_EDF, w2_EFD = stacks
        out_SD = self.kernels.grouped_mm(F.gelu(self.kernels.grouped_mm(x_SD, w1_EDF, ends_E)), w2_EFD, ends_E)
        return weights_S.unsqueeze(1) * out_SD


class OwnExperts(Qwen3Moe):
    draws_random = False

    def build_feed_forward(self, layer: int) -> nn.Module:
        return Ungated(self.args)


@dataclass(frozen=True, kw_only=True)
class VariantsArgs(ExpertArgs):
    n_dense_layers: int = 1

    @property
    def experts(self) -> ExpertOptions:
        return ExpertOptions(
            scores="sigmoid", scale=2.5, n_groups=4, n_active_groups=2, router_has_bias=True, shared_dim=16,
            have_biases=True, activation=clamped_swiglu, n_dense_layers=self.n_dense_layers, dense_dim=48,
        )  # fmt: skip


class Variants(DecoderOfExperts):
    """A dense layer, and experts with all that can be declared. Their biases begin as other values than 0."""

    draws_random = False
    flavors: ClassVar[dict[str, ModelArgs]] = {
        "debug": VariantsArgs(
            dim=32, n_layers=2, n_heads=2, n_kv_heads=2, hidden_dim=24, vocab_size=260, max_seq_len=8192, norm_eps=1e-5,
            rope_theta=1e4, n_experts=8, n_active_experts=3, balance_rate=0.01,
        ),
    }  # fmt: skip

    def init_weight(self, name: str, shape: torch.Size) -> InitialValues:
        is_bias = name.rpartition(".")[2] in ("b1", "b2", "b3", "router_bias")
        return Normal(std=0.5) if is_bias else super().init_weight(name, shape)


class Balanced(Variants):
    """A flavor with a balance loss, of which the config says nothing."""

    draws_random = False
    flavors: ClassVar[dict[str, ModelArgs]] = {
        "debug": VariantsArgs(**{**vars(Variants.flavors["debug"]), "balance_loss": 0.1}),
    }
