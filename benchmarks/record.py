"""Measurements of benchmarks in a file, one JSON object a line, with all that is needed to repeat or to doubt them.

    from record import add_record_option, record

    add_record_option(parser)          # --record FILE.jsonl
    record(options.record, name="plain / ours, seconds of a step", pairs=(plain, ours), better="higher", aim=">= 0.97")

A name holds what was measured, down to each option that changes the value: table.py knows measurements by their names.
Imports no torch: scripts that need none stay as quick as they are.
"""

import argparse
import json
import math
import os
import platform
import shlex
import statistics
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Literal

from pydantic import TypeAdapter, ValidationError

import titanlite
from titanlite.runtime.errors import UserError

ROOT = Path(__file__).resolve().parents[1]
PLACES = ("--record", "--folder")
"""Options that choose where files are put: no part of what is measured, so they are left out of the command."""
Better = Literal["higher", "lower", "none"]


@dataclass(frozen=True)
class Measurement:
    """One result, and where it comes from. `low` and `high` enclose `value`: the least and the most of its repeats."""

    name: str
    value: float
    low: float
    high: float
    unit: str
    """ "" or "ratio" for what has none, losses too; "%", "s", "MiB", "tokens/s"; "of 50": so many out of 50."""
    better: Better
    aim: str
    """For people: "< 0.5". May be empty."""
    command: str
    date: str
    """UTC, ISO 8601, to the second."""
    machine: str
    versions: dict[str, str]
    """Of python, torch and titanlite."""
    commit: str
    """With "+" if the tree differed from it; "" outside of git."""

    @property
    def half_spread(self) -> float:
        return (self.high - self.low) / 2

    @property
    def is_portable(self) -> bool:
        """Means the same on every machine: ratios, shares and counts do, times, sizes and rates do not."""
        return self.unit in ("", "ratio", "%") or self.unit.startswith("of ")


def add_record_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--record", type=writable_file, metavar="FILE.jsonl", help="append the measurements to this file (record.py)"
    )


def writable_file(text: str) -> Path:
    """Return the path, if it can be written: an error comes before the benchmark runs, not after."""
    path = Path(text)
    if path.is_dir() or not path.parent.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"cannot write to {text}: no folder {path.parent}, or no right to")
    return path


def record(
    path: Path | str | None,
    *,
    name: str,
    value: float | None = None,
    low: float | None = None,
    high: float | None = None,
    values: Sequence[float] | None = None,
    pairs: tuple[Sequence[float], Sequence[float]] | None = None,
    unit: str = "",
    better: Better = "none",
    aim: str = "",
) -> None:
    """Append one measurement to a file. Without a path it does nothing, so scripts call it always.

    Args:
        value: the measurement, with `low` and `high` if it has a spread. Or else:
        values: repeats; recorded are their median, least and most. Or else:
        pairs: repeats of two contenders that took turns; recorded are the ratio of their medians, first / second, and
            the least and the most of the ratios pair by pair.
    """
    if path is None:
        return
    assert sum(given is not None for given in (value, values, pairs)) == 1, "one of value, values, pairs"
    if pairs is not None:
        value, values = statistics.median(pairs[0]) / statistics.median(pairs[1]), ratios(*pairs)
    elif values is not None:
        value = statistics.median(values)
    assert value is not None
    around = [value, *(values or ()), *(bound for bound in (low, high) if bound is not None)]
    assert all(map(math.isfinite, around)), f"{name}: {around}"
    measurement = Measurement(
        name=name, value=value, low=min(around), high=max(around), unit=unit, better=better, aim=aim,
        command=command(sys.argv), date=datetime.now(UTC).isoformat(timespec="seconds"), machine=machine(),
        versions=versions(), commit=commit(),
    )  # fmt: skip
    with open(path, "a") as file:
        file.write(json.dumps(asdict(measurement)) + "\n")


def ratios(numerators: Iterable[float], denominators: Iterable[float]) -> list[float]:
    """Pair by pair. A repeat that one contender has and the other has not is left out."""
    return [a / b for a, b in zip(numerators, denominators, strict=False)]


# Where a measurement comes from


def command(argv: Sequence[str]) -> str:
    """As one would type it in the repository's folder, without options of PLACES."""
    script = Path(argv[0]).resolve()
    words = ["python", str(script.relative_to(ROOT) if script.is_relative_to(ROOT) else script.name)]
    rest = iter(argv[1:])
    for word in rest:
        if word in PLACES:
            next(rest, None)
        elif not word.startswith(tuple(f"{place}=" for place in PLACES)):
            words.append(word)
    return shlex.join(words)


@cache
def machine() -> str:
    """Processor, cores that this process may use, and memory; the GPU, where the script's torch sees one."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    parts = [processor(), f"{cores} core{'s' * (cores != 1)}", f"{memory / 2**30:.0f} GiB"]
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        count = torch.cuda.device_count()
        parts.append(f"{f'{count} x ' if count > 1 else ''}{torch.cuda.get_device_name()}")
    return ", ".join(parts)


def processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    about = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    vectors = next((name for name in ("avx512_bf16", "avx512f", "avx2") if name in about.get("flags", "").split()), "")
    name = about.get("model name", "") or platform.processor() or platform.machine()
    return f"{name} ({vectors})" if vectors else name


@cache
def versions() -> dict[str, str]:
    try:
        torch = metadata.version("torch")
    except metadata.PackageNotFoundError:
        torch = ""
    return {"python": platform.python_version(), "torch": torch, "titanlite": titanlite.__version__}


@cache
def commit() -> str:
    """Files of measurements do not count as a difference: this one grows while benchmarks run."""
    try:
        found = git("rev-parse", "--short", "HEAD")
        return found + "+" * bool(git("status", "--porcelain", "--", ".", ":(exclude)*.jsonl"))
    except (OSError, subprocess.CalledProcessError):
        return ""


def git(*words: str) -> str:
    environment = os.environ | {"GIT_OPTIONAL_LOCKS": "0"}  # to ask is not to disturb
    run = subprocess.run(["git", *words], cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    return run.stdout.strip()


# Reading


def read(path: Path | str, *, may_be_empty: bool = False) -> dict[str, Measurement]:
    """Measurements of a file by their names. Of two with the same name the later counts, at the place of the first.

    Raises:
        UserError: there is no such file, a line is no measurement, or there is none.
    """
    try:
        lines = Path(path).read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from error
    found = [measurement_of(line, f"{path}:{number}") for number, line in enumerate(lines, 1) if line.strip()]
    if not found and not may_be_empty:
        raise UserError(f"{path}: has no measurements")
    return {measurement.name: measurement for measurement in found}


def measurement_of(line: str, where: str) -> Measurement:
    """Return the measurement of one line. Further fields are ignored: a newer record.py may write more.

    Raises:
        UserError: it is not a measurement.
    """
    try:
        measurement = TypeAdapter(Measurement).validate_json(line, strict=True)
    except ValidationError as error:
        problem = error.errors()[0]
        key = ".".join(map(str, problem["loc"]))
        raise UserError(f"{where}: not a measurement: {key + ': ' if key else ''}{problem['msg']}") from error
    if not measurement.low <= measurement.value <= measurement.high:
        raise UserError(f"{where}: {measurement.value} is not between {measurement.low} and {measurement.high}")
    return measurement


# Showing


def number(value: float) -> str:
    """Four significant digits."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def with_unit(text: str, unit: str) -> str:
    return f"{text} {unit}" if unit not in ("", "ratio") else text
