"""Tokens that other programs prepared, read in place.

A function for each format turns a file into a `Layout`: where its tokens are, and where its documents begin.
`ForeignTokens` reads any layout, so nothing else knows the formats. docs/data.md has their table, with versions.
"""

import csv
import gzip
import hashlib
import logging
import os
import struct
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from titanlite.data.tokenizer import Tokenizer
from titanlite.data.tokens import ArrayFile, SortedRecords, TokenStore
from titanlite.runtime.errors import UserError
from titanlite.runtime.files import lock_work, naming_path, write_atomically

logger = logging.getLogger(__name__)

BLOCK = 2**12
SAMPLED = 64
"""Blocks of a source that are looked at when it is opened."""
SCANNED = 2**22
"""Tokens that are searched for the ends of documents at once."""
REMEDY = "Restore it"
MEGATRON = struct.Struct("<9sQBQQ")
MEGATRON_MAGIC = b"MMIDIDX\0\0"
MEGATRON_DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
"""Types of tokens by their code. Those of numbers with a point are no tokens."""
LLM_C = {20240520: "<u2", 20240801: "<u4"}
"""Types of tokens by the first number of llm.c's header, which modded-nanogpt has too."""
LLM_C_BYTES = 1024
NUMPY_MAGIC = b"\x93NUMPY"
SUFFIXES = {"megatron": ".idx", "nanogpt": ".bin", "olmo": ".npy", "datatrove": ".ds"}
TOKEN_SUFFIXES = tuple(SUFFIXES.values())
BESIDE = ".ds.index", ".ds.metadata", ".ds.loss", ".csv.gz"
"""Suffixes of files that describe the tokens beside them."""
OLMO_TOKENS, OLMO_MASK = "token_ids", "labels_mask"
"""Parts of the names of tokens, and of the masks beside them, that open-instruct writes for OLMo-core."""


class Layout(NamedTuple):
    """Where the tokens of one file are, and where its documents begin."""

    path: Path
    dtype: str
    tokens: int
    offset: int = 0
    """Bytes before the tokens."""
    starts: Callable[[], SortedRecords] | None = None
    """Opens the starts of documents. Without it, special tokens are between them."""
    documents: int | None = None
    """Number of documents, where the files state it."""
    mask: Path | None = None
    """File of one byte a token, 0 for those that do not count in the loss."""
    beside: tuple[Path, ...] = ()
    """Other files that samples depend on."""
    begins: bool = False
    """Whether the program puts the special token before each document, not after it."""
    digest: str = ""
    """Hash of the sizes of all these files and of blocks of them."""


class Marks(NamedTuple):
    """Ids of the special tokens with which documents begin and end; None where they do not."""

    bos: int | None = None
    eos: int | None = None


# Recognize files


def find_foreign(path: str, form: str | None) -> str | None:
    """Return the format of a file of tokens, or None if it does not say it and `form` does not name it.

    Args:
        path: the file, or NAME of Megatron's NAME.bin and NAME.idx.
        form: `data.format`.
    """
    if megatron_prefix(path):
        return "megatron"
    with_index = path.endswith(".ds") and os.path.isfile(f"{path}.index")
    if with_index or (path.endswith(".npy") and _begin(path).startswith(NUMPY_MAGIC)):
        return "datatrove" if with_index else "olmo"
    if path.endswith(".bin") and int.from_bytes(_begin(path)[:4], "little") in LLM_C:
        return "nanogpt"
    return form if form and path.endswith(SUFFIXES[form]) and os.path.isfile(path) else None


def find_all_foreign(folder: str, names: Sequence[str], form: str | None) -> list[str]:
    """Return the files of tokens of some names; none if there are others too.

    Raises:
        UserError: all may be tokens, and nothing says of which format; or `form` is set, and others are among them.
    """
    paths = [os.path.join(folder, name) for name in names if OLMO_MASK not in os.path.basename(name)]
    formats = {
        place: find_foreign(place, form) for place in dict.fromkeys(megatron_prefix(path) or path for path in paths)
    }
    rest = [place for place, found in formats.items() if not found and not place.endswith(BESIDE)]
    if rest and all(place.endswith(TOKEN_SUFFIXES) and os.path.isfile(place) for place in rest):
        raise UserError(
            f"data.format: {rest[0]} is no text, and does not say which program wrote its tokens: set nanogpt for .bin "
            "or olmo for .npy of 2 or 4 bytes a token, datatrove for .ds. A .bin of Megatron-LM needs its .idx"
        )
    found = [place for place, found in formats.items() if found]
    if found and rest and form:
        raise UserError(f"data.path: {rest[0]} is among tokens of {form}, and is none: name the tokens with a glob")
    return [] if rest else found


def megatron_prefix(path: str) -> str | None:
    """Return NAME of a path that is NAME, NAME.bin or NAME.idx of an IndexedDataset; None for another path."""
    prefix = path.removesuffix(".bin") if path.endswith(".bin") else path.removesuffix(".idx")
    return prefix if _begin(f"{prefix}.idx").startswith(MEGATRON_MAGIC) else None


def _begin(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read(16)
    except OSError:
        return b""


# Open them


def open_foreign(
    paths: Sequence[str],
    *,
    tokenizer: Tokenizer,
    cache_folder: Path,
    form: str | None = None,
    wanted: tuple[bool, bool] = (False, False),
) -> list[TokenStore]:
    """Open files of tokens: a store for each format in a row.

    Args:
        tokenizer: the one that wrote them, which the files do not name.
        cache_folder: for the boundaries of OLMo-core's metadata files.
        form: `data.format`.
        wanted: whether documents should begin and end with special tokens. It decides where files do not show it.

    Raises:
        UserError: a file is damaged, or holds what the tokenizer cannot have written.
    """
    stores: list[TokenStore] = []
    read = {"megatron": _megatron, "nanogpt": _nanogpt, "olmo": _olmo, "datatrove": _datatrove}
    for kind, group in groupby(paths, key=lambda path: find_foreign(path, form)):
        assert kind
        layouts: list[Layout] = []
        for path in map(Path, group):
            try:
                with naming_path(path):
                    layout = read[kind](path, tokenizer.vocab_size, cache_folder)
            except (OSError, ValueError, struct.error) as error:
                raise UserError(f"data.path: {path} cannot be read as tokens of {kind}: {error}") from None
            if not layout.tokens:
                raise UserError(f"data.path: {layout.path} has no tokens: leave it out")
            layouts.append(layout)
        files = [[layout.path, *layout.beside, *([layout.mask] if layout.mask else [])] for layout in layouts]
        blocks = max(SAMPLED // len(layouts), 4)
        layouts = [layout._replace(digest=_digest(some, blocks)) for layout, some in zip(layouts, files, strict=True)]
        about = {"fingerprint": tokenizer.fingerprint, "vocab_size": tokenizer.vocab_size, "name": tokenizer.name}
        marks = _find_marks(ForeignTokens(layouts, about, Marks()), tokenizer, wanted)
        stores.append(ForeignTokens(layouts, about, marks))
    return stores


def _digest(files: Sequence[Path], blocks: int) -> str:
    found = hashlib.sha256()
    for path in files:
        with naming_path(path), open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            found.update(size.to_bytes(8, "little"))
            for at in np.linspace(0, max(size - BLOCK, 0), blocks, dtype=np.int64).tolist():
                found.update(os.pread(file.fileno(), BLOCK, at))
    return found.hexdigest()


def _find_marks(store: "ForeignTokens", tokenizer: Tokenizer, wanted: tuple[bool, bool]) -> Marks:
    """Find which special tokens are between documents, and check that ids are those of the vocabulary.

    Raises:
        UserError: they are not.
    """
    bos, eos = tokenizer.bos_id, tokenizer.eos_id
    has_starts = all(layout.documents is not None for layout in store.layouts)
    firsts, lasts, singles = [store.read_unchecked(0, 1)], [store.read_unchecked(len(store) - 1, 1)], 0
    for at in {*np.linspace(0, max(len(store) - BLOCK, 0), SAMPLED, dtype=np.int64).tolist()}:
        count = min(BLOCK, len(store) - at)
        tokens = store.read_unchecked(at, count)
        for shard, begin, end, first in store.pieces(at, count):
            layout = store.layouts[shard]
            if why := _why_wrong(tokens[first : first + end - begin].astype(layout.dtype), tokenizer.vocab_size):
                raise UserError(f"data.path: {layout.path} {why}, or data.tokenizer did not write it")
        singles += int((tokens == bos).sum())
        starts = store.document_starts(at, count) - at if has_starts else np.flatnonzero(tokens == eos) + 1
        firsts.append(tokens[starts[starts < count]])
        lasts.append(tokens[starts[starts > 0] - 1])
    if not has_starts:
        del firsts[0], lasts[0]
    begin, end = (np.concatenate(some) for some in (firsts, lasts))
    if not len(end):  # nothing shows it: a single document
        return Marks(bos if (wanted[0] and has_starts) or singles else None, eos if wanted[1] and has_starts else None)
    if bos == eos and not has_starts:
        begins = wanted[0] if wanted[0] != wanted[1] else store.layouts[0].begins
        return Marks(bos, None) if begins else Marks(None, eos)
    is_bos, is_eos = ((some == mark).mean() >= 0.5 if len(some) else False for some, mark in ((begin, bos), (end, eos)))
    return Marks(bos if is_bos else None, eos if is_eos else None)


def _why_wrong(tokens: np.ndarray, vocab_size: int) -> str:
    """Return what is wrong with tokens that do not have the vocabulary or the width that is stated; "" if they do."""
    width, limit = tokens.itemsize, (vocab_size - 1) >> 16
    halves = sorted((int(tokens[0::2].max()), int(tokens[1::2].max()))) if len(tokens) >= SAMPLED else [0, 0]
    if width == 2 and halves[0] <= limit < halves[1]:
        return f"has tokens of 4 bytes, and is read as 2: every second one is {halves[0] or 'zero'}"
    wrong = (tokens < 0) | (tokens >= vocab_size)
    if not wrong.any():
        return ""
    what = f"has the token id {tokens[wrong][0]:,}, beyond the vocabulary of {vocab_size:,}"
    fits = width == 4 and not _why_wrong(tokens.view("<u2"), vocab_size)
    return f"{what}: its tokens have 2 bytes, and are read as {width}" if fits else what


class ForeignTokens(TokenStore):
    """The tokens of files of one format. Only what is read is in memory.

    Args:
        about: the tokenizer, as in an index.
        marks: special tokens with which documents begin and end.
    """

    remedy = "another tokenizer than data.tokenizer wrote it, or the file is damaged"

    def __init__(self, layouts: Sequence[Layout], about: dict[str, Any], marks: Marks) -> None:
        self.layouts, self._about, self._marks = layouts, about, marks
        paths = [str(layout.path) for layout in layouts]
        super().__init__(Path(paths[0] if len(paths) == 1 else os.path.commonpath(map(os.path.abspath, paths))))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.layouts, self._about, self._marks)

    def _read_folder(self, folder: Path) -> None:
        self.folder = folder
        bos, eos = (mark is not None for mark in self._marks)
        shards = []
        for layout in self.layouts:
            kinds = ["tokens", *(["mask"] if layout.mask else [])]
            digest = layout.digest if layout.documents is not None else f"{layout.digest} {tuple(self._marks)}"
            shards.append({"name": layout.path.name, "tokens": layout.tokens, "sha256": dict.fromkeys(kinds, digest)})
        self._starts = np.cumsum([0, *(layout.tokens for layout in self.layouts)])
        self.index = {"tokenizer": self._about, "dtype": self.layouts[0].dtype, "bos": bos, "eos": eos}
        self.index |= {"tokens": len(self), "shards": shards}
        documents = [layout.documents for layout in self.layouts if layout.documents is not None]
        if len(documents) == len(self.layouts):
            self.index["documents"] = sum(documents)

    @property
    def counts_bytes(self) -> bool:
        """False: the text is not there."""
        return False

    def files(self) -> Iterator[tuple[Path, int, str]]:
        """Yield no file: none has a checksum."""
        return iter(())

    def open_file(self, shard: int, kind: str) -> Any:
        """Open the tokens, the starts of documents or the mask of a file."""
        layout = self.layouts[shard]
        if kind == "mask":
            assert layout.mask
            return _records(layout.mask, "u1", layout.tokens)
        tokens = _records(layout.path, layout.dtype, layout.tokens, layout.offset)
        if kind == "tokens":
            return tokens
        return layout.starts() if layout.starts else _Marked(tokens, self._marks)


def _records(path: Path, dtype: str, count: int, offset: int = 0) -> ArrayFile:
    return ArrayFile(path, np.dtype(dtype), count, key="data.path", remedy=REMEDY, offset=offset)


class _Marked(SortedRecords):
    """Starts of documents that special tokens show: each begins after `eos`, or where there is none, with `bos`."""

    def __init__(self, tokens: ArrayFile, marks: Marks) -> None:
        self._tokens, self._marks = tokens, marks

    def within(self, begin: int, end: int) -> np.ndarray:
        bos, eos = self._marks
        found = [np.zeros(1 if begin == 0 and (eos is not None or bos is None) else 0, dtype=np.int64)]
        for at in range(begin, end, SCANNED):
            before = max(at - 1, 0)
            tokens = self._tokens.read(before, min(at + SCANNED, end))
            if eos is None:
                is_start = tokens[at - before :] == bos
            else:
                is_start = tokens[:-1] == eos
                is_start = np.insert(is_start if bos is None else is_start & (tokens[1:] == bos), 0, [False] * (not at))
            found.append(np.flatnonzero(is_start) + at)
        return np.concatenate(found)


class _Ends(ArrayFile):
    """Starts of documents in a file of their ends."""

    def within(self, begin: int, end: int) -> np.ndarray:
        ends = super().within(begin, end).astype(np.int64)
        return np.append(np.zeros(1, dtype=np.int64), ends) if begin == 0 else ends


# Formats


def _raw(path: Path, vocab_size: int, offset: int = 0) -> Layout:
    """Describe tokens without a header. Their width is the least for the vocabulary, unless they show another one."""
    size = path.stat().st_size - offset
    usual, other = ("<u2", "<u4") if vocab_size <= 2**16 else ("<u4", "<u2")
    with open(path, "rb") as file:
        blocks = [
            os.pread(file.fileno(), BLOCK, offset + int(at) // 4 * 4)
            for at in np.linspace(0, max(size - BLOCK, 0), SAMPLED)
        ]
    blocks = [block[: len(block) // 4 * 4] for block in blocks if len(block) >= 4]
    fits = {
        dtype: not any(_why_wrong(np.frombuffer(block, dtype), vocab_size) for block in blocks)
        for dtype in (usual, other)
    }
    dtype = other if fits[other] and not fits[usual] else usual
    if size % np.dtype(dtype).itemsize:
        raise ValueError(f"{size:,} bytes are no whole number of tokens of {np.dtype(dtype).itemsize} bytes: it is cut")
    return Layout(path, dtype, size // np.dtype(dtype).itemsize, offset)


def _nanogpt(path: Path, vocab_size: int, _: Path) -> Layout:
    """Read a .bin of nanoGPT, or of llm.c and modded-nanogpt with a header of 256 int32: type, version, tokens."""
    with open(path, "rb") as file:
        header = np.frombuffer(file.read(LLM_C_BYTES), "<i4", 3) if path.stat().st_size >= LLM_C_BYTES else None
    if header is None or (dtype := LLM_C.get(int(header[0]))) is None:
        return _raw(path, vocab_size)
    tokens, size = int(header[2]), path.stat().st_size
    if size != (stated := LLM_C_BYTES + tokens * np.dtype(dtype).itemsize):
        raise ValueError(f"it has {size:,} bytes, and its header states {stated:,}")
    return Layout(path, dtype, tokens, LLM_C_BYTES, begins=True)


def _olmo(path: Path, vocab_size: int, cache_folder: Path) -> Layout:
    """Read a .npy of dolma and OLMo-core, which is raw, or of np.save; boundaries are in NAME.csv.gz, if it is there,
    since not every document ends with the special token."""
    with open(path, "rb") as file:
        if file.read(len(NUMPY_MAGIC)) == NUMPY_MAGIC:
            file.seek(0)
            read = np.lib.format.read_array_header_1_0 if np.lib.format.read_magic(file) == (1, 0) else None
            shape, _, dtype = (read or np.lib.format.read_array_header_2_0)(file)
            if len(shape) != 1 or dtype.kind not in "ui":
                raise ValueError(f"it is an array of shape {shape} and dtype {dtype}: a row of whole numbers is read")
            layout = Layout(path, dtype.str, shape[0], file.tell())
            if path.stat().st_size != (stated := layout.offset + layout.tokens * dtype.itemsize):
                raise ValueError(f"it has {path.stat().st_size:,} bytes, and its header states {stated:,}")
        else:
            layout = _raw(path, vocab_size)
    if OLMO_TOKENS in path.name:
        layout = _with_mask(layout, path.with_name(path.name.replace(OLMO_TOKENS, OLMO_MASK)))
    ends = path.with_suffix(".csv.gz")
    if not ends.is_file():
        return layout
    with gzip.open(ends) as rows:
        if not rows.read(1):  # a writer without documents leaves its whole file of zeros (dolma 1.2.1)
            raise ValueError(f"{ends.name} states no documents: leave both out")
    return layout._replace(starts=partial(_read_ends, ends, layout.tokens, cache_folder), beside=(ends,))


def _read_ends(path: Path, tokens: int, cache_folder: Path) -> SortedRecords:
    """Open the ends of documents in a metadata file. They are unpacked to the cache once."""
    stats = path.stat()
    name = hashlib.sha256(f"{path.absolute()} {stats.st_size} {stats.st_mtime_ns}".encode()).hexdigest()[:16]
    place = cache_folder / f"{name}.ends"
    if not place.is_file():
        cache_folder.mkdir(parents=True, exist_ok=True)
        with lock_work(cache_folder / f"{name}.lock", on_wait=lambda holder: None):
            try:
                with gzip.open(path, "rt") as file:
                    bounds = (int(bound) for row in csv.reader(file) for bound in row[:2])
                    rows = np.fromiter(bounds, np.uint64).reshape(-1, 2)
            except (OSError, EOFError, ValueError) as error:
                raise UserError(f"data.path: {path} is damaged: {error}. {REMEDY}") from None
            if not np.array_equal(np.append(rows[:, 0], tokens), np.append(np.uint64(0), rows[:, 1])):
                raise UserError(f"data.path: {path} does not state the boundaries of all {tokens:,} tokens. {REMEDY}")
            write_atomically(place, rows[:, 1].tobytes())
    return _Ends(place, np.dtype("<u8"), place.stat().st_size // 8, key="data.path", remedy=REMEDY)


def _with_mask(layout: Layout, mask: Path) -> Layout:
    if not mask.is_file():
        return layout
    if mask.stat().st_size != layout.tokens:
        raise ValueError(f"{mask} has {mask.stat().st_size:,} bytes for {layout.tokens:,} tokens")
    return layout._replace(mask=mask)


def _datatrove(path: Path, vocab_size: int, _: Path) -> Layout:
    """Read a .ds of datatrove, which nanotron reads. NAME.ds.index has the ends of documents (uint64), and NAME.ds.loss
    a byte for each token."""
    index = Path(f"{path}.index")
    if not index.is_file():
        return _with_mask(_raw(path, vocab_size), Path(f"{path}.loss"))
    documents, left = divmod(index.stat().st_size, 8)
    tokens = _records(index, "<u8", documents)[documents - 1] if documents else 0
    size = path.stat().st_size
    if left or size not in (2 * tokens, 4 * tokens):
        raise ValueError(f"it has {size:,} bytes, and {index.name} states {tokens:,} tokens of 2 or 4")
    starts = partial(_Ends, index, np.dtype("<u8"), documents, key="data.path", remedy=REMEDY)
    layout = Layout(path, "<u2" if size == 2 * tokens else "<u4", tokens, 0, starts, documents, beside=(index,))
    return _with_mask(layout, Path(f"{path}.loss"))


def _megatron(prefix: Path, _: int, __: Path) -> Layout:
    """Read NAME.bin and NAME.idx of Megatron-core's IndexedDataset.

    The .idx has a header, then for each sequence its length (int32) and its first byte in the .bin (int64), for each
    document the number of its first sequence (int64), with one more number at the end, and maybe a mode of each
    sequence, which is not 0 for images.
    """
    index, data = (prefix.with_name(f"{prefix.name}{suffix}") for suffix in (".idx", ".bin"))
    with open(index, "rb") as file:
        _, version, code, sequences, ends = MEGATRON.unpack(file.read(MEGATRON.size))
    size, stated = index.stat().st_size, MEGATRON.size + 12 * sequences + 8 * ends
    if version != 1 or code not in MEGATRON_DTYPES:
        raise ValueError(f"{index.name} has version {version} and dtype {code}, which are not read")
    if size not in (stated, stated + sequences) or ends < 1:
        raise ValueError(f"{index.name} has {size:,} bytes, and its header states {stated:,}")
    if size > stated and any(_records(index, "u1", sequences, stated).read(0, sequences)):
        raise ValueError(f"{index.name} states sequences of images, which are not read")
    dtype = np.dtype(MEGATRON_DTYPES[code])
    tokens, left = divmod(data.stat().st_size, dtype.itemsize)
    last, length = 0, 0
    if sequences:
        length = _records(index, "<i4", sequences, MEGATRON.size)[sequences - 1]
        last = _records(index, "<i8", sequences, MEGATRON.size + 4 * sequences)[sequences - 1]
    if left or last + length * dtype.itemsize != data.stat().st_size:
        raise ValueError(f"{data.name} has {data.stat().st_size:,} bytes, and {index.name} states others")
    starts = partial(_MegatronStarts, index, sequences, ends, tokens, dtype.itemsize)
    return Layout(data, dtype.str, tokens, 0, starts, ends - 1, beside=(index,))


class _MegatronStarts(SortedRecords):
    """Positions of the tokens with which documents begin."""

    def __init__(self, index: Path, sequences: int, ends: int, tokens: int, size: int) -> None:
        self._places = _records(index, "<i8", sequences, MEGATRON.size + 4 * sequences)
        self._firsts = _records(index, "<i8", ends, MEGATRON.size + 12 * sequences)
        self._tokens, self._size = tokens, size

    def __len__(self) -> int:
        return len(self._firsts) - 1

    def within(self, begin: int, end: int) -> np.ndarray:
        first = bisect_left(self._places, begin * self._size) if begin else 0
        last = min(first + max(BLOCK // 32, (end - begin) // 1024), len(self), len(self._places))
        low = max(first - 1, 0)
        if low < last and np.array_equal(self._firsts.read(low, last), np.arange(low, last)):
            starts = self._places.read(first, last) // self._size  # documents of one sequence each, as usual
            if last == len(self) or starts[-1] >= end:
                return starts[: np.searchsorted(starts, end)]
        return super().within(begin, end)

    def read(self, begin: int, end: int) -> np.ndarray:
        firsts = self._firsts.read(begin, end)
        low, high = int(firsts[0]), min(int(firsts[-1]) + 1, len(self._places))
        places = self._places.read(low, high) // self._size
        places = np.append(places, self._tokens)  # a document without a sequence may end the file
        return places[np.minimum(firsts, high) - low].astype(np.uint64)
