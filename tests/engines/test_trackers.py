"""Loggers with a real MLflow server. README.md says how to install it."""

import json
import shutil
import socket
import subprocess
from pathlib import Path

import pytest

from tests.support.helpers import TinyRun, free_port, wait_until
from titanlite.metrics.loggers import Loggers
from titanlite.run.records import RecordFile
from titanlite.schema import dump

pytestmark = [
    pytest.mark.engines,
    pytest.mark.skipif(shutil.which("mlflow") is None, reason="needs MLflow's server"),
]


def log(folder: Path, loggers: Loggers, first: int, last: int) -> None:
    file = RecordFile(folder / "metrics.jsonl", first - 1)
    for step in range(first, last + 1):
        file.write({"step": step, "loss": 10.0 - step})
        loggers.log({"step": step, "loss": 10.0 - step})
    file.close()


def test_a_server_that_is_down_or_silent_loses_nothing(tiny: TinyRun, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlflow import MlflowClient
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder, port = tiny.folder / "run", free_port()
    folder.mkdir()
    (folder / "run.json").write_text(json.dumps({"id": "0123456789abcdef0123456789abcdef", "starts": []}))
    (folder / "config.toml").write_text(dump(tiny.config()))
    for name, value in {
        "MLFLOW_TRACKING_URI": f"http://127.0.0.1:{port}", "MLFLOW_EXPERIMENT_NAME": "runs",
        "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1", "MLFLOW_HTTP_REQUEST_TIMEOUT": "30",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    names = ["tensorboard", "mlflow"]

    with socket.create_server(("127.0.0.1", port)):  # accepts, and never answers
        loggers = Loggers(names, folder, step=0)
        log(folder, loggers, 1, 20)
        monkeypatch.setattr("titanlite.metrics.loggers.CLOSE_SECONDS", 10.0)
        loggers.close(75)
    events = EventAccumulator(str(folder / "tensorboard"), size_guidance={"tensors": 0})  # else 10 of them
    events.Reload()
    assert [event.step for event in events.Tensors("loss")] == [*range(1, 21)]

    loggers = Loggers(names, folder, step=18)  # nothing listens
    log(folder, loggers, 19, 24)
    command = ["mlflow", "server", "--port", str(port), "--backend-store-uri", f"sqlite:///{tiny.folder}/store.db"]
    with open(tiny.folder / "server.log", "w") as output:
        server = subprocess.Popen([*command, "--workers", "1"], stdout=output, stderr=output, cwd=tiny.folder)
    try:
        wait_until(lambda: "Application startup complete" in (tiny.folder / "server.log").read_text(), 600)
        monkeypatch.setattr("titanlite.metrics.loggers.CLOSE_SECONDS", 120.0)
        loggers.close(75)
        client = MlflowClient()
        experiment = client.get_experiment_by_name("runs")
        assert experiment is not None
        [run] = client.search_runs([experiment.experiment_id])
        assert run.info.status == "KILLED"
        assert [point.step for point in client.get_metric_history(run.info.run_id, "loss")] == [*range(1, 25)]
    finally:
        server.terminate()
        server.wait()
