"""Problems with [optimizer], found before anything is allocated."""

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from titanlite.optim.groups import parameter_groups
from titanlite.optim.quantized import block_size_of
from titanlite.optim.registry import accepts, constructor_options, find_optimizer_cls, has_two_betas
from titanlite.optim.state_size import state_after_one_step
from titanlite.runtime.errors import ConfigError, Problem, UserError, did_you_mean
from titanlite.schema import Optimizer, OptimizerGroup

SET_BY = {"lr": "lr", "weight_decay": "weight_decay", "betas": "beta1 and beta2", "eps": "eps"}
"""Constructor arguments that options of [optimizer] set, with those options."""


def check_optimizer(config: Optimizer, model: nn.Module | None, *, dtype: str) -> list[Problem]:
    """Return all problems with [optimizer].

    Args:
        model: may be on the meta device, since only names and shapes matter. None: groups are not checked.
        dtype: `training.dtype`.
    """
    problems: list[Problem] = []
    used: list[type[torch.optim.Optimizer]] = []
    groups = [(f"optimizer.groups.{number}", group) for number, group in enumerate(config.groups)]
    for key, section in [("optimizer", config), *groups]:
        try:
            optimizer_cls = find_optimizer_cls(section.name or config.name)
        except UserError as error:
            problems += [Problem(f"{key}.name", str(error))] if section.name else []  # else it is optimizer.name's
            continue
        used.append(optimizer_cls)
        problems += _check_arg_names(key, optimizer_cls, config, section) or [
            *_check_group(key, optimizer_cls, config, section),
            *_check_rounding(key, optimizer_cls, config, section, dtype),
            *_check_state(key, optimizer_cls, config, section),
        ]
    if config.name == "Muon" and not groups:
        used.append(torch.optim.AdamW)
    problems += _check_unused(config, used)
    try:
        parameter_groups(config, model) if model else None
    except ConfigError as error:
        problems += error.problems
    return problems


def _check_arg_names(
    key: str, optimizer_cls: type[torch.optim.Optimizer], config: Optimizer, section: Optimizer | OptimizerGroup
) -> list[Problem]:
    signature = inspect.signature(optimizer_cls).parameters.values()
    ours = constructor_options(optimizer_cls, config, {}).keys() & SET_BY.keys()
    known = [it.name for it in signature if it.kind not in (it.VAR_KEYWORD, it.VAR_POSITIONAL)][1:]
    known = [name for name in known if name not in ours]
    accepts_any = any(it.kind == it.VAR_KEYWORD for it in signature)
    problems = []
    for name in section.args:
        if name in ours:
            problems.append(Problem(f"{key}.args.{name}", f"is set by {SET_BY[name]} of [optimizer]"))
        elif name not in known and not accepts_any:
            hint = did_you_mean(name, known)
            message = f"unknown key {name!r}{hint} ({optimizer_cls.__name__} takes {', '.join(known)})"
            problems.append(Problem(f"{key}.args.{name}", message))
    return problems


def _args_of(config: Optimizer, section: Optimizer | OptimizerGroup) -> dict[str, Any]:
    inherits = section.name in (None, config.name)
    return (config.args if inherits else {}) | section.args


def _check_group(
    key: str, optimizer_cls: type[torch.optim.Optimizer], config: Optimizer, section: Optimizer | OptimizerGroup
) -> list[Problem]:
    problems = []
    if isinstance(section, OptimizerGroup):
        if section.lr and not config.lr:
            problems.append(Problem(f"{key}.lr", "is scheduled in proportion to optimizer.lr, which is 0"))
        if section.weight_decay and not accepts(optimizer_cls, "weight_decay"):
            problems.append(Problem(f"{key}.weight_decay", f"{section.name or config.name} has none"))
    return problems


def _check_rounding(
    key: str,
    optimizer_cls: type[torch.optim.Optimizer],
    config: Optimizer,
    section: Optimizer | OptimizerGroup,
    dtype: str,
) -> list[Problem]:
    """Refuse bfloat16 weights where updates are rounded to the nearest."""
    name, args = section.name or config.name, _args_of(config, section)
    if optimizer_cls is torch.optim.AdamW:
        if args and "bfloat16" in (dtype, config.state_dtype):
            return [Problem(f"{key}.args", "AdamW takes none where weights or moments are bfloat16")]
        return []
    if dtype != "bfloat16":
        return []
    message = f"{name} would lose small updates of bfloat16 weights: set "
    if optimizer_cls.__module__.startswith(("torch.optim", "titanlite.optim")):
        return [Problem(f"{key}.name", message + 'training.dtype = "float32", or use AdamW')]
    if block_size_of(optimizer_cls, args) and not args.get("bf16_stochastic_round"):
        return [Problem(f"{key}.name", message + "args = {bf16_stochastic_round = true}")]
    return []


def _check_state(
    key: str, optimizer_cls: type[torch.optim.Optimizer], config: Optimizer, section: Optimizer | OptimizerGroup
) -> list[Problem]:
    """Try a step of the class, and refuse state that a checkpoint cannot keep."""
    name, args = section.name or config.name, _args_of(config, section)
    try:
        state = state_after_one_step(optimizer_cls, constructor_options(optimizer_cls, config, args))
    except (TypeError, ValueError, IndexError) as error:
        return [Problem(f"{key}.args", f"{name}: {error}")]
    problems = []
    if optimizer_cls is torch.optim.SGD and args.get("fused") and args.get("momentum"):
        message = "PyTorch's fused SGD starts with uninitialized momentum if the first step is skipped: remove it"
        problems.append(Problem(f"{key}.args.fused", message))
    for entry, value in state.items():
        if not isinstance(value, Tensor | int | float | None):
            what = f"{name} keeps {entry} as {type(value).__name__}"
            problems.append(Problem(f"{key}.name", f"{what}: only tensors and numbers of a parameter are saved"))
    return problems


def _check_unused(config: Optimizer, used: list[type[torch.optim.Optimizer]]) -> list[Problem]:
    """Find options that differ from their default and that no class in use takes."""
    names = ", ".join(dict.fromkeys(optimizer_cls.__name__ for optimizer_cls in used))
    two_betas = any(map(has_two_betas, used))
    is_taken = {
        "beta1": two_betas,
        "beta2": two_betas,
        "eps": two_betas,
        "weight_decay": not config.weight_decay or any(accepts(it, "weight_decay") for it in used),
        "state_dtype": torch.optim.AdamW in used,
    }
    return [
        Problem(f"optimizer.{option}", f"is not for {names}" + ("; see optimizer.args" if option == "eps" else ""))
        for option, taken in is_taken.items()
        if used and not taken and getattr(config, option) != Optimizer.model_fields[option].default
    ]
