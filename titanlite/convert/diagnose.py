"""Explanations of a block that computes something else in another program: which tensor is wrong there, and how.

Each usual mistake is made in our own block, in turn. The one that gives the other program's result is the explanation.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import combinations
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from titanlite.models.base import Model


class BlockCall(NamedTuple):
    """Arguments of a block's forward."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class Mistake(NamedTuple):
    """A way in which tensors of a block can be wrong."""

    description: str
    values: dict[str, Tensor]
    """Wrong values by the name in the block."""


def explain(model: Model, number: int, call: BlockCall, found: Tensor, names: dict[str, str], *, limit: float) -> str:
    """Return the mistake that explains another result of a block.

    Args:
        call: what the block was called with; there, the input was the same.
        found: result of the other program.
        names: the other program's name of each tensor.
        limit: largest relative difference of results that are the same.
    """
    block = model.layers[number]
    head_size = getattr(getattr(model, "args", None), "head_size", 0)
    best = (float("inf"), "")
    for mistake in _mistakes(model, number, head_size):
        with torch.no_grad():
            result = torch.func.functional_call(block, mistake.values, call.args, call.kwargs)
        difference = ((result - found).double().square().mean() / found.double().square().mean()).sqrt().item()
        best = min(best, (difference, mistake.description))
        if difference <= limit:
            tensors = [f"layers.{number}.{name}" for name in mistake.values]
            return f"{' and '.join(_both(name, names) for name in tensors)}: {mistake.description}"
    tensors = [f"layers.{number}.{name}" for name, _ in block.named_parameters()]
    return (
        f"no single mistake explains it: one of {', '.join(_both(name, names) for name in tensors)} differs, or an "
        "argument in config.json"
    )


def _both(name: str, names: dict[str, str]) -> str:
    return f"{name} ({names[name]})" if name in names else name


def _mistakes(model: Model, number: int, head_size: int) -> Iterator[Mistake]:
    block = model.layers[number]
    own = {name: tensor.detach() for name, tensor in block.named_parameters()}
    for (a, first), (b, second) in combinations(own.items(), 2):
        if first.shape == second.shape:
            yield Mistake("exchanged there", {a: second, b: first})
    square = [name for name, tensor in own.items() if tensor.ndim >= 2 and tensor.shape[-1] == tensor.shape[-2]]
    for count in (1, 2, 3):
        for group in combinations(square, count):
            turned = {name: own[name].transpose(-2, -1).contiguous() for name in group}
            yield Mistake("transposed there", turned)
    for name, tensor in own.items():
        if tensor.ndim == 3:
            yield Mistake("its experts are in reverse order there", {name: tensor.flip(0)})
    yield from _rotated(own, head_size)
    yield from _of_other_blocks(model.layers, number, own)
    for name, tensor in own.items():
        yield Mistake("all ones there", {name: torch.ones_like(tensor)})
        yield Mistake("all zeros there", {name: torch.zeros_like(tensor)})


def _rotated(own: dict[str, Tensor], head_size: int) -> Iterator[Mistake]:
    """Yield wrong layouts for RoPE, of each tensor whose rows are heads, and of each two."""
    if head_size < 4:
        return
    heads = [name for name, tensor in own.items() if tensor.ndim == 2 and tensor.shape[0] % head_size == 0]
    layouts: list[tuple[str, Callable[[Tensor], Tensor]]] = [
        ("its rows pair as neighbours for RoPE there, and here as halves of a head", _interleave),
        ("its rows were put in order for RoPE there though they were in order", _halve),
    ]
    groups: Sequence[tuple[str, ...]] = [*combinations(heads, 2), *((name,) for name in heads)]
    for text, layout in layouts:
        for group in groups:
            changed = {name: layout(own[name].unflatten(0, (-1, head_size))).flatten(0, 1) for name in group}
            yield Mistake(text, changed)


def _interleave(heads: Tensor) -> Tensor:
    return heads.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)


def _halve(heads: Tensor) -> Tensor:
    return heads.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2)


def _of_other_blocks(layers: nn.ModuleList, number: int, own: dict[str, Tensor]) -> Iterator[Mistake]:
    for i, other in enumerate(layers):
        for name, tensor in other.named_parameters():
            if i != number and name in own and tensor.shape == own[name].shape:
                yield Mistake(f"that of block {i} there", {name: tensor.detach()})
