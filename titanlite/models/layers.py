"""Layers that models share for the same reason. Single-device code: no ranks, no meshes, and of devices only what a
tensor itself says, where a kernel is chosen.

Shape suffixes: B batch, L sequence, D model dim, N query heads, K key/value heads, H head dim, F feed-forward dim,
V vocabulary, T all B * L tokens, 1 a dim that broadcasts.
"""

import inspect
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Loss = Callable[[Tensor, Tensor], Any]
"""(hidden [B, L, D], weight [V, D]) -> scalars. It owns the product with the vocabulary, so that a loss can avoid ever
holding the full logits."""


class Documents(NamedTuple):
    """Where in a batch its documents are, so that each is seen as if it were alone. A tuple of tensors, so that what
    walks through inputs (FSDP, checkpointing, the compiler) finds them."""

    positions_BL: Tensor
    """int64: from 0 in each document, and in each row."""
    ids_BL: Tensor
    """int32: the document's number in its row, ascending."""
    boundaries: Tensor
    """int32 [documents + 1]: where documents begin among the B * L tokens (rows begin one too), and B * L."""


class Boundaries(NamedTuple):
    """Of the documents, for a kernel that takes them packed: int32 [documents + 1]."""

    offsets: Tensor


HAS_BFLOAT16_UNITS = torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported()
"""Of this CPU. The compiler could not ask."""

AttentionMask = Tensor | Boundaries
"""What holds attention within documents. A tensor [B, 1, L, L] is added to the scores: 0, or -inf where the key is of
another document or of a later token."""


def attention_mask(documents: Documents, x_BLD: Tensor, head_dim: int) -> AttentionMask:
    """For all blocks of one forward pass, as the device and type of `x_BLD` take it best."""
    if has_packed_kernel(x_BLD.device, x_BLD.dtype, head_dim):
        # The number of documents is another one in each batch: say so, or the second batch compiles every block anew.
        torch._dynamo.maybe_mark_dynamic(documents.boundaries, 0)
        return Boundaries(documents.boundaries)
    ids_BL = documents.ids_BL
    allowed_B1LL = (ids_BL[:, None, :, None] == ids_BL[:, None, None, :]).tril()
    # Of the type of the scores: a boolean mask would be converted, and kept for backward, once a block.
    blocked_B1LL = torch.zeros(allowed_B1LL.shape, dtype=x_BLD.dtype, device=x_BLD.device)
    return blocked_B1LL.masked_fill_(~allowed_B1LL, -math.inf)


def has_packed_kernel(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Whether `packed_attention` runs: torch's flash attention of variable length. It needs an NVIDIA GPU from Ampere
    on and half precision, and with grouped queries torch 2.12, of which its arguments tell."""
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16) or head_dim % 8 or head_dim > 256:
        return False
    # Planning is on fake tensors of a device that need not be there.
    if not torch.cuda.is_available() or torch.version.hip or torch.cuda.get_device_capability(device) < (8, 0):
        return False
    if not torch.backends.cuda.is_flash_attention_available():
        return False
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return False
    return {"window_size", "enable_gqa"} <= inspect.signature(varlen_attn).parameters.keys()


def packed_attention(q_BNLH: Tensor, k_BKLH: Tensor, v_BKLH: Tensor, boundaries: Boundaries) -> Tensor:
    """Causal attention within documents, [B, N, L, H]: the time is that of the documents, and no mask is held."""
    from torch.nn.attention.varlen import varlen_attn  # it takes a second, and not every device has use for it

    q_TNH, k_TKH, v_TKH = (x.transpose(1, 2).flatten(0, 1) for x in (q_BNLH, k_BKLH, v_BKLH))
    B, _, L, _ = q_BNLH.shape
    # The longest document has at most L tokens; its true length is on the device, and asking would wait for it.
    out_TNH = varlen_attn(
        q_TNH, k_TKH, v_TKH, boundaries.offsets, boundaries.offsets, L, L, window_size=(-1, 0), enable_gqa=True
    )
    assert isinstance(out_TNH, Tensor)
    return out_TNH.unflatten(0, (B, L)).transpose(1, 2)


def attend(q_BNLH: Tensor, k_BKLH: Tensor, v_BKLH: Tensor, mask: AttentionMask | None) -> Tensor:
    """Causal attention, [B, N, L, H]; with a mask within documents only. Heads of queries can share those of keys."""
    if isinstance(mask, Boundaries):
        return packed_attention(q_BNLH, k_BKLH, v_BKLH, mask)
    grouped = q_BNLH.shape[1] != k_BKLH.shape[1]
    return F.scaled_dot_product_attention(
        q_BNLH, k_BKLH, v_BKLH, attn_mask=mask, is_causal=mask is None, enable_gqa=grouped
    )


def rope_cos_sin(head_dim: int, max_seq_len: int, theta: float, scaling_factor: float = 1.0) -> tuple[Tensor, Tensor]:
    """cos and sin tables, fp32 [max_seq_len, head_dim], for `apply_rope` (arXiv:2104.09864).

    `scaling_factor` is Llama 3.1's: wavelengths beyond the 8192 tokens of Llama 3's own training are stretched by it,
    those below a quarter of that are kept, and those between are blended (arXiv:2407.21783, Meta's release). 1 is
    Llama 3.
    """
    inv_freq = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    low, high, original_seq_len = 1.0, 4.0, 8192
    turns = original_seq_len * inv_freq / (2 * math.pi)
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    inv_freq = (1 - keep) * inv_freq / scaling_factor + keep * inv_freq
    angles = torch.outer(torch.arange(max_seq_len, dtype=torch.float32), inv_freq)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def rope_at(table_LH: Tensor, seq_len: int, documents: Documents | None) -> Tensor:
    """The rows of a cos or sin table that a batch needs: [L, H], or [B, 1, L, H] by the positions in documents."""
    return table_LH[:seq_len] if documents is None else table_LH[documents.positions_BL].unsqueeze(1)


def apply_rope(x_BNLH: Tensor, cos_LH: Tensor, sin_LH: Tensor) -> Tensor:
    """Rotate the pairs (i, i + H/2) of each head, in real arithmetic (so that it compiles); keeps x's dtype. cos and
    sin are as `rope_at` gives them."""
    if torch.compiler.is_compiling():  # it finds a backward of its own, and caches nothing of ours
        return _rotate(x_BNLH, cos_LH, sin_LH)
    return _Rotation.apply(x_BNLH, cos_LH, sin_LH)


class _Rotation(torch.autograd.Function):
    """The gradient of a rotation is the rotation back, by the same three kernels: nothing of x is kept."""

    @staticmethod
    def forward(ctx: Any, x_BNLH: Tensor, cos_LH: Tensor, sin_LH: Tensor) -> Tensor:
        ctx.save_for_backward(cos_LH, sin_LH)
        return _rotate(x_BNLH, cos_LH, sin_LH)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        cos_LH, sin_LH = ctx.saved_tensors
        return _rotate(gradients[0], cos_LH, -sin_LH), None, None


def _rotate(x_BNLH: Tensor, cos_LH: Tensor, sin_LH: Tensor) -> Tensor:
    if torch.compiler.is_compiling():
        x1, x2 = x_BNLH.chunk(2, dim=-1)
        return (x_BNLH * cos_LH + torch.cat((-x2, x1), dim=-1) * sin_LH).type_as(x_BNLH)
    half = x_BNLH.shape[-1] // 2
    out_BNLH = x_BNLH * cos_LH
    out_BNLH[..., :half].addcmul_(x_BNLH[..., half:], sin_LH[..., :half], value=-1)
    out_BNLH[..., half:].addcmul_(x_BNLH[..., :half], sin_LH[..., half:])
    return out_BNLH.type_as(x_BNLH)


def matmul_dtype(x: Tensor) -> torch.dtype:
    """Of the operands of matrix products: x's own, but on CPUs without units for bfloat16, which take 3 to 50 times as
    long for it, float32. Sums are in float32 either way."""
    if x.dtype != torch.bfloat16 or x.device.type != "cpu":
        return x.dtype
    return x.dtype if HAS_BFLOAT16_UNITS else torch.float32


class Linear(nn.Linear):
    """Without a bias."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(in_features, out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        if (wide := matmul_dtype(x)) == x.dtype:
            return super().forward(x)
        if torch.compiler.is_compiling():
            return F.linear(x.to(wide), self.weight.to(wide)).type_as(x)
        return _WideProduct.apply(x, self.weight, wide)


class _WideProduct(torch.autograd.Function):
    """x @ weight^T by operands of a wider type, of which nothing is kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, wide: torch.dtype) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.wide = wide
        return F.linear(x.to(wide), weight.to(wide)).type_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        gradient = gradients[0].to(ctx.wide)
        d_x = (gradient @ weight.to(ctx.wide)).type_as(x)
        d_weight = gradient.flatten(0, -2).t() @ x.to(ctx.wide).flatten(0, -2)
        return d_x, d_weight.type_as(weight), None


class RMSNorm(nn.RMSNorm):
    """x / sqrt(mean(x^2) + eps) * weight (arXiv:1910.07467), computed in float32."""

    def forward(self, x: Tensor) -> Tensor:
        if has_norm_kernel(x.device) or torch.compiler.is_compiling():
            return super().forward(x)
        return _RMSNorm.apply(x, self.weight, self.eps)


def has_norm_kernel(device: torch.device) -> bool:
    """Whether PyTorch has one kernel for all of `F.rms_norm` and one for its backward. CPUs take a dozen."""
    return device.type != "cpu"


class _RMSNorm(torch.autograd.Function):
    """Half of the passes over memory that PyTorch's takes on a CPU; beside x, one number a row is kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.float()
        scale = wide.square().mean(dim=-1, keepdim=True).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        return (wide * scale).mul_(weight).type_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, scale = ctx.saved_tensors
        gradient, normal = gradients[0].float(), x.float() * scale
        both = gradient * normal
        along = (both.flatten(0, -2) @ weight.float()).div_(-x.shape[-1]).view_as(scale)
        d_x = (gradient * weight).addcmul_(normal, along).mul_(scale)
        return d_x.type_as(x), both.flatten(0, -2).sum(dim=0).type_as(weight), None


class Attention(nn.Module):
    """Causal grouped-query attention (arXiv:2305.13245) with rotary positions, with a mask within documents only.

    Args:
        qk_norm_eps: normalize each head's queries and keys (arXiv:2302.05442), with this in the root. None does not.
    """

    def __init__(
        self, dim: int, n_heads: int, n_kv_heads: int, head_dim: int, *, qk_norm_eps: float | None = None
    ) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.wq = Linear(dim, n_heads * head_dim)
        self.wk = Linear(dim, n_kv_heads * head_dim)
        self.wv = Linear(dim, n_kv_heads * head_dim)
        self.wo = Linear(n_heads * head_dim, dim)
        self.q_norm = nn.Identity() if qk_norm_eps is None else RMSNorm(head_dim, eps=qk_norm_eps)
        self.k_norm = nn.Identity() if qk_norm_eps is None else RMSNorm(head_dim, eps=qk_norm_eps)

    def forward(self, x_BLD: Tensor, cos_LH: Tensor, sin_LH: Tensor, mask: AttentionMask | None = None) -> Tensor:
        B, L, _ = x_BLD.shape
        q_BNLH = self.q_norm(self.wq(x_BLD).view(B, L, -1, self.head_dim)).transpose(1, 2)
        k_BKLH = self.k_norm(self.wk(x_BLD).view(B, L, -1, self.head_dim)).transpose(1, 2)
        v_BKLH = self.wv(x_BLD).view(B, L, -1, self.head_dim).transpose(1, 2)
        q_BNLH, k_BKLH = apply_rope(q_BNLH, cos_LH, sin_LH), apply_rope(k_BKLH, cos_LH, sin_LH)
        out_BNLH = attend(q_BNLH, k_BKLH, v_BKLH, mask)
        return self.wo(out_BNLH.transpose(1, 2).reshape(B, L, -1))


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up (arXiv:2002.05202)."""
    if torch.compiler.is_compiling():  # it makes the same of the formula
        return F.silu(gate) * up
    return _SwiGLU.apply(gate, up)


class _SwiGLU(torch.autograd.Function):
    """Of three tensors that autograd would keep, backward makes silu(gate) anew: one pass over memory."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        d_gate = gradients[0] * up
        torch.ops.aten.silu_backward.grad_input(d_gate, gate, grad_input=d_gate)
        return d_gate, F.silu(gate).mul_(gradients[0])


class FeedForward(nn.Module):
    """SwiGLU (arXiv:2002.05202): w2(silu(w1 x) * w3 x)."""

    def __init__(self, dim: int, hidden_dim: int) -> None:
        super().__init__()
        self.w1 = Linear(dim, hidden_dim)
        self.w2 = Linear(hidden_dim, dim)
        self.w3 = Linear(dim, hidden_dim)

    def forward(self, x_BLD: Tensor) -> Tensor:
        return self.w2(swiglu(self.w1(x_BLD), self.w3(x_BLD)))


class Head(nn.Module):
    """Final norm and projection to the vocabulary: one unit, so that one all-gather serves both, and so that a
    chunked loss can use the projection's weight many times without more communication."""

    def __init__(self, dim: int, vocab_size: int, norm_eps: float) -> None:
        super().__init__()
        self.norm = RMSNorm(dim, eps=norm_eps)
        self.output = Linear(dim, vocab_size)

    def forward(self, x_BLD: Tensor, loss: Loss | None = None) -> Any:
        """Logits [B, L, V], or what `loss` makes of the hidden states and the projection's weight."""
        x_BLD = self.norm(x_BLD)
        return self.output(x_BLD) if loss is None else loss(x_BLD, self.output.weight)
