"""What only CPUs need, and the choice of the kernels of a device."""

import torch

from titanlite.ops.kernels import Kernels
from titanlite.schema import AttentionBackend


def pick_kernels(
    device: torch.device, *, compiles: bool = False, attention_backend: AttentionBackend = "auto"
) -> Kernels:
    """Return the kernels of this process's device. On a CPU, they decide which library multiplies float32 matrices.

    Args:
        compiles: whether torch.compile is used, `compile.enable`.
        attention_backend: `training.attention_backend`.
    """
    if device.type != "cpu":
        return Kernels(compiles=compiles, attention=attention_backend)
    from titanlite.ops.cpu import CpuKernels, multiply_by_onednn

    multiply_by_onednn()
    return CpuKernels()
