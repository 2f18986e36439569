"""Problems with [optimizer], found before anything is allocated."""

import inspect
from collections.abc import Iterator
from typing import Any, NamedTuple

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


class _Section(NamedTuple):
    """[optimizer] or one of its groups, and the class that it names."""

    key: str
    own: Optimizer | OptimizerGroup
    config: Optimizer
    optimizer_cls: type[torch.optim.Optimizer]

    @property
    def name(self) -> str:
        return self.own.name or self.config.name

    @property
    def args(self) -> dict[str, Any]:
        return (self.config.args if self.name == self.config.name else {}) | self.own.args


def check_optimizer(config: Optimizer, model: nn.Module | None, *, dtype: str) -> list[Problem]:
    """Return all problems with [optimizer].

    Args:
        model: may be on the meta device, since only names and shapes matter. None: groups are not checked.
        dtype: `training.dtype`.
    """
    problems: list[Problem] = []
    used: list[type[torch.optim.Optimizer]] = []
    groups = [(f"optimizer.groups.{number}", group) for number, group in enumerate(config.groups)]
    for key, own in [("optimizer", config), *groups]:
        try:
            section = _Section(key, own, config, find_optimizer_cls(own.name or config.name))
        except UserError as error:
            if own.name:  # otherwise the problem is that of optimizer.name
                problems.append(Problem(f"{key}.name", str(error)))
            continue
        used.append(section.optimizer_cls)
        problems += [*_check_arg_names(section)] or [
            *_check_group(section),
            *_check_rounding(section, dtype),
            *_check_state(section),
        ]
    if config.name == "Muon" and not groups:
        used.append(torch.optim.AdamW)
    problems += _check_unused(config, used)
    try:
        parameter_groups(config, model) if model else None
    except ConfigError as error:
        problems += error.problems
    return problems


def _check_arg_names(section: _Section) -> Iterator[Problem]:
    """Yield `args` that the class does not take, or that other options set."""
    optimizer_cls = section.optimizer_cls
    signature = inspect.signature(optimizer_cls).parameters.values()
    ours = constructor_options(optimizer_cls, section.config, {}).keys() & SET_BY.keys()
    known = [
        parameter.name
        for parameter in signature
        if parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
    ][1:]
    known = [name for name in known if name not in ours]
    accepts_any = any(parameter.kind == parameter.VAR_KEYWORD for parameter in signature)
    for name in section.own.args:
        if name in ours:
            yield Problem(f"{section.key}.args.{name}", f"is set by {SET_BY[name]} of [optimizer]")
        elif name not in known and not accepts_any:
            hint = did_you_mean(name, known)
            message = f"unknown key {name!r}{hint} ({optimizer_cls.__name__} takes {', '.join(known)})"
            yield Problem(f"{section.key}.args.{name}", message)


def _check_group(section: _Section) -> Iterator[Problem]:
    if isinstance(section.own, OptimizerGroup):
        if section.own.lr and not section.config.lr:
            yield Problem(f"{section.key}.lr", "is scheduled in proportion to optimizer.lr, which is 0")
        if section.own.weight_decay and not accepts(section.optimizer_cls, "weight_decay"):
            yield Problem(f"{section.key}.weight_decay", f"{section.name} has none")


def _check_rounding(section: _Section, dtype: str) -> Iterator[Problem]:
    """Refuse bfloat16 weights where updates are rounded to the nearest."""
    optimizer_cls = section.optimizer_cls
    if optimizer_cls is torch.optim.AdamW:
        if section.args and "bfloat16" in (dtype, section.config.state_dtype):
            yield Problem(f"{section.key}.args", "AdamW takes none where weights or moments are bfloat16")
    elif dtype == "bfloat16":
        message = f"{section.name} would lose small updates of bfloat16 weights: set "
        if optimizer_cls.__module__.startswith(("torch.optim", "titanlite.optim")):
            yield Problem(f"{section.key}.name", message + 'training.dtype = "float32", or use AdamW')
        elif block_size_of(optimizer_cls, section.args) and not section.args.get("bf16_stochastic_round"):
            yield Problem(f"{section.key}.name", message + "args = {bf16_stochastic_round = true}")


def _check_state(section: _Section) -> Iterator[Problem]:
    """Try a step of the class, and refuse state that a checkpoint cannot keep."""
    optimizer_cls, args = section.optimizer_cls, section.args
    try:
        state = state_after_one_step(optimizer_cls, constructor_options(optimizer_cls, section.config, args))
    except (TypeError, ValueError, IndexError) as error:
        yield Problem(f"{section.key}.args", f"{section.name}: {error}")
        return
    if optimizer_cls is torch.optim.SGD and args.get("fused") and args.get("momentum"):
        message = "PyTorch's fused SGD starts with uninitialized momentum if the first step is skipped: remove it"
        yield Problem(f"{section.key}.args.fused", message)
    for entry, value in state.items():
        if not isinstance(value, Tensor | int | float | None):
            what = f"{section.name} keeps {entry} as {type(value).__name__}"
            yield Problem(f"{section.key}.name", f"{what}: only tensors and numbers of a parameter are saved")


def _check_unused(config: Optimizer, used: list[type[torch.optim.Optimizer]]) -> list[Problem]:
    """Find options that differ from their default and that no class in use takes."""
    names = ", ".join(dict.fromkeys(optimizer_cls.__name__ for optimizer_cls in used))
    two_betas = any(map(has_two_betas, used))
    is_taken = {
        "beta1": two_betas,
        "beta2": two_betas,
        "eps": two_betas,
        "weight_decay": not config.weight_decay
        or any(accepts(optimizer_cls, "weight_decay") for optimizer_cls in used),
        "state_dtype": torch.optim.AdamW in used,
    }
    return [
        Problem(f"optimizer.{option}", f"is not for {names}" + ("; see optimizer.args" if option == "eps" else ""))
        for option, taken in is_taken.items()
        if used and not taken and getattr(config, option) != Optimizer.model_fields[option].default
    ]
