"""The optimizer of a run, which may be several: which class updates which parameters, and a step that waits for
nothing."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._functorch import config as functorch

from titanlite.config.schema import Optimizer
from titanlite.models.base import unique_parameters
from titanlite.optim.classes import (
    bytes_of_state,
    check_optimizer,
    compiles_updates,
    dtype_of_codes,
    find_class,
    options_of,
    takes,
)
from titanlite.optim.groups import Group, plan_groups, table
from titanlite.optim.quantized import block_of, check_shards
from titanlite.optim.rounding import SlicedAdamW
from titanlite.runtime.disk import DiskTensors
from titanlite.runtime.errors import UserError

__all__ = [
    "SlicedAdamW",
    "build_optimizer",
    "bytes_of_state",
    "check_optimizer",
    "compiles_updates",
    "plan_groups",
    "set_learning_rate",
    "state_dtypes",
    "table",
    "update",
]


def build_optimizer(
    model: nn.Module, config: Optimizer, *, seed: int, disk: DiskTensors | None = None
) -> torch.optim.Optimizer:
    """The optimizer that the config names; if several are named, one that holds them.

    AdamW is one fused kernel; or goes slice by slice, and rounds stochastically, where anything is bfloat16 or on disk.

    Args:
        seed: of the rounding.
        disk: where parameters or moments are. None: they are in memory.

    Raises:
        UserError: a name is not known, or the groups do not fit the model.
    """
    kinds: dict[tuple[str, str], list[Group]] = {}
    for group in plan_groups(config, {name: p for name, p in unique_parameters(model) if p.requires_grad}):
        kinds.setdefault((group.name, repr(sorted(group.args.items()))), []).append(group)
    parts = [_build(groups, config, seed=seed, disk=disk) for groups in kinds.values()]
    return parts[0] if len(parts) == 1 else Several(parts)


def _build(groups: list[Group], config: Optimizer, *, seed: int, disk: DiskTensors | None) -> torch.optim.Optimizer:
    """Args:
    groups: that differ in rate and decay only.
    """
    kind = find_class(groups[0].name)
    parameters = {name: p for group in groups for name, p in group.parameters.items()}
    tables: list[dict[str, Any]] = [
        {
            "params": [*group.parameters.values()],
            "lr": group.lr,
            "lr_scale": 1.0 if group.lr == config.lr else group.lr / config.lr,
            **({"weight_decay": group.weight_decay} if takes(kind, "weight_decay") else {}),
        }
        for group in groups
    ]
    options = options_of(kind, config, groups[0].args)
    state_dtype = getattr(torch, config.state_dtype)
    in_float32 = state_dtype == torch.float32 and all(p.dtype == torch.float32 for p in parameters.values())
    if kind is torch.optim.AdamW and (disk or not in_float32):
        del options["fused"]
        return SlicedAdamW(tables, parameters, state_dtype=state_dtype, seed=seed, disk=disk, **options)
    if (block := block_of(kind, options)) is not None:
        for name, parameter in parameters.items():
            check_shards(name, parameter, block)
    try:
        return kind(tables, **options)
    except (TypeError, ValueError) as error:
        raise UserError(f"optimizer.name: {groups[0].name}: {error}") from error


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Of every group; one with a peak of its own keeps its proportion to `optimizer.lr`."""
    for group in optimizer.param_groups:
        rate = lr * group.get("lr_scale", 1.0)
        if isinstance(group["lr"], Tensor):  # an optimizer that compiles its update, once for all rates
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def update(optimizer: torch.optim.Optimizer, *, skip: Tensor) -> None:
    """One step of the optimizer, or none where `skip` (a bool on the device) is true.

    Fused optimizers can be told by a tensor, as gradient scalers do it. For others the host has to wait for it.
    """
    if getattr(optimizer, "_step_supports_amp_scaling", False):
        told: Any = optimizer
        place = optimizer.param_groups[0]["params"][0].device  # the CPU, with offload
        told.grad_scale, told.found_inf = None, skip.float().to(place)
        optimizer.step()
        del told.grad_scale, told.found_inf
    elif not skip:
        # An update that compiles itself, as torchao's: the cache of traced code knows of a DTensor the whole's shape,
        # but neither this rank's part nor what that is made of, and gives moments in 4 bits the code for 8.
        with functorch.patch(enable_autograd_cache=False):
            optimizer.step()


def parts_of(optimizer: torch.optim.Optimizer) -> Sequence[torch.optim.Optimizer]:
    return optimizer.parts if isinstance(optimizer, Several) else [optimizer]


def state_dtypes(optimizer: torch.optim.Optimizer) -> set[torch.dtype]:
    """Types in which moments are kept."""
    found: set[torch.dtype] = set()
    for part in parts_of(optimizer):
        kept = part.state_dtype if isinstance(part, SlicedAdamW) else dtype_of_codes(type(part))
        found |= {kept or parameter.dtype for group in part.param_groups for parameter in group["params"]}
    return found


class Several(torch.optim.Optimizer):
    """Optimizers of different parameters, as one: it has their groups and their states, which are the same objects.

    Each part is told by itself whether the step is skipped, so that only those parts wait for it that cannot be told
    by a tensor.
    """

    _step_supports_amp_scaling = True  # reads found_inf

    def __init__(self, parts: Sequence[torch.optim.Optimizer]) -> None:
        super().__init__([group for part in parts for group in part.param_groups], {})
        self.parts = parts
        for part in parts:
            self.state.update(part.state)  # some fill it when they are made
            part.state = self.state

    def step(self, closure: Callable[[], float] | None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        assert closure is None
        skip = getattr(self, "found_inf", None)
        for part in self.parts:
            if skip is None:
                part.step()
            else:
                update(part, skip=skip != 0)
