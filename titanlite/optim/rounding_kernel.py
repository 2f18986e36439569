"""AdamW with stochastic rounding as one Triton kernel: one launch for each tensor, and no memory beside the state.

It computes what `SlicedAdamW` computes with PyTorch's operators on a GPU: the float32 operations of `_fused_adamw_` in
the same order (ATen/native/cuda/fused_adam_utils.cuh), the same random bits, the same rounding. Integer arithmetic is
exact, so the random bits are equal on every device. NVIDIA's compiler may join a multiplication and an addition into
one operation (FMA) where the formula has two; here, the weight decay is one. No GPU has compared the two yet.

Imported only where Triton is installed.
"""

# pyright: reportMissingImports=false, reportInvalidTypeForm=false, reportIndexIssue=false
import torch
import triton
import triton.language as tl
from torch import Tensor

from titanlite.ops.hash_random import BITS, MULTIPLIER, ROUNDS

ELEMENTS = 1024
"""Elements that one program updates."""
GOLDEN: tl.constexpr = tl.constexpr(MULTIPLIER)
SHIFT_1: tl.constexpr = tl.constexpr(ROUNDS[0][0])
FACTOR_1: tl.constexpr = tl.constexpr(ROUNDS[0][1])
SHIFT_2: tl.constexpr = tl.constexpr(ROUNDS[1][0])
FACTOR_2: tl.constexpr = tl.constexpr(ROUNDS[1][1])
LOWEST: tl.constexpr = tl.constexpr(64 - BITS)


def update(
    weight: Tensor,
    gradient: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    *,
    corrections: Tensor,
    number: int,
    skip: Tensor,
    salt: int,
    first: int,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> None:
    """Update one tensor and its moments in place, all contiguous, float32 or bfloat16.

    Args:
        corrections: float32 [3, tensors]: number of this step, from 1; 1 - beta1^step; sqrt(1 - beta2^step).
        number: of this tensor in corrections.
        skip: nothing is changed where it is not 0.
        salt: of the random bits.
        first: index of the first element in the whole tensor.
    """
    if size := weight.numel():
        _update[(triton.cdiv(size, ELEMENTS),)](
            weight, gradient, exp_avg, exp_avg_sq, corrections, number, corrections.shape[1], skip, salt, first, size,
            lr, betas[0], betas[1], eps, weight_decay, ELEMENTS=ELEMENTS,
        )  # fmt: skip


def try_update(device: torch.device) -> None:
    """Compile and start the kernel once.

    Raises:
        Exception: any error of Triton, of the C compiler or of the driver.
    """
    tensors = [torch.zeros(ELEMENTS, dtype=torch.bfloat16, device=device) for _ in range(4)]
    update(
        *tensors, corrections=torch.ones(3, 1, device=device), number=0, skip=torch.zeros((), device=device), salt=0,
        first=0, lr=0.0, betas=(0.0, 0.0), eps=0.0, weight_decay=0.0,
    )  # fmt: skip


@triton.jit(do_not_specialize=["number", "count", "salt", "first", "lr", "weight_decay"])
def _update(
    weights, gradients, means, squares, corrections, number, count, skip, salt: tl.int64, first: tl.int64,
    size: tl.int64, lr, beta1, beta2, eps, weight_decay, ELEMENTS: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0).to(tl.int64) * ELEMENTS + tl.arange(0, ELEMENTS)
    here = index < tl.where(tl.load(skip) == 0, size, 0)
    step = tl.load(corrections + number)
    weight = tl.load(weights + index, mask=here, other=0.0).to(tl.float32)
    gradient = tl.load(gradients + index, mask=here, other=0.0).to(tl.float32)
    mean = tl.load(means + index, mask=here, other=0.0).to(tl.float32)
    square = tl.load(squares + index, mask=here, other=0.0).to(tl.float32)

    rate = tl.full([ELEMENTS], lr, tl.float32)
    weight = tl.fma(-(rate * weight_decay), weight, weight)
    mean = tl.fma(beta1, mean, tl.fma(-beta1, gradient, gradient))
    squared = gradient * gradient
    square = tl.fma(beta2, square, tl.fma(-beta2, squared, squared))
    step_size = tl.div_rn(rate, tl.load(corrections + count + number))
    root = tl.div_rn(tl.sqrt_rn(square), tl.load(corrections + 2 * count + number))
    weight = weight - tl.div_rn(step_size * mean, root + eps)

    x = (index + first) * GOLDEN + (step.to(tl.int64) + salt)
    x = (x ^ _shifted(x, SHIFT_1)) * FACTOR_1
    x = (x ^ _shifted(x, SHIFT_2)) * FACTOR_2
    bits = _shifted(x, LOWEST)
    tl.store(weights + index, _rounded(weight, bits, weights.dtype.element_ty), mask=here)
    tl.store(means + index, _rounded(mean, bits >> 16, means.dtype.element_ty), mask=here)
    tl.store(squares + index, _rounded(square, bits >> 32, squares.dtype.element_ty), mask=here)


@triton.jit
def _shifted(x, by: tl.constexpr):
    """Shift to the right, and fill up with zeros, not with the sign."""
    return (x.to(tl.uint64, bitcast=True) >> by).to(tl.int64, bitcast=True)


@triton.jit
def _rounded(value, bits, dtype: tl.constexpr):
    """Return float32 in the dtype of the memory; to bfloat16 it is `round_stochastically`."""
    if dtype == tl.bfloat16:
        raised = value.to(tl.int32, bitcast=True) + (bits & 0xFFFF).to(tl.int32)
        rounded = (raised & -0x10000).to(tl.float32, bitcast=True)
        return tl.where(tl.abs(value) < float("inf"), rounded, value).to(tl.bfloat16)
    else:
        return value
