"""Size and types of optimizer state, before and after there is any."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from titanlite.optim.combined import optimizers_in
from titanlite.optim.groups import parameter_groups
from titanlite.optim.quantized import block_size_of, inner_tensors, is_quantized
from titanlite.optim.registry import constructor_options, find_optimizer_cls
from titanlite.runtime.private_torch.tensors import local_tensor
from titanlite.schema import Optimizer

SAMPLE = 32, 128
"""Shape of the matrix on which an optimizer class is tried. It is not square: state of another shape, such as a
preconditioner of one side, must not look like state of the parameter's shape."""


def state_after_one_step(optimizer_cls: type[torch.optim.Optimizer], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state that a class keeps of one float32 matrix of shape `SAMPLE`.

    Values that it keeps outside `state[parameter]` are included, as one-element lists: they would not be saved.

    Raises:
        TypeError, ValueError, IndexError: the options are wrong.
    """
    weight = nn.Parameter(torch.ones(SAMPLE))
    weight.grad = torch.ones_like(weight)
    optimizer = optimizer_cls([weight], **options)
    before = dict(optimizer.param_groups[0])
    try:
        with torch.compiler.set_stance("force_eager"):
            optimizer.step()
    except (TypeError, ValueError, IndexError):
        raise
    except Exception:  # the class may need a GPU
        return {}
    after = {name: value for name, value in optimizer.param_groups[0].items() if name != "params"}
    elsewhere = {f"{name} of a group": [value] for name, value in after.items() if value is not before.get(name)}
    elsewhere |= {str(name): [value] for name, value in optimizer.state.items() if name is not weight}
    return dict(optimizer.state[weight]) | elsewhere


def state_bytes(config: Optimizer, model: nn.Module, *, dtype: str) -> int:
    """Return the least bytes that the states of all optimizers take, unsharded.

    Only tensors of the parameter's own shape count.

    Args:
        dtype: `training.dtype`.

    Raises:
        UserError: the config is wrong.
    """
    total = 0
    for group in parameter_groups(config, model):
        optimizer_cls = find_optimizer_cls(group.name)
        state = state_after_one_step(optimizer_cls, constructor_options(optimizer_cls, config, group.args)).values()
        kept = [value for value in state if isinstance(value, Tensor) and value.shape == SAMPLE]
        itemsize = getattr(torch, config.state_dtype if optimizer_cls is torch.optim.AdamW else dtype).itemsize
        bytes_per_element = sum(_bytes_per_element(value, at_most=itemsize) for value in kept)
        total += int(bytes_per_element * sum(parameter.numel() for parameter in group.parameters.values()))
    return total


def _bytes_per_element(value: Tensor, *, at_most: int) -> float:
    if is_quantized(value):
        return sum(inner.nbytes for inner in inner_tensors(value).values()) / value.numel()
    return min(at_most, value.element_size())


def local_bytes(tensor: Tensor | None) -> int:
    """Return the bytes of this rank's part of a tensor. None has none."""
    if tensor is None:
        return 0
    local = local_tensor(tensor)
    return local.numel() * local.element_size()


def local_state_bytes(state: Mapping[str, Any]) -> int:
    """Return the bytes of a parameter's optimizer state on this rank. Numbers take none."""
    tensors = [value for value in state.values() if isinstance(value, Tensor)]
    parts = [inner_tensors(value).values() if is_quantized(value) else [value] for value in tensors]
    return sum(local_bytes(part) for several in parts for part in several)


def state_dtypes(optimizer: torch.optim.Optimizer) -> set[torch.dtype]:
    """Return the dtypes of the moments."""
    found: set[torch.dtype] = set()
    for single in optimizers_in(optimizer):
        kept = getattr(single, "state_dtype", None) or _dtype_of_codes(type(single))
        found |= {kept or parameter.dtype for group in single.param_groups for parameter in group["params"]}
    return found


def _dtype_of_codes(optimizer_cls: type[torch.optim.Optimizer]) -> torch.dtype | None:
    """Return the dtype in which a class of torchao.optim keeps moments of all but small shards; None for others."""
    if block_size_of(optimizer_cls, {}) is None:
        return None
    kept = [value for value in state_after_one_step(optimizer_cls, {}).values() if is_quantized(value)]
    return inner_tensors(kept[0])["codes"].dtype if kept else None
