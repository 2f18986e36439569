"""Comparison of two dumps of a step: the first tensor that differs, and a table by block.

Values are compared in the order in which they are computed: the forward pass, the backward pass, the update.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from titanlite.runtime.dtypes import DTYPES
from titanlite.runtime.errors import UserError
from titanlite.tools.convert.module_values import Difference, difference
from titanlite.tools.report.parameter_table import split_block
from titanlite.tools.report.value_dump import TOKENS, Dump

Direction = Literal["forward", "gradient", "update"]
DIRECTIONS: tuple[Direction, ...] = ("forward", "gradient", "update")
OF_UPDATES = 30
"""Factor of the tolerance of updates, and of the weights that they lead to: Adam's first update has the sign of each
gradient, however small."""


@dataclass(frozen=True)
class Compared:
    """Result of a comparison.

    Attributes:
        differences: of all tensors that both dumps have, in the order in which they are computed.
        dtypes: of each dump, by key.
        left_out: number of tensors that only one of the dumps has.
    """

    differences: list[Difference]
    dtypes: tuple[dict[str, str], dict[str, str]]
    tolerance: float
    left_out: int

    @property
    def first(self) -> Difference | None:
        """The first difference beyond the tolerance."""
        return next((it for it in self.differences if not it.is_within), None)


def compare_dumps(dump: Dump, reference: Dump, *, tolerance: float | None = None) -> Compared:
    """Compare all values that two dumps have in common.

    Args:
        tolerance: largest relative difference; None takes that of the dtype.

    Raises:
        UserError: nothing is in both, or they are dumps of different steps.
    """
    steps = dump.index.step, reference.index.step
    if steps[0] != steps[1]:
        raise UserError(f"--where: one dump is of step {steps[0]}, the other of step {steps[1]}")
    known = [DTYPES.get(it.index.compute_dtype) or DTYPES["float32"] for it in (dump, reference)]
    limit = max(it.tolerance or 0 for it in known)
    limit = limit if tolerance is None else tolerance
    index = reference.index
    keys = [key for key in (*index.forward, *index.gradients, *index.updates) if key in dump and key in reference]
    if len(keys) <= (TOKENS in keys):
        raise UserError("--where: the dumps have no module in common: are they of the same model?")
    before = [key for key in reference.parts[0] if key.startswith("before ") and key in dump]
    keys.sort(key=lambda key: key != TOKENS)
    keys[keys[0] == TOKENS : 0] = before
    differences = [difference(key, dump[key], reference[key], _limit(key, limit)) for key in keys]
    ours, theirs = ({*it.index.forward, *it.index.gradients, *it.index.updates} for it in (dump, reference))
    return Compared(differences, (dump.index.dtypes, index.dtypes), limit, len(ours ^ theirs))


def _limit(key: str, limit: float) -> float:
    if key == TOKENS:
        return 0.0
    return limit * (OF_UPDATES if key.startswith(("before", "update")) else 1)


# Output


def table(compared: Compared) -> Iterator[str]:
    """Yield the lines of the table by block: largest absolute difference, and largest relative norm of a difference."""
    blocks: dict[str, dict[str, list[Difference]]] = {}
    for it in compared.differences:
        if it.direction == "before":
            continue
        blocks.setdefault(_block(it.name), {}).setdefault(it.direction, []).append(it)
    yield _row("block", [f"{it} {what}" for it in DIRECTIONS for what in ("max abs", "relative")])
    for block, by_direction in blocks.items():
        cells: list[str] = []
        for direction in DIRECTIONS:
            found = by_direction.get(direction, [])
            if not found:
                cells += ["", ""]
                continue
            mark = " " if all(it.is_within for it in found) else "*"
            cells += [f"{max(it.most for it in found):.1e}", f"{max(it.relative for it in found):.1e}{mark}"]
        yield _row(block, cells)


def summary(compared: Compared) -> Iterator[str]:
    """Yield the result in words."""
    beyond = {it.direction: 0 for it in compared.differences}
    for it in compared.differences:
        beyond[it.direction] += not it.is_within
    counts = ", ".join(f"{count:,} of {direction}" for direction, count in beyond.items() if count)
    yield (
        f"{len(compared.differences):,} tensors compared, tolerance {compared.tolerance:g} "
        f"(updates {compared.tolerance * OF_UPDATES:g})"
        + (f", {compared.left_out:,} are in one dump only" if compared.left_out else "")
    )
    if compared.first is None:
        yield "equal"
        return
    yield f"beyond it (*): {counts}"
    one, other = (dtypes.get(compared.first.key) for dtypes in compared.dtypes)
    yield f"first difference: {compared.first.key}" + (f" ({one} in A, {other} in B)" if one != other else "")


def _block(name: str) -> str:
    parts = split_block(name)
    return f"{parts[0]}.{parts[1]}" if parts else name.split(".")[0]


def _row(block: str, cells: Sequence[str]) -> str:
    return " ".join([block.ljust(16), *(cell.rjust(18) for cell in cells)]).rstrip()
