"""Parts of files -> documents: the text of each, or why there is none."""

import json
from collections.abc import Iterator, Sequence
from itertools import repeat
from typing import Any, NamedTuple

from titanlite.runtime.errors import UserError
from titanlite.tools.ingest.formats import Part, is_json, no_field
from titanlite.tools.ingest.inputs import find_files
from titanlite.tools.ingest.reading import CHUNK_BYTES, read_chunks

PLACES = {"lines": ":{}", "rows": ": row {}"}
Segment = tuple[str, bool]
"""A text, and whether it counts in the loss."""


class Document(NamedTuple):
    """One document, or a piece of a long one."""

    segments: list[Segment]
    text_bytes: int
    """Bytes of all segments in UTF-8."""


class Bad(NamedTuple):
    """A document that cannot be read."""

    place: str
    """File, and line or row."""
    why: str

    def __str__(self) -> str:
        return f"{self.place}: {self.why}"


class Wrong(Exception):
    """A problem of one document, with its reason."""


def read_documents(part: Part, text_field: str) -> Iterator[Document | Bad]:
    """Yield the documents of a part of a file, in order.

    Args:
        text_field: where the text is, in lines and rows.
    """
    for place, value, _ in read_values(part, text_field):
        try:
            if isinstance(value, Bad):
                yield value
                continue
            segments = _segments(value, text_field)
            yield Document(segments, sum([utf8_length(text) for text, _ in segments]))
        except Wrong as wrong:
            yield Bad(place, str(wrong))


def read_values(part: Part, field: str) -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """Yield (place, value of the field or what is bad, the JSON line or row) of each document of a part, in order."""
    for number, raw in _values(part):
        place = part.path + PLACES.get(part.kind, "").format(number)
        try:
            value, line = _parse(part.kind, raw, field)
        except Wrong as wrong:
            value, line = Bad(place, str(wrong)), {}
        yield place, value, line


def read_texts(paths: Sequence[str], *, text_field: str) -> Iterator[str]:
    """Yield all text that the paths name, document by document, long ones in pieces.

    Raises:
        UserError: something is not there, or cannot be read.
    """
    for chunk in read_chunks(find_files(paths), text_field=text_field, chunk_bytes=CHUNK_BYTES):
        for part in chunk.parts:
            for document in read_documents(part, text_field):
                if isinstance(document, Bad):
                    raise UserError(str(document))
                yield from (text for text, _ in document.segments)


def _values(part: Part) -> Iterator[tuple[int, Any]]:
    """Yield (number of the line or row, what is there) of each document."""
    match part.kind:
        case "lines":
            for number, line in enumerate(part.data.split(b"\n"), start=part.first):
                if line and not line.isspace():
                    yield number, line
        case "rows":
            import pyarrow

            table = pyarrow.ipc.open_stream(part.data).read_all()
            try:
                rows = table.to_pylist()
            except UnicodeDecodeError:
                rows = [table.slice(row, 1) for row in range(len(table))]  # find the damaged row
            yield from enumerate(zip(rows, repeat(table.schema)), start=part.first)
        case _:
            yield 0, part.data


def _parse(kind: str, raw: Any, text_field: str) -> tuple[Any, dict[str, Any]]:
    """Return the text field of a document, whatever that is, and the JSON line or the row that has it."""
    try:
        match kind:
            case "text":
                return raw.decode(), {}
            case "rows":
                row, schema = raw
                row = _members(row if isinstance(row, dict) else row.to_pylist()[0], schema)
                return row.get(text_field), row
            case "bad":
                raise Wrong(raw.decode())
        document = json.loads(raw.decode())
    except UnicodeDecodeError as error:
        raise Wrong(f"not UTF-8: byte {error.start:,}") from None
    except (ValueError, RecursionError) as error:
        raise Wrong(f"not JSON: {error}") from None
    if not isinstance(document, dict):
        raise Wrong("not a JSON object")
    if text_field not in document:
        raise Wrong(no_field(text_field, document))
    return document[text_field], document


def _of_table(value: Any, field: Any) -> Any:
    """Return a value of a table as Hugging Face datasets returns it: JSON decoded, which keeps its own nulls.

    Args:
        field: of Arrow.
    """
    import pyarrow

    stored = getattr(field.type, "storage_type", field.type)  # that of an extension
    if value is None or pyarrow.types.is_primitive(stored):
        return value
    if is_json(field):
        return json.loads(value)
    if isinstance(value, dict):
        return _members(value, stored)
    return [_of_table(item, stored.value_field) for item in value] if hasattr(stored, "value_field") else value


def _members(value: dict[str, Any], fields: Any) -> dict[str, Any]:
    """Return an object of a table without the keys whose value is null: Arrow gives all objects of a column each key.

    Args:
        fields: schema of the table, or type of the object.
    """
    return {key: _of_table(item, fields.field(key)) for key, item in value.items() if item is not None}


def _segments(value: Any, text_field: str) -> list[Segment]:
    if isinstance(value, str):
        return [(value, True)]
    if not isinstance(value, list):
        raise Wrong(f"field {text_field!r} is neither a text nor a list of segments")
    segments: list[Segment] = []
    for segment in value:
        text, counts = (segment.get("text"), segment.get("loss")) if isinstance(segment, dict) else (None, None)
        if not isinstance(text, str) or not isinstance(counts, bool):
            raise Wrong(f'field {text_field!r} has a segment that is not {{"text": a text, "loss": true or false}}')
        segments.append((text, counts))
    return segments


def utf8_length(text: str) -> int:
    try:
        return len(text) if text.isascii() else len(text.encode())
    except UnicodeEncodeError:
        raise Wrong("half a character (a lone surrogate) in the text") from None
