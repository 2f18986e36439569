"""Rotation, SwiGLU and RMSNorm with a backward pass that keeps less memory than autograd's, linear layers that add up
the gradient of their common input in fewer kernels, and a gradient that is known after forward.

The compiler finds such a backward pass by itself, and caches no code with custom functions in it: it gets the plain
formulas.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from titanlite.runtime.private_torch.tensors import has_saved_tensor_hooks, version_of

Activation = Callable[[Tensor, Tensor], Tensor]
"""(gate, up) -> hidden, elementwise."""

# Grouped matmul for devices without a kernel for it: one matmul after the other.


def loop_over_groups(x_TD: Tensor, weights_EDF: Tensor, ends_E: Tensor, dtype: torch.dtype) -> Tensor:
    """Matmul of each group of tokens with its own weight -> [T, F], one group after the other.

    The loop waits for the device to read the sizes of the groups.

    Args:
        ends_E: int32. Group e holds the tokens from ends_E[e - 1] to ends_E[e]; the last end is T.
        dtype: compute dtype of the operands.
    """
    return _grouped_mm(x_TD, weights_EDF, ends_E, dtype)


# These are custom operators, so that the compiler and fake tensors need not know the sizes of the groups.


@torch.library.custom_op("titanlite::grouped_mm", mutates_args=())
def _grouped_mm(x_TD: Tensor, weights_EDF: Tensor, ends_E: Tensor, dtype: torch.dtype) -> Tensor:
    out_TF = x_TD.new_empty(len(x_TD), weights_EDF.shape[2])
    for (begin, end), weight_DF in zip(_groups(ends_E), weights_EDF, strict=True):
        out_TF[begin:end] = torch.mm(x_TD[begin:end].to(dtype), weight_DF.to(dtype))
    return out_TF


@torch.library.custom_op("titanlite::grouped_mm_weights", mutates_args=())
def _weight_gradient(x_TD: Tensor, gradient_TF: Tensor, ends_E: Tensor, dtype: torch.dtype) -> Tensor:
    out_EDF = x_TD.new_empty(len(ends_E), x_TD.shape[1], gradient_TF.shape[1])
    for (begin, end), out_DF in zip(_groups(ends_E), out_EDF, strict=True):
        out_DF.copy_(torch.mm(x_TD[begin:end].t().to(dtype), gradient_TF[begin:end].to(dtype)))
    return out_EDF


def _groups(ends_E: Tensor) -> list[tuple[int, int]]:
    ends = ends_E.tolist()
    return list(zip([0, *ends], ends, strict=False))


@_grouped_mm.register_fake
def _(x_TD: Tensor, weights_EDF: Tensor, ends_E: Tensor, dtype: torch.dtype) -> Tensor:
    return x_TD.new_empty(len(x_TD), weights_EDF.shape[2])


@_weight_gradient.register_fake
def _(x_TD: Tensor, gradient_TF: Tensor, ends_E: Tensor, dtype: torch.dtype) -> Tensor:
    return x_TD.new_empty(len(ends_E), x_TD.shape[1], gradient_TF.shape[1])


def _save_inputs(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, torch.dtype], output: Tensor) -> None:
    *tensors, ctx.dtype = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, gradient_TF: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
    x_TD, weights_EDF, ends_E = ctx.saved_tensors
    gradient_TF = gradient_TF.contiguous()
    x_needs, weights_need, *_ = ctx.needs_input_grad
    d_x_TD = _grouped_mm(gradient_TF, weights_EDF.transpose(1, 2), ends_E, ctx.dtype) if x_needs else None
    return d_x_TD, _weight_gradient(x_TD, gradient_TF, ends_E, ctx.dtype) if weights_need else None, None, None


_grouped_mm.register_autograd(_backward, setup_context=_save_inputs)


@register_flop_formula(torch.ops.titanlite.grouped_mm)
def _flops(x_shape: Any, weights_shape: Any, ends_shape: Any, *_: Any, **__: Any) -> int:
    return 2 * x_shape[0] * x_shape[1] * weights_shape[2]


@register_flop_formula(torch.ops.titanlite.grouped_mm_weights)
def _flops_of_weights(x_shape: Any, gradient_shape: Any, ends_shape: Any, *_: Any, **__: Any) -> int:
    return 2 * x_shape[0] * x_shape[1] * gradient_shape[1]


def rotate(x_BNLH: Tensor, cos_LH: Tensor, sin_LH: Tensor) -> Tensor:
    """Rotate the pairs (i, i + H/2) of each head by the angles of cos and sin; keeps the dtype of x.

    H is the number of dims that cos and sin have. A head may have more, which are kept.
    """
    if torch.compiler.is_compiling():
        rotated, kept = x_BNLH.tensor_split([cos_LH.shape[-1]], dim=-1)
        x1, x2 = rotated.chunk(2, dim=-1)
        rotated = (rotated * cos_LH + torch.cat((-x2, x1), dim=-1) * sin_LH).type_as(x_BNLH)
        return torch.cat((rotated, kept), dim=-1) if kept.shape[-1] else rotated
    return _Rotation.apply(x_BNLH, cos_LH, sin_LH)


class _Rotation(torch.autograd.Function):
    """Rotation whose backward is the inverse rotation, so that x need not be kept."""

    @staticmethod
    def forward(ctx: Any, x_BNLH: Tensor, cos_LH: Tensor, sin_LH: Tensor) -> Tensor:
        ctx.save_for_backward(cos_LH, sin_LH)
        return _rotate_in_three_kernels(x_BNLH, cos_LH, sin_LH, sign=1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        cos_LH, sin_LH = ctx.saved_tensors
        return _rotate_in_three_kernels(gradients[0], cos_LH, sin_LH, sign=-1), None, None


def _rotate_in_three_kernels(x_BNLH: Tensor, cos_LH: Tensor, sin_LH: Tensor, *, sign: int) -> Tensor:
    """Rotate by the angles, or with sign -1 back. Sums are float32, and rounded once by the kernel that makes them."""
    dims = cos_LH.shape[-1]
    half = dims // 2
    first, second = (..., slice(half)), (..., slice(half, dims))
    wide_BNLH = x_BNLH[..., :dims] * cos_LH
    is_same = x_BNLH.dtype == wide_BNLH.dtype and x_BNLH.shape == wide_BNLH.shape
    out_BNLH = wide_BNLH if is_same else torch.empty_like(x_BNLH)
    out_BNLH[..., dims:] = x_BNLH[..., dims:]
    for part, other, value in ((first, second, -sign), (second, first, sign)):
        torch.addcmul(wide_BNLH[part], x_BNLH[other], sin_LH[part], value=value, out=out_BNLH[part])
    return out_BNLH


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up (arXiv:2002.05202), elementwise."""
    if torch.compiler.is_compiling():
        return F.silu(gate) * up
    return _SwiGLU.apply(gate, up)


class _SwiGLU(torch.autograd.Function):
    """SwiGLU that keeps two tensors for backward, where autograd keeps three: silu(gate) is recomputed in one pass."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.recomputed = []
        ctx.again = partial(_SwiGLU.again, ctx.recomputed)
        out = F.silu(gate).mul_(up)
        ctx.version = version_of(out)
        return out

    @staticmethod
    def again(recomputed: list[Tensor], gate: Tensor, up: Tensor) -> Tensor:
        """Return the output, and leave silu(gate) for backward, which is next."""
        recomputed[:] = [F.silu(gate)]
        return recomputed[0] * up

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        d_gate = gradients[0] * up
        torch.ops.aten.silu_backward.grad_input(d_gate, gate, grad_input=d_gate)
        silu = ctx.recomputed.pop() if ctx.recomputed else F.silu(gate)
        return d_gate, silu.mul_(gradients[0])


def clamped_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """(up + 1) * gate * sigmoid(1.702 gate), elementwise, with gate at most 7 and up within 7 of 0 (gpt-oss,
    arXiv:2508.10925)."""
    if torch.compiler.is_compiling():
        gate = gate.clamp(max=LIMIT)
        return (up.clamp(-LIMIT, LIMIT) + 1) * (gate * torch.sigmoid(SLOPE * gate))
    return _ClampedSwiGLU.apply(gate, up)


SLOPE, LIMIT = 1.702, 7.0


class _ClampedSwiGLU(torch.autograd.Function):
    """Clamped SwiGLU that keeps two tensors for backward, where autograd keeps seven."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        gate = gate.clamp(max=LIMIT)
        return torch.sigmoid(SLOPE * gate).mul_(gate).mul_(up.clamp(-LIMIT, LIMIT).add_(1))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        limited = gate.clamp(max=LIMIT)
        share = torch.sigmoid(SLOPE * limited)
        d_up = (limited * share).mul_(gradients[0]).mul_(up.abs() <= LIMIT)
        d_gate = (1 - share).mul_(limited).mul_(SLOPE).add_(1).mul_(share)
        d_gate.mul_(up.clamp(-LIMIT, LIMIT).add_(1)).mul_(gradients[0]).mul_(gate <= LIMIT)
        return d_gate, d_up


def weighted(activation: Activation, gate: Tensor, up: Tensor, weights: Tensor) -> Tensor:
    """activation(gate, up) times the weight of each row; `activation` is elementwise."""
    if torch.compiler.is_compiling():
        return activation(gate, up) * weights.unsqueeze(1)
    return _Weighted.apply(activation, gate, up, weights)


class _Weighted(torch.autograd.Function):
    """Weighted activation that recomputes the activation in backward, which autograd would keep."""

    @staticmethod
    def forward(ctx: Any, activation: Activation, gate: Tensor, up: Tensor, weights: Tensor) -> Tensor:
        ctx.activation = activation
        ctx.save_for_backward(gate, up, weights)
        return activation(gate, up).mul_(weights.unsqueeze(1))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        *leaves, weights = (saved.detach() for saved in ctx.saved_tensors)
        with torch.enable_grad():
            hidden = ctx.activation(*(leaf.requires_grad_() for leaf in leaves))
        d_weights = (gradients[0] * hidden.detach()).sum(dim=1) if ctx.needs_input_grad[3] else None
        return None, *torch.autograd.grad(hidden, leaves, gradients[0] * weights.unsqueeze(1)), d_weights


def geglu(gate: Tensor, up: Tensor) -> Tensor:
    """gelu(gate) * up (arXiv:2002.05202), elementwise, with the tanh approximation of GELU."""
    return F.gelu(gate, approximate="tanh") * up


def rms_norm(x: Tensor, weight: Tensor, eps: float | None) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dim, computed in float32; the dtype of x."""
    eps = torch.finfo(x.dtype).eps if eps is None else eps
    if torch.compiler.is_compiling():
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps) * weight).type_as(x)
    return _RMSNorm.apply(x, weight, eps)


class _RMSNorm(torch.autograd.Function):
    """RMSNorm with half of the passes over memory that PyTorch's takes on a CPU, for weights of any dtype. Beside x, it
    keeps one number for each vector."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.float()
        out = wide.square()
        scale = out.mean(dim=-1, keepdim=True).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        ctx.again = _RMSNorm.again
        out = torch.mul(wide, scale, out=out).mul_(weight).type_as(x)
        ctx.version = version_of(out)
        return out

    @staticmethod
    def again(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
        return (x.float() * scale).mul_(weight).type_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, scale = ctx.saved_tensors
        gradient, normal = gradients[0].float(), x.float() * scale
        both = gradient * normal
        along = (both.flatten(0, -2) @ weight.float()).div_(-x.shape[-1]).view_as(scale)
        d_x = (gradient * weight).addcmul_(normal, along).mul_(scale)
        d_weight = both.flatten(0, -2).sum(dim=0).type_as(weight) if ctx.needs_input_grad[1] else None
        return d_x.type_as(x), d_weight, None


def source_of(x: Tensor) -> Any:
    """Return the node of autograd that makes x, if it is one of `rms_norm` or `swiglu`. `source.again` makes x again
    from `source.saved_tensors`.

    None if x was changed in place since then, and while hooks see what is kept: those of activation checkpointing
    recompute x anyway.
    """
    node: Any = x.grad_fn
    is_source = hasattr(node, "again") and node.version == version_of(x) and not has_saved_tensor_hooks()
    return node if is_source else None


def linears(x: Tensor, weights: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """x @ weight^T for each weight."""
    return _CommonInput.apply(x, *weights)


class _CommonInput(torch.autograd.Function):
    """Linear layers of one input, whose backward adds the input gradients within the matmuls, where autograd would
    write one for each weight and add them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(x, *weights)
        return tuple(F.linear(x, weight) for weight in weights)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        x_needs, *weights_need = ctx.needs_input_grad
        rows, d_x, d_weights = x.flatten(0, -2), None, []
        for gradient, weight, needs in zip(gradients, weights, weights_need, strict=True):
            of_rows = gradient.flatten(0, -2)
            if x_needs:
                d_x = of_rows @ weight if d_x is None else d_x.addmm_(of_rows, weight)
            d_weights.append(of_rows.t() @ rows if needs else None)
        return None if d_x is None else d_x.view_as(x), *d_weights


# A gradient that is known only between forward and backward. The compiler does not look into these operators: it would
# compute in forward what does not depend on a gradient.


def with_gradient(x_TD: Tensor, source_TE: Tensor, row_E: Tensor) -> Tensor:
    """Return x. Backward adds `row_E`, with the values that it has then, to the gradient of each row of `source_TE`.

    So the row may follow from sums over the whole batch. Write it into `row_E.data`: autograd would take a buffer that
    has changed since forward for a mistake.
    """
    return _with_gradient(x_TD, source_TE, row_E)


@torch.library.custom_op("titanlite::with_gradient", mutates_args=())
def _with_gradient(x_TD: Tensor, source_TE: Tensor, row_E: Tensor) -> Tensor:
    return x_TD.clone()


@torch.library.custom_op("titanlite::repeated_row", mutates_args=())
def _repeated_row(row_E: Tensor, gradient_TD: Tensor) -> Tensor:
    return row_E.repeat(len(gradient_TD), 1)


@_with_gradient.register_fake
def _(x_TD: Tensor, source_TE: Tensor, row_E: Tensor) -> Tensor:
    return torch.empty_like(x_TD)


@_repeated_row.register_fake
def _(row_E: Tensor, gradient_TD: Tensor) -> Tensor:
    return row_E.new_empty(len(gradient_TD), len(row_E))


def _keep_row(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    ctx.row_E = inputs[2]  # no saved tensor, which hooks may copy


def _add_row(ctx: Any, gradient_TD: Tensor) -> tuple[Tensor, Tensor, None]:
    return gradient_TD, _repeated_row(ctx.row_E, gradient_TD), None


_with_gradient.register_autograd(_add_row, setup_context=_keep_row)
