"""How the documents of a token store become sequences: cut from one long stream, or packed whole.

`Stream` has the next seq_len tokens of the stream in each row, and so cuts documents wherever a row is full. `BestFit`
packs whole documents ("Fewer truncations improve language modeling", Ding et al., 2024, arXiv:2404.10830): only those
longer than a row are cut, and what stays empty is padding. No torch here: worker processes read rows.
"""

import json
import logging
import os
import platform
import shutil
from bisect import bisect_left, insort
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from titanlite.batch import IGNORE
from titanlite.data.tokens import TokenStore
from titanlite.runtime.errors import RunError
from titanlite.runtime.files import lock_file

logger = logging.getLogger(__name__)

PADDING = 0
VERSION = 1
"""Of plans: another one means other rows for the same documents."""
PIECE = np.dtype([("start", "<i8"), ("length", "<i4"), ("labels", "<i4")])
"""Where in the stream a piece begins, and how many of its tokens there are and have a next one to predict."""


class Row(NamedTuple):
    """One sequence of L tokens."""

    tokens: np.ndarray
    """[L], int64."""
    labels: np.ndarray
    """[L], int64: the token that follows, or IGNORE."""
    starts: np.ndarray
    """int64, ascending: where in the row documents, and its padding, begin; 0 is always there."""


class Stream:
    """Row i is tokens [i * seq_len, (i + 1) * seq_len) of the stream.

    Args:
        document_mask: whether rows say where documents begin, and the last token of a document predicts nothing.
            Without, it predicts the first of the next, and each row is as one document.
    """

    def __init__(self, store: TokenStore, *, seq_len: int, document_mask: bool) -> None:
        self.store = store
        self.seq_len = seq_len
        self.document_mask = document_mask
        self._has_mask = store.has_mask

    def __len__(self) -> int:
        return max(0, (len(self.store) - 1) // self.seq_len)

    def read(self, index: int) -> Row:
        begin, length = index * self.seq_len, self.seq_len
        stretch = self.store.read(begin, length + 1)
        row = Row(stretch[:-1], stretch[1:], np.zeros(1, dtype=np.int64))
        if self._has_mask or self.document_mask:
            row = row._replace(labels=row.labels.copy())  # tokens and labels share memory
        if self._has_mask:
            row.labels[~self.store.read_mask(begin + 1, length)] = IGNORE
        if self.document_mask:
            firsts = self.store.document_starts(begin + 1, length) - begin
            row.labels[firsts - 1] = IGNORE
            row = row._replace(starts=_not_empty(firsts, length)[0])
        return row


class BestFit:
    """Rows of whole documents, padded at the end.

    Documents longer than a row are cut into whole rows, and their rest is packed as others are. The last token of such
    a row still predicts the next of its document, the last one of a document predicts nothing. Rows are in the order in
    which the longest piece of each is in the stream.

    Args:
        plan_folder: keeps which pieces are in which row, for all processes and for the next start.

    Raises:
        RunError: the plan cannot be written.
    """

    def __init__(self, store: TokenStore, *, seq_len: int, plan_folder: Path) -> None:
        self.store = store
        self.seq_len = seq_len
        self.plan_folder = plan_folder
        self._has_mask = store.has_mask
        try:
            plan = _plan_once(store, seq_len, plan_folder)
        except OSError as error:
            raise RunError(f"{plan_folder} cannot be written: {error}") from error
        self._pieces = np.load(plan / "pieces.npy", mmap_mode="r")
        self._rows = np.load(plan / "rows.npy", mmap_mode="r")
        self.cut_documents: int = json.loads((plan / "plan.json").read_text())["cut_documents"]

    def __reduce__(self) -> Any:
        """A worker process maps the plan anew."""
        return partial(type(self), seq_len=self.seq_len, plan_folder=self.plan_folder), (self.store,)

    def __len__(self) -> int:
        return len(self._rows) - 1

    @property
    def fill(self) -> float:
        """Share of the rows that is tokens and not padding."""
        return len(self.store) / (len(self) * self.seq_len) if len(self) else 1.0

    def read(self, index: int) -> Row:
        tokens = np.full(self.seq_len, PADDING, dtype=np.int64)
        labels = np.full(self.seq_len, IGNORE, dtype=np.int64)
        starts = []
        at = 0
        begin, end = self._rows[index : index + 2].tolist()
        for start, length, predicted in self._pieces[begin:end].tolist():
            stretch = self.store.read(start, max(length, predicted + 1))
            tokens[at : at + length] = stretch[:length]
            labels[at : at + predicted] = stretch[1 : predicted + 1]
            if self._has_mask:
                labels[at : at + predicted][~self.store.read_mask(start + 1, predicted)] = IGNORE
            starts.append(at)
            at += length
        if at < self.seq_len:
            starts.append(at)
        return Row(tokens, labels, np.array(starts, dtype=np.int64))


def _plan_once(store: TokenStore, seq_len: int, plan_folder: Path) -> Path:
    """Where the plan is; it is made by whichever process comes first."""
    folder = plan_folder / f"best-fit-{VERSION}-{store.fingerprint}-{seq_len}"
    if folder.is_dir():
        return folder
    plan_folder.mkdir(parents=True, exist_ok=True)
    with lock_file(plan_folder / f"{folder.name}.lock"):
        if folder.is_dir():
            return folder
        logger.info(f"packing {store.index['documents']:,} documents of {store.folder} into sequences of {seq_len}")
        pieces, rows, cut_documents = plan_best_fit(store, seq_len)
        staging = plan_folder / f".{folder.name}.partial-{platform.node()}"
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir()
        for name, values in {"pieces.npy": pieces, "rows.npy": rows}.items():
            with open(staging / name, "wb") as file:
                np.save(file, values)
                file.flush()
                os.fsync(file.fileno())
        (staging / "plan.json").write_text(json.dumps({"cut_documents": cut_documents}))
        try:
            os.rename(staging, folder)
        except OSError:  # another machine was faster, with the same
            shutil.rmtree(staging)
            if not folder.is_dir():
                raise
    return folder


def plan_best_fit(store: TokenStore, seq_len: int) -> tuple[np.ndarray, np.ndarray, int]:
    """Returns:
    All pieces, row by row, in a row as in the stream; where among them each row begins, and their number; how many
    documents were cut.
    """
    firsts, lengths = _not_empty(store.document_starts(0, len(store)), len(store))
    counts = -(-lengths // seq_len)
    before = seq_len * (np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts))
    left = np.repeat(lengths, counts) - before
    pieces = np.empty(len(before), dtype=PIECE)
    pieces["start"] = np.repeat(firsts, counts) + before
    pieces["length"] = np.minimum(left, seq_len)
    pieces["labels"] = np.minimum(left - 1, seq_len)
    openers = best_fit_decreasing(pieces["length"], seq_len)
    order = np.argsort(openers, kind="stable")
    rows = np.flatnonzero(np.diff(openers[order], prepend=-1))
    return pieces[order], np.append(rows, len(pieces)), int((counts > 1).sum())


def _not_empty(starts: np.ndarray, end: int) -> tuple[np.ndarray, np.ndarray]:
    """(starts, lengths) of the documents before `end` that have tokens; the first begins at 0, whatever `starts` says.
    np.unique would take ten times as long."""
    starts = np.append(np.zeros(1, dtype=np.int64), starts)
    lengths = np.diff(starts, append=end)
    return starts[lengths > 0], lengths[lengths > 0]


def best_fit_decreasing(lengths: np.ndarray, capacity: int) -> np.ndarray:
    """Put the longest piece first, and each into the fullest bin that still has room, else into a new one.

    Bins with equal room are alike. So all pieces of one length are put into all bins of one room at once, and as many
    into each bin as fit: a bin that has just got one of them is the fullest that fits. Room that is used up like this
    is more than halved, so that there are O(capacity log capacity) turns, whatever the number of pieces.

    Returns:
        The bin of each piece, called by the index of the piece that it was opened for; int64.
    """
    smallest_type = np.min_scalar_type(capacity)  # up to 16 bits, numpy sorts in linear time
    order = np.argsort((capacity - lengths).astype(smallest_type), kind="stable")
    counts = np.bincount(lengths, minlength=1)
    bins = np.empty(len(lengths), dtype=np.int64)
    rooms = _Rooms()
    first = 0
    for length in np.flatnonzero(counts)[::-1].tolist():
        pieces = order[first : first + counts[length]]
        first += len(pieces)
        while len(pieces):
            room, found = rooms.take(length)
            room = capacity if found is None else room
            each = room // length
            found = pieces[::each] if found is None else found
            used, unused = np.split(found, [-(-len(pieces) // each)])
            placed, pieces = np.split(pieces, [len(used) * each])
            bins[placed] = np.repeat(used, each)[: len(placed)]
            last = len(placed) - (len(used) - 1) * each  # pieces in the last of the bins
            whole = len(used) - (last < each)
            rooms.put(room, unused)
            rooms.put(room - each * length, used[:whole])
            rooms.put(room - last * length, used[whole:])
    return bins


class _Rooms:
    """Bins by the room that they have left."""

    def __init__(self) -> None:
        self._rooms: list[int] = []
        self._bins: dict[int, list[np.ndarray]] = {}

    def put(self, room: int, bins: np.ndarray) -> None:
        if room == 0 or len(bins) == 0:
            return
        if room not in self._bins:
            insort(self._rooms, room)
            self._bins[room] = []
        self._bins[room].append(bins)

    def take(self, least: int) -> tuple[int, np.ndarray | None]:
        """Bins of the smallest room that is enough."""
        at = bisect_left(self._rooms, least)
        if at == len(self._rooms):
            return 0, None
        room = self._rooms[at]
        bins = self._bins[room].pop()
        if not self._bins[room]:
            del self._rooms[at], self._bins[room]
        return room, bins
