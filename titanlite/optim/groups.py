"""Which parameters are updated how: `[[optimizer.groups]]`, or the defaults where there are none."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from titanlite.config.schema import Optimizer
from titanlite.runtime.errors import ConfigError, Problem


@dataclass(frozen=True)
class Group:
    """Parameters that are updated alike."""

    label: str
    name: str
    """Of the optimizer."""
    lr: float
    """Peak of the learning rate."""
    weight_decay: float
    args: dict[str, Any]
    parameters: dict[str, nn.Parameter]


def plan_groups(config: Optimizer, parameters: Mapping[str, nn.Parameter]) -> list[Group]:
    """Every parameter in exactly one group. What has fewer than two dimensions is a group of its own without weight
    decay, unless the decay was set for its group.

    Args:
        parameters: by name; they may be on the meta device.

    Raises:
        ConfigError: parameters are in no group or in several, or a group has none.
    """
    parameters = dict(parameters)
    if config.groups:
        return _configured(config, parameters)
    everything = Group("", config.name, config.lr, config.weight_decay, config.args, parameters)
    if config.name != "Muon":
        return _vectors_apart(everything)
    inside = {name: p for name, p in parameters.items() if name.startswith("layers.") and p.ndim in (2, 3)}
    rest = {name: p for name, p in parameters.items() if name not in inside}
    return [
        replace(everything, label="matrices in layers", parameters=inside),
        *_vectors_apart(replace(everything, label="other ", name="AdamW", args={}, parameters=rest)),
    ]


def _configured(config: Optimizer, parameters: dict[str, nn.Parameter]) -> list[Group]:
    numbers_of = {
        name: tuple(
            number
            for number, group in enumerate(config.groups)
            if any(fnmatchcase(name, pattern) for pattern in group.match)
        )
        for name in parameters
    }
    problems = []
    for numbers in sorted(set(numbers_of.values())):
        names = ", ".join(collapse(name for name, found in numbers_of.items() if found == numbers))
        if not numbers:
            problems.append(Problem("optimizer.groups", f"no group matches {names}"))
        elif len(numbers) > 1:
            groups = " and ".join(map(str, numbers))
            problems.append(Problem("optimizer.groups", f"groups {groups} match the same: {names}"))
    planned = []
    for number, group in enumerate(config.groups):
        name, label = group.name or config.name, f"groups.{number}"
        members = {key: parameter for key, parameter in parameters.items() if number in numbers_of[key]}
        vectors = collapse(key for key, parameter in members.items() if parameter.ndim not in (2, 3))
        if not members:
            there = ", ".join(collapse(parameters))
            problems.append(Problem(f"optimizer.{label}.match", f"matches no parameter; there are {there}"))
        if name == "Muon" and vectors:
            message = f"is for matrices; give these a group with another optimizer: {', '.join(vectors)}"
            problems.append(Problem(f"optimizer.{label}.name", f"Muon {message}"))
        args = (config.args if name == config.name else {}) | group.args
        lr = config.lr if group.lr is None else group.lr
        decay = config.weight_decay if group.weight_decay is None else group.weight_decay
        whole = Group(label, name, lr, decay, args, members)
        is_split = group.weight_decay is None
        planned += _vectors_apart(replace(whole, label=f"{label}: ")) if is_split else [whole]
    if problems:
        raise ConfigError(problems)
    return planned


def _vectors_apart(group: Group) -> list[Group]:
    matrices = {name: p for name, p in group.parameters.items() if p.ndim >= 2}
    vectors = {name: p for name, p in group.parameters.items() if p.ndim < 2}
    groups = [
        replace(group, label=f"{group.label}matrices", parameters=matrices),
        replace(group, label=f"{group.label}vectors", parameters=vectors, weight_decay=0.0),
    ]
    return [group for group in groups if group.parameters]


def collapse(names: Iterable[str]) -> list[str]:
    """Names of which those that differ in numbers only are one: layers.*.norm.weight x32."""
    alike: dict[str, list[str]] = {}
    for name in names:
        alike.setdefault(re.sub(r"\.\d+(?=\.|$)", ".*", name), []).append(name)
    return [f"{form} x{len(found)}" if len(found) > 1 else found[0] for form, found in alike.items()]


def table(groups: Iterable[Group]) -> list[str]:
    """Lines that show what is updated how, in columns."""
    rows = [["group", "optimizer", "lr", "weight decay", "tensors", "parameters", "for example"]]
    for group in groups:
        count = sum(parameter.numel() for parameter in group.parameters.values())
        figures = [f"{group.lr:g}", f"{group.weight_decay:g}", f"{len(group.parameters):,}", f"{count:,}"]
        rows.append([group.label, group.name, *figures, ", ".join(collapse(group.parameters)[:3])])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if 2 <= column <= 5 else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
