"""Files -> chunks of about a MiB, cut where documents end, each with the position to resume from.

What follows a position depends on the files and the position alone, so that resuming there gives the same chunks.
"""

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import NamedTuple

from titanlite.runtime.errors import UserError
from titanlite.tools.ingest.formats import File, Part, Step, bad, read_file
from titanlite.tools.ingest.streams import state_of

CHUNK_BYTES = 2**20
PART_COST = 2**8
"""Bytes that a part counts for beside its own: a million empty files are no chunk."""
Position = list[int]
"""Number of the file, and of its parts that are done. They are read again on resume, and not tokenized again."""


class Chunk(NamedTuple):
    parts: list[Part]
    position: Position
    """Position after the chunk."""
    done: int
    """Bytes of the files, as they are, up to there."""


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
        steps = islice(_read(file, text_field, chunk_bytes), skip, None)
        for number, (part, done) in enumerate(steps, start=skip + 1):
            parts.append(part)
            size += len(part.data) + PART_COST
            if size >= chunk_bytes:
                yield Chunk(parts, [index, number], before + done)
                parts, size = [], 0
        skip = 0
        before += file.size
    if parts:
        yield Chunk(parts, [len(files), 0], before)


def _read(file: File, text_field: str, chunk_bytes: int) -> Iterator[Step]:
    try:
        yield from read_file(file, text_field, chunk_bytes)
        if file.kind != "dataset" and state_of(file.path) != (file.size, file.mtime_ns):
            raise UserError(f"{file.path} has changed while it was read: run this again")
    except OSError as error:
        yield bad(file, f"cannot be read: {error.strerror or error}"), file.size
