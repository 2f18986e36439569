"""Sequences made of the documents of a token store: cut from one long stream, or packed whole.

`Stream` cuts the stream of tokens every seq_len tokens, wherever documents end. `BestFit` packs whole documents ("Fewer
truncations improve language modeling", Ding et al., 2024, arXiv:2404.10830): only documents longer than a sequence are
cut, and the rest of a sequence is padding. Imports no torch, so that worker processes start fast.
"""

import hashlib
import json
import logging
import os
import platform
import shutil
from bisect import bisect_left, insort
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from titanlite.batch import IGNORE
from titanlite.data.tokens import ArrayFile, TokenStore
from titanlite.runtime.errors import RunError
from titanlite.runtime.files import lock_work, publish, quarantine_path, read_small, write_atomically

logger = logging.getLogger(__name__)

PADDING = 0
PLAN = "plan.json"
VERSION = 1
"""Version of packing plans: another version makes other sequences of the same documents."""
PIECE = np.dtype([("start", "<i8"), ("length", "<i4"), ("labels", "<i4")])
"""Piece of a document: its start in the stream, its number of tokens, and how many of them have a next token."""
NO_PLAN = (FileNotFoundError, NotADirectoryError, ValueError, KeyError, TypeError)
FORM = 3
"""Version of the files of a plan, which no sequence depends on."""
PLAN_FILES = {"pieces": PIECE, "first_pieces": np.dtype("<i8")}
"""Types of the records in the files of a plan, see `plan_best_fit`. Their numbers and checksums are in plan.json."""


class TokenSequence(NamedTuple):
    """A sequence of L tokens."""

    tokens: np.ndarray
    """[L], int64."""
    labels: np.ndarray
    """[L], int64: the next token, or IGNORE."""
    starts: np.ndarray
    """int64, ascending from 0: positions at which documents, and the padding, begin."""
    padding: int = 0
    """Number of tokens at the end that are padding."""


class SequenceReader(Protocol):
    """Random access to the sequences of a source."""

    def __len__(self) -> int: ...

    def read(self, index: int) -> TokenSequence: ...


class Stream:
    """Reader that cuts the stream: sequence i is tokens [i * seq_len, (i + 1) * seq_len).

    Args:
        document_mask: give the start of each document, and let its last token predict nothing. Otherwise the last
            token predicts the first of the next document, and a sequence counts as one document.
        to_end: keep the rest of the stream too: the last sequence is padded.
    """

    def __init__(self, store: TokenStore, *, seq_len: int, document_mask: bool, to_end: bool = False) -> None:
        self.store = store
        self.seq_len = seq_len
        self.document_mask = document_mask
        self.to_end = to_end
        self._has_mask = store.has_mask

    def __len__(self) -> int:
        predicted = max(0, len(self.store) - 1)
        return -(-predicted // self.seq_len) if self.to_end else predicted // self.seq_len

    def wait_for(self, sequences: int) -> bool:
        """Wait until there are as many sequences, or all. Return whether all are there."""
        self.store.wait_for(sequences * self.seq_len + 1)
        return self.store.is_complete

    def read(self, index: int) -> TokenSequence:
        begin = index * self.seq_len
        length = min(self.seq_len, len(self.store) - 1 - begin) if self.to_end else self.seq_len
        stretch = self.store.read(begin, length + 1)
        sequence = TokenSequence(stretch[:-1], stretch[1:], np.zeros(1, dtype=np.int64))
        if self._has_mask or self.document_mask:
            sequence = sequence._replace(labels=sequence.labels.copy())  # tokens and labels share memory
        if self._has_mask:
            sequence.labels[~self.store.read_mask(begin + 1, length)] = IGNORE
        if self.document_mask:
            firsts = self.store.document_starts(begin + 1, length) - begin
            sequence.labels[firsts - 1] = IGNORE
            sequence = sequence._replace(starts=_not_empty(firsts, length)[0])
        return sequence if length == self.seq_len else _padded(sequence, self.seq_len)


def _padded(sequence: TokenSequence, length: int) -> TokenSequence:
    missing = 0, length - len(sequence.tokens)
    tokens = np.pad(sequence.tokens, missing, constant_values=PADDING)
    labels = np.pad(sequence.labels, missing, constant_values=IGNORE)
    return TokenSequence(tokens, labels, np.append(sequence.starts, len(sequence.tokens)), missing[1])


class BestFit:
    """Reader that packs whole documents into sequences, padded at the end.

    A document longer than a sequence is cut: its first parts fill sequences, its rest is packed like other documents.
    The last token of such a part predicts the next token of its document. The last token of a document predicts
    nothing. Sequences are in the order in which their longest pieces are in the stream.

    Args:
        plan_folder: keeps the packing plan, for all processes and for the next start.

    Raises:
        RunError: the plan cannot be written.
    """

    def __init__(self, store: TokenStore, *, seq_len: int, plan_folder: Path) -> None:
        self.store = store
        self.seq_len = seq_len
        self.plan_folder = plan_folder
        self._has_mask = store.has_mask
        try:
            self.plan = _plan_once(store, seq_len, plan_folder)
        except OSError as error:
            raise RunError(f"{plan_folder} cannot be written: {error}") from error
        self.cut_documents = self.plan.cut_documents

    def __reduce__(self) -> Any:
        """Pickle the arguments only: a worker process maps the plan again."""
        return partial(type(self), seq_len=self.seq_len, plan_folder=self.plan_folder), (self.store,)

    def __len__(self) -> int:
        return len(self.plan.first_pieces) - 1

    @property
    def fill(self) -> float:
        """Share of tokens in the sequences, from 0 to 1; the rest is padding."""
        return len(self.store) / (len(self) * self.seq_len) if len(self) else 1.0

    def read(self, index: int) -> TokenSequence:
        tokens = np.full(self.seq_len, PADDING, dtype=np.int64)
        labels = np.full(self.seq_len, IGNORE, dtype=np.int64)
        starts = []
        at = 0
        begin, end = self.plan.first_pieces.read(index, index + 2).tolist()
        for start, length, predicted in self.plan.pieces.read(begin, end).tolist():
            stretch = self.store.read(start, max(length, predicted + 1))
            tokens[at : at + length] = stretch[:length]
            labels[at : at + predicted] = stretch[1 : predicted + 1]
            if self._has_mask:
                labels[at : at + predicted][~self.store.read_mask(start + 1, predicted)] = IGNORE
            starts.append(at)
            at += length
        if at < self.seq_len:
            starts.append(at)
        return TokenSequence(tokens, labels, np.array(starts, dtype=np.int64), self.seq_len - at)


class PackingPlan:
    """Packing plan in a folder. Its files are read, not mapped, see `ArrayFile`.

    Raises:
        NO_PLAN: the folder is no plan, or a file of it does not have its size.
        OSError: the disk is at fault.
    """

    def __init__(self, folder: Path) -> None:
        about = json.loads(read_small(folder / PLAN))
        self.folder = folder
        self.fingerprint = folder.name
        self.cut_documents = int(about["cut_documents"])
        self._checksums = {name: str(about["sha256"][name]) for name in PLAN_FILES}
        self.pieces, self.first_pieces = (
            ArrayFile(
                folder / name, dtype, int(about[name]), key="data.packing", remedy="Start again: it is made again"
            )
            for name, dtype in PLAN_FILES.items()
        )
        for file in (self.pieces, self.first_pieces):
            file.check_size()

    def files(self) -> Iterator[tuple[Path, int, str]]:
        """Yield (path, bytes, SHA-256) of every file but plan.json."""
        for name, checksum in self._checksums.items():
            path = self.folder / name
            yield path, path.stat().st_size, checksum


def _plan_once(store: TokenStore, seq_len: int, plan_folder: Path) -> PackingPlan:
    """Return the plan, which the first process to arrive makes. One that is damaged is quarantined, with a warning."""
    folder = plan_folder / f"best-fit-{VERSION}.{FORM}-{store.fingerprint}-{seq_len}"
    with suppress(*NO_PLAN):
        return PackingPlan(folder)
    plan_folder.mkdir(parents=True, exist_ok=True)
    lock = plan_folder / f"{folder.name}.lock"
    with lock_work(lock, on_wait=lambda holder: logger.info(f"waiting for {holder}, which packs {store.folder}")):
        try:
            return PackingPlan(folder)
        except NO_PLAN as error:
            if os.path.lexists(folder):
                aside = quarantine_path(folder)
                folder.rename(aside)
                logger.warning(f"{folder} is damaged ({error}): it is now {aside.name}, and the plan is made again")
        logger.info(f"packing the documents of {store.folder} into sequences of {seq_len}")
        pieces, first_pieces, cut_documents = plan_best_fit(store, seq_len)
        staging = plan_folder / f".{folder.name}.partial-{platform.node()}"
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir()
        about: dict[str, Any] = {"cut_documents": cut_documents, "sha256": {}}
        for name, values in zip(PLAN_FILES, (pieces, first_pieces), strict=True):
            content = values.view("u1").data
            write_atomically(staging / name, content)
            about[name], about["sha256"][name] = len(values), hashlib.sha256(content).hexdigest()
        write_atomically(staging / PLAN, json.dumps(about))
        publish(staging, folder, last=PLAN)
        return PackingPlan(folder)


def plan_best_fit(store: TokenStore, seq_len: int) -> tuple[np.ndarray, np.ndarray, int]:
    """Pack documents into sequences.

    Returns:
        the pieces of all sequences in order, in a sequence as in the stream [pieces] PIECE; the index of each
        sequence's first piece, and the number of pieces [sequences + 1] int64; the number of documents that were cut.
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
    first_pieces = np.flatnonzero(np.diff(openers[order], prepend=-1))
    return pieces[order], np.append(first_pieces, len(pieces)), int((counts > 1).sum())


def _not_empty(starts: np.ndarray, end: int) -> tuple[np.ndarray, np.ndarray]:
    """Return (starts, lengths) of the documents before `end` that have tokens. One begins at 0, also if `starts` lacks
    it. np.unique would take ten times as long."""
    starts = np.append(np.zeros(1, dtype=np.int64), starts)
    lengths = np.diff(starts, append=end)
    return starts[lengths > 0], lengths[lengths > 0]


def best_fit_decreasing(lengths: np.ndarray, capacity: int) -> np.ndarray:
    """Put each piece, the longest first, into the fullest bin that still has room, else into a new bin.

    Bins with equal room are alike. So all pieces of one length are put into all bins of one room at once, and as many
    into each bin as fit: a bin that has just got one of them is the fullest that fits. Room that is used up like this
    is more than halved, so that there are O(capacity log capacity) turns, whatever the number of pieces.

    Returns:
        the bin of each piece [pieces] int64: the index of the first piece of the bin.
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
            last = len(placed) - (len(used) - 1) * each  # number of pieces in the last bin
            whole = len(used) - (last < each)
            rooms.put(room, unused)
            rooms.put(room - each * length, used[:whole])
            rooms.put(room - last * length, used[whole:])
    return bins


class _Rooms:
    """Bins, by the room that is left in them."""

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
        """Return bins of the smallest room that is enough, and that room."""
        at = bisect_left(self._rooms, least)
        if at == len(self._rooms):
            return 0, None
        room = self._rooms[at]
        bins = self._bins[room].pop()
        if not self._bins[room]:
            del self._rooms[at], self._bins[room]
        return room, bins
