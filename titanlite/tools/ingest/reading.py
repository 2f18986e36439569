"""Files -> chunks of about a MiB, cut where documents end, each with the position to resume from.

Nothing is parsed here: that is left to whoever tokenizes. Only long text files are cut within the document, where the
tokenizer would cut them itself. What follows a position depends on the files and the position alone, so that
resuming there gives the same chunks.
"""

import codecs
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

from titanlite.data.pieces import PIECE_BYTES, cut
from titanlite.data.prepared import HUGGING_FACE
from titanlite.runtime.errors import UserError
from titanlite.tools.ingest.inputs import READABLE, File, first_object
from titanlite.tools.ingest.streams import Stream

CHUNK_BYTES = 2**20
SNIFFED = 2**13
MOST_ROWS = 2**13
PART_COST = 2**8
"""Bytes that a part counts for beside its own: a million empty files are no chunk."""
Position = list[int]
"""Number of the file, and of its parts that are done. They are read again on resume, and not tokenized again."""


class Part(NamedTuple):
    """Part of a chunk: data of one file."""

    source: int
    path: str
    kind: str
    """text: one document, or a piece of it. lines: JSON lines. rows: a column, as Arrow writes it. bad: `data` is the
    reason why the file, or its rest, cannot be read; `path` has the position too. binary: the file is left out."""
    data: bytes
    first: int = 0
    """Number of the first line, from 1, or row, from 0."""
    begins: bool = True
    """True if the text begins here, False if it continues."""
    ends: bool = True


class Chunk(NamedTuple):
    parts: list[Part]
    position: Position
    """Position after the chunk."""
    done: int
    """Bytes of the files, as they are, up to there."""


Step = tuple[Part, int]
"""A part, and the bytes of the file that are read."""


class _NoField(Exception):
    """A table lacks the column of the text."""


def read_chunks(
    files: Sequence[File], *, text_field: str, chunk_bytes: int, position: Position | None = None
) -> Iterator[Chunk]:
    """Yield the chunks from `position` to the end of the files.

    Raises:
        UserError: a file has changed since it was found.
    """
    start, skip = position or (0, 0)
    before = sum(file.size for file in files[:start])
    parts: list[Part] = []
    size = 0
    for index, file in enumerate(files[start:], start=start):
        for number, (part, done) in enumerate(_read(file, skip, text_field, chunk_bytes), start=skip + 1):
            parts.append(part)
            size += len(part.data) + PART_COST
            if size >= chunk_bytes:
                yield Chunk(parts, [index, number], before + done)
                parts, size = [], 0
        skip = 0
        before += file.size
    if parts:
        yield Chunk(parts, [len(files), 0], before)


def _read(file: File, skip: int, text_field: str, chunk_bytes: int) -> Iterator[Step]:
    """Yield the parts of a file but for the first `skip`."""
    try:
        kind = file.kind
        if kind == "json":
            kind = "lines" if text_field in (first_object(file.path, file.packing) or {}) else "text"
        match kind:
            case "text":
                yield from islice(_read_text(file, chunk_bytes), skip, None)
            case "lines":
                yield from islice(_read_lines(file, chunk_bytes), skip, None)
            case "parquet":
                yield from _read_rows(file, _parquet_columns(file.path, text_field, chunk_bytes), skip)
            case "dataset":
                yield from _read_rows(file, _dataset_columns(file.path, text_field, chunk_bytes), skip)
        if kind != "dataset":
            stat = os.stat(file.path)
            if (stat.st_size, stat.st_mtime_ns) != (file.size, file.mtime_ns):
                raise UserError(f"{file.path} has changed while it was read: run this again")
    except OSError as error:
        yield _bad(file, f"cannot be read: {error.strerror or error}"), file.size


def no_field(text_field: str, names: Iterable[str]) -> str:
    return f"no field {text_field!r}: it has {', '.join(islice(names, 8)) or 'none'} (--text-field, data.text_field)"


def _bad(file: File, why: str, place: str = "") -> Part:
    return Part(file.source, file.path + place, "bad", why.encode())


def _read_text(file: File, chunk_bytes: int) -> Iterator[Step]:
    with Stream(file.path, file.packing) as stream:
        data = stream.read(max(chunk_bytes, SNIFFED) + 1)
        only = None
        if b"\0" in data[:SNIFFED]:
            only = _bad(file, f"binary: {READABLE}") if file.named else Part(file.source, file.path, "binary", b"")
        elif stream.damage:
            only = _bad(file, f"damaged: {stream.damage}")
        elif len(data) <= chunk_bytes:
            only = Part(file.source, file.path, "text", data.removeprefix(codecs.BOM_UTF8))
        elif wrong := _wrong_text(file, chunk_bytes):
            only = _bad(file, wrong)
        if only:
            yield only, file.size
            return
        data, begins, ends = data.removeprefix(codecs.BOM_UTF8), True, False
        while not ends:
            more = chunk_bytes + PIECE_BYTES + 1 - len(data)  # enough for `cut`, also at the last place
            data += stream.read(max(more, 0))
            end = 0
            while end < min(chunk_bytes, len(data)):
                end = cut(data, end)
            ends = end == len(data)  # then the stream has ended too
            yield Part(file.source, file.path, "text", data[:end], begins=begins, ends=ends), stream.done
            data, begins = data[end:], False


def _wrong_text(file: File, chunk_bytes: int) -> str:
    """Return the problem of a long text, or "". The whole text is checked before any of it is written."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    with Stream(file.path, file.packing) as stream:
        at, data = 0, b""
        try:
            while data := stream.read(chunk_bytes):
                decoder.decode(data)
                at += len(data)
            if stream.damage:
                return f"damaged: {stream.damage}"
            decoder.decode(b"", final=True)
        except UnicodeDecodeError as error:
            pending = len(error.object) - len(data)
            return f"not UTF-8: byte {at - pending + error.start:,}"
    return ""


def _read_lines(file: File, chunk_bytes: int) -> Iterator[Step]:
    number = 1
    with Stream(file.path, file.packing) as stream:
        while data := stream.read_lines(chunk_bytes):
            lines = data.removeprefix(codecs.BOM_UTF8) if number == 1 else data
            yield Part(file.source, file.path, "lines", lines, number), stream.done
            number += data.count(b"\n")
        if stream.damage:
            yield _bad(file, f"damaged: {stream.damage}; what follows cannot be read", f":{number}"), file.size


def _read_rows(file: File, columns: Iterator[tuple[Any, int]], skip: int) -> Iterator[Step]:
    """Yield the rows of a table.

    Args:
        columns: the text of some rows, and the number of rows of the table.
    """
    import pyarrow

    row = 0
    try:
        for number, (column, count) in enumerate(columns):
            first, row = row, row + len(column)
            if number >= skip:
                yield Part(file.source, file.path, "rows", _as_bytes(column), first), file.size * row // count
    except _NoField as error:
        yield _bad(file, str(error)), file.size
    except (pyarrow.ArrowException, OSError) as error:
        why = f"damaged: {str(error).splitlines()[0]}; what follows cannot be read"
        yield _bad(file, why, f": row {row}"), file.size


def _parquet_columns(path: str, text_field: str, chunk_bytes: int) -> Iterator[tuple[Any, int]]:
    from pyarrow.parquet import ParquetFile

    with ParquetFile(path, pre_buffer=False, buffer_size=2**20, page_checksum_verification=True) as table:
        if text_field not in table.schema_arrow.names:
            raise _NoField(no_field(text_field, table.schema_arrow.names))
        for group in range(table.num_row_groups):
            about = table.metadata.row_group(group)
            columns = [about.column(i) for i in range(about.num_columns)]
            mine = [it for it in columns if it.path_in_schema.partition(".")[0] == text_field]
            size = _batch_rows(chunk_bytes, sum(it.total_uncompressed_size for it in mine), about.num_rows)
            for batch in table.iter_batches(size, row_groups=[group], columns=[text_field], use_threads=False):
                yield batch.column(0), table.metadata.num_rows


def _dataset_columns(path: str, text_field: str, chunk_bytes: int) -> Iterator[tuple[Any, int]]:
    dataset = open_dataset(path)
    if text_field not in dataset.column_names:
        raise _NoField(no_field(text_field, dataset.column_names))
    size, count = _batch_rows(chunk_bytes, dataset.data.nbytes, len(dataset)), len(dataset)
    dataset = dataset.select_columns([text_field]).with_format("arrow")
    for start in range(0, count, size):
        yield dataset[start : min(start + size, count)].column(text_field), count


def open_dataset(path: str) -> Any:
    """A dataset of Hugging Face: the folder that `save_to_disk` wrote, or hf://NAME[:CONFIG][:SPLIT].

    Raises:
        UserError: it cannot be loaded.
    """
    import datasets

    try:
        if not path.startswith(HUGGING_FACE):
            return datasets.load_from_disk(path)
        name, *rest = re.split(r":(?![^\[]*\])", path.removeprefix(HUGGING_FACE))  # test[:10%] is a split
        return datasets.load_dataset(name, *rest[:-1], split=rest[-1] if rest else "train")
    except Exception as error:  # of a hub, a network, a file: each has its own
        raise UserError(f"{path} cannot be loaded: {error}") from None


def _batch_rows(chunk_bytes: int, size: int, rows: int) -> int:
    return min(max(chunk_bytes * rows // max(size, 1), 1), MOST_ROWS)


def _as_bytes(column: Any) -> bytes:
    import pyarrow

    table = pyarrow.table({"": column})
    sink = pyarrow.BufferOutputStream()
    with pyarrow.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue().to_pybytes()
