"""The optimizer of a run, built from [optimizer]: several classes may update different parameters."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from titanlite.ops.kernels import DEFAULT_KERNELS, Kernels
from titanlite.optim.combined import CombinedOptimizer, scales_gradients, update, zero_moments
from titanlite.optim.groups import ParameterGroup, parameter_groups
from titanlite.optim.quantized import block_size_of, check_shards
from titanlite.optim.registry import accepts, constructor_options, find_optimizer_cls
from titanlite.optim.state_memory import StateMemory
from titanlite.runtime.errors import UserError
from titanlite.runtime.private_torch.tensors import LocalAdamW, local_tensor
from titanlite.schema import Optimizer

if TYPE_CHECKING:
    from titanlite.optim.rounding import UpdateKernel

PickKernel = Callable[[torch.device], "UpdateKernel | None"]

__all__ = ["build_optimizer", "scales_gradients", "set_learning_rate", "update"]


def build_optimizer(
    model: nn.Module,
    config: Optimizer,
    *,
    seed: int,
    memory: StateMemory | None = None,
    pick_kernel: PickKernel | None = None,
    fused: bool = True,
    reproducible: bool = False,
    kernels: Kernels = DEFAULT_KERNELS,
) -> torch.optim.Optimizer:
    """Build the optimizer that the config names; several classes become one `CombinedOptimizer`.

    AdamW is PyTorch's fused kernel. Where weights or moments are bfloat16, or not in memory, it is `SlicedAdamW`.

    Args:
        seed: for stochastic rounding.
        memory: of parameters and moments. Default: as PyTorch allocates it.
        pick_kernel: returns the kernel of `SlicedAdamW` for parameters on a device. Default: the Triton kernel, where
            it starts.
        fused: whether AdamW is the fused kernel. On CPUs, that kernel rounds the last elements of a shard differently.
        reproducible: whether the bits of a matrix do not depend on which others a rank has, for Muon.
        kernels: of the device that multiplies matrices, for Muon.

    Raises:
        UserError: a name is unknown, or the groups do not fit the model.
    """
    by_class: dict[tuple[str, str], list[ParameterGroup]] = {}
    for group in parameter_groups(config, model):
        by_class.setdefault((group.name, repr(sorted(group.args.items()))), []).append(group)
    optimizers = [
        _build(groups, config, seed=seed, memory=memory, pick_kernel=pick_kernel, fused=fused)
        for groups in by_class.values()
    ]
    for (name, _), optimizer in zip(by_class, optimizers, strict=True):
        if name == "Muon":
            from titanlite.optim.muon import Muon

            assert isinstance(optimizer, Muon)
            optimizer.kernels = kernels
            if reproducible:
                optimizer.together = 1
    return optimizers[0] if len(optimizers) == 1 else CombinedOptimizer(optimizers)


def _build(
    groups: list[ParameterGroup],
    config: Optimizer,
    *,
    seed: int,
    memory: StateMemory | None,
    pick_kernel: PickKernel | None,
    fused: bool,
) -> torch.optim.Optimizer:
    """Build the optimizer of groups that differ in learning rate and weight decay only."""
    optimizer_cls = find_optimizer_cls(groups[0].name)
    parameters = {name: p for group in groups for name, p in group.parameters.items()}
    param_groups: list[dict[str, Any]] = [
        {
            "params": [*group.parameters.values()],
            "lr": group.lr,
            "lr_scale": 1.0 if group.lr == config.lr else group.lr / config.lr,
            **({} if group.eps is None else {"eps": group.eps}),
            **({"weight_decay": group.weight_decay} if accepts(optimizer_cls, "weight_decay") else {}),
        }
        for group in groups
    ]
    options = constructor_options(optimizer_cls, config, groups[0].args, fused=fused)
    state_dtype = getattr(torch, config.state_dtype)
    is_float32 = state_dtype == torch.float32 and all(p.dtype == torch.float32 for p in parameters.values())
    by_slice = memory is not None and memory.slices_updates
    if optimizer_cls is torch.optim.AdamW and (by_slice or not is_float32):
        from titanlite.optim import rounding

        del options["fused"]
        pick = pick_kernel or rounding.pick_kernel
        kernel = None if by_slice else pick(local_tensor(next(iter(parameters.values()))).device)
        return rounding.SlicedAdamW(
            param_groups, parameters, state_dtype=state_dtype, seed=seed, memory=memory, kernel=kernel, **options
        )
    if (block_size := block_size_of(optimizer_cls, options)) is not None:
        for name, parameter in parameters.items():
            check_shards(name, parameter, block_size)
    by_fused_kernel = optimizer_cls is torch.optim.AdamW and options["fused"] and not options.get("amsgrad")
    try:
        optimizer = (LocalAdamW if by_fused_kernel else optimizer_cls)(param_groups, **options)
    except (TypeError, ValueError) as error:
        raise UserError(f"optimizer.name: {groups[0].name}: {error}") from error
    if by_fused_kernel:
        for parameter in parameters.values():
            optimizer.state[parameter] = zero_moments(parameter, dtype=state_dtype)
    return optimizer


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate of every group; a group with its own peak keeps its proportion to `optimizer.lr`."""
    for group in optimizer.param_groups:
        scaled = lr * group.get("lr_scale", 1.0)
        if isinstance(group["lr"], Tensor):  # the optimizer compiles its update once for all rates
            group["lr"].fill_(scaled)
        else:
            group["lr"] = scaled
