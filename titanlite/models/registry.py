"""How `[model]` finds a model by its name."""

from dataclasses import fields, replace
from difflib import get_close_matches
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from titanlite.models.base import Model, ModelArgs
from titanlite.models.llama3 import Llama3
from titanlite.models.qwen3 import Qwen3
from titanlite.models.qwen3_moe import Qwen3Moe
from titanlite.runtime.errors import ConfigError, Problem, UserError
from titanlite.runtime.user_code import load_module

MODELS: dict[str, type[Model]] = {"llama3": Llama3, "qwen3": Qwen3, "qwen3_moe": Qwen3Moe}
"""The built-in model families by `[model] name`."""


def resolve_model(
    name: str | None, flavor: str | None, overrides: dict[str, Any], file: str | None = None
) -> tuple[type[Model], ModelArgs]:
    """The class and its arguments for `[model]`.

    Args:
        name: a built-in family, or a class of the file; None for llama3, or the only class.
        flavor: None for debug, or else the first.

    Raises:
        ConfigError: naming every unknown name, flavor or argument, and the nearest right ones.
    """
    known_models = MODELS if file is None else _models_of(file)
    name = name or ("llama3" if file is None else next(iter(known_models)) if len(known_models) == 1 else "")
    if name not in known_models:
        raise ConfigError([_unknown("model.name", name, known_models)])
    model = known_models[name]
    if not model.flavors:
        raise ConfigError([Problem("model.name", f"{name} has no flavors: it must name at least one shape")])
    flavor = flavor or ("debug" if "debug" in model.flavors else next(iter(model.flavors)))
    args = model.flavors.get(flavor) or next(iter(model.flavors.values()))  # all have the same fields
    problems = [] if flavor in model.flavors else [_unknown("model.flavor", flavor, model.flavors)]
    hints = get_type_hints(type(args))  # types, also where annotations are kept as text
    known = {field.name: hints[field.name] for field in fields(args)}
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


def _models_of(file: str) -> dict[str, type[Model]]:
    """The models that a file of the user's defines, by class name; not those that it imports."""
    try:
        module = load_module(file)
    except UserError as error:
        raise ConfigError([Problem("model.file", str(error))]) from error
    own = [it for it in vars(module).values() if isinstance(it, type) and it.__module__ == module.__name__]
    found = {kind.__name__: kind for kind in own if issubclass(kind, Model)}
    if not found:
        raise ConfigError([Problem("model.file", f"{file} defines no subclass of titanlite.models.base.Model")])
    return found


def _fits(value: Any, expected: Any) -> bool:
    if isinstance(expected, UnionType) or get_origin(expected) is Union:
        return any(_fits(value, kind) for kind in get_args(expected))
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
