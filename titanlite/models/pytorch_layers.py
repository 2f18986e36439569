"""Layers of torch.nn in models that were written without titanlite's: those of transformers, and of users.

A CPU computes them by titanlite's kernels, because PyTorch's add up some gradients in narrow dtypes, and multiply
bfloat16 slowly where the hardware does not. On a GPU they stay what they are.
"""

import torch
from torch import Tensor, nn

from titanlite.models.layers import Embedding
from titanlite.ops.kernels import DEFAULT_KERNELS, Kernels, set_kernels


class _Linear(nn.Linear):
    kernels: Kernels = DEFAULT_KERNELS

    def forward(self, input: Tensor) -> Tensor:
        if self.kernels.matmul_dtype(input.dtype) == input.dtype:
            return super().forward(input)  # the bias is added within the matmul
        out = self.kernels.linear(input, self.weight)
        return out if self.bias is None else out + self.bias


class _LayerNorm(nn.LayerNorm):
    kernels: Kernels = DEFAULT_KERNELS

    def forward(self, input: Tensor) -> Tensor:
        return self.kernels.layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps)


REPLACEMENTS: dict[type[nn.Module], type[nn.Module]] = {
    nn.Embedding: Embedding, nn.Linear: _Linear, nn.LayerNorm: _LayerNorm,
}  # fmt: skip


def use_kernels(model: nn.Module, kernels: Kernels, device: torch.device) -> None:
    """Let the layers of a model compute by the kernels of its device, in place.

    A subclass of torch.nn's gets the new class between the two, so that its own forward is called first.
    """
    classes = dict(REPLACEMENTS)  # one for each class: blocks that are alike stay so for the compiler
    for module in () if kernels.is_gpu(device) else model.modules():
        new = next((new for old, new in REPLACEMENTS.items() if isinstance(module, old)), None)
        if new is not None and not hasattr(module, "kernels") and not _is_special(module):
            cls = type(module)
            if cls not in classes:
                classes[cls] = type(cls.__name__, (cls, new), {})
            module.__class__ = classes[cls]
    set_kernels(model, kernels)


def _is_special(module: nn.Module) -> bool:
    """Return whether an embedding changes its rows, or has gradients of another kind."""
    return isinstance(module, nn.Embedding) and bool(module.max_norm or module.scale_grad_by_freq or module.sparse)
