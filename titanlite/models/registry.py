"""How `[model]` finds a model by its name."""

from dataclasses import fields, replace
from difflib import get_close_matches
from typing import Any

from titanlite.errors import ConfigError, Problem
from titanlite.models.base import Model, ModelArgs
from titanlite.models.llama3 import Llama3
from titanlite.models.qwen3 import Qwen3
from titanlite.models.qwen3_moe import Qwen3Moe

MODELS: dict[str, type[Model]] = {"llama3": Llama3, "qwen3": Qwen3, "qwen3_moe": Qwen3Moe}
"""The built-in model families by `[model] name`."""


def resolve_model(name: str, flavor: str, overrides: dict[str, Any]) -> tuple[type[Model], ModelArgs]:
    """The class and its arguments for `[model]`.

    Raises:
        ConfigError: naming every unknown name, flavor or argument, and the nearest right ones.
    """
    if name not in MODELS:
        raise ConfigError([_unknown("model.name", name, MODELS)])
    model = MODELS[name]
    args = model.flavors.get(flavor) or next(iter(model.flavors.values()))  # all have the same fields
    problems = [] if flavor in model.flavors else [_unknown("model.flavor", flavor, model.flavors)]
    known = {field.name: field.type for field in fields(args)}
    for key, value in overrides.items():
        if key not in known:
            problems.append(_unknown(f"model.args.{key}", key, known, what="key"))
        elif not _fits(value, known[key]):
            expected = getattr(known[key], "__name__", known[key])
            problems.append(Problem(f"model.args.{key}", f"expected {expected}, got {value!r}"))
    if problems:
        raise ConfigError(problems)
    try:
        return model, replace(args, **overrides)
    except ValueError as error:
        raise ConfigError([Problem("model.args", str(error))]) from error


def _fits(value: Any, expected: Any) -> bool:
    if expected is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if expected in (int, bool, str):
        return type(value) is expected
    return False


def _unknown(key: str, name: str, known: dict[str, Any], what: str = "value") -> Problem:
    by_lower_case = {option.lower(): option for option in known}
    near = get_close_matches(name.lower(), by_lower_case, n=1)
    hint = f", did you mean {by_lower_case[near[0]]}?" if near else ""
    return Problem(key, f"unknown {what} {name!r}{hint} (known: {', '.join(known)})")
