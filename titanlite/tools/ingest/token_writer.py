"""Write token shards: the form is that of `titanlite.data.tokens`, which reads them.

A folder of tokens is written beside its place and renamed when it is complete. Readers that want a part of it find what
is written so far in `GROWING`: bytes up to there never change, also where a killed process is followed by another.
"""

import hashlib
import json
import math
import os
import platform
import shutil
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

import numpy as np

from titanlite.data.tokens import FORMAT, GROWING, INDEX
from titanlite.runtime.files import publish, read_small, write_atomically

PROGRESS = "resume.json"
SHARD_TOKENS = 2**27
GROWING_TOKENS = 2**20
"""Tokens between two states of `GROWING`."""


class TokenWriter:
    """Writes documents to a folder that appears, whole, when the `with` block ends without an error.

    Until then they are in a folder beside it, with the state to resume after the last finished shard.

    Args:
        bos, eos: whether documents begin and end with special tokens; recorded in the index.
        key: of all that the result depends on. The writer resumes what an earlier attempt with the same key
            left, see `position`.
    """

    def __init__(
        self,
        folder: Path,
        *,
        vocab_size: int,
        tokenizer: str,
        bos: bool = True,
        eos: bool = True,
        shard_tokens: int = SHARD_TOKENS,
        key: str = "",
    ) -> None:
        self.folder = folder
        self.position: Any = None
        """Position after the last finished shard, from `add`; None at the beginning."""
        self.notes: dict[str, Any] = {}
        """Entries of the caller: kept with the position, and added to the index."""
        self._staging = folder.with_name(f".{folder.name}.partial-{platform.node()}")
        self._about = {"dtype": "<u2" if vocab_size <= 2**16 else "<u4", "bos": bos, "eos": eos}
        self._tokenizer = {"fingerprint": tokenizer, "vocab_size": vocab_size}
        self._shard_tokens = shard_tokens
        self._key = key
        self._counts = np.zeros(vocab_size, dtype=np.int64)
        self._shards: list[dict[str, Any]] = []
        self._shard: _Shard | None = None
        self._shown = 0

    @property
    def tokens(self) -> int:
        """Written so far."""
        return int(self._counts.sum())

    def __enter__(self) -> Self:
        if not self._resume():
            shutil.rmtree(self._staging, ignore_errors=True)
            self._staging.mkdir(parents=True)
            self._save()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if kind is None:
            self._commit()
            return
        if self._shard:
            self._shard.close()
        if not self._shards:
            shutil.rmtree(self._staging, ignore_errors=True)

    def add(
        self,
        tokens: np.ndarray,
        starts: np.ndarray | None = None,
        mask: np.ndarray | None = None,
        *,
        position: Any = None,
    ) -> None:
        """Add tokens of documents. The shard is closed if it is full, and nothing up to here is ever done again.

        Args:
            starts: where in `tokens` documents begin. Tokens before the first belong to the document before. Default:
                all is one document.
            mask: which tokens count in the loss; default: all.
            position: of types of JSON, from which reading can resume after these tokens.
        """
        if self._shard is None:
            self._shard = _Shard(self._staging, f"{len(self._shards):05d}", np.dtype(self._about["dtype"]))
        self._shard.add(tokens, np.zeros(1, dtype=np.int64) if starts is None else starts, mask)
        self._counts += np.bincount(tokens, minlength=len(self._counts))
        if self._shard.tokens >= self._shard_tokens:
            self._close_shard()
            self.position = position
            self._save()
        if self.tokens >= self._shown + min(GROWING_TOKENS, self._shard_tokens):
            self._shown = self.tokens
            shards = self._shards + ([self._shard.show()] if self._shard else [])
            write_atomically(self._staging / GROWING, json.dumps({**self._index(), "key": self._key, "shards": shards}))

    def _save(self) -> None:
        state = {"key": self._key, "shards": self._shards, "position": self.position, "notes": self.notes}
        write_atomically(self._staging / PROGRESS, json.dumps({**state, "counts": self._counts.tolist()}))

    def _index(self) -> dict[str, Any]:
        return {"format": FORMAT, **self._about, "tokenizer": self._tokenizer}

    def _close_shard(self) -> None:
        if self._shard:
            self._shards.append(self._shard.close())
            self._shard = None

    def _resume(self) -> bool:
        try:
            state = json.loads(read_small(self._staging / PROGRESS))
            if state["key"] != self._key:
                return False
            self._counts = np.array(state["counts"])
        except (OSError, ValueError, KeyError, TypeError):
            return False
        self._shards, self.position, self.notes = state["shards"], state["position"], state["notes"]
        return True

    def _commit(self) -> None:
        self._close_shard()
        index = {
            **self._index(),
            "tokens": self.tokens,
            "documents": sum(shard["documents"] for shard in self._shards),
            "unigram_entropy": unigram_entropy(self._counts),
            **self.notes,
            "shards": self._shards,
        }
        write_atomically(self._staging / INDEX, json.dumps(index, indent=1))
        publish(self._staging, self.folder, last=INDEX)
        for name in (PROGRESS, GROWING):
            (self.folder / name).unlink(missing_ok=True)  # a resume needs these files until here


class _Shard:
    """The files of one shard, while they are written."""

    def __init__(self, folder: Path, name: str, dtype: np.dtype) -> None:
        self.tokens = 0
        self._folder = folder
        self._name = name
        self._dtype = dtype
        self._documents = 0
        self._files: dict[str, IO[bytes]] = {}
        self._hashes: dict[str, Any] = {}

    def add(self, tokens: np.ndarray, starts: np.ndarray, mask: np.ndarray | None) -> None:
        self._write("documents", (starts + self.tokens).astype("<u8"))
        self._documents += len(starts)
        if mask is not None and "mask" not in self._files and not mask.all():
            self._write("mask", np.ones(self.tokens, dtype=np.uint8))
        if "mask" in self._files:
            self._write("mask", np.ones(len(tokens), dtype=np.uint8) if mask is None else mask.astype(np.uint8))
        self._write("tokens", tokens.astype(self._dtype, copy=False))
        self.tokens += len(tokens)

    def close(self) -> dict[str, Any]:
        """Return the shard's record in the index."""
        for file in self._files.values():
            file.truncate()
            file.flush()
            os.fsync(file.fileno())
            file.close()
        return self._record({kind: digest.hexdigest() for kind, digest in sorted(self._hashes.items())})

    def show(self) -> dict[str, Any]:
        """Return the record of what readers find so far."""
        for file in self._files.values():
            file.flush()
        return self._record(dict.fromkeys(self._files, ""))

    def _record(self, checksums: dict[str, str]) -> dict[str, Any]:
        return {"name": self._name, "tokens": self.tokens, "documents": self._documents, "sha256": checksums}

    def _write(self, kind: str, values: np.ndarray) -> None:
        if kind not in self._files:
            # What a killed process has left stays, because it is the same, and others may be reading it.
            self._files[kind] = open(self._folder / f"{self._name}.{kind}", "wb", opener=_open_as_it_is)  # noqa: SIM115
            self._hashes[kind] = hashlib.sha256()
        data = np.ascontiguousarray(values).data
        if len(values):
            self._files[kind].write(data)
            self._hashes[kind].update(data)


def _open_as_it_is(path: str, flags: int) -> int:
    return os.open(path, flags & ~os.O_TRUNC, 0o666)


def unigram_entropy(counts: np.ndarray) -> float:
    """Return nats a token: the loss of a model that knows how often each token occurs, and nothing of their order."""
    total = counts.sum()
    if total == 0:
        return 0.0
    shares = counts[counts > 0] / total
    return float(math.fsum(-shares * np.log(shares)))
