"""What only CPUs need, and the choice of the kernels of a device."""

import torch
from torch.nn.attention import activate_flash_attention_impl

from titanlite.ops.kernels import FLASH_PACKAGES, Kernels
from titanlite.runtime.errors import UserError
from titanlite.schema import AttentionBackend


def pick_kernels(
    device: torch.device, *, compiles: bool = False, attention_backend: AttentionBackend = "auto"
) -> Kernels:
    """Return the kernels of this process's device. On a CPU, they decide which library multiplies float32 matrices.

    Args:
        compiles: whether torch.compile is used, `compile.enable`.
        attention_backend: `training.attention_backend`.

    Raises:
        UserError: the package of the attention backend is not installed.
    """
    if device.type != "cpu":
        if attention_backend in FLASH_PACKAGES:
            use_flash_package(attention_backend)
        return Kernels(compiles=compiles, attention=attention_backend)
    from titanlite.ops.cpu import CpuKernels, multiply_by_onednn

    multiply_by_onednn()
    return CpuKernels()


def use_flash_package(name: str) -> None:
    """Let PyTorch use the kernels of FlashAttention-3 or -4 as its flash attention.

    Raises:
        UserError: the package is not installed, or does not run here.
    """
    try:
        activate_flash_attention_impl(name.upper())
    except (ImportError, RuntimeError, ValueError) as error:  # ValueError: PyTorch does not know it
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise UserError(
            f"training.attention_backend: {name} needs the package {FLASH_PACKAGES[name]} ({reason}); use auto"
        ) from None
