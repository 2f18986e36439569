"""Observers of training: named hooks, so that planner, profilers and error messages need no patches of the code."""

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext

from torch import Tensor


class StepObserver:
    """Hooks of training. Each does nothing by default; a subclass overrides those that it needs."""

    def begin_step(self, step: int) -> None:
        """An optimizer step begins, with the wait for its data."""

    def phase(self, name: str) -> None:
        """A phase begins: data, forward, backward, update, validation, checkpoint."""

    def collective(self, category: str, unit: str) -> AbstractContextManager[None]:
        """An FSDP unit communicates within the context, and allocates and frees memory for it. Only for a model that
        `observe_fsdp` was called on.

        Args:
            category: all-gather or reduce-scatter.
            unit: name of the FSDP unit's first module.
        """
        return nullcontext()

    def label(self, tensors: Iterable[Tensor], category: str) -> None:
        """The memory of tensors has a category from here on: parameters, gradients, reduce-scatter, ..."""


class CurrentPhase(StepObserver):
    """Remembers where training is, for error messages."""

    def __init__(self) -> None:
        self.step = 0
        """0 before the first step."""
        self.name = "start"

    def begin_step(self, step: int) -> None:
        self.step, self.name = step, "data"

    def phase(self, name: str) -> None:
        self.name = name

    def __str__(self) -> str:
        return f"step {self.step}, {self.name}" if self.step else self.name
