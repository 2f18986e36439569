"""Token shards: what training reads. Random access to any stretch of tokens, memory-mapped.

A folder holds `index.json`, and for each shard `NAME.tokens` (uint16 or uint32, little endian), `NAME.documents`
(uint64: where in the shard documents begin) and, if some of its tokens do not count in the loss, `NAME.mask` (one byte
a token, 0 for those). The folder is written beside its place and renamed when it is whole.
"""

import hashlib
import json
import math
import os
import platform
import shutil
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

import numpy as np

from titanlite.runtime.errors import UserError

FORMAT = 2
INDEX = "index.json"
PROGRESS = "progress.json"
SHARD_TOKENS = 2**27
MOST_OPEN_SHARDS = 1024
"""Of tens of thousands of shards not all can be mapped at once (vm.max_map_count)."""


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
        if not isinstance(self.index, dict) or self.index.get("format") != FORMAT:
            has = self.index.get("format") if isinstance(self.index, dict) else None
            raise UserError(f"data.path: {folder} has format {has}, this version reads {FORMAT}: prepare it again")
        self._dtypes = {"tokens": np.dtype(self.index["dtype"]), "documents": np.dtype("<u8"), "mask": np.dtype("u1")}
        self._starts = np.cumsum([0, *(shard["tokens"] for shard in self.index["shards"])])
        for path, size, _ in self.files():
            if not path.is_file() or path.stat().st_size != size:
                raise UserError(f"data.path: {path} is missing or does not have the size that {INDEX} states")
        self._map = lru_cache(MOST_OPEN_SHARDS)(self._map_file)

    def __reduce__(self) -> tuple[type[Self], tuple[Path]]:
        return type(self), (self.folder,)  # a worker process maps the files anew

    def __len__(self) -> int:
        return int(self._starts[-1])

    @property
    def fingerprint(self) -> str:
        """Equal for equal tokens, documents and masks in equal order."""
        checksums = [shard["sha256"][kind] for shard in self.index["shards"] for kind in sorted(shard["sha256"])]
        parts = [self.index["tokenizer"]["fingerprint"], *checksums]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]

    @property
    def has_mask(self) -> bool:
        """Whether some tokens do not count in the loss."""
        return any("mask" in shard["sha256"] for shard in self.index["shards"])

    def files(self) -> Iterator[tuple[Path, int, str]]:
        """(path, bytes, SHA-256) of every file but the index."""
        for shard in self.index["shards"]:
            for kind, checksum in shard["sha256"].items():
                count = shard["documents" if kind == "documents" else "tokens"]
                yield self.folder / f"{shard['name']}.{kind}", count * self._dtypes[kind].itemsize, checksum

    def read(self, start: int, count: int) -> np.ndarray:
        """Tokens [start, start + count) of the stream, int64."""
        out = np.empty(count, dtype=np.int64)
        for shard, begin, end, at in self._pieces(start, count):
            out[at : at + end - begin] = self._map(shard, "tokens")[begin:end]
        return out

    def read_mask(self, start: int, count: int) -> np.ndarray:
        """Which of the tokens [start, start + count) count in the loss, bool."""
        out = np.ones(count, dtype=np.bool_)
        for shard, begin, end, at in self._pieces(start, count):
            if "mask" in self.index["shards"][shard]["sha256"]:
                out[at : at + end - begin] = self._map(shard, "mask")[begin:end]
        return out

    def document_starts(self, start: int, count: int) -> np.ndarray:
        """Where in the stream documents begin, of those that begin within [start, start + count); int64, ascending."""
        found = [np.empty(0, dtype=np.int64)]
        for shard, begin, end, _ in self._pieces(start, count):
            starts = self._map(shard, "documents")
            first, last = np.searchsorted(starts, np.array([begin, end], dtype=starts.dtype))
            found.append(starts[first:last].astype(np.int64) + int(self._starts[shard]))
        return np.concatenate(found)

    def _pieces(self, start: int, count: int) -> Iterator[tuple[int, int, int, int]]:
        """(shard, begin and end within it, place in the result) of each shard's part of a stretch."""
        assert 0 <= start <= start + count <= len(self), (start, count, len(self))
        shard = int(np.searchsorted(self._starts, start, side="right")) - 1
        done = 0
        while done < count:
            begin = start + done - int(self._starts[shard])
            end = min(begin + count - done, int(self._starts[shard + 1] - self._starts[shard]))
            yield shard, begin, end, done
            done += end - begin
            shard += 1

    def _map_file(self, shard: int, kind: str) -> np.ndarray:
        path = self.folder / f"{self.index['shards'][shard]['name']}.{kind}"
        if path.stat().st_size == 0:
            return np.empty(0, dtype=self._dtypes[kind])
        return np.memmap(path, dtype=self._dtypes[kind], mode="r").view(np.ndarray)  # a plain array is read faster


class TokenWriter:
    """Writes documents to a folder that appears, whole, when the `with` block ends without an error.

    Until then they are in a folder beside it, with what is needed to go on after a kill from the last finished shard.

    Args:
        bos, eos: whether documents begin and end with a token that says so; for the record.
        key: of all that the result depends on. What an earlier attempt with the same key left is gone on from: see
            `position`. Without a key there is no going on.
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
        """What `end_chunk` was told last, of what is kept; None where nothing is."""
        self.notes: dict[str, Any] = {}
        """Figures of the caller: kept with the position, and added to the index."""
        self._staging = folder.with_name(f".{folder.name}.partial-{platform.node()}")
        self._about = {"dtype": "<u2" if vocab_size <= 2**16 else "<u4", "bos": bos, "eos": eos}
        self._tokenizer = {"fingerprint": tokenizer, "vocab_size": vocab_size}
        self._shard_tokens = shard_tokens
        self._key = key
        self._counts = np.zeros(vocab_size, dtype=np.int64)
        self._shards: list[dict[str, Any]] = []
        self._shard: _Shard | None = None

    @property
    def tokens(self) -> int:
        """Written so far."""
        return int(self._counts.sum())

    def __enter__(self) -> Self:
        if not self._go_on():
            shutil.rmtree(self._staging, ignore_errors=True)
            self._staging.mkdir(parents=True)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if kind is None:
            self._commit()
            return
        if self._shard:
            self._shard.close()
        if not self._key or not self._shards:
            shutil.rmtree(self._staging, ignore_errors=True)

    def add(self, tokens: np.ndarray, starts: np.ndarray | None = None, mask: np.ndarray | None = None) -> None:
        """Add tokens of documents.

        Args:
            starts: where in `tokens` documents begin. What is before the first goes on with the one before. Default:
                all is one document.
            mask: which tokens count in the loss; default: all.
        """
        if self._shard is None:
            self._shard = _Shard(self._staging, f"{len(self._shards):05d}", np.dtype(self._about["dtype"]))
        self._shard.add(tokens, np.zeros(1, dtype=np.int64) if starts is None else starts, mask)
        self._counts += np.bincount(tokens, minlength=len(self._counts))
        if not self._key:
            self.end_chunk(None)

    def end_chunk(self, position: Any) -> None:
        """Say where reading would go on after what was added (anything that JSON can hold). The shard is closed here if
        it is full, and then nothing before this position is ever done again."""
        if self._shard and self._shard.tokens >= self._shard_tokens:
            self._close_shard()
            self.position = position
            if self._key:
                self._keep()

    def _close_shard(self) -> None:
        if self._shard:
            self._shards.append(self._shard.close())
            self._shard = None

    def _keep(self) -> None:
        counts = self._staging / f"counts-{len(self._shards)}.npy"
        np.save(counts, self._counts)
        state = {"key": self._key, "shards": self._shards, "position": self.position, "notes": self.notes}
        staging = self._staging / f".{PROGRESS}"
        staging.write_text(json.dumps(state))
        os.replace(staging, self._staging / PROGRESS)
        for old in self._staging.glob("counts-*.npy"):
            if old != counts:
                old.unlink()

    def _go_on(self) -> bool:
        try:
            state = json.loads((self._staging / PROGRESS).read_text())
            if not self._key or state["key"] != self._key:
                return False
            self._counts = np.load(self._staging / f"counts-{len(state['shards'])}.npy")
        except (OSError, ValueError):
            return False
        self._shards, self.position, self.notes = state["shards"], state["position"], state["notes"]
        return True

    def _commit(self) -> None:
        self._close_shard()
        index = {
            "format": FORMAT,
            **self._about,
            "tokenizer": self._tokenizer,
            "tokens": self.tokens,
            "documents": sum(shard["documents"] for shard in self._shards),
            "unigram_entropy": unigram_entropy(self._counts),
            **self.notes,
            "shards": self._shards,
        }
        with open(self._staging / INDEX, "w") as file:
            json.dump(index, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        try:
            os.rename(self._staging, self.folder)
        except OSError:  # another machine was faster; others may read its folder already
            shutil.rmtree(self._staging)
            if not (self.folder / INDEX).is_file():
                raise
        for left_over in (*self.folder.glob("counts-*.npy"), self.folder / PROGRESS):  # wanted until here
            left_over.unlink(missing_ok=True)


class _Shard:
    """The files of one shard, while they are written."""

    def __init__(self, folder: Path, name: str, dtype: np.dtype) -> None:
        self.tokens = 0
        self._folder = folder
        self._name = name
        self._dtype = dtype
        self._starts: list[np.ndarray] = []
        self._files: dict[str, IO[bytes]] = {}
        self._hashes: dict[str, Any] = {}

    def add(self, tokens: np.ndarray, starts: np.ndarray, mask: np.ndarray | None) -> None:
        self._starts.append(starts + self.tokens)
        if mask is not None and "mask" not in self._files and not mask.all():
            self._write("mask", np.ones(self.tokens, dtype=np.uint8))
        if "mask" in self._files:
            self._write("mask", np.ones(len(tokens), dtype=np.uint8) if mask is None else mask.astype(np.uint8))
        self._write("tokens", tokens.astype(self._dtype, copy=False))
        self.tokens += len(tokens)

    def close(self) -> dict[str, Any]:
        """Returns the shard's record in the index."""
        starts = np.concatenate(self._starts).astype("<u8")
        self._write("documents", starts)
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())
            file.close()
        checksums = {kind: digest.hexdigest() for kind, digest in sorted(self._hashes.items())}
        return {"name": self._name, "tokens": self.tokens, "documents": len(starts), "sha256": checksums}

    def _write(self, kind: str, values: np.ndarray) -> None:
        if kind not in self._files:
            self._files[kind] = open(self._folder / f"{self._name}.{kind}", "wb")  # noqa: SIM115 (open until close())
            self._hashes[kind] = hashlib.sha256()
        data = np.ascontiguousarray(values).data
        if len(values):
            self._files[kind].write(data)
            self._hashes[kind].update(data)


def unigram_entropy(counts: np.ndarray) -> float:
    """Nats a token: the loss of a model that knows how often each token occurs, and nothing of their order."""
    total = counts.sum()
    if total == 0:
        return 0.0
    shares = counts[counts > 0] / total
    return float(math.fsum(-shares * np.log(shares)))
