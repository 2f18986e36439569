"""Loggers of other programs get each step once, under the id of the run."""

import json
import math
import re
import sys
import time
from collections import namedtuple
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from posixpath import normpath
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import pytest

from tests.support.helpers import TinyRun, mentions, wait_until
from titanlite.metrics.loggers import Loggers, check_logger
from titanlite.run.records import RecordFile
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
    files = {kind: RecordFile(folder / f"{kind}.jsonl", resumed) for kind in ("metrics", "validation")}

    def record(kind: str, record: dict[str, Any]) -> None:
        files[kind].write(record)
        loggers.log(record, kind=kind)

    for step in range(resumed + 1, last + 1):
        record("metrics", {"step": step, "loss": 10.0 - step, "data_shares": {"text": 1.0}})
        if step == 4:
            record("validation", {"step": step, "loss": 5.5})
    return loggers


@pytest.mark.long
def test_tensorboard_has_each_step_once_after_a_kill_and_rounds_nothing(folder: Path) -> None:
    """float32 has the seconds of a clock in steps of 128, and no odd numbers above 2**24."""
    from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator
    from tensorboard.util.tensor_util import make_ndarray

    for resumed, last in ((0, 5), (3, 7)):
        loggers = Loggers(["tensorboard"], folder, step=resumed)
        for step in range(resumed + 1, last + 1):
            loggers.log({"step": step, "loss": 0.1 * step, "clock": 1764423442.125 + step, "samples": 2**24 + step})
        loggers.close()
    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()

    def values(name: str) -> dict[int, float]:
        return {event.step: make_ndarray(event.tensor_proto).item() for event in events.Tensors(name)}

    steps = range(1, 8)
    assert values("loss") == {step: 0.1 * step for step in steps}
    assert values("clock") == {step: 1764423442.125 + step for step in steps}
    assert values("samples") == {step: 2**24 + step for step in steps}


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


class FakeRun:
    """A run of a store that refuses what MLflow refuses."""

    def __init__(self, tags: dict[str, str], name: str) -> None:
        self.info = SimpleNamespace(run_id=name, status="RUNNING", run_name=name)
        self.data = SimpleNamespace(tags=tags, params={})
        self.points: dict[str, list[Any]] = {}


class FakeMlflow:
    """MlflowClient of an MLflow that is not installed."""

    runs: dict[str, FakeRun]

    def create_experiment(self, name: str) -> None: ...

    def get_experiment_by_name(self, name: str) -> SimpleNamespace:
        return SimpleNamespace(experiment_id=f"id of {name}")

    def search_runs(self, experiments: list[str], words: str = "") -> list[FakeRun]:
        assert experiments == ["id of runs"]
        _, name, _, value, *_ = re.split(r"[`']", words) if words else [""] * 5
        return [run for run in self.runs.values() if not words or run.data.tags[name] == value]

    def create_run(self, experiment: str, tags: dict[str, str], run_name: str) -> FakeRun:
        return self.runs.setdefault(run_name, FakeRun(tags, run_name))

    def update_run(self, run: str, status: str) -> None:
        self.runs[run].info.status = status

    def set_terminated(self, run: str, status: str) -> None:
        self.runs[run].info.status = status

    def log_batch(self, run: str, metrics: Sequence[Any] = (), params: Sequence[Any] = ()) -> None:
        for entry in (*metrics, *params):
            assert re.fullmatch(r"[/\w.\- ]*", entry.key)
            assert normpath(entry.key) == entry.key
        for point in metrics:
            self.runs[run].points.setdefault(point.key, []).append(point)
        for param in params:
            assert self.runs[run].data.params.setdefault(param.key, param.value) == param.value

    def get_metric_history(self, run: str, name: str) -> list[Any]:
        return self.runs[run].points.get(name, [])


@pytest.fixture
def mlflow_client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The client of MLflow's file store, else of one in memory."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file://{tmp_path}/store")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "runs")
    if find_spec("mlflow"):
        return import_module("mlflow").MlflowClient()
    FakeMlflow.runs = {}
    entities = SimpleNamespace(
        Metric=namedtuple("Metric", "key value timestamp step"), Param=namedtuple("Param", "key value")
    )
    fake = SimpleNamespace(MlflowClient=FakeMlflow, MlflowException=OSError, entities=entities)
    monkeypatch.setitem(sys.modules, "mlflow", cast(ModuleType, fake))
    return FakeMlflow()


def test_mlflow_has_one_run_and_each_step_once_after_a_kill(folder: Path, mlflow_client: Any) -> None:
    log("mlflow", folder, resumed=0, last=4).close()  # killed after the step 4, and resumed from step 3
    [run] = mlflow_client.search_runs([mlflow_client.get_experiment_by_name("runs").experiment_id])
    assert run.info.status == "FINISHED"
    (folder / "config.toml").write_text((folder / "config.toml").read_text().replace("steps = 6", "steps = 7"))
    loggers = log("mlflow", folder, resumed=3, last=7)
    loggers.log({"step": 7, "loss": math.nan, "data_shares": {"c4 (en)/../x": 0.5}}, kind="validation")
    loggers.close(75)
    [run] = mlflow_client.search_runs([mlflow_client.get_experiment_by_name("runs").experiment_id])
    assert (run.info.status, run.info.run_name) == ("KILLED", "run")
    assert run.data.tags["titanlite.run_id"] == RUN_ID
    options = {"training.steps": "6", "optimizer.name": "AdamW", "checkpoint.enable": "true"}
    assert {key: run.data.params[key] for key in options} == options, "those of the first start"

    def points(name: str) -> list[tuple[int, float]]:
        return [(point.step, point.value) for point in mlflow_client.get_metric_history(run.info.run_id, name)]

    assert sorted(points("loss")) == [(step, 10.0 - step) for step in range(1, 8)]
    assert sorted(points("data_shares/text")) == [(step, 1.0) for step in range(1, 8)]
    assert points("validation/loss")[0] == (4, 5.5)
    assert [step for step, _ in points("validation/loss")] == [4, 7]
    assert points("validation/data_shares/x") == [(7, 0.5)]


LISTED = """
import json

class Listed:
    def __init__(self, folder, *, step):
        self.path = folder / f"{type(self).__name__}.txt"

    def log(self, metrics, *, step):
        with open(self.path, "a") as file:
            file.write(f"{step} {json.dumps(metrics)}\\n")

    def close(self):
        with open(self.path, "a") as file:
            file.write("closed")
"""


STUCK = """
import threading

class Stuck(Listed):
    def __init__(self, folder, *, step):
        if (folder / "silent").exists():
            threading.Event().wait()
        super().__init__(folder, step=step)
"""


def listed(folder: Path, name: str = "Listed") -> list[int | str]:
    """Return the steps that a logger has, and `closed` if it was closed."""
    path = folder / f"{name}.txt"
    lines = path.read_text().splitlines() if path.exists() else []
    return [int(line.split()[0]) if line != "closed" else line for line in lines]


def test_a_logger_that_hangs_holds_up_no_other_and_gets_all_records_at_the_next_start(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (folder / "stuck.py").write_text(LISTED + STUCK)
    (folder / "silent").touch()
    monkeypatch.setattr("titanlite.metrics.loggers.MOST_WAITING", 10)
    monkeypatch.setattr("titanlite.metrics.loggers.CLOSE_SECONDS", 1)
    stuck, other, began = f"{folder}/stuck.py:Stuck", f"{folder}/stuck.py:Listed", time.monotonic()
    loggers, file = Loggers([stuck, other], folder, step=0), RecordFile(folder / "metrics.jsonl", 0)
    for step in range(1, 21):
        file.write({"step": step, "loss": 1.0})
        loggers.log({"step": step, "loss": 1.0})
    wait_until(lambda: listed(folder) == [*range(1, 21)])
    loggers.close()
    assert time.monotonic() - began < 10
    assert listed(folder) == [*range(1, 21), "closed"]
    [record] = caplog.records
    assert mentions(record.message, f"metrics.loggers: {stuck}", "20 records", "metrics.jsonl")
    (folder / "silent").unlink()
    Loggers([stuck], folder, step=20).close()  # another start, after the last step
    assert listed(folder, "Stuck") == [*range(1, 21), "closed"]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("tensorbord", ["tensorbord", "tensorboard?", "tensorboard, wandb, trackio, mlflow"]),
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


@pytest.mark.long
def test_tensorboard_has_the_config_as_text_and_as_hyperparameters(folder: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData  # pyright: ignore

    log("tensorboard", folder, resumed=0, last=2).close()
    found = EventAccumulator(str(folder / "tensorboard"))
    found.Reload()
    assert [event.step for event in found.Tensors("loss")] == [1, 2]
    [text] = found.Tensors("config/text_summary")
    assert text.tensor_proto.string_val[0].decode() == f"```toml\n{(folder / 'config.toml').read_text()}\n```"
    [start] = [
        HParamsPluginData.FromString(content).session_start_info.hparams
        for tag, content in found.PluginTagToContent("hparams").items()
        if tag.endswith("session_start_info")
    ]
    assert (start["training.steps"].number_value, start["optimizer.name"].string_value) == (6, "AdamW")


RAISES = """
class Raises(Listed):
    def log(self, metrics, *, step):
        if (self.path.parent / "down").exists():
            raise RuntimeError("no answer")
        super().log(metrics, step=step)

    def end(self, code):
        with open(self.path, "a") as file:
            file.write(f"{100 + code}")
"""


@pytest.mark.parametrize("keeps", [True, False])
def test_a_logger_that_raises_is_tried_again_and_has_each_step_once(
    folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, keeps: bool
) -> None:
    """A start is killed after step 6, and the next one resumes at step 4."""
    monkeypatch.setattr("titanlite.metrics.loggers.FIRST_PAUSE", 0.01)
    (folder / "raises.py").write_text(LISTED + RAISES + f"    keeps_later_steps = {keeps}\n")
    name, down = f"{folder}/raises.py:Raises", folder / "down"
    down.touch()
    loggers = log(name, folder, resumed=0, last=2)
    wait_until(lambda: len(caplog.records) > 0)
    down.unlink()
    wait_until(lambda: listed(folder, "Raises") == [1, 2])
    for step in range(3, 7):
        loggers.log({"step": step, "loss": math.nan})
    wait_until(lambda: listed(folder, "Raises") == [1, 2, 3, 4, 5, 6])
    [failed] = [record for record in caplog.records if record.levelname == "WARNING"]
    assert mentions(failed.getMessage(), name, "raises.py:19", "RuntimeError: no answer")
    assert failed.exc_info is None
    assert "NaN" in (folder / "Raises.txt").read_text()
    log(name, folder, resumed=4, last=8).close(1)
    assert listed(folder, "Raises") == [1, 2, 3, 4, 5, 6, *([] if keeps else [5, 6]), 7, 8, 101]
