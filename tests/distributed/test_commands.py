"""Commands in processes of their own: a run from start to resume, and run_train.sh on several processes and nodes."""

import json
import re
from pathlib import Path

import pytest

from tests.support.helpers import TinyRun, mentions, run_train, titanlite
from titanlite.runtime.console import shell_command
from titanlite.tools import cli


@pytest.mark.usefixtures("own_process_group")
def test_a_run_from_start_to_resume(tiny: TinyRun, capfd: pytest.CaptureFixture[str]) -> None:
    command = ("train", "--config", str(tiny.toml), "--training.steps=3", "--metrics.loggers=['tensorboard']")
    assert cli.run([*command]) == 0
    text, err = capfd.readouterr()
    assert err == ""
    run = tiny.folder / "outputs" / "tiny"
    resume = f"{shell_command('titanlite')} train {run}/config.toml"
    assert f"{resume} --training.steps=6" in text, "the last lines say how to continue"
    assert f"{shell_command('titanlite')} report {run}" in text, "and where to look"
    assert sorted(path.name for path in run.iterdir()) == [
        ".lock", "checkpoints", "checkpoints.jsonl", "config.toml", "loggers", "logs", "metrics.jsonl", "report.html",
        "run.json", "tensorboard",
    ]  # fmt: skip
    assert "step     3  loss" in (run / "logs" / "rank-0.log").read_text()
    assert list((run / "tensorboard").glob("events*"))
    assert cli.run([*resume.split()[1:], "--training.steps=5"]) == 0
    assert re.search(r"step 3\b.* 24 ", capfd.readouterr().out)
    assert [record["step"] for record in tiny.records()] == [1, 2, 3, 4, 5]
    assert cli.run([*command, "--training.steps=5"]) == 0
    assert re.search(r"step 5\b.* training\.steps\b", capfd.readouterr().out)


@pytest.mark.slow
@pytest.mark.usefixtures("own_process_group")
def test_umlauts_in_paths_where_the_locale_is_ascii(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real command, in an environment in which Python takes paths for ASCII, and its folders elsewhere."""
    tiny = TinyRun(tmp_path)
    (tmp_path / "Prüfung").mkdir()
    tiny.text.rename(tmp_path / "Prüfung" / "Text")
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "Prüfung" / "läuft"
    words = [
        "train",
        "--data.path=Prüfung/Text",
        "--job.dump_folder=Prüfung",
        "--job.name=läuft",
        "--config",
        "tiny.toml",
    ]
    code, _, err = titanlite(*words, "--training.steps=2", LC_ALL="C", PYTHONUTF8="0")
    assert (code, err) == (0, [])
    assert (run / "checkpoints" / "step-00000002" / "manifest.json").exists()
    assert 'name = "läuft"' in (run / "config.toml").read_text(encoding="utf-8")
    assert cli.run([*words, "--training.steps=3"]) == 0
    assert [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()] == [1, 2, 3]
    assert cli.run(["report", str(run), "--out", "Prüfung/Bericht.html"]) == 0
    assert "läuft" in (tmp_path / "Prüfung" / "Bericht.html").read_text(encoding="utf-8")
    assert cli.run(["generate", str(run), "--prompt", "ü", "--max-new-tokens", "1"]) == 0


def test_a_mistake_is_reported_once_before_processes_start(tiny: TinyRun) -> None:
    (tiny.folder / "broken.toml").write_text("[training")  # nothing else is checked: that would import torch
    here = {"NPROC": "2", "TMPDIR": str(tiny.folder)}
    result = run_train(f"--config={tiny.folder}/broken.toml", cwd=tiny.folder, **here)
    assert (result.returncode, result.stdout) == (2, "")
    [line] = result.stderr.splitlines()
    assert line.startswith("error: broken.toml ")
    helped = run_train("--config=debug", "--help", cwd=tiny.folder, **here)
    assert (helped.returncode, helped.stderr, helped.stdout.count("usage: titanlite train")) == (0, "", 1)
    assert not [*tiny.folder.glob("titanlite-*")]
    without_place = run_train("--config", str(tiny.toml), cwd=tiny.folder, NNODES="2")
    assert without_place.returncode == 2
    assert "RDZV_ENDPOINT" in without_place.stderr


@pytest.mark.nightly
def test_run_train_passes_on_the_exit_code_of_a_rank(tiny: TinyRun) -> None:
    for file in tiny.text.iterdir():
        file.write_text("short")  # found out only when the text is read
    result = run_train("--config", str(tiny.toml), cwd=tiny.folder, NPROC="2")
    assert result.returncode == 2
    errors = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert mentions(errors[0], 32)


@pytest.mark.usefixtures("own_process_group")
def test_a_run_that_stops_itself_reports_why_and_exits_with_3(tiny: TinyRun, capfd: pytest.CaptureFixture[str]) -> None:
    """Weights that overflow."""
    assert cli.run(["train", "--config", str(tiny.toml), "--optimizer.lr=1e36"]) == 3
    out, err = capfd.readouterr()
    [error] = [line for line in err.splitlines() if line.startswith("error: ")]
    assert re.match(r"error: step 2: .*\(loss ", error)
    assert mentions(out, "weights float32", "compute float32", "reduction float32", "moments float32")
    skipped = tiny.folder / "outputs" / "tiny" / "skipped.jsonl"
    assert str(skipped) in out
    [record] = [json.loads(line) for line in skipped.read_text().splitlines()]
    assert (record["step"], record["samples"]) == (2, [*range(8, 16)])
    assert [path.name for path in (tiny.folder / "outputs" / "tiny" / "checkpoints").glob("step*")] == ["step-00000001"]
