"""Contents of tensors and modules: parts of sharded and wrapped tensors, storages, buffers."""

from collections.abc import Callable, Hashable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


def local_tensor(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor, sharded or not, without a gradient function.

    `to_local()` would add a gradient function, which takes longer than writing a small tensor.
    """
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def wrapped_tensors(tensor: Tensor) -> dict[str, Tensor]:
    """Return the tensors that a tensor subclass consists of, by the names of its attributes.

    A plain tensor has none.
    """
    if not is_traceable_wrapper_subclass(tensor):
        return {}
    names, _ = tensor.__tensor_flatten__()
    return {name: getattr(tensor, name) for name in names}


def storage_key(storage: torch.UntypedStorage) -> Hashable:
    """Return the identity of a storage: equal for all Python objects of the same memory, while it is alive."""
    return storage._cdata


def non_persistent_buffers(module: nn.Module) -> set[str]:
    """Return the names of a module's own buffers that do not belong in a checkpoint."""
    return module._non_persistent_buffers_set


def has_hooks(module: nn.Module) -> bool:
    """Return whether calling a module calls hooks of its own beside its forward."""
    hooks = module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks
    return any(hooks)


def replace_tensors(module: nn.Module, function: Callable[[Tensor], Tensor]) -> None:
    """Replace every parameter and buffer of a module by the result of a function, as `Module.to_empty` does it."""
    module._apply(function)
