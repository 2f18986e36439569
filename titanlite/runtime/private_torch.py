"""Every use of PyTorch's private API: names that PyTorch may change without notice.

Nothing else below titanlite/ uses a private name of PyTorch. Each function here has a test in
tests/unit/test_private_torch.py that fails when PyTorch changes what it relies on.
"""

from torch import Tensor
from torch.distributed.tensor import DTensor

# DTensor


def local_tensor(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor, sharded or not, without a gradient function.

    `to_local()` would add a gradient function, which takes longer than writing a small tensor.
    """
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


# FSDP2


# Checkpoints (DCP)


# Compiler


# Fake tensors and fake process groups
