"""Quantized weights in Hugging Face's files: narrow codes, and a scale for each block of them, read as wide weights.

A weight is its code times the scale of its block. For a region of a weight, only the codes of this region are read, and
the scales of its blocks.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from titanlite.runtime.errors import UserError
from titanlite.tools.convert.reader import ForeignTensor, Part, Region

NARROW = {"F8_E4M3": torch.float8_e4m3fn, "F8_E8M0": torch.float8_e8m0fnu, "U8": torch.uint8}
"""Dtypes of codes and scales, by their names in safetensors."""
WIDE = torch.bfloat16
"""Dtype that a quantized weight counts as stored in: that of the model before it was quantized."""
FLOAT8 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
"""Values of float8. To look them up takes a third of the time of a conversion."""
POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
FP4 = torch.tensor([*POSITIVE, *(-value for value in POSITIVE)], dtype=WIDE)
"""Values of the 16 codes of MXFP4 (E2M1 of OCP's Microscaling Formats 1.0)."""
PAIRS = torch.stack([FP4.repeat(16), FP4.repeat_interleave(16)], dim=1).view(torch.int32).flatten()
"""The two values in each byte, as one number of 4 bytes. That of the low half is the first."""
GROUP = 32
"""Values of MXFP4 that share a scale."""
Shape = tuple[int, ...]


@dataclass(frozen=True)
class StorageForm:
    """Tensors that stand for a weight in files."""

    codes: str
    """Suffix of the name of the codes, behind the name of the weight."""
    scales: str
    """Suffix of the name of the scales, behind the name of the weight."""
    dtype: torch.dtype
    """Dtype of the codes."""
    shapes: Callable[[Shape], tuple[Shape, Shape] | None]
    """Return the shapes of the weight and of the scales for that of the codes; None if they cannot have it."""
    read: Callable[[ForeignTensor, ForeignTensor, Region], Tensor]
    """Return a region of the weight, from its codes and scales."""

    def widened(self, stored: Mapping[str, ForeignTensor]) -> dict[str, ForeignTensor]:
        """Return tensors by name, with weights in the place of their codes and scales.

        Raises:
            UserError: codes have no scales, or scales of another shape.
        """
        found = dict(stored)
        for name, codes in stored.items():
            if codes.dtype != self.dtype or not name.endswith(self.codes):
                continue
            weight = name.removesuffix(self.codes)
            scales = found.pop(weight + self.scales, None)
            if scales is None:
                raise UserError(f"{name} has no {weight}{self.scales}, the scales of its blocks")
            if (shapes := self.shapes(codes.shape)) is None or scales.shape != shapes[1]:
                raise UserError(f"{scales.name} {[*scales.shape]} does not fit {name} {[*codes.shape]}")
            del found[name]
            found[weight] = self._weight(weight, shapes[0], codes, scales)
        return found

    def _weight(self, name: str, shape: Shape, codes: ForeignTensor, scales: ForeignTensor) -> ForeignTensor:
        """Return a weight. Each matrix of a stack is a part."""

        def part(first: int, count: int) -> Part:
            def read(region: Region) -> Tensor:
                rows = slice(first + region[0].start, first + region[0].stop)
                return self.read(codes, scales, (rows, *region[1:]))

            return Part((first, *[0] * len(shape[1:])), (count, *shape[1:]), read)

        parts = [part(0, shape[0])] if len(shape) == 2 else [part(i, 1) for i in range(shape[0])]
        return ForeignTensor(name, shape, WIDE, parts)


def _factors(scales: ForeignTensor, region: Region) -> Tensor:
    """Return scales in float32. Bytes are exponents (E8M0)."""
    found = scales.read(region)
    return (found.view(torch.float8_e8m0fnu) if found.dtype == torch.uint8 else found).float()


def _blocks(wanted: slice, size: int) -> slice:
    """Return the blocks of a size that have some of these elements."""
    return slice(wanted.start // size, -(-wanted.stop // size))


def _float8(height: int, width: int) -> StorageForm:
    """Return the form of DeepSeek-V3 (arXiv:2412.19437, section 3.3): one scale for each block of a matrix."""

    def read(codes: ForeignTensor, scales: ForeignTensor, region: Region) -> Tensor:
        rows, columns = region
        blocks = _blocks(rows, height), _blocks(columns, width)
        factors = _factors(scales, blocks).repeat_interleave(width, dim=1)[:, columns.start % width :]
        numbers = codes.read(region).view(torch.uint8)
        found = torch.empty(numbers.shape)
        for block, of_columns in enumerate(factors[:, : numbers.shape[1]], blocks[0].start):
            strip = slice(max(block * height - rows.start, 0), (block + 1) * height - rows.start)
            values = FLOAT8.index_select(0, numbers[strip].flatten().int()).view(-1, numbers.shape[1])
            torch.mul(values, of_columns, out=found[strip])
        return found  # it is float32, which the reader rounds once, to the dtype that it wants

    def shapes(shape: Shape) -> tuple[Shape, Shape] | None:
        return (shape, (-(-shape[0] // height), -(-shape[1] // width))) if len(shape) == 2 else None

    return StorageForm("", "_scale_inv", torch.float8_e4m3fn, shapes, read)


def _shapes_of_mxfp4(shape: Shape) -> tuple[Shape, Shape] | None:
    return ((shape[0], shape[2] * GROUP, shape[1]), shape[:3]) if shape[3:] == (GROUP // 2,) else None


def _read_mxfp4(codes: ForeignTensor, scales: ForeignTensor, region: Region) -> Tensor:
    experts, rows, columns = region
    stored = experts, columns, _blocks(rows, GROUP)
    factors = _factors(scales, stored).to(WIDE).unsqueeze(-1)
    numbers = codes.read((*stored, slice(0, GROUP // 2))).flatten().int()
    values = PAIRS.index_select(0, numbers).view(WIDE).view(*factors.shape[:-1], GROUP)
    values *= factors  # they are powers of two, so that the product is exact
    return values.flatten(-2)[..., rows.start % GROUP :][..., : rows.stop - rows.start].transpose(-2, -1)


MXFP4 = StorageForm("_blocks", "_scales", torch.uint8, _shapes_of_mxfp4, _read_mxfp4)
"""The form of gpt-oss: stacks [experts, out, groups, 16 bytes] of matrices that are transposed."""


def form_of(config: Mapping[str, Any], where: str) -> StorageForm | None:
    """Return the form of weights in a folder; None if they are not quantized.

    Args:
        config: content of config.json.
        where: its place, for errors.

    Raises:
        UserError: the weights are quantized in another way.
    """
    if (settings := config.get("quantization_config")) is None:
        return None
    method = settings.get("quant_method") if isinstance(settings, dict) else settings
    match method, settings:
        case "mxfp4", _:
            return MXFP4
        case "fp8", {"weight_block_size": [int(height), int(width)]} if min(height, width) > 0:
            return _float8(height, width)
    raise UserError(
        f"{where} describes weights quantized as {method!r}: only 'fp8' with a weight_block_size and 'mxfp4' are read"
    )
