"""Files that benchmarks/record.py writes and table.py compares, made by hand."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
RATIO: dict[str, Any] = {
    "name": "plain / ours",
    "value": 1.0,
    "low": 0.95,
    "high": 1.05,
    "unit": "",
    "better": "higher",
    "aim": ">= 0.97",
    "command": "python benchmarks/bench_step.py --runs 7",
    "date": "2026-11-22T03:18:42+00:00",
    "machine": "EPYC, 2 cores, 24 GiB",
    "versions": {"python": "3.11.7", "torch": "2.13.0", "titanlite": "0.1.0"},
    "commit": "a2426e7",
}
SECONDS = {**RATIO, "name": "start", "value": 2.0, "low": 1.9, "high": 2.1, "unit": "s", "better": "lower"}


def script(name: str, *words: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(BENCHMARKS / name), *map(str, words)], capture_output=True, text=True, timeout=60
    )


def written(path: Path, *measurements: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(measurement) + "\n" for measurement in measurements))
    return path


def page_of(folder: Path, now: list[dict[str, Any]], before: list[dict[str, Any]]) -> list[str]:
    """Lines of the page of a release."""
    old = written(folder / "0.1.0.jsonl", *before)
    run = script("table.py", written(folder / "0.2.0.jsonl", *now), "--before", old)
    assert (run.returncode, run.stderr) == (0, "")
    return run.stdout.splitlines()


def marks(folder: Path, now: list[dict[str, Any]], before: list[dict[str, Any]]) -> list[str]:
    """What stands in the columns "ratio to before" and "mark" of each measurement."""
    page = page_of(folder, now, before)
    rows = [line.split(" | ") for line in page if line.startswith("| ")]
    return [" ".join(row[4:6]) for row in rows if not row[0].startswith(("| measurement", "| ---"))]


BEFORE_AND_AFTER: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "beyond": (RATIO, {"value": 0.94, "low": 0.93, "high": 0.95}, "0.940 **worse**"),
    "within new's": (RATIO, {"value": 0.94, "low": 0.85, "high": 1.01}, "0.940 "),
    "slower": (SECONDS, {"value": 2.5, "high": 2.6, "low": 2.4}, "1.250 **worse**"),
    "no direction": ({**RATIO, "better": "none"}, {"value": 0.1, "low": 0.1}, "0.100 not compared"),
    "other machine": (SECONDS, {"value": 9, "high": 9, "machine": "EPYC, 4 cores"}, "4.500 other machine"),
    "other unit": (SECONDS, {"unit": "ms"}, " **other unit**"),
}  # fmt: skip


@pytest.mark.long
def test_marks_of_a_release(tmp_path: Path) -> None:
    """All cases in one page: each in a row of its own."""
    cases = BEFORE_AND_AFTER.items()
    before = [{**old, "name": name} for name, (old, _, _) in cases]
    now = [{**old, **new, "name": name} for name, (old, new, _) in cases]
    found = dict(zip(BEFORE_AND_AFTER, marks(tmp_path, now, before), strict=True))
    assert found == {name: mark for name, (_, _, mark) in cases}
