"""The samples of a run: global sample index -> one sequence, whatever reads it.

Samples are numbered 0, 1, 2, ... over the whole run. The mixture tells of which source a sample is and which of that
source's it is; the source's order tells the epoch and the sequence. The position of a run is the number of samples that
it has consumed, and, if its data was changed on the way, since when the data is what it is now.
"""

import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch.utils.data import Dataset

from titanlite.batch import Batch
from titanlite.data.mixture import Mixture
from titanlite.data.order import Order
from titanlite.data.packing import Row
from titanlite.runtime.errors import UserError

logger = logging.getLogger(__name__)


class Rows(Protocol):
    """Documents cut or packed into sequences."""

    def __len__(self) -> int: ...

    def read(self, index: int) -> Row: ...


@dataclass(frozen=True)
class Source:
    """One of the sources of a mixture."""

    name: str
    rows: Rows
    fingerprint: str
    """Equal where the rows are."""
    weight: float = 1.0
    epochs: int | None = None
    """Most passes over it."""


@dataclass(frozen=True)
class Origin:
    """Since when the data is what it is: the sample with which this mixture began, and how many samples of each source
    (by fingerprint) had been read before it."""

    since: int = 0
    consumed: dict[str, int] = field(default_factory=dict)


class Samples(Dataset[Batch]):
    """Args:
    origin: for a run whose data was changed.
    document_mask: whether batches tell which document each token is of.

    Raises:
        UserError: a source has not one whole sequence, or two are the same.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        *,
        seed: int,
        shuffle: bool = True,
        document_mask: bool = False,
        origin: Origin | None = None,
    ) -> None:
        self.sources = sorted(sources, key=lambda source: source.name)  # their order in the config means nothing
        self.seed = seed
        self.shuffle = shuffle
        self.document_mask = document_mask
        self.origin = origin or Origin()
        self.mixture = Mixture([source.weight for source in self.sources])
        self.orders = [Order(len(source.rows), seed, shuffle) for source in self.sources]
        self._before = [self.origin.consumed.get(source.fingerprint, 0) for source in self.sources]
        names = {source.fingerprint: source.name for source in sources}
        if twice := next((s for s in sources if names[s.fingerprint] != s.name), None):
            raise UserError(
                f"data.sources: {twice.name} and {names[twice.fingerprint]} hold the same tokens: name them once, with "
                "both weights"
            )

    def locate(self, sample: int) -> tuple[int, int, int]:
        """(source, epoch, sequence) of a global sample index."""
        source, number = self.mixture.locate(sample - self.origin.since)
        return source, *self.orders[source].locate(self._before[source] + number)

    def __getitems__(self, samples: list[int]) -> Batch:
        located = [self.locate(sample) for sample in samples]
        rows = [self.sources[source].rows.read(sequence) for source, _, sequence in located]
        return as_batch(rows, document_mask=self.document_mask)

    def consumed(self, samples: int) -> list[int]:
        """How many samples of each source are among the first `samples` of the run."""
        counts = self.mixture.counts(samples - self.origin.since)
        return [before + count for before, count in zip(self._before, counts, strict=True)]

    def shares(self, samples: int) -> dict[str, float]:
        """Each source's part of the first `samples` samples of the run, all of which have the same length."""
        names = [source.name for source in self.sources]
        return {name: count / samples for name, count in zip(names, self.consumed(samples), strict=True)}

    def passes(self, samples: int) -> dict[str, float]:
        """How often the first `samples` samples of the run read each source."""
        consumed = zip(self.sources, self.consumed(samples), strict=True)
        return {source.name: count / len(source.rows) for source, count in consumed}

    def limit(self, epochs: int | None = None) -> int | None:
        """How many samples the run can have before a source is read more often than it may be.

        Args:
            epochs: for sources that have no limit of their own.
        """
        limits = []
        for i, source in enumerate(self.sources):
            if passes := source.epochs or epochs:
                left = max(0, passes * len(source.rows) - self._before[i])
                limits.append(self.origin.since + self.mixture.index(i, left))
        return min(limits, default=None)

    # Going on

    @property
    def meaning(self) -> dict[str, Any]:
        """Equal where, with the same seed and origin, every sample index means the same tokens."""
        sources = {f"data.sources.{s.name}": f"{s.fingerprint} x {s.weight!r}" for s in self.sources}
        return {**sources, "data.shuffle": self.shuffle}

    def state(self, samples: int) -> dict[str, Any]:
        """What a checkpoint keeps, beside the number of samples (anything that JSON can hold)."""
        consumed = zip([source.fingerprint for source in self.sources], self.consumed(samples), strict=True)
        return {
            "meaning": self.meaning,
            "origin": asdict(self.origin),
            "consumed": {**self.origin.consumed, **dict(consumed)},
        }

    def resumed(
        self, state: dict[str, Any], samples: int, on_change: Literal["error", "continue", "restart"]
    ) -> "Samples":
        """The samples of a run that has consumed some.

        Args:
            state: that of the checkpoint.
            on_change: what to do if the data is not what it was then.
        """
        if state.get("meaning") == self.meaning:
            origin = Origin(**state["origin"])
        else:
            # With "error" the loader has refused to come this far, unless checkpoint.allow_changes names the data.
            origin = Origin(samples, {} if on_change == "restart" else dict(state.get("consumed", {})))
            for source in self.sources:
                at = origin.consumed.get(source.fingerprint, 0)
                logger.info(f"data changed: {source.name} goes on after {at:,} of its sequences (data.on_change)")
        return Samples(
            self.sources, seed=self.seed, shuffle=self.shuffle, document_mask=self.document_mask, origin=origin
        )


def as_batch(rows: Sequence[Row], *, document_mask: bool) -> Batch:
    """Rows -> tokens and labels [B, L] int64. With document_mask also `positions` [B, L] int64, which start anew with
    each document; `documents` [B, L] int32, its number in the row; and `boundaries` [n + 1] int32: where in the B * L
    tokens documents begin, and B * L."""
    batch = {
        "tokens": torch.from_numpy(np.stack([row.tokens for row in rows])),
        "labels": torch.from_numpy(np.stack([row.labels for row in rows])),
    }
    if not document_mask:
        return batch
    seq_len = len(rows[0].tokens)
    positions = np.empty((len(rows), seq_len), dtype=np.int64)
    documents = np.empty((len(rows), seq_len), dtype=np.int32)
    for i, row in enumerate(rows):
        lengths = np.diff(row.starts, append=seq_len)
        positions[i] = np.arange(seq_len) - np.repeat(row.starts, lengths)
        documents[i] = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)
    ends = [len(rows) * seq_len]
    boundaries = np.concatenate([row.starts + i * seq_len for i, row in enumerate(rows)] + [ends]).astype(np.int32)
    return batch | {
        "positions": torch.from_numpy(positions),
        "documents": torch.from_numpy(documents),
        "boundaries": torch.from_numpy(boundaries),
    }
