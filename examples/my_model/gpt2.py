"""GPT-2 (Radford et al., 2019). B batch, L sequence, D model dim, N heads, H head dim."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from titanlite.models.base import Model, ModelArgs
from titanlite.models.formats import Entry, Formats, HuggingFace, Table
from titanlite.models.initial import Constant, InitialValues, Normal
from titanlite.models.layers import AttentionMask, Documents, KeySource, Loss
from titanlite.ops.kernels import DEFAULT_KERNELS, Kernels


@dataclass(frozen=True, kw_only=True)
class GPT2Args(ModelArgs):
    dim: int
    n_layers: int
    n_heads: int
    vocab_size: int = 50257
    max_seq_len: int = 1024

    def __post_init__(self) -> None:
        if self.dim % self.n_heads:
            raise ValueError(f"dim {self.dim} must be a multiple of n_heads {self.n_heads}")


class Block(nn.Module):
    kernels: Kernels = DEFAULT_KERNELS
    key_source: KeySource | None = None

    def __init__(self, args: GPT2Args) -> None:
        super().__init__()
        self.head_dim = args.dim // args.n_heads
        self.norm_1 = nn.LayerNorm(args.dim)
        self.qkv = nn.Linear(args.dim, 3 * args.dim)
        self.attention_out = nn.Linear(args.dim, args.dim)
        self.norm_2 = nn.LayerNorm(args.dim)
        self.up = nn.Linear(args.dim, 4 * args.dim)
        self.down = nn.Linear(4 * args.dim, args.dim)

    def forward(self, x_BLD: Tensor, mask: AttentionMask | None = None) -> Tensor:
        qkv_BLND = self.qkv(self.norm_1(x_BLD)).unflatten(-1, (-1, self.head_dim))
        q_BNLH, k_BNLH, v_BNLH = qkv_BLND.transpose(1, 2).chunk(3, dim=1)
        heads_BNLH = self.kernels.attend(q_BNLH, k_BNLH, v_BNLH, mask, self.key_source)
        x_BLD = x_BLD + self.attention_out(heads_BNLH.transpose(1, 2).flatten(2))
        return x_BLD + self.down(F.gelu(self.up(self.norm_2(x_BLD)), approximate="tanh"))


class Head(nn.Module):
    def __init__(self, args: GPT2Args, weight_VD: Tensor) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(args.dim)
        self.weight = weight_VD

    def forward(self, x_BLD: Tensor, loss: Loss | None = None) -> Any:
        x_BLD = self.norm(x_BLD)
        return F.linear(x_BLD, self.weight) if loss is None else loss(x_BLD, self.weight)


NAMES = {
    "norm_1": "ln_1", "qkv": "attn.c_attn", "attention_out": "attn.c_proj",
    "norm_2": "ln_2", "up": "mlp.c_fc", "down": "mlp.c_proj",
}  # fmt: skip
HUGGING_FACE = HuggingFace(
    architecture="GPT2LMHeadModel",
    model_type="gpt2",
    tensors=Table(
        [
            Entry("tok_embeddings.weight", "transformer.wte.weight"),
            Entry("pos_embeddings.weight", "transformer.wpe.weight"),
            *(
                Entry(
                    f"layers.{{layer}}.{ours}.{kind}",
                    f"transformer.h.{{layer}}.{theirs}.{kind}",
                    transposed=kind == "weight" and "norm" not in ours,
                )
                for ours, theirs in NAMES.items()
                for kind in ("weight", "bias")
            ),
            Entry("head.norm.weight", "transformer.ln_f.weight"),
            Entry("head.norm.bias", "transformer.ln_f.bias"),
        ]
    ),
    fields={
        "dim": "n_embd", "n_layers": "n_layer", "n_heads": "n_head",
        "vocab_size": "vocab_size", "max_seq_len": "n_positions",
    },
    constants={"activation_function": "gelu_new", "layer_norm_epsilon": 1e-5, "tie_word_embeddings": True},
)  # fmt: skip


class GPT2(Model):
    formats = Formats(hugging_face=HUGGING_FACE)
    flavors: ClassVar[dict[str, ModelArgs]] = {
        "debug": GPT2Args(dim=256, n_layers=4, n_heads=4, vocab_size=2048),
        "124M": GPT2Args(dim=768, n_layers=12, n_heads=12),
        "355M": GPT2Args(dim=1024, n_layers=24, n_heads=16),
        "774M": GPT2Args(dim=1280, n_layers=36, n_heads=20),
        "1.5B": GPT2Args(dim=1600, n_layers=48, n_heads=25),
    }

    def __init__(self, args: GPT2Args) -> None:
        super().__init__(args)
        self.tok_embeddings = nn.Embedding(args.vocab_size, args.dim)
        self.pos_embeddings = nn.Embedding(args.max_seq_len, args.dim)
        self.layers = nn.ModuleList(Block(args) for _ in range(args.n_layers))
        self.head = Head(args, self.tok_embeddings.weight)

    def forward(self, tokens: Tensor, loss: Loss | None = None, *, documents: Documents | None = None) -> Any:
        if documents is None:
            positions, mask = torch.arange(tokens.shape[1], device=tokens.device), None
        else:
            positions, mask = documents.positions_BL, None
        x_BLD = self.tok_embeddings(tokens) + self.pos_embeddings(positions)
        if documents is not None:
            head_dim = self.args.dim // self.args.n_heads
            mask = self.kernels.attention_mask(documents, x_BLD, head_dim, self.key_source)
        for block in self.layers:
            x_BLD = block(x_BLD, mask)
        return self.head(x_BLD, loss)

    def init_weight(self, name: str, shape: torch.Size) -> InitialValues:
        module, _, kind = name.rpartition(".")
        if kind == "bias":
            return Constant(0.0)
        if module.endswith(("norm", "norm_1", "norm_2")):
            return Constant(1.0)
        if module.endswith(("attention_out", "down")):  # they add to the residual stream, twice a block
            return Normal(std=0.02 / (2 * self.args.n_layers) ** 0.5)
        return Normal(std=0.01 if module == "pos_embeddings" else 0.02)

    def flops_per_token(self, seq_len: int, *, causal: bool = False) -> float:
        args = self.args
        weights = 12 * args.n_layers * args.dim**2 + args.dim * args.vocab_size
        seen = (seq_len + 1) / 2 if causal else seq_len
        return 6 * weights + 12 * args.n_layers * args.dim * seen
