"""Where figures go beside the console and metrics.jsonl: TensorBoard, and what `metrics.loggers` names."""

from pathlib import Path
from typing import Any, Protocol


class Logger(Protocol):
    """Where else figures go: TensorBoard, and `metrics.loggers`. Made and called on rank 0 only."""

    def __init__(self, folder: Path, *, step: int) -> None:
        """Args:
        folder: of the run.
        step: that the run goes on from; figures of later steps, of a run that was killed, will come anew.
        """
        ...

    def log(self, figures: dict[str, float], *, step: int) -> None:
        """Of a log step (`loss`, `lr`, ...), a validation (`validation/loss`, ...) or a save (`checkpoint/...`)."""
        ...

    def close(self) -> None:
        """At the end of the run; not after an error."""
        ...


class TensorBoard:
    """Is imported and made after the first line of figures is on the console: it takes a third of a second."""

    def __init__(self, folder: Path, *, step: int) -> None:
        self._folder = folder / "tensorboard"
        self._purge_step = step + 1
        self._writer: Any = None

    def log(self, figures: dict[str, float], *, step: int) -> None:
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(self._folder), purge_step=self._purge_step)
        for name, value in figures.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
