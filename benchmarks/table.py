"""The table of benchmarks/README.md, from recorded figures.

    python benchmarks/table.py FILE.jsonl [...]

The files are those of --record. A figure that several of them have is taken from the last one.
"""

import argparse
import sys
from pathlib import Path

from record import Figure, number, read, with_unit

from titanlite.runtime.errors import UserError

HEADER = ("what", "figure (least to most)", "aim", "command", "date", "machine", "versions")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE.jsonl")
    figures: dict[str, Figure] = {}
    try:
        for path in parser.parse_args().files:
            figures |= read(path)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    print(line(*HEADER), line(*["---"] * len(HEADER)), *map(row, figures.values()), sep="\n")
    return 0


def row(figure: Figure) -> str:
    versions = [f"{name} {version}" for name, version in figure.versions.items() if version]
    known = ", ".join([*versions, *([figure.commit] if figure.commit else [])])
    command = f"`{figure.command}`"
    return line(figure.name, shown(figure), figure.aim, command, figure.date[:10], figure.machine, known)


def shown(figure: Figure) -> str:
    value, low, high = map(number, (figure.value, figure.low, figure.high))
    return with_unit(value, figure.unit) + (f" ({low} to {high})" if low != high else "")


def line(*cells: str) -> str:
    """A row of a table in Markdown; a bar within a cell is no border."""
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


if __name__ == "__main__":
    sys.exit(main())
