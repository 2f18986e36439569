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
from typing import Any, Protocol

import tomli

from titanlite.run.endings import FAILED
from titanlite.run.records import read_records
from titanlite.runtime.console import install_hint
from titanlite.runtime.errors import UserError, did_you_mean
from titanlite.runtime.files import read_small
from titanlite.runtime.signals import STOPPED, shielding_children
from titanlite.runtime.user_code import check_call, describe_error, find_object

logger = logging.getLogger(__name__)

MOST_WAITING = 1000
"""Records that wait in memory for a logger. More are read from the run's folder when it answers again."""
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 300.0
"""Pauses in seconds after a logger has failed; each is twice the one before."""
CLOSE_SECONDS, FAILED_SECONDS = 15.0, 3.0
"""Longest waits for the loggers at the end of a run, because a scheduler kills what has not ended 30 s after a signal,
and before the error of a run that fails."""


class Logger(Protocol):
    """Contract of a logger. Created and called on rank 0 only, in a thread of its own.

    A method `end(code)`, if there is one, is called with the exit code of the run instead of `close()`; also after an
    error, with 1. With an attribute `keeps_later_steps = True`, steps that it has do not come again.
    """

    def __init__(self, folder: Path, *, step: int) -> None:
        """Open the logger.

        Args:
            folder: folder of the run.
            step: step at which the run resumes. Metrics of later steps, from a start that was killed, come again. So do
                those of earlier steps that could not be logged.
        """
        ...

    def log(self, metrics: dict[str, float], *, step: int) -> None:
        """Log metrics of a log step (`loss`, `lr`, ...), a validation (`validation/loss`, ...) or a save
        (`checkpoint/...`). After an exception the logger is made again later, and gets the same metrics."""
        ...

    def close(self) -> None:
        """Close the logger at the end of the run; not after an error."""
        ...


class TensorBoard:
    """TensorBoard's writer. It is imported after the first console line: that takes a third of a second."""

    def __init__(self, folder: Path, *, step: int) -> None:
        self._run, self._folder = folder, folder / "tensorboard"
        self._step = step
        self._writer: Any = None

    def log(self, metrics: dict[str, float], *, step: int) -> None:
        if self._writer is None:
            self._writer = self._open()
        for name, value in metrics.items():
            # As float32, the seconds of a clock have steps of 128, and counts above 2**24 are rounded.
            self._writer.add_scalar(name, value, step, new_style=True, double_precision=True)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()

    def _open(self) -> Any:
        """Open a file of events, which begins with the config: as text, and as hyperparameters of the run."""
        from torch.utils.tensorboard import SummaryWriter
        from torch.utils.tensorboard.summary import hparams

        from titanlite.runtime.console import flat

        writer = SummaryWriter(str(self._folder), purge_step=self._step + 1)
        text = read_small(self._run / "config.toml").decode()
        writer.add_text("config", f"```toml\n{text}\n```", self._step)
        assert writer.file_writer is not None
        options = {key: json.loads(value) for key, value in flat(tomli.loads(text)).items()}
        for summary in hparams({key: value for key, value in options.items() if value not in ([], {})}, {"loss": None}):
            writer.file_writer.add_summary(summary)
        return writer


class WeightsAndBiases:
    """Weights & Biases, as its own environment variables set it up (WANDB_PROJECT, WANDB_ENTITY, WANDB_MODE).

    The run's id there is the id of the run. Weights & Biases ignores steps that it has already.
    """

    keeps_later_steps = True

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
    """Trackio, as its own environment variables set it up (TRACKIO_DIR, TRACKIO_SPACE_ID). It would keep a step that
    comes again twice."""

    keeps_later_steps = True

    def __init__(self, folder: Path, *, step: int) -> None:
        import trackio

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
        self._run.log(metrics, step=step)

    def close(self) -> None:
        self._run.finish()


class MLflow:
    """MLflow, as its own environment variables set it up (MLFLOW_TRACKING_URI, MLFLOW_EXPERIMENT_NAME).

    A tag of its run has the id of the run, by which a resumed run finds it. MLflow would keep a step that comes again
    twice, so it is asked for its last one: also after an error, since the server may have what it did not confirm. It
    changes no parameter: those of the first start stay.
    """

    keeps_later_steps = True

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
            from titanlite.runtime.console import flat

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
        self.end(0)

    def end(self, code: int) -> None:
        self._client.set_terminated(self._id, {0: "FINISHED", STOPPED: "KILLED"}.get(code, "FAILED"))

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


RECORDS = {"metrics": "", "validation": "validation/", "checkpoints": "checkpoint/"}
"""Files of records that loggers get, and what stands before the names of their metrics there."""


NO_METRICS = ("step", "schema", "time")
"""Numbers of a record that are no metrics."""


class Loggers:
    """All loggers of a run. Each has a thread of its own: training waits for none, and none for another's network."""

    def __init__(self, names: Sequence[str], folder: Path, *, step: int) -> None:
        self._feeds = [_Feed(name, BUILT_IN.get(name) or find_object(name), folder, step) for name in names]

    def log(self, record: dict[str, Any], *, kind: str = "metrics") -> None:
        """Log all numbers of a record, which has a step.

        Args:
            kind: name of its file in the run's folder, without the suffix.
        """
        for feed in self._feeds:
            feed.give(kind, record)

    def close(self, code: int = 0) -> None:
        """Close the loggers when they have all records. It waits CLOSE_SECONDS at most, after an error FAILED_SECONDS.

        Args:
            code: exit code of the run; 1 after an error.
        """
        deadline = time.monotonic() + (FAILED_SECONDS if code == FAILED else CLOSE_SECONDS)
        for feed in self._feeds:
            feed.end(code)
        for feed in self._feeds:
            feed.join(deadline)
        self._feeds = []


class _Feed:
    """What one logger gets: the records of this start, and those of earlier ones that it does not have yet.

    The last step that arrived is kept in loggers/<name>.json in the run's folder. After an error the logger is made
    again and gets the same records, with growing pauses. What waits in memory is limited; the rest is read from the
    run's records.

    Args:
        step: step at which the run resumes.
    """

    def __init__(self, name: str, logger_cls: type[Logger], folder: Path, step: int) -> None:
        self._name, self._logger_cls, self._folder, self._step = name, logger_cls, folder, step
        self._arrived_file = folder / "loggers" / (re.sub(r"[^\w.-]", "_", name) + ".json")
        self._arrived: dict[str, int] = {}
        """Last step of each kind that the logger has."""
        self._given: list[tuple[str, dict[str, Any]]] = []
        self._is_behind = step > 0
        """Whether the logger may lack records that are in files only."""
        self._code: int | None = None
        self._wakes = threading.Condition()
        self._is_complete = self._is_over = False
        """Whether the logger has all records and is closed, and whether it gets no more."""
        self._thread = threading.Thread(target=self._work, name=f"logger {name}", daemon=True)
        self._thread.start()

    def give(self, kind: str, record: dict[str, Any]) -> None:
        with self._wakes:
            if len(self._given) == MOST_WAITING:
                self._given.clear()
                self._is_behind = True
            self._given.append((kind, record))
            self._wakes.notify()

    def end(self, code: int) -> None:
        """Let the logger be closed when it has all records."""
        with self._wakes:
            self._code = code
            self._wakes.notify()

    def join(self, deadline: float) -> None:
        """Wait for the end of the logger, and log a warning if it does not have all records."""
        self._thread.join(max(deadline - time.monotonic(), 0))
        if not self._is_complete:
            self._is_behind = self._is_over = True
            if missing := len(self._pending({})):
                logger.warning(
                    f"metrics.loggers: {self._name} does not have the last {missing:,} records. metrics.jsonl has all "
                    "of them, and the next start of this run logs them"
                )

    def _work(self) -> None:
        pause, made, pending = 0.0, None, {}
        while not self._is_complete:
            try:
                if not self._arrived:
                    self._read_arrived()
                if made is None:
                    made = self._logger_cls(self._folder, step=self._step)
                if not pending:
                    with self._wakes:
                        self._wakes.wait_for(lambda: self._given or self._is_behind or self._code is not None)
                code, pending = self._code, self._pending(pending)
                for kind, step in [*pending]:
                    if self._is_over:  # after a rollback, another feed is at work
                        return
                    made.log(_numbers(pending[kind, step], RECORDS[kind]), step=step)
                    del pending[kind, step]
                    self._arrived[kind] = step
                    self._keep_arrived()
                if pause:
                    logger.info(f"metrics.loggers: {self._name} has all records again")
                    pause = 0.0
                if code is not None:
                    self._close(made, code)
                    self._is_complete = True
            except Exception as error:
                made, self._step = None, max([self._step, *self._arrived.values()])
                if not pause:
                    logger.warning(f"metrics.loggers: {self._name} failed, and is tried again: {describe_error(error)}")
                with self._wakes:
                    if self._code is not None and pause:  # it has had its last attempt
                        return
                    pause = min(max(2 * pause, FIRST_PAUSE), LONGEST_PAUSE)
                    self._wakes.wait_for(lambda: self._code is not None, pause)

    def _pending(self, before: dict[tuple[str, int], dict[str, Any]]) -> dict[tuple[str, int], dict[str, Any]]:
        """Return the records that the logger does not have, by kind and step, in the order of steps.

        Args:
            before: those of an attempt that failed.
        """
        with self._wakes:
            given, self._given, is_behind, self._is_behind = self._given, [], self._is_behind, False
        found: dict[tuple[str, int], dict[str, Any]] = {}
        if is_behind or len(before) > MOST_WAITING:
            before = {}
            for kind in RECORDS:
                for record in read_records(self._folder / f"{kind}.jsonl"):
                    if type(step := record.get("step")) is int:
                        found[kind, step] = record
        found |= before  # files have no NaN
        found |= {(kind, record["step"]): record for kind, record in given}
        keys = sorted((key for key in found if key[1] > self._arrived.get(key[0], 0)), key=lambda key: key[1])
        return {key: found[key] for key in keys}

    def _read_arrived(self) -> None:
        """Read which steps the logger has; of a logger that the run has not had before, those up to the resumed one."""
        self._arrived = dict.fromkeys(RECORDS, self._step)
        if self._arrived_file.exists():
            self._arrived |= json.loads(read_small(self._arrived_file))
        if not getattr(self._logger_cls, "keeps_later_steps", False):  # those of a start that was killed come again
            self._arrived = {kind: min(step, self._step) for kind, step in self._arrived.items()}
        self._keep_arrived()

    def _keep_arrived(self) -> None:
        """Write which steps the logger has, for the next start. A loss of power may lose it; a kill does not."""
        self._arrived_file.parent.mkdir(exist_ok=True)
        staging = self._arrived_file.with_suffix(".staging")
        staging.write_text(json.dumps(self._arrived))
        staging.replace(self._arrived_file)

    @staticmethod
    def _close(made: Any, code: int) -> None:
        if hasattr(made, "end"):
            made.end(code)
        elif code != FAILED:
            made.close()


def _numbers(record: dict[str, Any], prefix: str) -> dict[str, float]:
    """Return the numbers of a record that are metrics."""
    return dict(_flat({name: value for name, value in record.items() if name not in NO_METRICS}, prefix))


def _flat(record: dict[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    """Yield every number, those of nested tables by their path."""
    for name, value in record.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}/")
        elif isinstance(value, int | float):
            yield prefix + name, value
