"""Cache of a teacher on disk: its most probable tokens for each token of the training data.

`titanlite distill cache` (tools/convert/teacher_cache.py) writes it, and training reads it.

A cache is a folder. `teacher.json` has the settings of all its entries. Each source of the data has a folder, named by
the fingerprint of the source, with `0000000.topk`, `0000001.topk`, ..., each renamed when it is whole. A file has the
records of a fixed number of sequences, in the order of the source. So (sequence, position) gives the place of an entry
in any epoch, order and layout.

A record has an entry for each token of a sequence, and a checksum of the entries and of the sequence's tokens. It is
compared at each read, so that training never takes a damaged entry, or one of other tokens. Imports no torch, so that
worker processes start fast.
"""

import hashlib
import json
import zlib
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np

from titanlite.data.packing import TokenSequence
from titanlite.data.tokens import RecordFile
from titanlite.runtime.errors import UserError
from titanlite.runtime.files import read_small

FORMAT = 1
SETTINGS = "teacher.json"
TOP_K = 64
BLOCK_BYTES = 2**27
"""Largest size of a file, unless one sequence is larger. A file is written at once: as much work is lost when the
command is killed."""
MOST_OPEN_FILES = 64
COMMAND = "titanlite distill cache"
PREFIX = "teacher_"
"""Prefix of the parts of an entry in a batch."""
StoredDtype = Literal["float16", "float32"]


@dataclass(frozen=True, kw_only=True)
class CacheSettings:
    """All that entries depend on, beside the sequences of their source."""

    teacher: str
    """Fingerprint of the teacher."""
    compute_dtype: str
    """Dtype of the teacher's weights and compute."""
    vocab_size: int
    tokenizer: str
    """Fingerprint of the tokenizer of the data."""
    seq_len: int
    packing: str
    document_mask: bool
    temperature: float
    top_k: int
    dtype: StoredDtype
    """Dtype of the logarithms of probabilities."""
    block_sequences: int
    """Sequences in a file."""

    @property
    def fingerprint(self) -> str:
        """Hash of the settings but for the size of files, which changes no entry."""
        fields = {name: value for name, value in asdict(self).items() if name != "block_sequences"}
        return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:16]

    @property
    def entry(self) -> np.dtype:
        """Type of the entry of a token."""
        return entry_type(self.vocab_size, self.top_k, self.dtype)

    @property
    def record(self) -> np.dtype:
        """Type of the record of a sequence."""
        return np.dtype([("entries", self.entry, (self.seq_len,)), ("checksum", "<u4")])

    def difference(self, other: dict[str, Any]) -> str:
        """Return words for the settings that others have in another way; empty if there are none."""
        mine = asdict(self)
        changed = [name for name in mine if name in other and mine[name] != other[name]]
        return "; ".join(f"{KEYS.get(name, name)} was {mine[name]!r}, is {other[name]!r}" for name in changed)


KEYS = {
    "teacher": "the teacher's fingerprint",
    "compute_dtype": "teacher.dtype",
    "vocab_size": "the vocabulary",
    "tokenizer": "the fingerprint of data.tokenizer",
    "seq_len": "training.seq_len",
    "packing": "data.packing",
    "document_mask": "data.document_mask",
    "temperature": "distill.temperature",
    "top_k": "--top-k",
    "dtype": "--dtype",
}
"""Names of settings for people."""


def entry_type(vocab_size: int, top_k: int, dtype: StoredDtype) -> np.dtype:
    """Return the type of an entry: token ids, the most probable first; logarithms of their probabilities; and that of
    the probability of all other tokens, -inf if there are none."""
    ids, log_probs = "<u2" if vocab_size <= 2**16 else "<u4", {"float16": "<f2", "float32": "<f4"}[dtype]
    return np.dtype([("ids", ids, (top_k,)), ("log_probs", log_probs, (top_k,)), ("log_tail", "<f4")])


def checksum(entries: np.ndarray, sequence: TokenSequence) -> int:
    """Return the checksum of the entries [L] of a sequence, and of its tokens and documents."""
    parts = sequence.tokens.astype("<i8"), sequence.starts.astype("<i8"), entries
    value = 0
    for part in parts:
        value = zlib.crc32(part.tobytes(), value)
    return value


def block_name(block: int) -> str:
    return f"{block:07d}.topk"


def block_sizes(sequences: int, settings: CacheSettings) -> list[int]:
    """Return the number of sequences in each file of a source."""
    whole, rest = divmod(sequences, settings.block_sequences)
    return [settings.block_sequences] * whole + [rest] * (rest > 0)


def has_block(folder: Path, block: int, count: int, settings: CacheSettings) -> bool:
    """Return whether the file of a block of sequences is there, with its size."""
    path = folder / block_name(block)
    return path.is_file() and path.stat().st_size == count * settings.record.itemsize


def read_settings(cache: Path) -> CacheSettings:
    """Read the settings of a cache.

    Raises:
        UserError: there are none, or they are of another version.
    """
    path = cache / SETTINGS
    try:
        fields = json.loads(read_small(path))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(
            f"teacher.cache: {cache} is not a cache of a teacher, which `{COMMAND}` writes: {error}"
        ) from None
    has = fields.pop("format", None) if isinstance(fields, dict) else None
    if has != FORMAT:
        raise UserError(f"teacher.cache: {path} has format {has}, this version reads {FORMAT}: write the cache again")
    try:
        settings = CacheSettings(**fields)
        assert settings.entry.itemsize * settings.seq_len * settings.block_sequences > 0
    except (TypeError, ValueError, KeyError, AssertionError):
        raise UserError(f"teacher.cache: {path} is damaged: restore it, or write another cache") from None
    return settings


class Entries:
    """Entries of the sequences of a source in a cache.

    Args:
        folder: of the source, in the cache.
        sequences: number of sequences of the source.

    Raises:
        UserError: the folder is not complete.
    """

    def __init__(self, folder: Path, settings: CacheSettings, sequences: int) -> None:
        self.folder = folder
        self.settings = settings
        self._open = lru_cache(MOST_OPEN_FILES)(self._open_file)
        self._sizes = block_sizes(sequences, settings)
        there = [has_block(folder, block, count, settings) for block, count in enumerate(self._sizes)]
        if not all(there):
            raise UserError(
                f"teacher.cache: {folder} is not complete: {sum(there)} of {len(there)} files are written. Start "
                f"`{COMMAND}` again: it resumes with the rest"
            )

    def __reduce__(self) -> Any:
        return type(self), (self.folder, self.settings, sum(self._sizes))  # a worker process opens the files anew

    def __call__(self, index: int, sequence: TokenSequence) -> TokenSequence:
        """Return the sequence of an index with its entries: ids [L, K], log_probs [L, K], log_tail [L].

        Raises:
            UserError: the entries are damaged, or were made of other tokens.
        """
        block, at = divmod(index, self.settings.block_sequences)
        [record] = self._open(block).read(at, at + 1)
        if record["checksum"] != checksum(record["entries"], sequence):
            raise UserError(
                f"teacher.cache: {self.folder / block_name(block)} does not have the checksum of sequence {index:,}: "
                f"it is damaged, or the tokens have changed. {_remedy()}"
            )
        entries = record["entries"]
        added = {f"{PREFIX}{name}": entries[name] for name in ("log_probs", "log_tail")}
        return sequence._replace(added={f"{PREFIX}ids": entries["ids"].astype(np.int32), **added})

    def _open_file(self, block: int) -> RecordFile:
        path = self.folder / block_name(block)
        return RecordFile(path, self.settings.record, self._sizes[block], key="teacher.cache", remedy=_remedy())


def _remedy() -> str:
    return f"Restore it, or delete it: `{COMMAND}` then writes it again"
