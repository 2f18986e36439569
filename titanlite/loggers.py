"""Where figures go beside the console and metrics.jsonl: TensorBoard, and what `metrics.loggers` names."""

from pathlib import Path
from typing import Protocol


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
    def __init__(self, folder: Path, *, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1)

    def log(self, figures: dict[str, float], *, step: int) -> None:
        for name, value in figures.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()
