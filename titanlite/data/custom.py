"""Sequences that a class of the user's makes: data.path = "python://package.module:Name" or "python://file.py:Name"."""

import hashlib
from typing import Any, Protocol

import numpy as np

from titanlite.data.packing import Row
from titanlite.runtime.errors import UserError
from titanlite.runtime.user_code import find_object

PREFIX = "python://"


class Sequences(Protocol):
    """What such a class offers. Sequences are read in any order, by several processes, and more than once: number i
    must be the same each time."""

    def __init__(self, seq_len: int) -> None: ...

    def __len__(self) -> int:
        """How many sequences there are."""
        ...

    def __getitem__(self, index: int) -> Any:
        """seq_len + 1 token ids, as an array or a list: each predicts the next."""
        ...


class CustomRows:
    """A user's sequences as rows of a source.

    Raises:
        UserError: there is no such class, or what it makes is not what `Sequences` says.
    """

    def __init__(self, path: str, *, seq_len: int, vocab_size: int) -> None:
        self.path = path
        self.seq_len = seq_len
        self.vocab_size = vocab_size
        kind = find_object(path.removeprefix(PREFIX))
        try:
            self._sequences: Sequences = kind(seq_len=seq_len)
            self._length = len(self._sequences)
        except Exception as error:  # the user's code may raise anything
            raise UserError(f"data.path: {path}: {type(error).__name__}: {error}") from error

    def __reduce__(self) -> Any:
        """A worker process makes the user's object anew."""
        return _rebuild, (self.path, self.seq_len, self.vocab_size)

    def __len__(self) -> int:
        return self._length

    @property
    def fingerprint(self) -> str:
        """Another one where the number of sequences, or one of three of them, is another."""
        digest = hashlib.sha256(f"{self.path.rpartition('/')[2]} {len(self)} {self.seq_len}".encode())
        for index in sorted({0, len(self) // 2, len(self) - 1}) if len(self) else ():
            row = self.read(index)
            digest.update(row.tokens.tobytes() + row.labels[-1:].tobytes())
        return digest.hexdigest()[:16]

    def read(self, index: int) -> Row:
        try:
            stretch = np.asarray(self._sequences[index])
        except Exception as error:
            raise UserError(f"data.path: {self.path}[{index}]: {type(error).__name__}: {error}") from error
        if stretch.shape != (self.seq_len + 1,) or stretch.dtype.kind not in "iu":
            raise UserError(
                f"data.path: {self.path}[{index}] should be {self.seq_len + 1} token ids (seq_len + 1), and is of "
                f"shape {stretch.shape} and type {stretch.dtype}"
            )
        if stretch.min() < 0 or stretch.max() >= self.vocab_size:
            raise UserError(
                f"data.path: {self.path}[{index}] has token ids from {stretch.min()} to {stretch.max()}, and the "
                f"tokenizer {self.vocab_size} tokens (data.tokenizer)"
            )
        stretch = stretch.astype(np.int64)
        return Row(stretch[:-1], stretch[1:], np.zeros(1, dtype=np.int64))


def _rebuild(path: str, seq_len: int, vocab_size: int) -> CustomRows:
    return CustomRows(path, seq_len=seq_len, vocab_size=vocab_size)
