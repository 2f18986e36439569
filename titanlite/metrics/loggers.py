"""Loggers of metrics beside the console and metrics.jsonl: those that `metrics.loggers` names.

TensorBoard, Weights & Biases, trackio, MLflow and classes of the user's own get the same records. A resumed run keeps
its id with each of them, and no step is there twice.
"""

import json
import logging
import os
import re
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from posixpath import normpath
from queue import Full, Queue
from typing import Any, Protocol

import tomli

from titanlite.runtime.console import install_hint
from titanlite.runtime.errors import UserError, did_you_mean
from titanlite.runtime.files import read_small, write_atomically
from titanlite.runtime.signals import shielding_children
from titanlite.runtime.user_code import check_call, describe_error, find_object

logger = logging.getLogger(__name__)

MOST_WAITING = 1000
"""Records that wait for the loggers. Further ones are dropped."""
CLOSE_SECONDS = 15.0
"""Longest wait for the loggers at the end of a run: a scheduler kills what has not ended 30 s after a signal."""


class Logger(Protocol):
    """Contract of a logger. Created and called on rank 0 only, in a thread of the loggers."""

    def __init__(self, folder: Path, *, step: int) -> None:
        """Open the logger.

        Args:
            folder: folder of the run.
            step: step at which the run resumes. Metrics of later steps, from a start that was killed, come again.
        """
        ...

    def log(self, metrics: dict[str, float], *, step: int) -> None:
        """Log metrics of a log step (`loss`, `lr`, ...), a validation (`validation/loss`, ...) or a save
        (`checkpoint/...`)."""
        ...

    def close(self) -> None:
        """Close the logger at the end of the run; not after an error."""
        ...


class TensorBoard:
    """TensorBoard's writer. It is imported after the first console line: that takes a third of a second."""

    def __init__(self, folder: Path, *, step: int) -> None:
        self._folder = folder / "tensorboard"
        self._purge_step = step + 1
        self._writer: Any = None

    def log(self, metrics: dict[str, float], *, step: int) -> None:
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(self._folder), purge_step=self._purge_step)
        for name, value in metrics.items():
            # As float32, the seconds of a clock have steps of 128, and counts above 2**24 are rounded.
            self._writer.add_scalar(name, value, step, new_style=True, double_precision=True)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


class WeightsAndBiases:
    """Weights & Biases, as its own environment variables set it up (WANDB_PROJECT, WANDB_ENTITY, WANDB_MODE).

    The run's id there is the id of the run. Weights & Biases ignores steps that it has already.
    """

    def __init__(self, folder: Path, *, step: int) -> None:
        import wandb

        with shielding_children():  # its process sends what is left after a signal
            self._run = wandb.init(
                project=os.environ.get("WANDB_PROJECT", PROJECT),
                id=_run_id(folder),
                name=folder.name,
                config=_config(folder),
                dir=str(folder),
                resume="allow",
            )

    def log(self, metrics: dict[str, float], *, step: int) -> None:
        self._run.log(metrics, step=step)

    def close(self) -> None:
        self._run.finish()


class Trackio:
    """Trackio, as its own environment variables set it up (TRACKIO_DIR, TRACKIO_SPACE_ID).

    It would keep a step that comes again twice. So the step that was logged last is remembered in a file, and a resumed
    run logs those after it only.
    """

    def __init__(self, folder: Path, *, step: int) -> None:
        import trackio

        self._last = folder / "trackio.json"
        self._logged = json.loads(read_small(self._last))["step"] if self._last.exists() else 0
        self._run = trackio.init(
            project=os.environ.get("TRACKIO_PROJECT", PROJECT),
            name=f"{folder.name}-{_run_id(folder)[:8]}",
            config=_config(folder),
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def log(self, metrics: dict[str, float], *, step: int) -> None:
        if step > self._logged:
            self._run.log(metrics, step=step)
            write_atomically(self._last, json.dumps({"step": step}))

    def close(self) -> None:
        self._run.finish()


class MLflow:
    """MLflow, as its own environment variables set it up (MLFLOW_TRACKING_URI, MLFLOW_EXPERIMENT_NAME).

    A tag of its run has the id of the run, by which a resumed run finds it. MLflow would keep a step that comes again
    twice, and changes no parameter: those of the first start stay.
    """

    def __init__(self, folder: Path, *, step: int) -> None:
        self._mlflow: Any = import_module("mlflow")
        self._client = self._mlflow.MlflowClient()
        experiment = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        with suppress(self._mlflow.MlflowException):  # it is there
            self._client.create_experiment(experiment)
        place = self._client.get_experiment_by_name(experiment).experiment_id
        tags = {"titanlite.run_id": _run_id(folder)}
        found = self._client.search_runs([place], f"tags.`titanlite.run_id` = '{_run_id(folder)}'")
        run = found[0] if found else self._client.create_run(place, tags=tags, run_name=folder.name)
        self._id = run.info.run_id
        self._logged: dict[str, int] = {}
        """Last step of each metric that earlier starts have logged."""
        if found:
            self._client.update_run(self._id, status="RUNNING")
        else:
            from titanlite.run.versions import flat

            texts = flat(_config(folder)).items()
            options = {self._name(key): json.loads(text) if text.startswith('"') else text for key, text in texts}
            self._client.log_batch(self._id, params=[*map(self._mlflow.entities.Param, options, options.values())])

    def log(self, metrics: dict[str, float], *, step: int) -> None:
        now, points = int(time.time() * 1000), []
        for name, value in ((self._name(name), value) for name, value in metrics.items()):
            if name not in self._logged:
                history = self._client.get_metric_history(self._id, name)
                self._logged[name] = max((point.step for point in history), default=-1)
            if step > self._logged[name]:
                points.append(self._mlflow.entities.Metric(name, float(value), now, step))
        self._client.log_batch(self._id, metrics=points)

    def close(self) -> None:
        self._client.set_terminated(self._id)

    @staticmethod
    def _name(name: str) -> str:
        """Return a name without the characters that MLflow refuses, such as those of a file that names a source."""
        return normpath(re.sub(r"[^\w/. -]", "_", name))


PROJECT = "titanlite"
"""Project at Weights & Biases and trackio, and experiment at MLflow, that the environment does not name."""
BUILT_IN: dict[str, type[Logger]] = {
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
    "trackio": Trackio,
    "mlflow": MLflow,
}
"""Loggers by their names in `metrics.loggers`. The name is also that of the package."""


def _run_id(folder: Path) -> str:
    return json.loads(read_small(folder / "run.json"))["id"]


def _config(folder: Path) -> dict[str, Any]:
    return tomli.loads(read_small(folder / "config.toml").decode())


def check_logger(name: str) -> None:
    """Check that a logger can be made.

    Raises:
        UserError: it is unknown, or its package is not installed.
    """
    if name in BUILT_IN:
        if find_spec(name) is None:
            raise UserError(f"{name} is not installed: {install_hint(name)}")
    elif ":" not in name and "." not in name:
        known = ", ".join(BUILT_IN)
        raise UserError(
            f"no logger {name}{did_you_mean(name, BUILT_IN)} (there are {known}, and file.py:Class of yours)"
        )
    else:
        check_call(name, "folder", step=0)


class Loggers:
    """All loggers of a run, in a thread of their own: training never waits for one that hangs.

    One that fails gets a warning and no more metrics, and the run continues. While one falls behind, MOST_WAITING
    records are kept for it, and further ones are dropped.
    """

    def __init__(self, names: Sequence[str], folder: Path, *, step: int) -> None:
        self._names = ", ".join(names)
        self._waiting: Queue[tuple[dict[str, float], int] | None] = Queue(MOST_WAITING)
        self._given = self._taken = 0
        """Records so far, and those that every logger has."""
        self._drops = False
        classes = [BUILT_IN.get(name) or find_object(name) for name in names]
        self._thread = threading.Thread(target=self._work, args=(classes, folder, step), name="loggers", daemon=True)
        self._thread.start()

    def log(self, record: dict[str, Any], *, prefix: str = "") -> None:
        """Log all numbers of a record, which has a step.

        Args:
            prefix: of their names, such as "validation/".
        """
        metrics = dict(_flat({name: value for name, value in record.items() if name != "step"}, prefix))
        self._given += 1
        try:
            self._waiting.put_nowait((metrics, record["step"]))
        except Full:
            if not self._drops:
                logger.warning(f"metrics.loggers: {self._names} takes no records: they are dropped")
            self._drops = True

    def close(self) -> None:
        """Close the loggers when they have all records. It waits CLOSE_SECONDS at most."""
        deadline = time.monotonic() + CLOSE_SECONDS
        with suppress(Full):
            self._waiting.put(None, timeout=CLOSE_SECONDS)
        self._thread.join(max(deadline - time.monotonic(), 0))
        if self._thread.is_alive() or self._given > self._taken:
            missing = f"{self._given - self._taken:,} of {self._given:,} records"
            logger.warning(f"metrics.loggers: {self._names} has not taken {missing}. metrics.jsonl has all of them")

    def _work(self, classes: Sequence[type[Logger]], folder: Path, step: int) -> None:
        loggers: list[Logger] = []
        for logger_cls in classes:
            try:
                loggers.append(logger_cls(folder, step=step))
            except Exception as error:
                _report(f"{logger_cls.__name__} failed, and gets no metrics", error)
        while (record := self._waiting.get()) is not None:
            metrics, step = record
            for one in [*loggers]:
                try:
                    one.log(metrics, step=step)
                except Exception as error:
                    _report(f"{type(one).__name__} failed, and gets no more metrics", error)
                    loggers.remove(one)
            self._taken += 1
        for one in loggers:
            try:
                one.close()
            except Exception as error:
                _report(f"{type(one).__name__} failed to close", error)


def _report(what: str, error: Exception) -> None:
    logger.warning(f"{what}: {describe_error(error)}")


def _flat(record: dict[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    """Yield every number, those of nested tables by their path."""
    for name, value in record.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}/")
        elif isinstance(value, int | float):
            yield prefix + name, value
