"""`titanlite report`: arithmetic, the served page, and what cannot be read."""

import json
import threading
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from tests.run_folders import write_run
from titanlite import cli
from titanlite.report.charts import report_of
from titanlite.report.page import server, to_json
from titanlite.report.run_records import (
    config_differences,
    phase_totals,
    read_run,
    restarts,
    slowest_ranks,
    smoothed,
)
from titanlite.runtime.errors import UserError


def test_smoothing_is_an_unbiased_moving_average() -> None:
    assert smoothed([4.0, None, 1.0], span=3) == [4.0, None, pytest.approx((0.25 * 4 + 0.5 * 1) / 0.75)]
    assert smoothed([2.0] * 5, span=9) == pytest.approx([2.0] * 5)


def test_a_run_that_was_killed_and_resumed(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "run"))
    assert restarts(run) == [(4, "was killed")]
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
    assert line["y"] == smoothed(raw["y"], 5)
    assert (validation["x"], validation["y"]) == ([2, 6], [4.5, 1.5])
    assert (saves["x"], skipped["x"]) == ([4], [3])
    assert charts["loss"]["marks"] == [
        {"x": 4, "text": f"{name}: was killed", "color": color} for color, name in enumerate(["run", "other"])
    ]
    assert [trace["y"] for trace in charts["data_shares"]["traces"]] == [[0.25] * 6, [0.75] * 6] * 2
    by_source = charts["source_losses"]["traces"]
    assert [trace["x"] for trace in by_source] == [[2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 6]] * 2
    assert [trace["y"] for trace in by_source] == [[3.0, 2.0, 1.0, 0.0, -1.0], [3.0, 2.0, 2.0, 2.0, 2.0, 2.0]] * 2
    assert charts["run-gradients"]["traces"] == [{"x": [2], "y": ["layers.0", "head"], "z": [[0.5], [0.25]]}]
    summary = {row[0]: row[1] for row in report["tables"][0]["rows"]}
    assert summary["best validation loss"] == "1.5000 (step 6)"
    assert summary["step"] == "6 of 6"
    assert (summary["loss"], summary["loss, smoothed"]) == ("1.3333", f"{line['y'][-1]:.4f}")
    assert summary["tokens/s"] == "400"  # the median without the first
    assert summary["restarts"] == "1"
    assert json.loads(to_json({"x": [float("nan"), 1.0]})) == {"x": [None, 1.0]}


@pytest.mark.long
def test_the_served_page_is_read_only_and_current(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", steps=5)
    with server([folder], port=0) as serving:
        thread = threading.Thread(target=serving.serve_forever, daemon=True)
        thread.start()
        place = f"http://127.0.0.1:{serving.server_port}"

        def get(path: str, **headers: str) -> bytes:
            with urllib.request.urlopen(urllib.request.Request(place + path, headers=headers), timeout=20) as answer:
                return answer.read()

        assert json.loads(get("/report.json"))["charts"][0]["traces"][0]["x"] == [1, 2, 3, 4, 5]
        with (folder / "metrics.jsonl").open("a") as file:
            file.write((folder / "metrics.jsonl").read_text().splitlines()[-1].replace('"step": 5', '"step": 6') + "\n")
            file.write('{"schema": 2, "step": 7, "lo')  # being written
        assert json.loads(get("/report.json"))["charts"][0]["traces"][0]["x"] == [1, 2, 3, 4, 5, 6]
        assert b"setInterval(update, 5 * 1000)" in get("/")
        for path, headers, code in (
            ("/config.toml", {}, 404),
            ("/../run.json", {}, 404),
            ("/", {"Host": "evil.example:80"}, 403),
        ):
            with pytest.raises(urllib.error.HTTPError) as caught:
                get(path, **headers)
            assert caught.value.code == code, path
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(urllib.request.Request(place, data=b"x"), timeout=20)
        assert refused.value.code == 501
        serving.shutdown()
        thread.join()
    assert serving.server_address[0] == "127.0.0.1"


def test_mistakes_are_one_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "run")
    (tmp_path / "empty").mkdir()
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "metrics.jsonl").write_text('{"schema": 2, "st')
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "metrics.jsonl").write_text('{"step": 1, "loss": 3.0}\n')
    for runs, message in (
        (["gone"], f"no folder {tmp_path}/gone: name the folder of a run, such as outputs/debug"),
        (["empty"], f"{tmp_path}/empty is no folder of a run, or has no metrics.jsonl yet"),
        (["."], f"{tmp_path} is no folder of a run, or has no metrics.jsonl yet: name one of new, old, run in it"),
        (["new"], f"{tmp_path}/new/metrics.jsonl has no records yet"),
        (["old"], f"{tmp_path}/old/metrics.jsonl has records of schema 1, of another version of titanlite"),
        (["run", "run"], "two runs are called run: name each once"),
    ):
        assert cli.run(["report", *(str(tmp_path / run) for run in runs)]) == 2
        [line] = capfd.readouterr().err.splitlines()
        assert line.startswith(f"error: {message}"), line
    with pytest.raises(UserError, match="--port: 99999 cannot be used"):
        server([tmp_path / "run"], port=99999)


def test_places_that_cannot_be_written_are_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for options, message in (
        (["--out", f"{tmp_path}/no/page.html"], f"--out {tmp_path}/no/page.html: there is no folder {tmp_path}/no"),
        (["--png", "x.xyz"], "--png x.xyz: name a file with one of .png, .pdf, .svg, .jpg"),
    ):
        assert cli.run(["report", str(tmp_path), *options]) == 2
        assert capfd.readouterr().err == f"error: titanlite report: {message}\n"


@pytest.mark.long
def test_files_are_written(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = write_run(tmp_path / "run")
    (folder / "metrics.jsonl").open("a").write("damaged\n")
    assert cli.run(["report", str(folder), "--png", str(tmp_path / "paper.png")]) == 0
    assert capfd.readouterr().out == f"wrote {folder}/report.html\nwrote {tmp_path}/paper.png\n"
    text = (folder / "report.html").read_text()
    assert len(text) > 1_000_000, "plotly.js is inside"
    assert (tmp_path / "paper.png").read_bytes().startswith(b"\x89PNG")
    assert read_run(folder).damaged == 1
