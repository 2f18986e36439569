"""Small results of forward that need no gradient, kept so that activation checkpointing does not recompute them.

Recomputing them would cost much for their size, or let the host wait for the device."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Self, TypeVar, cast

import torch

T = TypeVar("T")


class _Pass:
    """Forward or one recomputation of a part of a model: a context, which can be entered again.

    Args:
        results: of the forward pass, in the order in which they are asked for.
        replays: this is a recomputation, which takes them from there.
        around: further context.
    """

    current: "_Pass | None" = None

    def __init__(self, results: list[Any], *, replays: bool, around: AbstractContextManager[Any]) -> None:
        self.results, self.replays, self.around = results, replays, around
        self.left: Iterator[Any] = iter(())
        self.outer: _Pass | None = None

    def __enter__(self) -> Self:
        self.left = iter(self.results)
        self.outer, _Pass.current = _Pass.current, self
        self.around.__enter__()
        return self

    def __exit__(self, *error: Any) -> bool | None:
        _Pass.current = self.outer
        return self.around.__exit__(*error)


def remembering(
    around: Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]] | None = None,
) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Return contexts of a forward pass and of its recomputation, for `torch.utils.checkpoint.checkpoint`.

    Args:
        around: returns further ones.
    """
    forward, recomputation = around() if around else (nullcontext(), nullcontext())
    results: list[Any] = []
    return _Pass(results, replays=False, around=forward), _Pass(results, replays=True, around=recomputation)


def computed_once(function: Callable[[], T]) -> T:
    """Return the result of a function, without a gradient; where `remembering` recomputes, that of the forward pass.

    Compiled code always calls the function, because the compiler decides what it recomputes.
    """
    now = None if torch.compiler.is_compiling() else _Pass.current
    if now and now.replays:
        return cast(T, next(now.left))
    with torch.no_grad():  # autograd would keep tensors that recomputation does not have
        result = function()
    if now:
        now.results.append(result)
    return result
