"""Whether benchmarks got worse: the figures of two files, one beside the other.

    python benchmarks/compare.py OLD.jsonl NEW.jsonl

The files are those of --record. A figure got worse if NEW is worse than OLD by more than half the spread of either, the
wider one. Times, sizes and rates are judged only where both come from machines of the same description. A figure that
NEW lacks, or has in another unit, is told as well.

Exit codes: 0 nothing is worse, 1 something is, or cannot be told, 2 a file cannot be read.
"""

import argparse
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from record import Figure, number, read, with_unit

from titanlite.runtime.errors import UserError

ROUNDING = 1e-9
"""Relative; so much is no change."""
FLAGGED = ("WORSE", "MISSING", "OTHER UNIT")


class Row(NamedTuple):
    name: str
    old: str
    new: str
    change: str
    """In percent of the old value."""
    skip_reason: str


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path, metavar="OLD.jsonl")
    parser.add_argument("new", type=Path, metavar="NEW.jsonl")
    arguments = parser.parse_args()
    try:
        old, new = read(arguments.old), read(arguments.new)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    for which, figures in (("old", old), ("new", new)):
        for line in origins(figures.values()):
            print(f"{which}: {line}")
    rows = list(compare(old, new))
    print("\n" + "\n".join(aligned([Row("name", "old", "new", "change", "verdict"), *rows])) + "\n")
    flagged = [row for row in rows if row.skip_reason in FLAGGED]
    for row in flagged:
        print(f"{row.skip_reason}: {row.name}: {row.old} -> {row.new}")
    print(f"{len(flagged)} of {len(rows)} figures flagged")
    return 1 if flagged else 0


def origins(figures: Iterable[Figure]) -> list[str]:
    """Machines, versions and commits of a file, each once."""
    return sorted({f"{it.machine}; {versions(it)}; commit {it.commit or 'unknown'}" for it in figures})


def versions(figure: Figure) -> str:
    return ", ".join(f"{name} {version}" for name, version in figure.versions.items() if version)


def compare(old: dict[str, Figure], new: dict[str, Figure]) -> Iterator[Row]:
    """A row for each name, those of `old` first."""
    for name, before in old.items():
        if name not in new:
            yield Row(name, shown(before), "-", "", "MISSING")
            continue
        after = new[name]
        change = after.value - before.value
        percent = f"{change / abs(before.value):+.1%}" if before.value and before.unit == after.unit else ""
        yield Row(name, shown(before), shown(after), percent, skip_reason(before, after))
    for name, figure in new.items():
        if name not in old:
            yield Row(name, "-", shown(figure), "", "new")


def skip_reason(old: Figure, new: Figure) -> str:
    if old.unit != new.unit:
        return "OTHER UNIT"
    if new.better == "none":
        return "not judged"
    if not new.is_portable and old.machine != new.machine:
        return "other machine"
    gain = (new.value - old.value) * (1 if new.better == "higher" else -1)
    margin = max(old.half_spread, new.half_spread) + ROUNDING * abs(old.value)
    return "WORSE" if gain < -margin else "better" if gain > margin else "same"


def shown(figure: Figure) -> str:
    return with_unit(number(figure.value), figure.unit)


def aligned(rows: list[Row]) -> Iterator[str]:
    """Words to the left, figures to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [cell.rjust(width) if 1 <= at <= 3 else cell.ljust(width)
                 for at, (cell, width) in enumerate(zip(row, widths, strict=True))]  # fmt: skip
        yield "  ".join(cells).rstrip()


if __name__ == "__main__":
    sys.exit(main())
