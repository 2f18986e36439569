"""Files that benchmarks/record.py writes and table.py compares, made by hand."""

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.record import Measurement, command, read, record
from titanlite.runtime.errors import UserError

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
    "within old's": (RATIO, {"value": 0.96, "low": 0.95, "high": 0.97}, "0.960 "),
    "beyond": (RATIO, {"value": 0.94, "low": 0.93, "high": 0.95}, "0.940 **worse**"),
    "within new's": (RATIO, {"value": 0.94, "low": 0.85, "high": 1.01}, "0.940 "),
    "better": (RATIO, {"value": 1.2, "low": 1.2, "high": 1.2}, "1.200 better"),
    "lower is better, within": (SECONDS, {"value": 2.09}, "1.045 "),
    "slower": (SECONDS, {"value": 2.5, "high": 2.6, "low": 2.4}, "1.250 **worse**"),
    "no direction": ({**RATIO, "better": "none"}, {"value": 0.1, "low": 0.1}, "0.100 not compared"),
    "other machine": (SECONDS, {"value": 9, "high": 9, "machine": "EPYC, 4 cores"}, "4.500 other machine"),
    "ratio elsewhere": (RATIO, {"value": 0.5, "low": 0.5, "high": 0.5, "machine": "EPYC"}, "0.500 **worse**"),
    "from nothing": (
        {**SECONDS, "value": 0, "low": 0, "high": 0, "unit": "of 50"}, {"value": 1, "high": 1}, " **worse**",
    ),
    "four digits": (
        {**RATIO, "value": 0.91404, "low": 0.91404, "high": 0.91404},
        {"value": 0.91401, "low": 0.91401, "high": 0.91401},
        "1.000 ",
    ),
    "one byte more": (
        {**SECONDS, "value": 84192001, "low": 84192001, "high": 84192001, "unit": "B"},
        {"value": 84192002, "low": 84192002, "high": 84192002},
        "1.000 **worse**",
    ),
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


@pytest.mark.parametrize(("last", "mark"), [(1.0, "1.000 "), (0.5, "0.500 **worse**")])
def test_of_the_same_name_the_last_counts(tmp_path: Path, last: float, mark: str) -> None:
    bad = {**RATIO, "value": 0.5, "low": 0.5, "high": 0.5}
    now = [bad, RATIO] if last == 1.0 else [RATIO, bad]
    assert marks(tmp_path, now, [RATIO]) == [mark]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not a measurement: Invalid JSON"),
        ("[1]", "not a measurement: "),
        ('{"name": "x"}', "not a measurement: value: "),
        (json.dumps({**RATIO, "value": "1"}), "not a measurement: value: "),
        (json.dumps({**RATIO, "value": float("nan")}), "nan is not between 0.95 and 1.05"),
        (json.dumps({**RATIO, "better": "more"}), "not a measurement: better: "),
        (json.dumps({**RATIO, "versions": ["3.11"]}), "not a measurement: versions: "),
        (json.dumps({**RATIO, "low": 2}), "1.0 is not between 2.0 and 1.05"),
    ],
)
def test_a_bad_line_is_named_with_its_place(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(f"{json.dumps(RATIO)}\n\n{line}\n")
    with pytest.raises(UserError) as caught:
        read(path)
    assert str(caught.value).startswith(f"{path}:3: {message}")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        pytest.param("measurements\n", ":1: not a measurement: ", id="not JSON"),
        pytest.param("", ": has no measurements", id="empty"),
        pytest.param(None, ": cannot be read: No such file or directory", id="no file"),
    ],
)
def test_what_cannot_be_read_is_one_line_and_exit_code_2(tmp_path: Path, text: str | None, problem: str) -> None:
    path = tmp_path / "other.jsonl"
    if text is not None:
        path.write_text(text)
    run = script("table.py", written(tmp_path / "good.jsonl", RATIO), "--before", path)
    assert (run.returncode, run.stdout, run.stderr.count("\n")) == (2, "", 1)
    assert run.stderr.startswith(f"error: {path}{problem}")


def test_record_of_values_pairs_and_one_value(tmp_path: Path) -> None:
    path = tmp_path / "measurements.jsonl"
    record(path, name="values", values=[3.0, 1.0, 2.5], unit="s", better="lower", aim="< 4 s")
    record(path, name="pairs", pairs=([2.0, 4.0, 9.0], [1.0, 8.0, 3.0]))
    record(path, name="value", value=0.5, low=0.25)
    found = read(path)
    spreads = {name: (measurement.value, measurement.low, measurement.high) for name, measurement in found.items()}
    assert spreads == {"values": (2.5, 1.0, 3.0), "pairs": (4 / 3, 0.5, 3.0), "value": (0.5, 0.25, 0.5)}
    first = found["values"]
    assert (first.unit, first.better, first.aim, first.half_spread) == ("s", "lower", "< 4 s", 1.0)
    assert first.versions["python"] == ".".join(map(str, sys.version_info[:3]))
    assert first.versions["titanlite"] == "0.1.0"
    assert " core" in first.machine
    assert first.machine.endswith("GiB")
    assert first.date.endswith("+00:00")


def test_record_without_a_path_does_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    record(None, name="nothing", value=1.0)
    assert not list(tmp_path.iterdir())


def test_the_command_has_no_places_in_it() -> None:
    words = ["--record", "/tmp/x.jsonl", "--runs", "7", "--folder=/tmp/y", "--only", "FSDP, 2"]
    expected = "python benchmarks/bench_step.py --runs 7 --only 'FSDP, 2'"
    assert command([str(BENCHMARKS / "bench_step.py"), *words]) == expected


@pytest.mark.parametrize("place", ["no/such/folder/x.jsonl", "."])
def test_where_one_cannot_write_is_reported_before_anything_runs(tmp_path: Path, place: str) -> None:
    run = script("bench_startup.py", "--record", tmp_path / place)
    assert run.returncode == 2
    assert f"--record: cannot write to {tmp_path / place}" in run.stderr


def below(page: list[str], heading: str) -> list[str]:
    """The lines of a section."""
    rest = page[page.index(f"## {heading}") + 2 :]
    return rest[: next((at for at, line in enumerate(rest) if line.startswith("## ")), len(rest) + 1) - 1]


def test_page_of(tmp_path: Path) -> None:
    step = {**RATIO, "name": "plain / titanlite, time of a step"}
    lost = {**SECONDS, "name": "lost", "value": 0, "low": 0, "high": 0, "unit": "of 50", "aim": ""}
    slower = {**step, "value": 0.94, "low": 0.93, "high": 0.95, "commit": "c88f508"}
    quicker = {**SECONDS, "value": 1.5, "low": 1.4, "high": 1.6}
    storm = {**lost, "name": "kills", "command": "python benchmarks/crash_storm.py"}
    added = {**RATIO, "name": "added", "aim": ""}
    page = page_of(tmp_path, [slower, quicker, added], [step, SECONDS, lost, storm, {**storm, "name": "two"}])
    assert page[0] == "# Measurements of 0.2.0"
    assert page[3] == f"python benchmarks/table.py {tmp_path}/0.2.0.jsonl --before {tmp_path}/0.1.0.jsonl"
    where = "2026-11-22, EPYC, 2 cores, 24 GiB; python 3.11.7, torch 2.13.0, titanlite 0.1.0"
    assert below(page, "Machines and versions") == [f"- 2 of {where}, a2426e7", f"- 1 of {where}, c88f508"]
    assert below(page, "Worse than before") == [
        "- `plain / titanlite, time of a step`: 1 (0.95 to 1.05) became 0.94 (0.93 to 0.95)"
    ]
    assert below(page, "Measured before, not in this release") == [
        "- `lost`: 0 of 50",
        "- all 2 of `benchmarks/crash_storm.py`",
    ]
    head, command = "| measurement | value (least to most) | aim | before | ratio to before |", RATIO["command"]
    assert below(page, "Ratios to the plain loop") == [
        f"{head} mark | command |",
        "| --- | --- | --- | --- | --- | --- | --- |",
        "| plain / titanlite, time of a step | 0.94 (0.93 to 0.95) | >= 0.97 | 1 (0.95 to 1.05) | 0.940 | **worse** "
        f"| `{command}` |",
    ]
    assert below(page, "Other measurements")[2:] == [
        f"| start | 1.5 s (1.4 to 1.6) | >= 0.97 | 2 s (1.9 to 2.1) | 0.750 | better | `{command}` |",
        f"| added | 1 (0.95 to 1.05) |  |  |  | new | `{command}` |",
    ]


def test_page_of_a_release_of_which_nothing_is_recorded(tmp_path: Path) -> None:
    page = page_of(tmp_path, [], [RATIO])
    assert below(page, "Worse than before") == ["None."]
    assert below(page, "Measured before, not in this release") == ["- all 1 of `benchmarks/bench_step.py`"]
    assert below(page, "Other measurements") == ["Nothing is recorded yet."]


@pytest.mark.parametrize("page", sorted((BENCHMARKS / "releases").glob("*.md")), ids=lambda page: page.stem)
def test_pages_of_releases_are_current(page: Path) -> None:
    """A stale page is made anew by the command in it."""
    command = page.read_text().splitlines()[3]
    program, path, *words = shlex.split(command)
    assert (program, path, words[0]) == ("python", "benchmarks/table.py", f"benchmarks/releases/{page.stem}.jsonl")
    made = script("table.py", *(word if word.startswith("-") else BENCHMARKS.parent / word for word in words))
    assert made.stdout == page.read_text(), f"{command} > {page.relative_to(BENCHMARKS.parent)}"


def test_measurements_of_before_can_be_read(tmp_path: Path) -> None:
    """A field that a newer record.py adds does not matter to this one."""
    assert read(written(tmp_path / "x.jsonl", {**RATIO, "runs": 7})) == {"plain / ours": Measurement(**RATIO)}
