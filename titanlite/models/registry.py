"""How `[model]` finds a model by its name."""

from dataclasses import fields, replace
from types import UnionType
from typing import Any, NamedTuple, Union, get_args, get_origin, get_type_hints

from titanlite.models.base import Model, ModelArgs, build_on_meta
from titanlite.models.llama3 import Llama3
from titanlite.models.qwen3 import Qwen3
from titanlite.models.qwen3_moe import Qwen3Moe
from titanlite.runtime.errors import ConfigError, Problem, UserError
from titanlite.runtime.nearest import did_you_mean
from titanlite.runtime.user_code import load_module

MODELS: dict[str, type[Model]] = {"llama3": Llama3, "qwen3": Qwen3, "qwen3_moe": Qwen3Moe}
"""The built-in model families by `[model] name`."""


class ModelSpec(NamedTuple):
    """Which model a config names."""

    model_cls: type[Model]
    args: ModelArgs

    def build(self) -> Model:
        """Return the model on the meta device: shapes without memory."""
        return build_on_meta(self.model_cls, self.args)


def resolve_model(
    name: str | None, flavor: str | None, overrides: dict[str, Any], file: str | None = None
) -> ModelSpec:
    """Find the class and the shape that `[model]` names.

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
        return ModelSpec(model, replace(args, **overrides))
    except ValueError as error:
        raise ConfigError([Problem("model.args", str(error))]) from error


def _models_of(file: str) -> dict[str, type[Model]]:
    """The models that a file of the user's defines, by class name; not those that it imports."""
    try:
        module = load_module(file)
    except UserError as error:
        raise ConfigError([Problem("model.file", str(error))]) from error
    own = [it for it in vars(module).values() if isinstance(it, type) and it.__module__ == module.__name__]
    found = {model_cls.__name__: model_cls for model_cls in own if issubclass(model_cls, Model)}
    if not found:
        raise ConfigError([Problem("model.file", f"{file} defines no subclass of titanlite.models.base.Model")])
    return found


def _fits(value: Any, expected: Any) -> bool:
    if isinstance(expected, UnionType) or get_origin(expected) is Union:
        return any(_fits(value, branch) for branch in get_args(expected))
    if expected is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if expected in (int, bool, str):
        return type(value) is expected
    return False


def _unknown(key: str, name: str, known: dict[str, Any], what: str = "value") -> Problem:
    return Problem(key, f"unknown {what} {name!r}{did_you_mean(name, known)} (known: {', '.join(known)})")
