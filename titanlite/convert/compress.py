"""A student from its teacher's weights: some of the layers, renumbered, as `checkpoint import --layers` writes them."""

import re
from dataclasses import dataclass, replace

from titanlite.config.schema import ModelSelection
from titanlite.models.registry import ModelSpec
from titanlite.runtime.errors import UserError

LAYER = re.compile(r"(model\.)?layers\.(\d+)\.(.*)")
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
class Depth:
    """Layers of a teacher that a student has, by their numbers there."""

    layers: list[int]

    def student(self, spec: ModelSpec) -> ModelSpec:
        """Return the teacher's model with these layers alone."""
        return spec._replace(args=replace(spec.args, n_layers=len(self.layers)))

    def model(self, selection: ModelSelection) -> ModelSelection:
        """Return the student's part of the config."""
        return selection.model_copy(update={"args": {**selection.args, "n_layers": len(self.layers)}})

    def teacher_name(self, name: str) -> str:
        """Return the teacher's name of a tensor of the student."""
        match = LAYER.fullmatch(name)
        return f"{match[1] or ''}layers.{self.layers[int(match[2])]}.{match[3]}" if match else name


def depth_of(text: str, spec: ModelSpec) -> Depth:
    """Return the choice of `--layers` for a teacher.

    Raises:
        UserError: the list is wrong, or the model's arguments do not state its number of layers.
    """
    n_layers = getattr(spec.args, "n_layers", None)
    if not isinstance(n_layers, int):
        raise UserError(f"--layers: {spec.model_cls.__name__} has no argument n_layers, so its depth cannot be changed")
    return Depth(parse_layers(text, n_layers))
