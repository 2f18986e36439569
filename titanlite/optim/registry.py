"""Optimizer classes by name, and the arguments that the config gives to their constructors."""

import inspect
from collections.abc import Mapping
from typing import Any

import torch

from titanlite.optim.quantized import block_size_of
from titanlite.runtime.errors import UserError, did_you_mean
from titanlite.runtime.user_code import find_object
from titanlite.schema import Optimizer

REFUSED = {
    "LBFGS": "computes the loss several times a step",
    "SparseAdam": "is for sparse gradients",
    "Adafactor": "of PyTorch cannot update sharded parameters",
    "Rprop": "of PyTorch cannot update sharded parameters",
    "Muon": 'of PyTorch cannot update sharded parameters; optimizer.name = "Muon" is titanlite\'s own, which can',
}
"""Classes of torch.optim that cannot train here, each with the reason."""


def find_optimizer_cls(name: str) -> type[torch.optim.Optimizer]:
    """Find an optimizer class: Muon (titanlite's own), a name of torch.optim, or package.module.Class.

    Raises:
        UserError: there is no such class, or it cannot train here.
    """
    if name == "Muon":
        from titanlite.optim.muon import Muon

        return Muon
    if "." in name or ":" in name:
        found = find_object(name)
        if not (isinstance(found, type) and issubclass(found, torch.optim.Optimizer)):
            raise UserError(f"{name} is not a subclass of torch.optim.Optimizer")
    else:
        found = _find_in_torch(name)
    if found.__module__.startswith("torch.optim") and found.__name__ in REFUSED:
        raise UserError(f"{found.__name__} {REFUSED[found.__name__]}: choose another one")
    return found


def _find_in_torch(name: str) -> type[torch.optim.Optimizer]:
    base = torch.optim.Optimizer
    classes = [value for value in vars(torch.optim).values() if isinstance(value, type) and issubclass(value, base)]
    known = {optimizer_cls.__name__: optimizer_cls for optimizer_cls in classes if optimizer_cls is not base}
    if name in known:
        return known[name]
    names = ", ".join(sorted(known.keys() - REFUSED.keys() | {"Muon"}))
    raise UserError(f"unknown value {name!r}{did_you_mean(name, known)} (known: {names}; or package.module.Class)")


def accepts(optimizer_cls: type[torch.optim.Optimizer], argument: str) -> bool:
    """Return whether the constructor has an argument of this name."""
    return argument in inspect.signature(optimizer_cls).parameters


def has_two_betas(optimizer_cls: type[torch.optim.Optimizer]) -> bool:
    """Return whether the class is like Adam: its `betas` are a pair."""
    default = getattr(inspect.signature(optimizer_cls).parameters.get("betas"), "default", ())
    return isinstance(default, tuple) and len(default) == 2


def constructor_options(
    optimizer_cls: type[torch.optim.Optimizer], config: Optimizer, args: Mapping[str, Any], *, fused: bool = True
) -> dict[str, Any]:
    """Return keyword arguments for the constructor.

    `lr` and `weight_decay` are given to classes that accept them, and beta1, beta2 and `eps` to classes like Adam.
    The `args` of the config come on top.

    Args:
        fused: whether AdamW is the fused kernel.
    """
    options: dict[str, Any] = {}
    if accepts(optimizer_cls, "lr"):
        options["lr"] = config.lr
    if accepts(optimizer_cls, "weight_decay"):
        options["weight_decay"] = config.weight_decay
    if has_two_betas(optimizer_cls):
        options["betas"] = config.beta1, config.beta2
        if accepts(optimizer_cls, "eps"):
            options["eps"] = config.eps
    if optimizer_cls is torch.optim.AdamW:
        options["fused"] = fused
    return options | dict(args)


def compiles_updates(config: Optimizer) -> bool:
    """Return whether an optimizer passes its update to torch.compile whatever [compile] is, as torchao's do."""
    names = {config.name, *(group.name for group in config.groups if group.name)}
    return any(block_size_of(find_optimizer_cls(name), {}) is not None for name in names)
