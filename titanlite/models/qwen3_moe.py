"""Qwen3-MoE (arXiv:2505.09388): Qwen3 whose feed-forward layers are experts, of which a router picks a few a token.

Experts are kept equally busy without an auxiliary loss (arXiv:2408.15664): each has a bias that counts only when
experts are picked, and after each step it goes up if the expert had less than its share of the global batch, else down.
So the loss stays what it is, and the balance does not depend on how the batch is split.

Shape suffixes: as in `layers`; E experts, K those of one token, S = T * K.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titanlite.models.base import (
    BRANCHES_OF_DECODER,
    DECODER_OF_EXPERTS,
    ExpertLayer,
    ModelArgs,
    Roles,
    TensorPlan,
)
from titanlite.models.decoder_formats import (
    HF_CONSTANTS,
    HF_DECODER,
    HF_FIELDS,
    HF_QK_NORM,
    META_DECODER,
    META_QK,
    META_QK_NORM,
    read_plain_rope,
    write_plain_rope,
)
from titanlite.models.formats import ConfigJson, Entry, Formats, HuggingFace, Table
from titanlite.models.initial import InitialValues, Normal
from titanlite.models.qwen3 import Qwen3, Qwen3Args
from titanlite.ops.functions import swiglu
from titanlite.ops.kernels import DEFAULT_KERNELS, Kernels
from titanlite.runtime.private_torch.tensors import reshape_result


@dataclass(frozen=True, kw_only=True)
class Qwen3MoeArgs(Qwen3Args):
    """hidden_dim is that of one expert."""

    n_experts: int = 128
    n_active_experts: int = 8
    balance_rate: float = 5e-3
    """Change of an expert's bias in a step, in units of the router's logits; 0 turns balancing off. This default is
    like 1e-3 for the sigmoid of the paper. Short runs at a high learning rate need more (`busiest_expert`)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.n_active_experts <= self.n_experts:
            raise ValueError(
                f"n_active_experts must be between 1 and n_experts ({self.n_experts}), got {self.n_active_experts}"
            )
        if self.n_active_experts == 1:
            raise ValueError(
                "n_active_experts = 1 never trains the router: a softmax over one expert is always 1, and its gradient "
                "0. Use 2 or more"
            )


class Experts(ExpertLayer):
    """SwiGLU feed-forward layers, each token through the K that the router weighs most."""

    kernels: Kernels = DEFAULT_KERNELS
    stacks = ("w1", "w2", "w3")
    hidden_dims = (2, 1, 2)
    bias_E: Tensor
    load_E: Tensor

    def __init__(self, args: Qwen3MoeArgs) -> None:
        super().__init__()
        self.n_active = args.n_active_experts
        E, D, F_ = args.n_experts, args.dim, args.hidden_dim
        self.router = nn.Parameter(torch.empty(E, D))
        self.w1 = nn.Parameter(torch.empty(E, D, F_))
        self.w2 = nn.Parameter(torch.empty(E, F_, D))
        self.w3 = nn.Parameter(torch.empty(E, D, F_))
        self.register_buffer("bias_E", torch.zeros(E))
        self.register_buffer("load_E", torch.zeros(E), persistent=False)

    def forward(self, x_BLD: Tensor) -> Tensor:
        x_TD = x_BLD.flatten(0, 1)
        logits_TE = F.linear(x_TD.float(), self.router.float())
        chosen_TK = (logits_TE + self.bias_E).topk(self.n_active, dim=-1).indices
        weights_TK = logits_TE.gather(-1, chosen_TK).softmax(dim=-1)  # of the softmax over all, scaled to a sum of 1
        expert_S, order_S = chosen_TK.flatten().sort(stable=True)
        experts_E = torch.arange(len(self.bias_E), device=x_TD.device)
        ends_E = torch.searchsorted(expert_S, experts_E, right=True).to(torch.int32)
        if self.training and torch.is_grad_enabled():
            # With activation checkpointing a block counts twice, which changes no expert's share.
            self.load_E.add_(ends_E.diff(prepend=ends_E.new_zeros(1)))
        x_SD = x_TD.index_select(0, order_S // self.n_active)
        out_SD = self.pass_through_experts(x_SD, ends_E)
        out_TKD = torch.empty_like(out_SD).index_copy(0, order_S, out_SD).unflatten(0, chosen_TK.shape)
        return reshape_result(torch.bmm(weights_TK.to(x_TD.dtype).unsqueeze(1), out_TKD), x_BLD.shape)

    def compute(self, x_SD: Tensor, ends_E: Tensor, weights: Sequence[Tensor]) -> Tensor:
        w1_EDF, w2_EFD, w3_EDF = weights
        grouped_mm = self.kernels.grouped_mm
        hidden_SF = swiglu(grouped_mm(x_SD, w1_EDF, ends_E), grouped_mm(x_SD, w3_EDF, ends_E))
        return grouped_mm(hidden_SF, w2_EFD, ends_E)


def _write_rest(args: Qwen3MoeArgs) -> ConfigJson:
    # transformers wants the size of dense feed-forward layers, of which these models have none.
    return {**write_plain_rope(args), "num_experts": args.n_experts, "intermediate_size": args.hidden_dim}


def _read_rest(config: ConfigJson) -> dict[str, Any]:
    n_experts = config.get("num_experts", config.get("num_local_experts"))  # the second since transformers 5
    if n_experts is None:
        raise ValueError("num_experts is missing")
    return {**read_plain_rope(config), "n_experts": n_experts}


HF_EXPERTS = (
    Entry("layers.{layer}.feed_forward.router", "model.layers.{layer}.mlp.gate.weight"),
    Entry(
        "layers.{layer}.feed_forward.w1", "model.layers.{layer}.mlp.experts.{expert}.gate_proj.weight", transposed=True
    ),
    Entry(
        "layers.{layer}.feed_forward.w2", "model.layers.{layer}.mlp.experts.{expert}.down_proj.weight", transposed=True
    ),
    Entry(
        "layers.{layer}.feed_forward.w3", "model.layers.{layer}.mlp.experts.{expert}.up_proj.weight", transposed=True
    ),
)
# moe.expert_bias of torchtitan counts on probabilities and ours on logits, so neither stands for the other.
TORCHTITAN_EXPERTS = (
    Entry("layers.{layer}.feed_forward.router", "layers.{layer}.moe.router.gate.weight"),
    Entry("layers.{layer}.feed_forward.w1", "layers.{layer}.moe.experts.w1", transposed=True),
    Entry("layers.{layer}.feed_forward.w2", "layers.{layer}.moe.experts.w2", transposed=True),
    Entry("layers.{layer}.feed_forward.w3", "layers.{layer}.moe.experts.w3", transposed=True),
)


class Qwen3Moe(Qwen3):
    draws_random = False
    tensor_plan: ClassVar[TensorPlan] = DECODER_OF_EXPERTS
    roles: ClassVar[Roles] = {"layers.*.feed_forward.router": "output", **BRANCHES_OF_DECODER}
    formats = Formats(
        hugging_face=HuggingFace(
            architecture="Qwen3MoeForCausalLM",
            model_type="qwen3_moe",
            tensors=Table(HF_DECODER + HF_QK_NORM + HF_EXPERTS),
            fields={
                **HF_FIELDS,
                "head_dim": "head_dim",
                "hidden_dim": "moe_intermediate_size",
                "n_active_experts": "num_experts_per_tok",
            },
            constants={
                **HF_CONSTANTS,
                "use_sliding_window": False,
                "decoder_sparse_step": 1,
                "mlp_only_layers": [],
                "norm_topk_prob": True,
            },
            write_rest=_write_rest,
            read_rest=_read_rest,
        ),
        torchtitan=Table(META_DECODER + META_QK + META_QK_NORM + TORCHTITAN_EXPERTS),
    )
    flavors: ClassVar[dict[str, ModelArgs]] = {
        "debug": Qwen3MoeArgs(
            dim=256, n_layers=4, n_heads=4, n_kv_heads=2, hidden_dim=192, head_dim=64, n_experts=8, n_active_experts=2,
            vocab_size=2048, max_seq_len=8192, rope_theta=10000.0, balance_rate=0.05,
        ),
        "30B-A3B": Qwen3MoeArgs(dim=2048, n_layers=48, n_heads=32, n_kv_heads=4, hidden_dim=768),
        "235B-A22B": Qwen3MoeArgs(dim=4096, n_layers=94, n_heads=64, n_kv_heads=4, hidden_dim=1536),
    }  # fmt: skip

    args: Qwen3MoeArgs  # pyright: ignore[reportIncompatibleVariableOverride]

    def build_feed_forward(self, layer: int) -> nn.Module:
        return Experts(self.args)

    def feed_forward_weights(self, layer: int) -> int:
        args = self.args
        return args.n_active_experts * 3 * args.dim * args.hidden_dim + args.dim * args.n_experts

    def share_of_experts(self) -> float:
        return self.args.n_active_experts / self.args.n_experts

    def init_weight(self, name: str, shape: torch.Size) -> InitialValues:
        if name.endswith("feed_forward.router"):
            return Normal(std=0.02)
        matrix = f"{name}.weight" if ".feed_forward." in name else name  # stacks of matrices: as FeedForward's
        return super().init_weight(matrix, shape)

    def init_buffers(self) -> None:
        super().init_buffers()
        for experts in self.experts():  # new ones: with offload, the old ones are where parameters are
            experts.bias_E, experts.load_E = torch.zeros(self.args.n_experts), torch.zeros(self.args.n_experts)

    def experts(self) -> list[Experts]:
        layers = (block.feed_forward for block in self.layers)
        return [layer for layer in layers if isinstance(layer, Experts)]

    def counters(self) -> list[Tensor]:
        return [experts.load_E for experts in self.experts()]

    @torch.no_grad()
    def end_step(self, taken: Tensor) -> dict[str, Tensor]:
        """`busiest_expert`: its tokens over an even share of them, in the layer where that is most."""
        busiest = []
        for experts in self.experts():
            mean = experts.load_E.mean()
            busiest.append(experts.load_E.max() / mean)
            if experts.router.requires_grad:  # the bias of a frozen router is frozen, too
                experts.bias_E += self.args.balance_rate * torch.sign(mean - experts.load_E) * taken
            experts.load_E.zero_()
        return {"busiest_expert": torch.stack(busiest).max()}
