"""What a model must offer, and how one is found by name.

A model is plain single-device PyTorch. It is built on the meta device, sharded and compiled by `parallelize`, and only
then given memory and values. So `__init__` gives shapes, `init_weight` gives every value, and the model never asks
which device or rank it is on.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from titanlite.errors import ConfigError, Problem
from titanlite.models.layers import Loss


@dataclass(frozen=True, kw_only=True)
class ModelArgs:
    """The shape of a model; each model family extends it."""

    vocab_size: int
    max_seq_len: int


class Model(nn.Module):
    """Base class of all models.

    Sharding, checkpointing and compiling treat each block of `layers` on its own. Every other direct child that has
    parameters is sharded as one unit: an embedding before the layers, a head as the last child.
    """

    flavors: ClassVar[dict[str, ModelArgs]] = {}
    """Named shapes: `[model] flavor` picks one, `[model.args]` changes fields of it."""

    layers: nn.ModuleList

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()

    def forward(self, tokens: Tensor, loss: Loss | None = None) -> Tensor:
        """tokens [B, L] int64 -> logits [B, L, V]; with `loss`, what it returns for the final hidden states."""
        raise NotImplementedError

    def init_weight(self, name: str, weight: Tensor, generator: torch.Generator) -> None:
        """Fill the whole (unsharded) parameter `name` in place, drawing only from `generator`."""
        raise NotImplementedError

    def init_buffers(self) -> None:
        """Compute non-persistent buffers anew, on the current default device."""

    def flops_per_token(self, seq_len: int) -> int:
        """Floating point operations of forward and backward for one token of a sequence of seq_len tokens."""
        raise NotImplementedError


def unique_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """(fully qualified name, parameter), a shared one once. On meta models this costs no memory."""
    return model.named_parameters(remove_duplicate=True)


def parameter_generator(seed: int, name: str, device: torch.device) -> torch.Generator:
    """A generator that depends on (seed, name) alone, so that a parameter's values do not depend on the layout."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest[:8], "little") >> 1)


def registry() -> dict[str, type[Model]]:
    """The built-in model families by `[model] name`."""
    from titanlite.models.llama3 import Llama3

    return {"llama3": Llama3}


def resolve_model(name: str, flavor: str, overrides: dict[str, Any]) -> tuple[type[Model], ModelArgs]:
    """The class and its arguments for `[model]`.

    Raises:
        ConfigError: naming every unknown name, flavor or argument, and the nearest right ones.
    """
    models = registry()
    if name not in models:
        raise ConfigError([_unknown("model.name", name, models)])
    model = models[name]
    if flavor not in model.flavors:
        raise ConfigError([_unknown("model.flavor", flavor, model.flavors)])
    args = model.flavors[flavor]
    known = {field.name: field.type for field in fields(args)}
    problems = []
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
