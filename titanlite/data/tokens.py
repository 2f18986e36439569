"""Token shards: what training reads. Random access to any stretch of tokens.

A folder holds `index.json`, and for each shard `NAME.tokens` (uint16 or uint32, little endian), `NAME.documents`
(uint64: where in the shard documents begin) and, if some of its tokens do not count in the loss, `NAME.mask` (one byte
a token, 0 for those). The folder is written beside its place and renamed when it is whole;
`titanlite.tools.ingest.background` reads it before that.
"""

import hashlib
import json
import os
import resource
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np

from titanlite.runtime.errors import UserError
from titanlite.runtime.files import checked_name, naming_path, read_small

# Files of records of one type, for random access: tokens, starts of documents, and plans of packing.
#
# Files are read, not mapped into memory: a read of a file that has become shorter is an error, and access to a map of
# it ends the process with SIGBUS.


class SortedRecords:
    """Ascending records, read where they are needed."""

    def __len__(self) -> int:
        raise NotImplementedError

    def read(self, begin: int, end: int) -> np.ndarray:
        """Return the records [begin, end)."""
        raise NotImplementedError

    def __getitem__(self, index: int) -> int:
        return int(self.read(index, index + 1)[0])

    def within(self, begin: int, end: int) -> np.ndarray:
        """Return the records with begin <= record < end, int64."""
        found = [np.empty(0, dtype=np.int64)]
        first = bisect_left(self, begin) if begin else 0
        while first < len(self):
            records = self.read(first, min(first + max(BLOCK, (end - begin) // 1024), len(self)))
            last = int(np.searchsorted(records, np.array(end, dtype=records.dtype)))
            found.append(records[:last].astype(np.int64))
            first += len(records)
            if last < len(records):
                break
        return np.concatenate(found)


class ArrayFile(SortedRecords):
    """Open file of records, which is closed when nothing refers to it.

    Args:
        count: number of records.
        key: option that names the folder, for errors.
        remedy: sentence that ends an error.
        offset: bytes before the records.

    Raises:
        UserError: the file is not there any more.
    """

    def __init__(self, path: Path, dtype: np.dtype, count: int, *, key: str, remedy: str, offset: int = 0) -> None:
        self.path = path
        self._dtype = dtype
        self._count = count
        self._offset = offset
        self._key = key
        self._remedy = remedy
        self._descriptor = -1
        try:
            self._descriptor = os.open(path, os.O_RDONLY)
        except FileNotFoundError:
            raise self._changed("is missing") from None

    def __del__(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)

    def __len__(self) -> int:
        return self._count

    def check_size(self) -> None:
        """Check that the file has all records, and nothing else.

        Raises:
            UserError: it has another size.
        """
        size = self._count * self._dtype.itemsize
        if (found := os.fstat(self._descriptor).st_size) != size:
            raise UserError(f"{self._key}: {self.path} has {found:,} bytes, and {size:,} are stated")

    def read(self, begin: int, end: int) -> np.ndarray:
        """Return the records [begin, end).

        Raises:
            UserError: the file has become shorter.
        """
        size, offset = ((number * self._dtype.itemsize) for number in (end - begin, begin))
        offset += self._offset
        data = b""
        while len(data) < size:  # one read returns 2 GiB at most
            with naming_path(self.path):
                more = os.pread(self._descriptor, size - len(data), offset + len(data))
            if not more:
                raise self._changed("has become shorter")
            data = data + more if data else more
        return np.frombuffer(data, dtype=self._dtype)

    def _changed(self, how: str) -> UserError:
        return UserError(f"{self._key}: {self.path} {how} since this start opened the folder. {self._remedy}")


FORMAT = 2
INDEX = "index.json"
GROWING = "growing.json"
"""Index of what is written so far, in the folder beside. The last shard may grow, and has no checksums yet."""
MOST_OPEN_FILES = 1024
"""Most files of a store that are open at once, where the limit of the process allows so many."""
TOKEN_BYTES = {"<u2": 2, "<u4": 4}
"""Bytes of a token by the `dtype` of an index."""
REMEDY = "Restore it, or delete the folder and prepare the text again"
BLOCK = 128
"""Starts of documents to read at once."""


class ShardFile(NamedTuple):
    """A file that an index states."""

    name: str
    size: int
    """Bytes."""
    sha256: str


def stated_files(index: Any, where: object) -> list[ShardFile]:
    """Return every file that an index states. Their names become paths.

    Args:
        where: path or URL of the index, for errors.

    Raises:
        UserError: a name is not plain (a path, "..", hidden), or has an unknown suffix.
        KeyError, TypeError, ValueError, AttributeError: the index is not of its form.
    """
    sizes = {"tokens": TOKEN_BYTES[index["dtype"]], "documents": 8, "mask": 1}
    files: list[ShardFile] = []
    for shard in index["shards"]:
        for kind, checksum in shard["sha256"].items():
            count = shard["documents" if kind == "documents" else "tokens"]
            files.append(ShardFile(_plain_name(shard["name"], kind, where), count * sizes[kind], checksum))
    if any(file.size < 0 for file in files) or len({file.name for file in files}) < len(files):
        raise ValueError("a negative number of tokens, or a file that is named twice")
    return files


def _plain_name(name: object, kind: object, where: object) -> str:
    file = f"{name}.{kind}"
    with suppress(ValueError):
        if not file.startswith(".") and kind in ("tokens", "documents", "mask"):
            return checked_name(file)
    raise UserError(f"data.path: {where} names a file {file!r}, which is no plain name of a shard's file")


class TokenStore:
    """The tokens of one prepared folder, as one stream.

    Raises:
        UserError: the folder is not complete.
    """

    is_complete = True
    remedy = "its files have changed. Restore them, or delete the folder and prepare the text again"
    """What an id beyond the vocabulary means."""

    def __init__(self, folder: Path) -> None:
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]  # -1 if there is no limit
        self._open = lru_cache(min(limit // 32, MOST_OPEN_FILES) if limit > 0 else MOST_OPEN_FILES)(self.open_file)
        self._read_folder(folder)

    def _read_folder(self, folder: Path) -> None:
        self.folder = folder
        try:
            self.index: dict[str, Any] = json.loads(read_small(folder / INDEX))
        except (OSError, ValueError, RecursionError) as error:
            raise UserError(f"data.path: {folder} is not a folder of prepared tokens: {error}") from None
        if not isinstance(self.index, dict) or self.index.get("format") != FORMAT:
            has = self.index.get("format") if isinstance(self.index, dict) else None
            raise UserError(f"data.path: {folder} has format {has}, this version reads {FORMAT}: prepare it again")
        try:
            self._read_index()
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            if isinstance(error, UserError):
                raise
            reason = f"{type(error).__name__}: {error}"
            raise UserError(f"data.path: {folder / INDEX} is damaged ({reason}). {REMEDY}") from None
        for path, size, _ in self.files():
            if not path.is_file() or path.stat().st_size != size:
                raise UserError(f"data.path: {path} is missing or does not have the size that {INDEX} states")

    def _read_index(self) -> None:
        """Read what the index states, all of which it must have."""
        self._dtypes = {"tokens": np.dtype(self.index["dtype"]), "documents": np.dtype("<u8"), "mask": np.dtype("u1")}
        self._starts = np.cumsum([0, *(shard["tokens"] for shard in self.index["shards"])])
        _ = [*self.files()], self.fingerprint, self.tokenizer_name, self.index["bos"], self.index["eos"]

    def __reduce__(self) -> tuple[type[Self], tuple[Any, ...]]:
        return type(self), (self.folder,)  # a worker process opens the files anew

    def __len__(self) -> int:
        return int(self._starts[-1])

    def wait_for(self, tokens: int) -> None:
        """Wait until there are as many tokens, or all."""

    @property
    def fingerprint(self) -> str:
        """Hash of the tokenizer and of all tokens, documents and masks in their order."""
        checksums = [shard["sha256"][kind] for shard in self.index["shards"] for kind in sorted(shard["sha256"])]
        parts = [self.index["tokenizer"]["fingerprint"], *checksums]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]

    @property
    def tokenizer_name(self) -> str:
        """Tokenizer of the tokens: the name that its user gave. Folders of older versions have no name."""
        made_with = self.index["tokenizer"]
        size = f"{made_with['vocab_size']:,} tokens"
        return f"{made_with['name']} ({size})" if made_with.get("name") else f"a tokenizer with {size}"

    @property
    def counts_bytes(self) -> bool:
        """Whether the tokens stand for as many bytes as the text had, to one in 1,000: normalizers may change a text.
        Tokens that were prepared before this was counted are taken to do."""
        if "token_bytes" not in self.index:
            return True
        return abs(self.index["token_bytes"] - self.index["text_bytes"]) * 1000 <= self.index["text_bytes"]

    @property
    def has_mask(self) -> bool:
        """True if some tokens do not count in the loss."""
        return any("mask" in shard["sha256"] for shard in self.index["shards"])

    @property
    def parts(self) -> Sequence["TokenStore"]:
        """The stores of one folder each that this one consists of."""
        return [self]

    def files(self) -> Iterator[tuple[Path, int, str]]:
        """Yield (path, bytes, SHA-256) of every file but the index."""
        for file in stated_files(self.index, self.folder / INDEX):
            yield self.folder / file.name, file.size, file.sha256

    def read(self, start: int, count: int) -> np.ndarray:
        """Return the tokens [start, start + count) of the stream, int64.

        Raises:
            UserError: an id is not in the vocabulary.
        """
        out = self.read_unchecked(start, count)
        worst = int(out.view(np.uint64).argmax()) if count else 0  # a negative number is beyond all others
        if count and not 0 <= out[worst] < self.index["tokenizer"]["vocab_size"]:
            raise UserError(
                f"data.path: {self.folder} has the token id {out[worst]:,} at {start + worst:,}, beyond the "
                f"{self.index['tokenizer']['vocab_size']:,} of its tokenizer: {self.remedy}"
            )
        return out

    def read_unchecked(self, start: int, count: int) -> np.ndarray:
        """Return the tokens [start, start + count) of the stream, int64, whatever ids they have."""
        out = np.empty(count, dtype=np.int64)
        for shard, begin, end, at in self.pieces(start, count):
            out[at : at + end - begin] = self._open(shard, "tokens").read(begin, end)
        return out

    def damaged(self, on_read: Callable[[int], None] = lambda size: None) -> Iterator[Path]:
        """Yield the files that have another checksum than stated.

        Args:
            on_read: called with the bytes of each file that was read.
        """
        for path, size, checksum in self.files():
            with open(path, "rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != checksum:
                    yield path
            on_read(size)

    def read_mask(self, start: int, count: int) -> np.ndarray:
        """Return for each of the tokens [start, start + count) if it counts in the loss, bool."""
        out = np.ones(count, dtype=np.bool_)
        for shard, begin, end, at in self.pieces(start, count):
            if "mask" in self.index["shards"][shard]["sha256"]:
                out[at : at + end - begin] = self._open(shard, "mask").read(begin, end)
        return out

    def document_starts(self, start: int, count: int) -> np.ndarray:
        """Return the starts of the documents that begin within [start, start + count) of the stream, int64."""
        found = [np.empty(0, dtype=np.int64)]
        for shard, begin, end, _ in self.pieces(start, count):
            found.append(self._open(shard, "documents").within(begin, end) + int(self._starts[shard]))
        return np.concatenate(found)

    def pieces(self, start: int, count: int) -> Iterator[tuple[int, int, int, int]]:
        """Yield (shard, begin and end within it, place in the result) of each shard's part of a stretch."""
        assert 0 <= start <= start + count <= len(self), (start, count, len(self))
        shard = int(np.searchsorted(self._starts, start, side="right")) - 1
        done = 0
        while done < count:
            begin = start + done - int(self._starts[shard])
            end = min(begin + count - done, int(self._starts[shard + 1] - self._starts[shard]))
            yield shard, begin, end, done
            done += end - begin
            shard += 1

    def open_file(self, shard: int, kind: str) -> ArrayFile:
        """Open the tokens, documents or mask of a shard."""
        about = self.index["shards"][shard]
        count = about["documents" if kind == "documents" else "tokens"]
        path = self.folder / f"{about['name']}.{kind}"
        return ArrayFile(path, self._dtypes[kind], count, key="data.path", remedy=REMEDY)


class JoinedTokens(TokenStore):
    """The tokens of several folders, one after another, as one stream.

    Args:
        parts: made with the same tokenizer and options.
    """

    def __init__(self, parts: Sequence[TokenStore]) -> None:
        self._parts = parts
        super().__init__(parts[0].folder)

    def _read_folder(self, folder: Path) -> None:
        self.folder = folder
        self.index = {key: self._parts[0].index[key] for key in ("tokenizer", "bos", "eos")}
        self.index["tokens"] = sum(len(part) for part in self._parts)
        if all("documents" in part.index for part in self._parts):
            self.index["documents"] = sum(part.index["documents"] for part in self._parts)
        self._shards = [(part, number) for part in self._parts for number in range(len(part.index["shards"]))]
        self.index["shards"] = [part.index["shards"][number] for part, number in self._shards]
        self._starts = np.cumsum([0, *(shard["tokens"] for shard in self.index["shards"])])

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._parts,)

    @property
    def counts_bytes(self) -> bool:
        """Whether those of all parts do."""
        return all(part.counts_bytes for part in self._parts)

    @property
    def parts(self) -> Sequence[TokenStore]:
        return self._parts

    def files(self) -> Iterator[tuple[Path, int, str]]:
        return (file for part in self._parts for file in part.files())

    def open_file(self, shard: int, kind: str) -> ArrayFile:
        part, number = self._shards[shard]
        return part.open_file(number, kind)
