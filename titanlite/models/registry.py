"""Models by name: the class and the shape that `[model]` selects."""

import importlib
import math
import sys
from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from types import UnionType
from typing import Any, NamedTuple, Union, get_args, get_origin, get_type_hints

from titanlite.models.base import Model, ModelArgs, build_on_meta
from titanlite.runtime.console import install_hint
from titanlite.runtime.errors import ConfigError, Problem, UserError, did_you_mean
from titanlite.runtime.user_code import describe_error, load_module


class _Families(Mapping[str, type[Model]]):
    """Model classes by name, whose modules are imported when they are asked for."""

    def __init__(self, classes: dict[str, str]) -> None:
        self._classes = classes

    def __getitem__(self, name: str) -> type[Model]:
        class_name = self._classes[name]
        return getattr(importlib.import_module(f"titanlite.models.{name}"), class_name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._classes)

    def __len__(self) -> int:
        return len(self._classes)


MODELS = _Families(
    {
        "deepseek_v3": "DeepseekV3",
        "gemma3": "Gemma3",
        "glm4_moe": "Glm4Moe",
        "gpt_oss": "GptOss",
        "llama3": "Llama3",
        "olmo3": "Olmo3",
        "qwen3": "Qwen3",
        "qwen3_moe": "Qwen3Moe",
        "qwen3_next": "Qwen3Next",
        "smollm3": "SmolLM3",
    }
)
"""The built-in model families by `[model] name`: a file of titanlite/models/ each, and the class in it."""


TRANSFORMERS = "transformers"


class ModelSpec(NamedTuple):
    """Model class and shape that a config selects."""

    model_cls: type[Model]
    args: ModelArgs

    def build(self) -> Model:
        """Return the model on the meta device: shapes without memory.

        Raises:
            ConfigError: the `__init__` of a model of the user's own fails, or defines no layers.
        """
        try:
            model = build_on_meta(self.model_cls, self.args)
            len(model.layers)
        except Exception as error:  # code of the user's own may raise anything
            if self.model_cls.__module__.startswith("titanlite.models."):
                if isinstance(error, UserError):
                    raise ConfigError([Problem("model.args", str(error))]) from error
                if isinstance(error, RuntimeError) and "overflow" in str(error):
                    raise ConfigError([Problem("model.args", "a weight has more than 2^63 bytes")]) from error
                raise
            name = f"{self.model_cls.__name__}.__init__"
            file = sys.modules[self.model_cls.__module__].__file__
            if isinstance(error, AttributeError) and error.name == "layers":
                problem = f"{name} defines no layers: see docs/add_a_model.md"
            else:
                problem = f"{name} fails: {describe_error(error, file)}"
            raise ConfigError([Problem("model.file", problem)]) from error
        return model


def resolve_model(
    name: str | None,
    flavor: str | None,
    overrides: dict[str, Any],
    file: str | None = None,
    *,
    path: str | None = None,
    tokenizer_size: int | None = None,
) -> ModelSpec:
    """Find the class and the shape that `[model]` names.

    Args:
        name: built-in family, or class in the file. None selects llama3, or the only class of the file.
        flavor: None selects debug, or else the first flavor.
        overrides: fields of the flavor to change.
        file: Python file or module of the user's own model.
        path: config of a model of transformers.
        tokenizer_size: entries of the tokenizer, which vocab_size follows unless overrides has it; None if unknown.

    Raises:
        ConfigError: lists every unknown name, flavor or argument, and the nearest known ones.
    """
    known_models: Mapping[str, type[Model]] = MODELS if file is None else _models_of(file)
    if file is None and (name == TRANSFORMERS or path is not None):
        known_models = _model_of_transformers(name, path)
    name = name or ("llama3" if file is None else next(iter(known_models)) if len(known_models) == 1 else "")
    if name not in known_models:
        raise ConfigError([_unknown("model.name", name, known_models)])
    model = known_models[name]
    if not model.flavors:
        raise ConfigError(
            [Problem("model.name", f'{name} has no flavors: give it at least one, flavors = {{"debug": ...}}')]
        )
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
    if tokenizer_size is not None:
        overrides = {"vocab_size": vocab_size_for(tokenizer_size, args.vocab_size), **overrides}
    try:
        return ModelSpec(model, replace(args, **overrides))
    except ValueError as error:
        raise ConfigError([Problem("model.args", str(error))]) from error


def vocab_size_for(tokenizer_size: int, flavor_size: int) -> int:
    """Return the vocabulary size of a model for a tokenizer.

    It is the flavor's size where the tokenizer fills at least 99 % of it: released models pad their vocabulary by less.
    Else it is the tokenizer's size rounded up to a multiple of 128, which matmuls on GPUs prefer.
    """
    if 0.99 * flavor_size <= tokenizer_size <= flavor_size:
        return flavor_size
    return -(-tokenizer_size // 128) * 128


def _model_of_transformers(name: str | None, path: str | None) -> dict[str, type[Model]]:
    """Return the class of a model of transformers.

    Raises:
        ConfigError: name and path do not belong together, the package is missing, or there is no such model.
    """
    if name != TRANSFORMERS:
        raise ConfigError([Problem("model.path", f'belongs to model.name = "{TRANSFORMERS}": set it, or leave it out')])
    if path is None:
        raise ConfigError([Problem("model.path", "is not set: name a folder with a config.json, or a model type")])
    try:
        from titanlite.models.transformers import decoder_of

        return {TRANSFORMERS: decoder_of(path)}
    except ImportError as error:
        raise ConfigError([Problem("model.name", f"{error} ({install_hint('transformers')})")]) from error
    except UserError as error:
        raise ConfigError([Problem("model.path", str(error).removeprefix("model.path: "))]) from error


def _models_of(file: str) -> dict[str, type[Model]]:
    """Return the models that a file of the user's own defines, by class name, without those that it imports."""
    try:
        module = load_module(file)
    except UserError as error:
        raise ConfigError([Problem("model.file", str(error))]) from error
    own = [value for value in vars(module).values() if isinstance(value, type) and value.__module__ == module.__name__]
    found = {model_cls.__name__: model_cls for model_cls in own if issubclass(model_cls, Model)}
    if not found:
        raise ConfigError([Problem("model.file", f"{file} defines no subclass of titanlite.models.base.Model")])
    return found


def _fits(value: Any, expected: Any) -> bool:
    if isinstance(expected, UnionType) or get_origin(expected) is Union:
        return any(_fits(value, branch) for branch in get_args(expected))
    if expected is float:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if expected in (int, bool, str):
        return type(value) is expected
    return False


def _unknown(key: str, name: str, known: Mapping[str, Any], what: str = "value") -> Problem:
    return Problem(key, f"unknown {what} {name!r}{did_you_mean(name, known)} (known: {', '.join(known)})")
