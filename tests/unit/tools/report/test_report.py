"""`titanlite report`: arithmetic, the page, and what cannot be read."""

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.helpers import mentions
from tests.support.run_folders import write_run
from titanlite.runtime.errors import UserError
from titanlite.tools import cli
from titanlite.tools.convert.export import OutputFolder
from titanlite.tools.plan.calibrate import calibrate
from titanlite.tools.report.charts import report_of
from titanlite.tools.report.page import page, to_json
from titanlite.tools.report.run_records import (
    config_differences,
    phase_totals,
    read_run,
    restarts,
    slowest_ranks,
    smoothed,
)


def test_the_smoothed_line_runs_through_the_values() -> None:
    """It has no lag: that of a short run lies on its values, and that of a falling line on the line."""
    falling = [8.0 / step for step in range(1, 50)]
    assert smoothed(falling) == falling
    assert smoothed([4.0, None, 1.0]) == [4.0, None, 1.0]
    line = [1000.0 - step for step in range(500)]
    assert smoothed(line) == pytest.approx(line)
    noisy = smoothed([value + (-1) ** step for step, value in enumerate(line)])
    assert noisy[0] == line[0] + 1
    assert noisy[10:-10] == pytest.approx(line[10:-10], abs=1.01 / 21), "a mean of 21"


def test_a_run_that_was_killed_and_resumed(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "run"))
    assert restarts(run) == [(4, "was killed")]
    assert read_run(str(tmp_path / "run")) == run
    # The first start has left its times in its last record (step 4), the second one in run.json.
    assert phase_totals(run) == {
        "start": 5 + 3, "compile": 0, "compute": 4 + 2.5, "data": 2, "checkpoint": 0, "validation": 0,
    }  # fmt: skip
    assert slowest_ranks(run) == [("rank 1 (h)", 3), ("rank 0 (h)", 3)]
    other = read_run(write_run(tmp_path / "other", lr=0.2))
    assert config_differences([run, other]) == {"optimizer.lr": ["0.1", "0.2"]}
    report = report_of([run, other])
    charts = {chart["name"]: chart for chart in report["charts"]}
    assert "mfu" not in charts, "there are no values"
    raw, line, validation, saves, skipped = charts["loss"]["traces"][:5]
    assert raw["y"] == run.column("loss") == [8.0, 4.0, None, 2.0, 1.6, pytest.approx(8 / 6)]
    assert line["y"] == raw["y"]
    assert (validation["x"], validation["y"]) == ([2, 6], [4.5, 1.5])
    assert (saves["x"], skipped["x"]) == ([4], [3])
    assert charts["loss"]["marks"] == [
        {"x": 4, "text": f"{name}: was killed", "color": color} for color, name in enumerate(["run", "other"])
    ]
    shares = charts["data_shares"]["traces"]
    assert [(trace["color"], trace["dash"]) for trace in shares] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert [trace["y"] for trace in shares] == [[0.25] * 6, [0.75] * 6] * 2
    assert charts["run-gradients"]["traces"] == [{"x": [2], "y": ["layers.0", "head"], "z": [[0.5], [0.25]]}]
    summary = {row[0]: row[1] for row in report["tables"][0]["rows"]}
    assert summary["step"] == "6 of 6"
    assert (summary["loss"], summary["loss, smoothed"]) == ("1.3333", f"{line['y'][-1]:.4f}")
    assert summary["tokens/s"] == "400"  # the median without the first
    assert summary["restarts"] == "1"
    assert summary["validation loss"] == "1.5000"
    assert not summary.keys() & {"hashes", "commit", "MFU"}, "no run has a value"
    assert all(any(row[1:]) for row in report["tables"][0]["rows"])
    no_loss = replace(run, validation=[*run.validation, {"step": 7, "tasks": {}}])
    assert ["validation loss", "1.5000"] in report_of([no_loss])["tables"][0]["rows"]
    assert json.loads(to_json({"x": [float("nan"), 1.0]})) == {"x": [None, 1.0]}


def test_the_first_step_at_which_the_hashes_of_two_runs_differ_is_marked(tmp_path: Path) -> None:
    one, other, third = (write_run(tmp_path / name) for name in ("one", "other", "third"))
    steps = {2: ("a", {"w": "1", "v": "1"}), 4: ("b", {"w": "2", "v": "2"}), 6: ("c", {"w": "3", "v": "3"})}
    changed = {4: ("x", {"w": "2", "v": "9"}), 6: ("y", {"w": "8", "v": "9"})}
    for folder, records in ((one, steps), (other, steps | changed), (third, {4: steps[4]})):
        lines = [json.dumps({"step": step, "hash": both, "tensors": by}) for step, (both, by) in records.items()]
        (folder / "hashes.jsonl").write_text("".join(f"{line}\n" for line in lines))
    report = report_of([read_run(folder) for folder in (one, other, third)])
    [row] = [row for row in report["tables"][0]["rows"] if row[0] == "hashes"]
    assert row[1] == ""
    assert mentions(row[2], "differ", "step 4", "(v)")
    assert mentions(row[3], "equal", "step 4")
    [loss] = [chart for chart in report["charts"] if chart["name"] == "loss"]
    assert [(mark["x"], mark["color"]) for mark in loss["marks"] if "hash" in mark["text"]] == [(4, 1)]


def test_records_of_another_form_are_one_line(tmp_path: Path, refused: Callable[..., str]) -> None:
    folder = write_run(tmp_path / "run")
    for name, text in (("metrics.jsonl", '{"schema": 2, "step": 7, "loss": "low"}\n'), ("run.json", '{"starts": [1]}')):
        before = (folder / name).read_text()
        (folder / name).write_text(before * name.endswith("jsonl") + text)
        refused("report", folder)
        (folder / name).write_text(before)


@pytest.mark.parametrize("name", ["$report", "<!--<script>", "ä\udcff"])
def test_a_page_about_a_run_of_any_name(name: str, tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / name))
    text = page([run])
    assert text.encode().decode() == text
    [_, script] = text.split('id="report">')
    assert json.loads(script.partition("</script>")[0])["tables"][0]["columns"] == ["", name]


def test_files_that_never_end_are_not_read(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    for name in ("validation.jsonl", "run.json", "config.toml"):
        (folder / name).unlink()
        os.mkfifo(folder / name)
    assert read_run(folder).validation == []
    (folder / "metrics.jsonl").unlink()
    os.mkfifo(folder / "metrics.jsonl")
    with pytest.raises(UserError, match=r"metrics\.jsonl"):
        read_run(folder)


def test_mistakes_are_one_line(tmp_path: Path, refused: Callable[..., str]) -> None:
    write_run(tmp_path / "run")
    (tmp_path / "empty").mkdir()
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "metrics.jsonl").write_text('{"schema": 2, "st')
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "metrics.jsonl").write_text('{"step": 1, "loss": 3.0}\n')
    for runs in (["gone"], ["empty"], ["."], ["new"], ["old"], ["run", "run"], ["run", "--out", "no/page.html"]):
        refused("report", *(tmp_path / word if word[0] != "-" else word for word in runs))


@pytest.mark.long
def test_files_are_written(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = write_run(tmp_path / "run")
    (folder / "metrics.jsonl").open("a").write("damaged\n")
    assert cli.run(["report", str(folder)]) == 0
    assert capfd.readouterr().out == f"wrote {folder}/report.html\n"
    text = (folder / "report.html").read_text()
    assert len(text) > 1_000_000, "plotly.js is inside"
    assert len(read_run(folder).metrics) == 6, "without the damaged line"


def test_out_replaces_no_link_and_no_folder(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """In all commands that have --out; a page replaces a page of before, and nothing else replaces a file."""
    run = write_run(tmp_path / "run")
    folder, text = tmp_path / "folder", tmp_path / "text.txt"
    folder.mkdir()
    text.write_text("one two " * 400)
    (folder / "kept").write_text("kept")
    (tmp_path / "empty").mkdir()
    targets = {"to_folder": folder, "to_file": text, "to_empty": tmp_path / "empty", "dangling": tmp_path / "no"}
    for name, target in targets.items():
        (tmp_path / f"link_{name}").symlink_to(target)
    places = [folder, *sorted(tmp_path.glob("link_*"))]
    old = tmp_path / "old.toml"
    old.write_text("[model]\nflavor = 'debugmodel'\n")
    commands: dict[str, list[str]] = {
        "page": ["report", str(run)],
        "migrate": ["config", "migrate", str(old)],
        "tokenizer": ["data", "tokenizer", str(text), "--vocab-size", "600"],
        "tokens": ["data", "prepare", str(text), "--tokenizer", "bytes"],
    }
    for name, words in commands.items():
        for place in places + ([text] if name != "page" else []):
            before = place.is_symlink(), place.is_dir(), sorted(tmp_path.rglob("*"))
            assert cli.run([*words, "--out", str(place)]) == 2, (name, place)
            assert mentions(capfd.readouterr().err, place)
            assert (place.is_symlink(), place.is_dir(), sorted(tmp_path.rglob("*"))) == before
    assert text.read_text().startswith("one two")
    for _ in range(2):
        assert cli.run(["report", str(run), "--out", str(tmp_path / "page.html")]) == 0
    for place in places:
        with pytest.raises(UserError):
            calibrate(place)
        with pytest.raises(UserError):
            OutputFolder(str(place))
