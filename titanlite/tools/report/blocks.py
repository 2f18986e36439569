"""Blocks that are alike, as one name: layers.0-31."""

import re
from collections.abc import Iterable, Sequence
from itertools import pairwise

BLOCK = re.compile(r"((?:.*\.)?layers)\.(\d+)(\..+)?")


def split_block(name: str) -> tuple[str, int, str] | None:
    """Return (layers, 3, .attention.wq.weight) of layers.3.attention.wq.weight; None for a name outside of blocks."""
    match = BLOCK.fullmatch(name)
    return (match[1], int(match[2]), match[3] or "") if match else None


def join_blocks(name: str, numbers: Sequence[int]) -> str:
    """Return the name of one block, or of a parameter in it, as that of several blocks.

    Args:
        numbers: of the blocks, ascending.
    """
    parts = split_block(name)
    return f"{parts[0]}.{format_numbers(numbers)}{parts[2]}" if parts else name


def format_numbers(numbers: Sequence[int]) -> str:
    """Return ascending numbers as 0-31, as 0,2,..,30 or as 0-2,7."""
    steps = {after - before for before, after in pairwise(numbers)}
    if len(numbers) > 3 and len(steps) == 1 and steps != {1}:
        return f"{numbers[0]},{numbers[1]},..,{numbers[-1]}"
    return ",".join(str(run[0]) if run[0] == run[-1] else f"{run[0]}-{run[-1]}" for run in _runs(numbers))


def _runs(numbers: Iterable[int]) -> list[list[int]]:
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return runs
