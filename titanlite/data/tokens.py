"""Token shards: what training reads. Random access to any stretch of tokens, memory-mapped.

A folder holds `index.json`, and for each shard `NAME.tokens` (uint16 or uint32, little endian) and `NAME.documents`
(uint64: where each document begins in the shard). The folder is written beside its place and renamed when it is whole.
"""

import hashlib
import json
import math
import os
import platform
import shutil
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from titanlite.errors import UserError

FORMAT = 1
INDEX = "index.json"
SHARD_TOKENS = 2**28


class TokenStore:
    """The tokens of one prepared folder, as one stream.

    Raises:
        UserError: the folder is not complete.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            self.index: dict[str, Any] = json.loads((folder / INDEX).read_text())
        except (OSError, ValueError) as error:
            raise UserError(f"data.path: {folder} is not a folder of prepared tokens: {error}") from None
        if self.index.get("format") != FORMAT:
            raise UserError(f"data.path: {folder} has format {self.index.get('format')}, this version reads {FORMAT}")
        dtype = np.dtype(self.index["dtype"])
        self._shards: list[np.ndarray] = []
        for shard in self.index["shards"]:
            path = folder / f"{shard['name']}.tokens"
            if not path.is_file() or path.stat().st_size != shard["tokens"] * dtype.itemsize:
                raise UserError(f"data.path: {path} is missing or does not have the size that {INDEX} states")
            self._shards.append(np.memmap(path, dtype=dtype, mode="r"))
        self._starts = np.cumsum([0, *(len(shard) for shard in self._shards)])

    def __reduce__(self) -> tuple[type[Self], tuple[Path]]:
        return type(self), (self.folder,)  # a worker process maps the files anew

    def __len__(self) -> int:
        return int(self._starts[-1])

    @property
    def fingerprint(self) -> str:
        """Equal for equal tokens in equal order."""
        parts = [self.index["tokenizer"]["fingerprint"], *(shard["sha256"] for shard in self.index["shards"])]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]

    def read(self, start: int, count: int) -> np.ndarray:
        """Tokens [start, start + count) of the stream, int64."""
        assert 0 <= start <= start + count <= len(self), (start, count, len(self))
        out = np.empty(count, dtype=np.int64)
        done = 0
        shard = int(np.searchsorted(self._starts, start, side="right")) - 1
        while done < count:
            offset = start + done - int(self._starts[shard])
            piece = self._shards[shard][offset : offset + count - done]
            out[done : done + len(piece)] = piece
            done += len(piece)
            shard += 1
        return out

    def count_sequences(self, seq_len: int) -> int:
        """Sequences of seq_len tokens, each with the token after it, that do not overlap in what they predict."""
        return max(0, (len(self) - 1) // seq_len)


class TokenWriter:
    """Writes documents to a folder that appears, whole, when the `with` block ends without an error."""

    def __init__(self, folder: Path, *, vocab_size: int, tokenizer: str, shard_tokens: int = SHARD_TOKENS) -> None:
        self.folder = folder
        self._staging = folder.with_name(f".{folder.name}.staging-{platform.node()}-{os.getpid()}")
        self._dtype = np.dtype("<u2" if vocab_size <= 2**16 else "<u4")
        self._tokenizer = {"fingerprint": tokenizer, "vocab_size": vocab_size}
        self._shard_tokens = shard_tokens
        self._counts = np.zeros(vocab_size, dtype=np.int64)
        self._shards: list[dict[str, Any]] = []
        self._pieces: list[np.ndarray] = []
        self._documents: list[int] = []
        self._size = 0

    def __enter__(self) -> Self:
        shutil.rmtree(self._staging, ignore_errors=True)
        self._staging.mkdir(parents=True)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if kind is None:
            self._commit()
        else:
            shutil.rmtree(self._staging, ignore_errors=True)

    def add(self, document: np.ndarray) -> None:
        self._documents.append(self._size)
        self._pieces.append(document.astype(self._dtype))
        self._size += len(document)
        self._counts += np.bincount(document, minlength=len(self._counts))
        if self._size >= self._shard_tokens:
            self._flush()

    def _flush(self) -> None:
        name = f"{len(self._shards):05d}"
        tokens = np.concatenate(self._pieces)
        tokens.tofile(self._staging / f"{name}.tokens")
        np.array(self._documents, dtype="<u8").tofile(self._staging / f"{name}.documents")
        digest = hashlib.sha256(tokens.data).hexdigest()
        self._shards.append({"name": name, "tokens": self._size, "documents": len(self._documents), "sha256": digest})
        self._pieces, self._documents, self._size = [], [], 0

    def _commit(self) -> None:
        if self._pieces:
            self._flush()
        index = {
            "format": FORMAT,
            "dtype": self._dtype.str,
            "tokenizer": self._tokenizer,
            "tokens": int(self._counts.sum()),
            "documents": sum(shard["documents"] for shard in self._shards),
            "unigram_entropy": unigram_entropy(self._counts),
            "shards": self._shards,
        }
        (self._staging / INDEX).write_text(json.dumps(index, indent=1))
        try:
            os.rename(self._staging, self.folder)
        except OSError:  # another machine was faster; others may read its folder already
            shutil.rmtree(self._staging)
            if not (self.folder / INDEX).is_file():
                raise


def unigram_entropy(counts: np.ndarray) -> float:
    """Nats a token: the loss of a model that knows how often each token occurs, and nothing of their order."""
    total = counts.sum()
    if total == 0:
        return 0.0
    shares = counts[counts > 0] / total
    return float(math.fsum(-shares * np.log(shares)))
