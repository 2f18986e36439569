"""A student from its teacher's weights: some of the layers, as `checkpoint import --layers` writes them."""

import re

from titanlite.models.registry import ModelSpec
from titanlite.runtime.errors import UserError

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


def teacher_name(name: str, layers: list[int]) -> str:
    """Return the teacher's name of a tensor of a student that has these of its layers."""
    match = LAYER.fullmatch(name)
    return f"layers.{layers[int(match[1])]}.{match[2]}" if match else name


def choose_layers(text: str, spec: ModelSpec) -> list[int]:
    """Return the layers that `--layers` names.

    Raises:
        UserError: the list is wrong, or the model's arguments do not state its number of layers.
    """
    n_layers = getattr(spec.args, "n_layers", None)
    if not isinstance(n_layers, int):
        raise UserError(f"--layers: {spec.model_cls.__name__} has no argument n_layers, so its depth cannot be changed")
    return parse_layers(text, n_layers)
