"""Loggers of metrics beside the console and metrics.jsonl: TensorBoard, and the classes in `metrics.loggers`."""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from titanlite.config.schema import Metrics
from titanlite.runtime.user_code import find_object

logger = logging.getLogger(__name__)


class Logger(Protocol):
    """Contract of TensorBoard and of the classes in `metrics.loggers`. Created and called on rank 0 only."""

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
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


class Loggers:
    """All loggers of a run. One that fails gets a warning and no more metrics, and the run continues."""

    def __init__(self, config: Metrics, folder: Path, *, step: int) -> None:
        classes: list[type[Logger]] = [TensorBoard] if config.enable_tensorboard else []
        self._loggers: list[Logger] = []
        for logger_cls in [*classes, *map(find_object, config.loggers)]:
            try:
                self._loggers.append(logger_cls(folder, step=step))
            except Exception:
                logger.warning(f"{logger_cls.__name__} failed, and gets no metrics:", exc_info=True)

    def log(self, record: dict[str, Any], *, prefix: str = "") -> None:
        """Log all numbers of a record, which has a step.

        Args:
            prefix: of their names, such as "validation/".
        """
        metrics = dict(_flat({name: value for name, value in record.items() if name != "step"}, prefix))
        for one in [*self._loggers]:
            try:
                one.log(metrics, step=record["step"])
            except Exception:
                logger.warning(f"{type(one).__name__} failed, and gets no more metrics:", exc_info=True)
                self._loggers.remove(one)

    def close(self) -> None:
        for one in self._loggers:
            try:
                one.close()
            except Exception:
                logger.warning(f"{type(one).__name__} failed to close:", exc_info=True)


def _flat(record: dict[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    """Yield every number, those of nested tables by their path."""
    for name, value in record.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}/")
        elif isinstance(value, int | float):
            yield prefix + name, value
