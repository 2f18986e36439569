"""Formats of text: how the files of each become parts. A format is one function, and one row of `FORMATS`.

Nothing is parsed here: that is left to whoever tokenizes. Only long text files are cut within the document, where the
tokenizer would cut them itself. What a reader yields depends on the file alone, so that a resume counts its parts.
"""

import codecs
import hashlib
import inspect
import json
import os
import re
import struct
import tarfile
from collections.abc import Callable, Iterable, Iterator
from itertools import groupby, islice, pairwise
from typing import Any, NamedTuple

from titanlite.data.pieces import PIECE_BYTES, cut
from titanlite.data.prepared import HUGGING_FACE
from titanlite.runtime.errors import UserError
from titanlite.runtime.user_code import check_call, describe_error, find_callable
from titanlite.tools.ingest.streams import Stream, open_binary

SNIFFED = 2**13
STREAM = "datasets.Dataset.from_file(FILE).to_parquet(OUT)"
"""Expression that converts a file of Arrow's stream format."""
MOST_ROWS = 2**13
RESERVED = re.compile(r"(\./)*__[^/]*__(/|$)")
"""Members of a tar archive that hold no samples, by WebDataset's rule."""
TOOLS = "tools"
"""Field beside a chat, with the functions that the assistant may call."""


class File(NamedTuple):
    """File or dataset to read, with its size and time of change."""

    path: str
    source: int
    """Number of the path that it was found by."""
    kind: str
    """Name in `FORMATS`, or that of a user's own reader; see `own_kind`."""
    packing: str = ""
    named: bool = True
    """True if a path names the file itself, False if it was found in a folder."""
    size: int = 0
    mtime_ns: int | str = 0
    """Time of the last change; at a URL, the version that its store states."""
    identity: Any = None
    """Device and inode, to find two names of one file."""


class Part(NamedTuple):
    """Part of a chunk: data of one file."""

    source: int
    path: str
    kind: str
    """text: one document, or a piece of it. json: one document, as a JSON object. lines: JSON lines. rows: columns, as
    Arrow writes them. bad: `data` is the reason why the file, or its rest, cannot be read; `path` has the position too.
    binary: the file is left out."""
    data: bytes
    first: int = 0
    """Number of the first line, from 1, or row, from 0."""
    begins: bool = True
    """True if the text begins here, False if it continues."""
    ends: bool = True


Step = tuple[Part, int]
"""A part, and the bytes of the file that are read."""
Reader = Callable[[File, str, int], Iterator[Step]]
"""Yields the parts of a file, given the name of the field with the text, and the bytes of a chunk."""


class Format(NamedTuple):
    read: Reader
    suffixes: tuple[str, ...] = ()
    """Suffixes of the files, in lower case and without that of a compression."""
    package: str = ""
    """Package that reads it."""
    install: str = ""
    """Command that installs the package. Default: that of the extra `data`."""


class _Unreadable(Exception):
    """A table that is not read, with the reason."""


def no_field(text_field: str, names: Iterable[str]) -> str:
    return f"no field {text_field!r}: it has {', '.join(islice(names, 8)) or 'none'} (--text-field, data.text_field)"


def bad(file: File, why: str, place: str = "") -> Part:
    return Part(file.source, file.path + place, "bad", why.encode())


def _read_text(file: File, _: str, chunk_bytes: int) -> Iterator[Step]:
    with Stream(file.path, file.packing) as stream:
        data = stream.read(max(chunk_bytes, SNIFFED) + 1)
        only = None
        if b"\0" in data[:SNIFFED]:
            only = bad(file, f"binary: {READABLE}") if file.named else Part(file.source, file.path, "binary", b"")
        elif stream.damage:
            only = bad(file, f"damaged: {stream.damage}")
        elif len(data) <= chunk_bytes:
            only = Part(file.source, file.path, "text", data.removeprefix(codecs.BOM_UTF8))
        elif wrong := _wrong_text(file, chunk_bytes):
            only = bad(file, wrong)
        if only:
            yield only, file.size
            return
        data, begins, ends = data.removeprefix(codecs.BOM_UTF8), True, False
        while not ends:
            more = chunk_bytes + PIECE_BYTES + 1 - len(data)  # `cut` looks so far beyond the last place
            data += stream.read(max(more, 0))
            end = 0
            while end < min(chunk_bytes, len(data)):
                end = cut(data, end)
            ends = end == len(data)  # if all data is cut, the stream has ended as well
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


def _read_lines(file: File, _: str, chunk_bytes: int) -> Iterator[Step]:
    number = 1
    with Stream(file.path, file.packing) as stream:
        while data := stream.read_lines(chunk_bytes):
            lines = data.removeprefix(codecs.BOM_UTF8) if number == 1 else data
            yield Part(file.source, file.path, "lines", lines, number), stream.done
            number += data.count(b"\n")
        if stream.damage:
            yield bad(file, f"damaged: {stream.damage}; what follows cannot be read", f":{number}"), file.size


def _read_json(file: File, text_field: str, chunk_bytes: int) -> Iterator[Step]:
    is_lines = text_field in (first_object(file.path, file.packing) or {})
    yield from (_read_lines if is_lines else _read_text)(file, text_field, chunk_bytes)


def first_object(path: str, packing: str) -> dict[str, Any] | None:
    """Return the first line, if it is a JSON object and not longer than 1 MiB: the file is JSON lines then, or one
    line."""
    with Stream(path, packing) as stream:
        line = stream.read(2**20).partition(b"\n")[0]
    try:
        value = json.loads(line.decode("utf-8-sig"))
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


# Tables


def _table(columns: Callable[[File, str, int], Iterator[tuple[Any, int]]]) -> Reader:
    """Return the reader of a kind of table.

    Args:
        columns: yields the columns of some rows, and the bytes of the file up to there.
    """

    def read(file: File, text_field: str, chunk_bytes: int) -> Iterator[Step]:
        import pyarrow

        row = 0
        try:
            for batch, done in columns(file, text_field, chunk_bytes):
                yield Part(file.source, file.path, "rows", _as_bytes(batch), row), done
                row += batch.num_rows
        except _Unreadable as error:
            yield bad(file, str(error)), file.size
        except (pyarrow.ArrowException, OSError) as error:
            why = f"damaged: {str(error).splitlines()[0]}; what follows cannot be read"
            yield bad(file, why, f": row {row}"), file.size

    return read


@_table
def _read_parquet(file: File, text_field: str, chunk_bytes: int) -> Iterator[tuple[Any, int]]:
    from pyarrow.parquet import ParquetFile

    options: dict[str, Any] = {"pre_buffer": False, "buffer_size": 2**20, "page_checksum_verification": True}
    with open_binary(file.path) as stream, ParquetFile(stream, **options) as table:
        names = _columns(text_field, table.schema_arrow)
        row = 0
        for group in range(table.num_row_groups):
            about = table.metadata.row_group(group)
            columns = [about.column(i) for i in range(about.num_columns)]
            mine = [column for column in columns if column.path_in_schema.partition(".")[0] in names]
            size = _batch_rows(chunk_bytes, sum(column.total_uncompressed_size for column in mine), about.num_rows)
            for batch in table.iter_batches(size, row_groups=[group], columns=names, use_threads=False):
                row += batch.num_rows
                yield batch, file.size * row // table.metadata.num_rows


@_table
def _read_arrow(file: File, text_field: str, chunk_bytes: int) -> Iterator[tuple[Any, int]]:
    """Read Arrow's file format, which Feather is too."""
    import pyarrow

    with open_binary(file.path) as stream:
        if stream.read(6) != b"ARROW1":
            raise _Unreadable(f"no file of Arrow's file format; of its stream format {STREAM} makes Parquet")
        stream.seek(0)
        table = pyarrow.ipc.open_file(stream)
        names = _columns(text_field, table.schema)
        for number in range(table.num_record_batches):
            rows = table.get_batch(number).select(names)
            size = _batch_rows(chunk_bytes, rows.nbytes, rows.num_rows)
            for start in range(0, rows.num_rows, size):
                yield rows.slice(start, size), stream.tell()


@_table
def _read_dataset(file: File, text_field: str, chunk_bytes: int) -> Iterator[tuple[Any, int]]:
    dataset = open_dataset(file.path)
    names = _columns(text_field, dataset.data.schema)
    size, count = _batch_rows(chunk_bytes, dataset.data.nbytes, len(dataset)), len(dataset)
    dataset = dataset.select_columns(names).with_format("arrow")
    for start in range(0, count, size):
        end = min(start + size, count)
        yield dataset[start:end], file.size * end // count


def _columns(text_field: str, schema: Any) -> list[str]:
    """Return the columns to read: that of the text, and that of tools if there is one and the text may be chats."""
    if text_field not in schema.names:
        raise _Unreadable(no_field(text_field, schema.names))
    return [text_field, TOOLS] if TOOLS in schema.names and text_field != TOOLS else [text_field]


def is_json(field: Any) -> bool:
    """Return whether a field of Arrow holds JSON text. A pyarrow that does not know the type reads it as plain text."""
    name = (
        getattr(field.type, "extension_name", None) or (field.metadata or {}).get(b"ARROW:extension:name", b"").decode()
    )
    return name == "arrow.json"


def open_dataset(path: str) -> Any:
    """Open a dataset of Hugging Face: the folder that `save_to_disk` wrote, or hf://NAME[:CONFIG][:SPLIT].

    Raises:
        UserError: it cannot be loaded.
    """
    import datasets

    try:
        if not path.startswith(HUGGING_FACE):
            return datasets.load_from_disk(path)
        name, *rest = re.split(r":(?![^\[]*\])", path.removeprefix(HUGGING_FACE))  # test[:10%] may follow
        return datasets.load_dataset(name, *rest[:-1], split=rest[-1] if rest else "train")
    except Exception as error:  # hubs, networks and files have errors of their own
        raise UserError(f"{path} cannot be loaded: {error}") from None


def _batch_rows(chunk_bytes: int, size: int, rows: int) -> int:
    return min(max(chunk_bytes * rows // max(size, 1), 1), MOST_ROWS)


def _as_bytes(batch: Any) -> bytes:
    import pyarrow

    sink = pyarrow.BufferOutputStream()
    with pyarrow.ipc.new_stream(sink, batch.schema) as writer:
        writer.write(batch)
    return sink.getvalue().to_pybytes()


# Documents one by one


def _read_tar(file: File, _: str, chunk_bytes: int) -> Iterator[Step]:
    """Read samples of WebDataset: members of one name up to its first dot. The text is NAME.txt, else it is in
    NAME.json."""
    extensions: set[str] = set()
    damage = ""
    with Stream(file.path, file.packing) as stream:
        try:  # tarfile reads single blocks, so that what follows the last one stays in the stream
            fileobj: Any = stream  # tarfile calls only `read`
            with tarfile.open(fileobj=fileobj, mode="r|", bufsize=tarfile.BLOCKSIZE) as archive:
                members = (member for member in archive if member.isfile() and not RESERVED.match(member.name))
                for _key, sample in groupby(members, key=lambda member: _sample_name(member.name)[0]):
                    texts: dict[str, Part] = {}
                    for member in sample:
                        extensions.add(extension := _sample_name(member.name)[1])
                        if kind := {"txt": "text", "json": "json"}.get(extension):
                            data = archive.extractfile(member).read().removeprefix(codecs.BOM_UTF8)  # pyright: ignore[reportOptionalMemberAccess]
                            texts[extension] = Part(file.source, f"{file.path}: {member.name}", kind, data)
                    if texts:
                        yield texts.get("txt") or texts["json"], stream.done
            rest = stream.read(2**20)  # an archive ends with two blocks of zeros, and tarfile does not look
            if not rest or rest.strip(b"\0"):
                damage = "the archive ends early, or has a wrong header"
        except (tarfile.TarError, EOFError) as error:
            damage = str(error)
        if damage := stream.damage or damage:
            yield bad(file, f"damaged: {damage}; what follows cannot be read"), file.size
        elif not extensions & {"txt", "json"}:
            why = f"no .txt or .json members: it has {', '.join(sorted(extensions)) or 'none'}"
            yield bad(file, why) if file.named else Part(file.source, file.path, "binary", b""), file.size


def _sample_name(member: str) -> tuple[str, str]:
    """Name of the sample that a member of a tar archive is of, and its extension."""
    folder, name = os.path.split(member)
    stem, _, extension = name.partition(".")
    return f"{folder}/{stem}", extension.lower() if stem else ""


def _documents(function: Callable[[str, str], Iterable[Any]]) -> Reader:
    """Return the reader of files whose documents a function yields.

    Args:
        function: of the path, and of the name of the field with the text. A document is a text, a list of segments, or
            a row with one of them in a field.
    """

    def read(file: File, text_field: str, chunk_bytes: int) -> Iterator[Step]:
        number = done = 0
        try:
            for number, document in enumerate(function(file.path, text_field), start=1):
                row = document if isinstance(document, dict) else {text_field: document}
                row = {name: value if name in (text_field, TOOLS) else None for name, value in row.items()}
                try:
                    data = json.dumps(row, default=_as_json).encode()
                except TypeError as error:
                    yield bad(file, f"field {text_field!r}: {error}", f": document {number}"), done
                    continue
                done = min(done + len(data), file.size)
                yield Part(file.source, f"{file.path}: document {number}", "json", data), done
        except Exception as error:  # the user's code and packages have errors of their own
            why = f"{describe_error(error)}; what follows cannot be read"
            yield bad(file, why, f": document {number + 1}"), file.size

    return read


def _as_json(value: Any) -> str:
    """Return what stands in JSON for a value of another type: a date, for instance, but not bytes or an array."""
    if isinstance(value, bytes | bytearray | memoryview) or getattr(value, "ndim", 0):
        raise TypeError(f"{type(value).__name__} is not text")
    return str(value)


def _read_mds(file: File, text_field: str, chunk_bytes: int) -> Iterator[Step]:
    """Read a shard of MosaicML's streaming, without its package: the number of samples, where each begins (uint32), the
    columns as JSON, then the samples. Each is the sizes of those columns that have none of their own, then all values.
    """
    with Stream(file.path, file.packing) as stream:
        try:
            [count] = struct.unpack("<I", stream.read(4))
            places = struct.unpack(f"<{count + 1}I", stream.read(4 * (count + 1)))
            about = json.loads(stream.read(places[0] - 4 * (count + 2)))
            sizes = dict(zip(about["column_names"], about["column_sizes"], strict=True))
            encodings = dict(zip(about["column_names"], about["column_encodings"], strict=True))
        except (ValueError, KeyError, TypeError, struct.error, MemoryError, OverflowError):
            yield bad(file, f"damaged: {stream.damage or 'no shard of MDS, or cut'}"), file.size
            return
        if encodings.get(text_field) not in ("str", "json"):
            why = f"column {text_field!r} has the encoding {encodings.get(text_field)}: str and json can be read"
            why = why if text_field in encodings else no_field(text_field, encodings)
            arrays = next((name for name, kind in encodings.items() if kind.startswith("ndarray")), "")
            if arrays:
                why += f'. Write tokens of {arrays!r} as one .bin for data.format = "nanogpt" (docs/migrate.md)'
            yield bad(file, why), file.size
            return
        wanted = [name for name in (text_field, TOOLS) if encodings.get(name) in ("str", "json")]
        for number, (begin, end) in enumerate(pairwise(places)):
            place = f"{file.path}: sample {number}"
            try:
                values = _mds_values(stream.read(max(end - begin, 0)), end - begin, sizes)
                row = [f"{json.dumps(name)}: {_mds_json(values[name], encodings[name])}" for name in wanted]
                yield Part(file.source, place, "json", f"{{{', '.join(row)}}}".encode()), stream.done
            except UnicodeDecodeError as error:
                yield Part(file.source, place, "bad", f"not UTF-8: byte {error.start:,}".encode()), stream.done
            except (ValueError, struct.error):
                why = f"damaged: {stream.damage or 'it ends early'}; what follows cannot be read"
                yield Part(file.source, place, "bad", why.encode()), file.size
                return


def _mds_values(data: bytes, length: int, sizes: dict[str, int | None]) -> dict[str, bytes]:
    free = [name for name, size in sizes.items() if not size]
    stated = dict(zip(free, struct.unpack_from(f"<{len(free)}I", data), strict=True))
    values, at = {}, 4 * len(free)
    for name, size in sizes.items():
        end = at + (size or stated[name])
        values[name], at = data[at:end], end
    if at != length or len(data) != length:
        raise ValueError
    return values


def _mds_json(value: bytes, encoding: str) -> str:
    return value.decode() if encoding == "json" else json.dumps(value.decode())


def own_kind(name: str) -> str:
    """Return the kind of files that a function of the user reads: its name, and a hash of its code.

    Raises:
        UserError: there is no such function, or it takes other arguments.
    """
    check_call(name, "path", "text_field")
    with open(inspect.getfile(find_callable(name)), "rb") as code:
        return f"{name}@{hashlib.sha256(code.read()).hexdigest()[:16]}"


FORMATS = {
    "text": Format(_read_text),
    "lines": Format(_read_lines, (".jsonl", ".ndjson", ".jsonlines")),
    "json": Format(_read_json, (".json",)),
    "parquet": Format(_read_parquet, (".parquet",), "pyarrow"),
    "arrow": Format(_read_arrow, (".arrow", ".feather"), "pyarrow"),
    "tar": Format(_read_tar, (".tar",)),
    "mds": Format(_read_mds, (".mds",)),
    "dataset": Format(_read_dataset, package="datasets", install="pip install datasets"),
}
READABLE = "text, JSON lines and .mds (also .gz and .zst), .parquet, .arrow and .tar can be read"


def read_file(file: File, text_field: str, chunk_bytes: int) -> Iterator[Step]:
    """Yield the parts of a file of any format, or of one that a user's function reads."""
    own = file.kind.rpartition("@")[0]
    reader = _documents(find_callable(own)) if own else FORMATS[file.kind].read
    return reader(file, text_field, chunk_bytes)
