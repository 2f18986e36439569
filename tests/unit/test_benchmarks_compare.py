"""Files that benchmarks/record.py writes, compare.py compares and table.py shows, made by hand."""

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


def skip_reasons(folder: Path, old: list[dict[str, Any]], new: list[dict[str, Any]]) -> tuple[int, dict[str, str]]:
    """The exit code, and the rest of the line of each measurement."""
    names = {measurement["name"] for measurement in (*old, *new)}
    run = script("compare.py", written(folder / "old.jsonl", *old), written(folder / "new.jsonl", *new))
    assert run.stderr == ""
    found = {}
    for line in run.stdout.splitlines():
        for name in names:
            if line.startswith(f"{name}  "):
                found[name] = " ".join(line.removeprefix(name).split())
    return run.returncode, found


@pytest.mark.long
@pytest.mark.parametrize(
    ("old", "new", "code", "line"),
    [
        pytest.param(RATIO, {"value": 0.96, "low": 0.95, "high": 0.97}, 0, "1 0.96 -4.0% same", id="within old's"),
        pytest.param(RATIO, {"value": 0.94, "low": 0.93, "high": 0.95}, 1, "1 0.94 -6.0% WORSE", id="beyond"),
        pytest.param(RATIO, {"value": 0.94, "low": 0.85, "high": 1.01}, 0, "1 0.94 -6.0% same", id="within new's"),
        pytest.param(RATIO, {"value": 1.2, "low": 1.2, "high": 1.2}, 0, "1 1.2 +20.0% better", id="better"),
        pytest.param(SECONDS, {"value": 2.09}, 0, "2 s 2.09 s +4.5% same", id="lower is better, within"),
        pytest.param(SECONDS, {"value": 2.5, "high": 2.6, "low": 2.4}, 1, "2 s 2.5 s +25.0% WORSE", id="slower"),
        pytest.param(SECONDS, {"value": 1.5, "low": 1.4, "high": 1.6}, 0, "2 s 1.5 s -25.0% better", id="quicker"),
        pytest.param(
            {**RATIO, "better": "none"}, {"value": 0.1, "low": 0.1}, 0, "1 0.1 -90.0% not compared", id="no direction"
        ),
        pytest.param(
            SECONDS, {"value": 9, "high": 9, "machine": "EPYC, 4 cores, 24 GiB"}, 0, "2 s 9 s +350.0% other machine",
            id="seconds of another machine",
        ),
        pytest.param(
            RATIO, {"value": 0.5, "low": 0.5, "high": 0.5, "machine": "EPYC, 4 cores, 24 GiB"}, 1, "1 0.5 -50.0% WORSE",
            id="ratio of another machine",
        ),
        pytest.param(
            {**SECONDS, "value": 0, "low": 0, "high": 0, "unit": "of 50"}, {"value": 1, "high": 1}, 1,
            "0 of 50 1 of 50 WORSE", id="from nothing",
        ),
        pytest.param(
            {**RATIO, "value": 0.91404, "low": 0.91404, "high": 0.91404},
            {"value": 0.91401, "low": 0.91401, "high": 0.91401}, 0, "0.914 0.914 -0.0% same", id="four digits",
        ),
        pytest.param(
            {**SECONDS, "value": 84192001, "low": 84192001, "high": 84192001, "unit": "B"},
            {"value": 84192002, "low": 84192002, "high": 84192002}, 1,
            "84,192,001 B 84,192,002 B +0.0% WORSE", id="one byte more",
        ),
        pytest.param(SECONDS, {"unit": "ms"}, 1, "2 s 2 ms OTHER UNIT", id="other unit"),
    ],
)  # fmt: skip
def test_result(tmp_path: Path, old: dict[str, Any], new: dict[str, Any], code: int, line: str) -> None:
    assert skip_reasons(tmp_path, [old], [{**old, **new}]) == (code, {old["name"]: line})


@pytest.mark.parametrize("name", ["compare.py", "table.py"])
@pytest.mark.parametrize(
    ("text", "problem"),
    [
        pytest.param("measurements\n", ":1: not JSON: Expecting value: line 1 column 1 (char 0)", id="not JSON"),
        pytest.param("", ": has no measurements", id="empty"),
        pytest.param(None, ": cannot be read: No such file or directory", id="no file"),
    ],
)
def test_what_cannot_be_read_is_one_line_and_exit_code_2(
    tmp_path: Path, name: str, text: str | None, problem: str
) -> None:
    path = tmp_path / "other.jsonl"
    if text is not None:
        path.write_text(text)
    run = script(name, written(tmp_path / "good.jsonl", RATIO), path)
    assert (run.returncode, run.stdout, run.stderr) == (2, "", f"error: {path}{problem}\n")
