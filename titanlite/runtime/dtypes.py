"""The floating-point dtypes of weights, compute and reductions, by the names that the config uses. Imports no torch.

float8 is a dtype of matmuls only, in any of PyTorch's formats. Which dtypes an option allows stands in `schema.py`.
"""

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch


class Dtype(NamedTuple):
    size: int
    """Bytes of a value."""
    rate: str
    """Field of `Hardware` with the peak rate of matmuls."""
    tolerance: float | None
    """Largest norm of a difference between two layouts, relative to the norm of the values, with such matmuls."""


DTYPES = {
    "float32": Dtype(4, "fp32_flops", 1e-5),
    "bfloat16": Dtype(2, "bf16_flops", 5e-2),
    "float16": Dtype(2, "bf16_flops", 1e-2),
    "float8": Dtype(1, "fp8_flops", None),
}


def torch_dtype(name: str) -> "torch.dtype":
    """Return PyTorch's dtype of a name in `DTYPES`, float8 aside."""
    import torch

    return getattr(torch, name)


def name_of(dtype: "torch.dtype") -> str:
    """Return the name of a dtype as in `DTYPES`; PyTorch's own name if it is not there."""
    name = str(dtype).removeprefix("torch.")
    return "float8" if name.startswith("float8") else name
