"""Values that the modules of a model compute, under names that two programs share: captured, and compared."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle


@dataclass(frozen=True)
class Difference:
    """Difference of one tensor."""

    key: str
    """`direction role name`: forward output layers.0.attention."""
    most: float
    """Largest absolute difference of an element."""
    relative: float
    """L2 norm of the difference, relative to that of the reference."""
    is_within: bool

    @property
    def direction(self) -> str:
        return self.key.split(" ", 2)[0]

    @property
    def name(self) -> str:
        return self.key.split(" ", 2)[2].partition(" (call")[0]


def difference(key: str, found: Tensor, wanted: Tensor, limit: float) -> Difference:
    """Compare a tensor with its reference.

    Args:
        limit: largest relative difference.
    """
    if found.shape != wanted.shape:
        return Difference(key, inf, inf, is_within=False)
    if not found.numel():
        return Difference(key, 0.0, 0.0, is_within=True)
    delta, norm = found.double() - wanted.double(), wanted.double().norm().item()
    relative = delta.norm().item() / norm if norm else (inf if delta.any() else 0.0)
    return Difference(key, delta.abs().max().item(), relative, is_within=relative <= limit)


def watch(modules: Iterable[tuple[str, nn.Module]], see: Callable[[str, str, Any], None]) -> list[RemovableHandle]:
    """Call see(role, name, value) with the input and the output of modules, until the handles are removed.

    An Identity computes nothing, and is left out. Hooks of a compiled block are compiled with it.
    """
    handles: list[RemovableHandle] = []
    for name, module in modules:
        if name and not isinstance(module, nn.Identity):
            handles.append(module.register_forward_pre_hook(partial(_see_input, name, see), with_kwargs=True))
            handles.append(module.register_forward_hook(partial(_see_output, name, see)))
    return handles


def _see_input(
    name: str, see: Callable[..., None], module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]
) -> None:
    see("input", name, inputs[0] if inputs else named.get("hidden_states"))


def _see_output(name: str, see: Callable[..., None], module: nn.Module, inputs: object, output: Any) -> None:
    see("output", name, output[0] if type(output) is tuple else output)


def modules_in(names: Mapping[str, str]) -> dict[str, str]:
    """Return the other program's name of each module of ours that has one there.

    Args:
        names: the other program's name of each parameter. Modules follow from the first parts of both names within a
            block, and elsewhere from all but the last.
    """
    found: dict[str, str] = {}
    for ours, theirs in names.items():
        prefix, _, inner = ours.partition(".")
        number, _, inner = inner.partition(".")
        block, _, there = theirs.partition(f".{number}.")
        if prefix != "layers" or not there:
            found[ours.rpartition(".")[0]] = theirs.rpartition(".")[0]
            continue
        one, other = [f"layers.{number}"], [f"{block}.{number}"]
        found[one[0]] = other[0]
        for a, b in zip(inner.split(".")[:-1], there.split(".")[:-1], strict=False):
            one.append(a)
            other.append(b)
            found[".".join(one)] = ".".join(other)
    return found
