"""Parameter groups: [[optimizer.groups]], or the defaults where there are none."""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from titanlite.models.base import Scaling, trainable_parameters, vector_names
from titanlite.runtime.errors import ConfigError, Problem, UserError
from titanlite.schema import Optimizer, OptimizerGroup


@dataclass(frozen=True)
class ParameterGroup:
    """Parameters that share an optimizer class, its arguments, a learning rate and a weight decay."""

    label: str
    name: str
    """Name of the optimizer class."""
    lr: float
    """Peak learning rate."""
    weight_decay: float
    args: dict[str, Any]
    parameters: dict[str, nn.Parameter]
    eps: float | None = None
    """None: the optimizer's."""


def parameter_groups(config: Optimizer, model: nn.Module) -> list[ParameterGroup]:
    """Put every trained parameter into exactly one group.

    Vectors (`vector_names`) become a group without weight decay, unless their group sets the decay.
    Groups of a model with `scaling` are split by the factors of their parameters.

    Args:
        model: may be on the meta device.

    Raises:
        ConfigError: a parameter is in no group or in several, or a group has none.
    """
    groups = _groups_of(config, trainable_parameters(model), vector_names(model))
    if scaling := getattr(model, "scaling", None):
        return [part for group in groups for part in _split_by_factors(group, scaling, eps=config.eps)]
    return groups


def _groups_of(config: Optimizer, parameters: dict[str, nn.Parameter], vectors: set[str]) -> list[ParameterGroup]:
    if config.groups:
        return _configured_groups(config, parameters, vectors)
    everything = ParameterGroup("", config.name, config.lr, config.weight_decay, config.args, parameters)
    if config.name != "Muon":
        return _split_vectors(everything, vectors)
    inside = {n: p for n, p in parameters.items() if n.startswith("layers.") and n not in vectors and p.ndim < 4}
    rest = {name: p for name, p in parameters.items() if name not in inside}
    return [
        replace(everything, label="matrices in layers", parameters=inside),
        *_split_vectors(replace(everything, label="other ", name="AdamW", args={}, parameters=rest), vectors),
    ]


def _configured_groups(
    config: Optimizer, parameters: dict[str, nn.Parameter], vectors: set[str]
) -> list[ParameterGroup]:
    numbers_by_name = {
        name: tuple(
            number
            for number, group in enumerate(config.groups)
            if any(fnmatchcase(name, pattern) for pattern in group.match)
        )
        for name in parameters
    }
    problems = _check_unique(numbers_by_name)
    found = []
    for number, group in enumerate(config.groups):
        members = {name: parameter for name, parameter in parameters.items() if number in numbers_by_name[name]}
        label, class_name = f"groups.{number}", group.name or config.name
        if not members:
            known = ", ".join(collapse_names(parameters))
            problems.append(Problem(f"optimizer.{label}.match", f"matches no parameter; there are {known}"))
        others = collapse_names(name for name, parameter in members.items() if name in vectors or parameter.ndim > 3)
        if class_name == "Muon" and others:
            message = f"Muon is for matrices; give these a group with another optimizer: {', '.join(others)}"
            problems.append(Problem(f"optimizer.{label}.name", message))
        found += _configured_group(config, group, label, members, vectors)
    if problems:
        raise ConfigError(problems)
    return found


def _check_unique(numbers_by_name: Mapping[str, tuple[int, ...]]) -> list[Problem]:
    """Find parameters that no group or several groups match.

    Args:
        numbers_by_name: numbers of the groups that match each parameter.
    """
    problems = []
    for numbers in sorted(set(numbers_by_name.values())):
        names = ", ".join(collapse_names(name for name, found in numbers_by_name.items() if found == numbers))
        if not numbers:
            problems.append(Problem("optimizer.groups", f"no group matches {names}"))
        elif len(numbers) > 1:
            groups = " and ".join(map(str, numbers))
            problems.append(Problem("optimizer.groups", f"groups {groups} match the same: {names}"))
    return problems


def _configured_group(
    config: Optimizer, group: OptimizerGroup, label: str, members: dict[str, nn.Parameter], vectors: set[str]
) -> list[ParameterGroup]:
    name = group.name or config.name
    args = (config.args if name == config.name else {}) | group.args
    lr = config.lr if group.lr is None else group.lr
    if group.weight_decay is not None:
        return [ParameterGroup(label, name, lr, group.weight_decay, args, members)]
    return _split_vectors(ParameterGroup(f"{label}: ", name, lr, config.weight_decay, args, members), vectors)


def _split_vectors(group: ParameterGroup, vectors: set[str]) -> list[ParameterGroup]:
    matrices = {name: p for name, p in group.parameters.items() if name not in vectors}
    others = {name: p for name, p in group.parameters.items() if name in vectors}
    groups = [
        replace(group, label=f"{group.label}matrices", parameters=matrices),
        replace(group, label=f"{group.label}vectors", parameters=others, weight_decay=0.0),
    ]
    return [group for group in groups if group.parameters]


def _split_by_factors(group: ParameterGroup, scaling: Mapping[str, Scaling], *, eps: float) -> Iterator[ParameterGroup]:
    """Yield groups of parameters with the same factors, and apply these; see `optim/parametrization.py`.

    Args:
        eps: of AdamW, at the base size.
    """
    from titanlite.optim.parametrization import Factors, update_factors

    parts: dict[Factors, list[str]] = {}
    for name, parameter in group.parameters.items():
        try:
            factors = update_factors(group.name, group.args, scaling[name], parameter)
        except UserError as error:
            raise ConfigError([Problem("optimizer.parametrization", f"{error} ({name})")]) from error
        parts.setdefault(factors._replace(std=1.0), []).append(name)
    for factors, names in parts.items():
        titles = dict.fromkeys(
            "in layers" if scale.role == "vector" and scale.in_layers else scale.role
            for scale in map(scaling.__getitem__, names)
        )
        yield replace(
            group,
            label=f"{group.label}: {', '.join(titles)}" if len(parts) > 1 else group.label,
            lr=group.lr * factors.lr,
            weight_decay=group.weight_decay / factors.lr,
            parameters={name: group.parameters[name] for name in names},
            eps=eps * factors.eps if group.name == "AdamW" else None,
        )


def collapse_names(names: Iterable[str]) -> list[str]:
    """Return one name for all that differ in numbers only, with their count: layers.*.norm.weight x32."""
    alike: dict[str, list[str]] = {}
    for name in names:
        alike.setdefault(re.sub(r"\.\d+(?=\.|$)", ".*", name), []).append(name)
    return [f"{form} x{len(found)}" if len(found) > 1 else found[0] for form, found in alike.items()]


def format_groups(groups: Iterable[ParameterGroup]) -> list[str]:
    """Return the lines of a table with one group a line."""
    lines = [["group", "optimizer", "lr", "weight decay", "tensors", "parameters", "for example"]]
    for group in groups:
        count = sum(parameter.numel() for parameter in group.parameters.values())
        numbers = [f"{group.lr:g}", f"{group.weight_decay:g}", f"{len(group.parameters):,}", f"{count:,}"]
        lines.append([group.label, group.name, *numbers, ", ".join(collapse_names(group.parameters)[:3])])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if 2 <= column <= 5 else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]
