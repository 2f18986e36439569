"""Tokens that Megatron-LM prepared, read in place: NAME.bin and NAME.idx of its IndexedDataset (Megatron-core 0.16).

The `.idx` holds a header of 9 bytes, the version and the dtype of the tokens, then for each sequence its length (int32)
and its first byte in the `.bin` (int64), and for each document the number of its first sequence (int64), with one more
number at the end.
"""

import hashlib
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from titanlite.data.tokenizer import Tokenizer
from titanlite.data.tokens import ArrayFile, TokenStore
from titanlite.runtime.errors import UserError
from titanlite.runtime.files import naming_path

HEADER = struct.Struct("<9sQBQQ")
MAGIC = b"MMIDIDX\0\0"
DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
"""Types of tokens by their code. Those of numbers with a point are no tokens."""
SUFFIXES = ".idx", ".bin"
BLOCK = 2**12
SAMPLED = 64
"""Blocks of each file that the fingerprint depends on, and documents whose boundaries are looked at."""
REMEDY = "Restore it"


def megatron_prefix(path: str) -> str | None:
    """Return NAME of a path that is NAME, NAME.bin or NAME.idx of an IndexedDataset; None for another path."""
    prefix = path.removesuffix(".bin") if path.endswith(".bin") else path.removesuffix(".idx")
    try:
        with open(f"{prefix}.idx", "rb") as file:
            return prefix if file.read(len(MAGIC)) == MAGIC else None
    except OSError:
        return None


class MegatronTokens(TokenStore):
    """The tokens of one IndexedDataset. Only what is read is in memory.

    Args:
        prefix: path without .bin or .idx.
        tokenizer: the one that wrote it, which the files do not name.

    Raises:
        UserError: a file is damaged, or holds what the tokenizer cannot have written.
    """

    def __init__(self, prefix: Path, tokenizer: Tokenizer | dict[str, Any]) -> None:
        if isinstance(tokenizer, dict):
            self._about = tokenizer
        else:
            known = {"fingerprint": tokenizer.fingerprint, "vocab_size": tokenizer.vocab_size, "name": tokenizer.name}
            self._about = {"tokenizer": known, "bos": tokenizer.bos_id, "eos": tokenizer.eos_id}
        super().__init__(prefix)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.folder, self._about)

    def _read_folder(self, folder: Path) -> None:
        self.folder = folder
        self._idx, self._bin = (folder.with_name(f"{folder.name}{suffix}") for suffix in SUFFIXES)
        try:
            with naming_path(self._idx), open(self._idx, "rb") as file:
                _, version, code, sequences, ends = HEADER.unpack(file.read(HEADER.size))
            sizes = [os.stat(path).st_size for path in (self._idx, self._bin)]
        except (OSError, struct.error) as error:
            raise UserError(f"data.path: {folder} cannot be read as Megatron's: {error}") from None
        if version != 1 or code not in DTYPES:
            raise UserError(f"data.path: {self._idx} has version {version} and dtype {code}, which are not read")
        self._dtype = np.dtype(DTYPES[code])
        self._places = HEADER.size + 4 * sequences, sequences
        self._ends = HEADER.size + 12 * sequences, ends
        whole = HEADER.size + 12 * sequences + 8 * ends
        if sizes[0] not in (whole, whole + sequences) or ends < 1:  # with a mode of each sequence, of images and text
            raise UserError(f"data.path: {self._idx} has {sizes[0]:,} bytes, and its header states {whole:,}")
        tokens, left = divmod(sizes[1], self._dtype.itemsize)
        last = self._array(self._places, "<i8").read(sequences - 1, sequences)[0] if sequences else 0
        length = self._array((HEADER.size, sequences), "<i4").read(sequences - 1, sequences)[0] if sequences else 0
        if left or last + int(length) * self._dtype.itemsize != sizes[1]:
            raise UserError(f"data.path: {self._bin} has {sizes[1]:,} bytes, and {self._idx.name} states others")
        shard = {"name": folder.name, "tokens": tokens, "documents": ends - 1, "sha256": {}}
        counts = {"tokens": tokens, "documents": ends - 1, "shards": [shard], "dtype": self._dtype.str}
        self.index = {"tokenizer": self._about["tokenizer"], **counts}
        self._starts = np.array([0, tokens])
        self._look_at_documents()

    def _look_at_documents(self) -> None:
        """Find whether documents begin and end with special tokens, and check that ids are those of the vocabulary."""
        documents, begins, ends = self.index["documents"], [], []
        file = self.open_file(0, "documents")
        for number in {*np.linspace(0, documents - 1, min(documents, SAMPLED), dtype=np.int64).tolist()}:
            start = file[number]
            end = file[number + 1] if number + 1 < documents else len(self)
            if start < end:
                document = self.read(start, min(end - start, BLOCK))
                if document.min() < 0:
                    raise UserError(f"data.path: {self._bin} has the token id {document.min()} in document {number:,}")
                begins.append(document[0] == self._about["bos"])
                ends.append(self.read(end - 1, 1)[0] == self._about["eos"])
        self.index |= {"bos": bool(begins) and all(begins), "eos": bool(ends) and all(ends)}

    @property
    def fingerprint(self) -> str:
        """Hash of the tokenizer, of the sizes of the files and of blocks of them."""
        found = hashlib.sha256(self.index["tokenizer"]["fingerprint"].encode())
        for path in (self._idx, self._bin):
            with naming_path(path), open(path, "rb") as file:
                size = os.fstat(file.fileno()).st_size
                found.update(size.to_bytes(8, "little"))
                for at in np.linspace(0, max(size - BLOCK, 0), SAMPLED, dtype=np.int64).tolist():
                    found.update(os.pread(file.fileno(), BLOCK, at))
        return found.hexdigest()[:16]

    @property
    def counts_bytes(self) -> bool:
        """False: the text is not there."""
        return False

    def files(self) -> Iterator[tuple[Path, int, str]]:
        """Yield no file: none has a checksum."""
        return iter(())

    def open_file(self, shard: int, kind: str) -> Any:
        """Open the tokens, or the starts of documents."""
        if kind == "documents":
            return _Starts(self, self._array(self._ends, "<i8"), self._array(self._places, "<i8"))
        return ArrayFile(self._bin, self._dtype, len(self), key="data.path", remedy=REMEDY)

    def _array(self, place: tuple[int, int], dtype: str) -> ArrayFile:
        offset, count = place
        return ArrayFile(self._idx, np.dtype(dtype), count, key="data.path", remedy=REMEDY, offset=offset)


class _Starts:
    """Positions of the tokens with which documents begin."""

    def __init__(self, store: MegatronTokens, firsts: ArrayFile, places: ArrayFile) -> None:
        self._firsts, self._places = firsts, places
        self._tokens, self._size = len(store), np.dtype(store.index["dtype"]).itemsize

    def __len__(self) -> int:
        return len(self._firsts) - 1

    def __getitem__(self, index: int) -> int:
        return int(self.read(index, index + 1)[0])

    def read(self, begin: int, end: int) -> np.ndarray:
        firsts = self._firsts.read(begin, end)
        low, high = int(firsts[0]), min(int(firsts[-1]) + 1, len(self._places))
        places = self._places.read(low, high) // self._size
        places = np.append(places, self._tokens)  # a document without a sequence may end the file
        return places[np.minimum(firsts, high) - low].astype(np.uint64)
