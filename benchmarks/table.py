"""The page of a release in Markdown: each measurement, the same one of the release before, and the ratio of the two.

    python benchmarks/table.py releases/0.2.0.jsonl --before releases/0.1.0.jsonl > releases/0.2.0.md

The files are those of --record; paths are relative to the current folder or to benchmarks/. A measurement that several
of them have is taken from the last one. A measurement got worse if it is worse than the one before by more than half
the spread of either, the wider one, and the two differ as printed: four digits, or a whole number above 1,000. Times,
sizes and rates are compared only where both come from machines of the same description. What was measured before and
not anew is named.
"""

import argparse
import shlex
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from record import ROOT, Measurement, number, read, with_unit

from titanlite.runtime.errors import UserError

HEADER = ("measurement", "value (least to most)", "aim", "before", "ratio to before", "mark", "command")
BENCHMARKS = ROOT / "benchmarks"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=in_benchmarks, metavar="FILE.jsonl")
    parser.add_argument("--before", required=True, type=in_benchmarks, metavar="OLD.jsonl", help="compare with this")
    options = parser.parse_args()
    measurements: dict[str, Measurement] = {}
    try:
        for path in options.files:
            measurements |= read(path, may_be_empty=True)
        before = read(options.before)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    print("\n".join(release_page(options.files, options.before, measurements, before)))
    return 0


def in_benchmarks(text: str) -> Path:
    """Return the path, or that below benchmarks/ if only there is such a file."""
    return BENCHMARKS / text if not Path(text).exists() and (BENCHMARKS / text).exists() else Path(text)


def mark_of(now: Measurement, before: Measurement) -> str:
    if before.unit != now.unit:
        return "**other unit**"
    if now.better == "none":
        return "not compared"
    if not now.is_portable and before.machine != now.machine:
        return "other machine"
    gain = (now.value - before.value) * (1 if now.better == "higher" else -1)
    if number(before.value) == number(now.value) or abs(gain) <= max(before.half_spread, now.half_spread):
        return ""
    return "better" if gain > 0 else "**worse**"


def known(measurement: Measurement) -> str:
    """Versions and commit."""
    versions = [f"{name} {version}" for name, version in measurement.versions.items() if version]
    return ", ".join([*versions, *([measurement.commit] if measurement.commit else [])])


def shown(measurement: Measurement) -> str:
    value, low, high = map(number, (measurement.value, measurement.low, measurement.high))
    return with_unit(value, measurement.unit) + (f" ({low} to {high})" if low != high else "")


def line(*cells: str) -> str:
    """A row of a table in Markdown; a bar within a cell is no border."""
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def release_page(
    files: list[Path], before_file: Path, now: dict[str, Measurement], before: dict[str, Measurement]
) -> Iterator[str]:
    """Yield the lines of the page."""
    name = files[-1].stem
    paths = [path_below_root(path) for path in (*files, before_file)]
    yield f"# Measurements of {name}"
    yield ""
    yield "<!-- made by a command, not by hand:"
    yield f"python benchmarks/table.py {shlex.join(paths[:-1])} --before {shlex.quote(paths[-1])}"
    yield "-->"
    yield ""
    if BENCHMARKS / "archive" in before_file.resolve().parents:
        yield f"There is no release before {name}: it is compared with older measurements."
    yield f'"Before" is `{paths[-1]}`. "Mark" follows the rule of `benchmarks/table.py`.'
    yield "How to run and record benchmarks is in [benchmarks/README.md](../README.md)."
    yield from section("Machines and versions", origins(now))
    yield from section("Worse than before", worse(now, before))
    yield from section("Measured before, not in this release", missing(now, before))
    beside_plain = {name: measurement for name, measurement in now.items() if is_beside_plain(name)}
    yield from table("Ratios to the plain loop", beside_plain, before)
    yield from table(
        "Other measurements",
        {name: measurement for name, measurement in now.items() if name not in beside_plain},
        before,
    )


def path_below_root(path: Path) -> str:
    return str(path.resolve().relative_to(ROOT) if path.resolve().is_relative_to(ROOT) else path)


def section(heading: str, items: list[str]) -> Iterator[str]:
    yield from ("", f"## {heading}", "", *([f"- {item}" for item in items] or ["None."]))


def origins(measurements: dict[str, Measurement]) -> list[str]:
    counts = Counter(
        f"{measurement.date[:10]}, {measurement.machine}; {known(measurement)}" for measurement in measurements.values()
    )
    return [f"{count} of {origin}" for origin, count in sorted(counts.items())]


def worse(now: dict[str, Measurement], before: dict[str, Measurement]) -> list[str]:
    """Measurements that are marked, with both values."""
    return [
        f"`{name}`: {shown(before[name])} became {shown(measurement)}"
        for name, measurement in now.items()
        if name in before and mark_of(measurement, before[name]).startswith("**")
    ]


def missing(now: dict[str, Measurement], before: dict[str, Measurement]) -> list[str]:
    """Measurements of `before` that are not there; in one line those of a script that did not run."""
    ran = {script_of(measurement) for measurement in now.values()}
    idle = Counter(script_of(measurement) for measurement in before.values() if script_of(measurement) not in ran)
    named = [
        f"`{name}`: {shown(measurement)}"
        for name, measurement in before.items()
        if name not in now and script_of(measurement) in ran
    ]
    return [*named, *(f"all {count} of `{script}`" for script, count in idle.items())]


def script_of(measurement: Measurement) -> str:
    return next((word for word in measurement.command.split() if word.endswith(".py")), measurement.command)


def is_beside_plain(name: str) -> bool:
    """Whether a measurement is a ratio of titanlite and the plain loop, whichever is above the line."""
    return "plain / titanlite" in name or "titanlite / plain" in name


def table(heading: str, now: dict[str, Measurement], before: dict[str, Measurement]) -> Iterator[str]:
    yield from ("", f"## {heading}", "")
    if not now:
        yield "Nothing is recorded yet."
        return
    yield line(*HEADER)
    yield line(*["---"] * len(HEADER))
    yield from (release_row(measurement, before.get(name)) for name, measurement in now.items())


def release_row(now: Measurement, before: Measurement | None) -> str:
    then, ratio, mark = "", "", "new"
    if before is not None:
        then, mark = shown(before), mark_of(now, before)
        if before.value and before.unit == now.unit:
            ratio = f"{now.value / before.value:.3f}"
    return line(now.name, shown(now), now.aim, then, ratio, mark, f"`{now.command}`")


if __name__ == "__main__":
    sys.exit(main())
