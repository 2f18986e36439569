"""A loss and a logger that a soak adds to its runs: which samples each step had, and when each step was done.

Both write below the folder in TITANLITE_SOAK_HOOKS: <attempt>/steps, of rank 0, and <attempt>/samples-<rank>. An
attempt is one start of the ranks, of which one start of a job may have several. Neither changes a result.
"""

import hashlib
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from titanlite.loss import TokenLoss, token_loss

FOLDER = "TITANLITE_SOAK_HOOKS"
MASK = (1 << 64) - 1


def rank_of(environ: Mapping[str, str]) -> int:
    return int(environ.get("RANK", "0"))


def hash_of_sequences(labels_BL: torch.Tensor) -> int:
    """Sum modulo 2^64 of a hash of each sequence's labels: the same in any order and any split over ranks."""
    hashes = (hashlib.blake2b(sequence.numpy().tobytes(), digest_size=8).digest() for sequence in labels_BL.cpu())
    return sum(int.from_bytes(digest, "little") for digest in hashes) & MASK


class Hooks:
    """The loss of each rank, and the logger of rank 0, which names the folder of the attempt for all ranks.

    torchrun counts restarts on each machine by itself, so its count is no name that ranks agree on.
    """

    def __init__(self) -> None:
        self._folder = ""
        self._samples: int | None = None

    def make_folder(self) -> Path:
        """Make the folder of this attempt, on rank 0. Names sort by time."""
        path = Path(os.environ[FOLDER], f"{time.time_ns():020d}")
        path.mkdir(parents=True)
        self._folder = str(path)
        return path

    def loss(self, hidden_BLD: torch.Tensor, weight_VD: torch.Tensor, *, labels_BL: torch.Tensor) -> TokenLoss:
        """Return titanlite's loss, and append 8 bytes to a file of this rank: the hash of the micro-batch.

        A file `nan-<rank>` beside the attempts is deleted by that rank, and makes its next loss NaN: a fault that comes
        once.
        """
        found = token_loss(hidden_BLD, weight_VD, labels_BL=labels_BL)
        rank = rank_of(os.environ)
        if self._samples is None:
            folder = [self._folder]
            dist.broadcast_object_list(folder)
            path = Path(folder[0], f"samples-{rank}")
            self._samples = os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o644)
        os.write(self._samples, hash_of_sequences(labels_BL).to_bytes(8, "little"))
        nan = Path(os.environ[FOLDER], f"nan-{rank}")
        if nan.exists():
            nan.unlink()
            return TokenLoss(found.total * torch.nan, found.cross_entropy * torch.nan)
        return found


HOOKS = Hooks()
loss = HOOKS.loss


class Watch:
    """File of the steps of an attempt: the step that it resumed from, then one line a step, with the clock."""

    def __init__(self, folder: Path, *, step: int) -> None:
        self._file = (HOOKS.make_folder() / "steps").open("a", buffering=1)
        self._write("resumed", step)

    def log(self, metrics: dict[str, Any], *, step: int) -> None:
        if "loss" in metrics:
            self._write("step", step)

    def close(self) -> None:
        self._file.close()

    def _write(self, event: str, step: int) -> None:
        self._file.write(f"{event} {step} {time.monotonic()}\n")
