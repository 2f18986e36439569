"""Comparison of benchmarks: the measurements of two files, side by side, and what got worse.

    python benchmarks/compare.py OLD.jsonl NEW.jsonl

The files are those of --record. A measurement got worse if NEW is worse than OLD by more than half the spread of
either, the wider one, and the two differ as printed: four digits, or a whole number above 1,000. Times, sizes and rates
are compared only where both come from machines of the same description. A measurement that NEW lacks, or has in another
unit, is flagged as well.

Exit codes: 0 nothing is worse, 1 something is flagged, 2 a file cannot be read.
"""

import argparse
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from record import Measurement, number, read, with_unit

from titanlite.runtime.errors import UserError

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
    for which, measurements in (("old", old), ("new", new)):
        for line in origins(measurements.values()):
            print(f"{which}: {line}")
    rows = list(compare(old, new))
    print("\n" + "\n".join(aligned([Row("name", "old", "new", "change", "result"), *rows])) + "\n")
    flagged = [row for row in rows if row.skip_reason in FLAGGED]
    for row in flagged:
        print(f"{row.skip_reason}: {row.name}: {row.old} -> {row.new}")
    print(f"{len(flagged)} of {len(rows)} measurements flagged")
    return 1 if flagged else 0


def origins(measurements: Iterable[Measurement]) -> list[str]:
    """Machines, versions and commits of a file, each once."""
    return sorted({f"{it.machine}; {versions(it)}; commit {it.commit or 'unknown'}" for it in measurements})


def versions(measurement: Measurement) -> str:
    return ", ".join(f"{name} {version}" for name, version in measurement.versions.items() if version)


def compare(old: dict[str, Measurement], new: dict[str, Measurement]) -> Iterator[Row]:
    """A row for each name, those of `old` first."""
    for name, before in old.items():
        if name not in new:
            yield Row(name, shown(before), "-", "", "MISSING")
            continue
        after = new[name]
        change = after.value - before.value
        percent = f"{change / abs(before.value):+.1%}" if before.value and before.unit == after.unit else ""
        yield Row(name, shown(before), shown(after), percent, skip_reason(before, after))
    for name, measurement in new.items():
        if name not in old:
            yield Row(name, "-", shown(measurement), "", "new")


def skip_reason(old: Measurement, new: Measurement) -> str:
    if old.unit != new.unit:
        return "OTHER UNIT"
    if new.better == "none":
        return "not compared"
    if not new.is_portable and old.machine != new.machine:
        return "other machine"
    if number(old.value) == number(new.value):
        return "same"
    gain = (new.value - old.value) * (1 if new.better == "higher" else -1)
    margin = max(old.half_spread, new.half_spread)
    return "WORSE" if gain < -margin else "better" if gain > margin else "same"


def shown(measurement: Measurement) -> str:
    return with_unit(number(measurement.value), measurement.unit)


def aligned(rows: list[Row]) -> Iterator[str]:
    """Words to the left, measurements to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [cell.rjust(width) if 1 <= at <= 3 else cell.ljust(width)
                 for at, (cell, width) in enumerate(zip(row, widths, strict=True))]  # fmt: skip
        yield "  ".join(cells).rstrip()


if __name__ == "__main__":
    sys.exit(main())
