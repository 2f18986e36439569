"""The table of benchmarks/README.md, from recorded measurements.

    python benchmarks/table.py FILE.jsonl [...]

The files are those of --record. A measurement that several of them have is taken from the last one.
"""

import argparse
import sys
from pathlib import Path

from record import Measurement, number, read, with_unit

from titanlite.runtime.errors import UserError

HEADER = ("what", "measurement (least to most)", "aim", "command", "date", "machine", "versions")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE.jsonl")
    measurements: dict[str, Measurement] = {}
    try:
        for path in parser.parse_args().files:
            measurements |= read(path)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    print(line(*HEADER), line(*["---"] * len(HEADER)), *map(row, measurements.values()), sep="\n")
    return 0


def row(measurement: Measurement) -> str:
    versions = [f"{name} {version}" for name, version in measurement.versions.items() if version]
    known = ", ".join([*versions, *([measurement.commit] if measurement.commit else [])])
    command = f"`{measurement.command}`"
    return line(
        measurement.name,
        shown(measurement),
        measurement.aim,
        command,
        measurement.date[:10],
        measurement.machine,
        known,
    )


def shown(measurement: Measurement) -> str:
    value, low, high = map(number, (measurement.value, measurement.low, measurement.high))
    return with_unit(value, measurement.unit) + (f" ({low} to {high})" if low != high else "")


def line(*cells: str) -> str:
    """A row of a table in Markdown; a bar within a cell is no border."""
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


if __name__ == "__main__":
    sys.exit(main())
