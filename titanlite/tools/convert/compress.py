"""A student from its teacher's weights: some of the layers and experts, as `checkpoint import` writes them."""

import re
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from titanlite.models.registry import ModelSpec
from titanlite.runtime.errors import UserError
from titanlite.schema import ModelSelection

LAYER = re.compile(r"layers\.(\d+)\.(.*)")
PART = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?")


def parse_layers(text: str, n_layers: int) -> list[int]:
    """Return the numbers in a list such as "0,2,4-7", in which both ends of a range count.

    Args:
        n_layers: number of layers of the teacher.

    Raises:
        UserError: the text is no such list, or its numbers are too large, repeated or not in order.
    """
    layers: list[int] = []
    for part in text.split(","):
        if (match := PART.fullmatch(part.strip())) is None:
            raise UserError(f"--layers: {part.strip()!r} is no number or range: write them as in 0,2,4-7")
        first, last = int(match[1]), int(match[2] or match[1])
        if max(first, last) >= n_layers:
            raise UserError(f"--layers: there is no layer {max(first, last)}: the model has layers 0 to {n_layers - 1}")
        if last < first or (layers and first <= layers[-1]):
            what = "is repeated" if first in layers else "is not in order"
            raise UserError(f"--layers: {part.strip()} {what}: name each layer once, the first of the model first")
        layers += range(first, last + 1)
    return layers


@dataclass(frozen=True)
class Student:
    """Parts of a teacher that a student has."""

    layers: list[int] | None = None
    """Layers, by their numbers in the teacher. None: all."""
    experts: dict[str, list[int]] | None = None
    """Experts of each layer of the teacher, by their numbers, for each name of a tensor with one entry an expert. None:
    all."""

    @property
    def changes(self) -> dict[str, Any]:
        """Return the model's arguments that differ from the teacher's."""
        found = {} if self.layers is None else {"n_layers": len(self.layers)}
        return found if self.experts is None else found | {"n_experts": len(next(iter(self.experts.values())))}

    def spec(self, teacher: ModelSpec) -> ModelSpec:
        """Return the student's model."""
        return teacher._replace(args=replace(teacher.args, **self.changes))

    def model(self, selection: ModelSelection) -> ModelSelection:
        """Return the student's part of the config."""
        return selection.model_copy(update={"args": {**selection.args, **self.changes}})

    def teacher_name(self, name: str) -> str:
        """Return the teacher's name of a tensor of the student."""
        match = LAYER.fullmatch(name)
        if match is None or self.layers is None:
            return name
        return f"layers.{self.layers[int(match[1])]}.{match[2]}"

    def part_of(self, name: str, tensor: Tensor) -> Tensor:
        """Return the student's part of a tensor of the teacher.

        Args:
            name: of the teacher.
        """
        kept = (self.experts or {}).get(name)
        return tensor if kept is None else tensor.index_select(0, torch.tensor(kept))


def choose_layers(text: str, spec: ModelSpec) -> list[int]:
    """Return the layers that `--layers` names.

    Raises:
        UserError: the list is wrong, or the model's arguments do not state its number of layers.
    """
    n_layers = getattr(spec.args, "n_layers", None)
    if not isinstance(n_layers, int):
        raise UserError(f"--layers: {spec.model_cls.__name__} has no argument n_layers, so its depth cannot be changed")
    return parse_layers(text, n_layers)
