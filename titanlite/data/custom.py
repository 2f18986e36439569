"""Sequences made by a user's class: data.path = "python://package.module:Name" or "python://file.py:Name"."""

import hashlib
from functools import partial
from typing import Any, Protocol

import numpy as np

from titanlite.data.packing import TokenSequence
from titanlite.runtime.errors import UserError
from titanlite.runtime.user_code import describe_error, find_object

PREFIX = "python://"


class Sequences(Protocol):
    """Interface of a user's class. Several processes read sequences, in any order and more than once: sequence i must
    be the same each time."""

    def __init__(self, seq_len: int) -> None: ...

    def __len__(self) -> int:
        """Return the number of sequences."""
        ...

    def __getitem__(self, index: int) -> Any:
        """Return seq_len + 1 token ids, as an array or a list: each predicts the next."""
        ...


class CustomSequences:
    """Reader of a user's sequences.

    Args:
        path: `data.path`, with the prefix python://.

    Raises:
        UserError: there is no such class, or it does not have the interface `Sequences`.
    """

    def __init__(self, path: str, *, seq_len: int, vocab_size: int) -> None:
        self.path = path
        self.seq_len = seq_len
        self.vocab_size = vocab_size
        sequences_cls = find_object(path.removeprefix(PREFIX))
        try:
            self._sequences: Sequences = sequences_cls(seq_len=seq_len)
            self._length = len(self._sequences)
        except Exception as error:  # the user's code may raise anything
            raise UserError(f"data.path: {path}: {describe_error(error)}") from error

    def __reduce__(self) -> Any:
        """Pickle the arguments only: a worker process makes the user's object again."""
        return partial(type(self), seq_len=self.seq_len, vocab_size=self.vocab_size), (self.path,)

    def __len__(self) -> int:
        return self._length

    @property
    def fingerprint(self) -> str:
        """Hash of the number of sequences, and of the first, the middle and the last one."""
        digest = hashlib.sha256(f"{self.path.rpartition('/')[2]} {len(self)} {self.seq_len}".encode())
        for index in sorted({0, len(self) // 2, len(self) - 1}) if len(self) else ():
            sequence = self.read(index)
            digest.update(sequence.tokens.tobytes() + sequence.labels[-1:].tobytes())
        return digest.hexdigest()[:16]

    def read(self, index: int) -> TokenSequence:
        """Return sequence `index`.

        Raises:
            UserError: the user's code fails, or returns something else than seq_len + 1 token ids of the vocabulary.
        """
        try:
            stretch = np.asarray(self._sequences[index])
        except Exception as error:
            raise UserError(f"data.path: {self.path}[{index}]: {describe_error(error)}") from error
        if stretch.shape != (self.seq_len + 1,) or stretch.dtype.kind not in "iu":
            raise UserError(
                f"data.path: {self.path}[{index}] should be {self.seq_len + 1} token ids (seq_len + 1), but it has "
                f"shape {stretch.shape} and type {stretch.dtype}"
            )
        if stretch.min() < 0 or stretch.max() >= self.vocab_size:
            raise UserError(
                f"data.path: {self.path}[{index}] has token ids from {stretch.min()} to {stretch.max()}, and the "
                f"tokenizer has {self.vocab_size} tokens (data.tokenizer)"
            )
        stretch = stretch.astype(np.int64)
        return TokenSequence(stretch[:-1], stretch[1:], np.zeros(1, dtype=np.int64))
