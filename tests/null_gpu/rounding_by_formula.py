"""Run AdamW's Triton kernel in Triton's interpreter (TRITON_INTERPRET=1), and count values that differ from a formula.

The formula is `_fused_adamw_`'s on GPUs, operation by operation in NumPy's float32, with `random_bits` and
`round_stochastically`. An FMA rounds once, as on a GPU; the interpreter of older Triton also rounds the product.
"""

# pyright: reportMissingImports=false, reportIndexIssue=false
import json
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from titanlite.ops.hash_random import random_bits, salt
from titanlite.optim.rounding import round_stochastically
from titanlite.optim.rounding_kernel import update

SIZE, NUMBER = 2500, 1
LR, BETAS, EPS, DECAY = 3e-4, (0.9, 0.95), 1e-8, 0.1
STEPS = torch.tensor([3.0, 9.0])
CORRECTIONS = torch.stack([STEPS, 1 - BETAS[0] ** STEPS, (1 - BETAS[1] ** STEPS).sqrt()])


def main() -> None:
    found = []
    for weight, state in (("float32", "bfloat16"), ("bfloat16", "bfloat16"), ("bfloat16", "float32")):
        for first in (0, 2**40 + 5):
            tensors = make_tensors(getattr(torch, weight), getattr(torch, state))
            expected = formula(*tensors, first=first)
            kept = [tensor.clone() for tensor in tensors]
            run(tensors, first=first, skip=1.0)
            changed = count_different(tensors, kept)
            run(tensors, first=first, skip=0.0)
            weights, _, *moments = tensors
            found.append({"skipped": changed, "taken": count_different([weights, *moments], expected)})
    print(json.dumps(found))


def make_tensors(weight_dtype: torch.dtype, state_dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    weight, gradient, mean = (torch.randn(SIZE, generator=generator) for _ in range(3))
    gradient[7], gradient[9], weight[11] = torch.nan, torch.inf, 3.38e38
    square = torch.rand(SIZE, generator=generator) / 100
    dtypes = weight_dtype, weight_dtype, state_dtype, state_dtype
    return [tensor.to(dtype) for tensor, dtype in zip((weight, gradient, mean / 10, square), dtypes, strict=True)]


def run(tensors: list[Tensor], *, first: int, skip: float) -> None:
    weight, gradient, mean, square = tensors
    update(
        weight, gradient, mean, square, corrections=CORRECTIONS, number=NUMBER, skip=torch.tensor(skip),
        salt=salt("0/weight"), first=first, lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY,
    )  # fmt: skip


@np.errstate(all="ignore")
def formula(*tensors: Tensor, first: int) -> list[Tensor]:
    weight, gradient, mean, square = (tensor.float().numpy() for tensor in tensors)
    lr, beta1, beta2, eps, decay = map(np.float32, (LR, *BETAS, EPS, DECAY))
    step, correction1, root2 = CORRECTIONS[:, NUMBER].numpy()
    fma = fma_of_interpreter()
    weight = fma(-(lr * decay), weight, weight)
    mean = fma(beta1, mean, fma(-beta1, gradient, gradient))
    squared = gradient * gradient
    square = fma(beta2, square, fma(-beta2, squared, squared))
    weight = weight - (lr / correction1 * mean) / (np.sqrt(square) / root2 + eps)
    bits = random_bits(int(step) + salt("0/weight"), torch.arange(first, first + SIZE))
    return [
        round_stochastically(torch.from_numpy(new), bits >> 16 * number) if old.dtype == torch.bfloat16 else
        torch.from_numpy(new)
        for number, (old, new) in enumerate(zip((tensors[0], *tensors[2:]), (weight, mean, square), strict=True))
    ]  # fmt: skip


def fma_of_interpreter() -> Any:
    """Return NumPy's x y + z with the roundings of the interpreter's FMA. A product of float32 is exact in 64 bits."""
    x, z, found = torch.tensor([1 + 2**-12]), torch.tensor([-1 - 2**-11]), torch.zeros(1)
    _fma[(1,)](x, z, found)
    wide = np.longdouble if found else np.float32
    return lambda x, y, z: (wide(x) * wide(y) + wide(z)).astype(np.float32)


@triton.jit
def _fma(x, z, found):
    tl.store(found, tl.fma(tl.load(x), tl.load(x), tl.load(z)))


def count_different(one: list[Tensor], other: list[Tensor]) -> list[int]:
    return [int(((a != b) & ~(a.isnan() & b.isnan())).sum()) for a, b in zip(one, other, strict=True)]


if __name__ == "__main__":
    main()
