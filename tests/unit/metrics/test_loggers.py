"""Loggers of other programs get each step once, under the id of the run."""

import json
import re
import time
from pathlib import Path

import pytest

from tests.support.helpers import TinyRun, mentions
from titanlite.metrics.loggers import Loggers, check_logger
from titanlite.runtime.console import install_hint
from titanlite.runtime.errors import UserError
from titanlite.schema import dump

RUN_ID = "0123456789abcdef0123456789abcdef"


@pytest.fixture
def folder(tiny: TinyRun) -> Path:
    folder = tiny.folder / "run"
    folder.mkdir()
    (folder / "run.json").write_text(json.dumps({"id": RUN_ID, "starts": []}))
    (folder / "config.toml").write_text(dump(tiny.config()))
    return folder


def log(name: str, folder: Path, *, resumed: int, last: int) -> Loggers:
    """Log steps after `resumed`; step 4 has a validation, too. The loggers are left open, as by a kill."""
    loggers = Loggers([name], folder, step=resumed)
    for step in range(resumed + 1, last + 1):
        loggers.log({"step": step, "loss": 10.0 - step, "data_shares": {"text": 1.0}})
        if step == 4:
            loggers.log({"step": step, "loss": 5.5}, prefix="validation/")
    return loggers


@pytest.mark.long
def test_trackio_has_each_step_once_after_a_kill(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("trackio")
    from trackio import utils
    from trackio.sqlite_storage import SQLiteStorage

    monkeypatch.setattr(utils, "TRACKIO_DIR", folder / "trackio")
    monkeypatch.setattr("trackio.sqlite_storage.TRACKIO_DIR", folder / "trackio")
    monkeypatch.setenv("TRACKIO_PROJECT", "project")
    log("trackio", folder, resumed=0, last=5).close()
    log("trackio", folder, resumed=3, last=7).close()
    [run] = SQLiteStorage.get_runs("project")
    assert run == f"run-{RUN_ID[:8]}"
    rows = SQLiteStorage.get_logs("project", run)
    found = [(row["step"], row["loss"]) for row in rows if "loss" in row]
    assert found == [(step, 10.0 - step) for step in range(1, 8)]
    assert [(row["step"], row["validation/loss"]) for row in rows if "validation/loss" in row] == [(4, 5.5)]
    assert (SQLiteStorage.get_run_config("project", run) or {})["training"]["steps"] == 6


STUCK = """
import threading

class Stuck:
    def __init__(self, folder, *, step):
        threading.Event().wait()
"""


def test_a_logger_that_hangs_loses_records_and_nothing_else(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (folder / "stuck.py").write_text(STUCK)
    monkeypatch.setattr("titanlite.metrics.loggers.MOST_WAITING", 10)
    monkeypatch.setattr("titanlite.metrics.loggers.CLOSE_SECONDS", 0.3)
    name, began = f"{folder}/stuck.py:Stuck", time.monotonic()
    loggers = Loggers([name], folder, step=0)
    for step in range(1, 21):
        loggers.log({"step": step, "loss": 1.0})
    loggers.close()
    assert time.monotonic() - began < 5
    assert len(caplog.records) == 2
    assert all(mentions(record.message, f"metrics.loggers: {name}") for record in caplog.records)
    assert mentions(caplog.records[1].message, "20 of 20 records", "metrics.jsonl")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("tensorbord", ["tensorbord", "tensorboard?", "tensorboard, wandb, trackio"]),
        ("os.path:sep", ["os.path:sep"]),
    ],
)
def test_a_logger_that_cannot_be_made_is_one_line(name: str, words: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        check_logger(name)
    assert mentions(str(caught.value), *words)


def test_an_extra_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("titanlite.metrics.loggers.find_spec", lambda name: None)
    with pytest.raises(UserError, match=f"^{re.escape('wandb is not installed: ' + install_hint('wandb'))}$"):
        check_logger("wandb")


RAISES = """
class Raises:
    def __init__(self, folder, *, step): pass
    def log(self, metrics, *, step): raise RuntimeError("no answer")
    def close(self): pass
"""


def test_a_logger_that_raises_is_one_line_and_gets_no_more(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "raises.py").write_text(RAISES)
    loggers = Loggers([f"{tmp_path}/raises.py:Raises"], tmp_path, step=0)
    loggers.log({"step": 1, "loss": 2.0})
    loggers.log({"step": 2, "loss": 2.0})
    loggers.close()
    [record] = caplog.records
    assert mentions(record.getMessage(), "Raises", "raises.py:4", "RuntimeError: no answer")
    assert record.exc_info is None
