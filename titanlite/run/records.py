"""JSON lines files of a run: metrics.jsonl, checkpoints.jsonl, validation.jsonl, skipped.jsonl."""

import json
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import Any, cast

from titanlite.runtime.errors import UserError
from titanlite.runtime.files import (
    json_text,
    put_aside_unless_file,
    quarantine_path,
    read_small,
    write_all,
    write_atomically,
)

logger = logging.getLogger(__name__)


SCHEMA = 2
"""Version of the form of records, in each record as `schema`; docs/metrics.md has the fields with their units. A field
that goes, or changes its type or unit, makes a new version. A field that joins does not. Records of version 1 have
neither `schema` nor `time` and `phase_seconds`."""
MOST_RECORDS = 2**31
"""Bytes of records that are read at most."""
MOST_WAITING = 10_000
"""Records that are kept while they cannot be written; older ones are lost then."""


class RecordFile:
    """A file of records, to append to. It is created with its first record.

    Records of steps after the one at which the run resumes are dropped: they will come again. Damaged lines move to
    <name>.damaged-N with a warning, and never keep a run from resuming.

    A record that cannot be written (a full disk) is kept in memory with a warning, and training continues. Each further
    record tries again to write all of them.

    Args:
        step: step at which the run resumes; None keeps all records.
        clock: returns the time of day, in seconds since 1970.
    """

    def __init__(self, path: Path, step: int | None, *, clock: Callable[[], float] = time.time) -> None:
        self.path = path
        self._clock = clock
        self._file: FileIO | None = None
        self._waiting: deque[bytes] = deque(maxlen=MOST_WAITING)
        self._is_failing = False
        if aside := put_aside_unless_file(path):
            logger.warning(f"{path} is not a file: it is now {aside.name}")
        if step is not None and path.exists():
            try:
                self._clean(step)
            except OSError as error:
                logger.warning(f"{path} cannot be cleaned: {error.strerror}. Records of later steps stay in it")

    def write(self, record: dict[str, Any]) -> None:
        """Append a record, with its time and the schema.

        Raises:
            UserError: the folder of the run was renamed or deleted.
        """
        record = {"schema": SCHEMA, **record, "time": round(self._clock(), 3)}
        self._waiting.append(json_text(record).encode() + b"\n")
        self._notice_lost_file()
        try:
            self._flush()
        except OSError as error:
            if not self._is_failing:
                logger.error(
                    f"{self.path} cannot be written: {error.strerror}. Its records are kept in memory, and training "
                    "and checkpoints continue"
                )
            self._is_failing = True
            self.close()
        else:
            if self._is_failing:
                logger.warning(f"{self.path} is written again, with all records since")
            self._is_failing = False

    def _notice_lost_file(self) -> None:
        """Begin the file anew if someone has deleted it; end the run if its whole folder is away."""
        if self._file is None or os.path.lexists(self.path):
            return
        self.close()
        folder = self.path.parent
        if not (os.path.lexists(folder / "run.json") or os.path.lexists(folder / "logs")):
            raise UserError(
                f"{folder} was renamed or deleted while this run trains in it. Move it back, and start again: the run "
                "resumes from its newest checkpoint"
            )

    def close(self) -> None:
        if self._file:
            self._file.close()
            self._file = None

    def _flush(self) -> None:
        """Write all records that wait. A part of a record is not left in the file."""
        self._file = self._file or FileIO(self.path, "ab")
        while self._waiting:
            record = self._waiting[0]
            before = self._file.seek(0, os.SEEK_END)
            try:
                write_all(self._file, record)
            except OSError:
                with suppress(OSError):
                    self._file.truncate(before)
                raise
            self._waiting.popleft()

    def _clean(self, step: int) -> None:
        kept, damaged = [], []
        for line in read_small(self.path, MOST_RECORDS).splitlines():
            record_step = _step_of(line)
            if record_step is None:
                damaged.append(line)
            elif record_step <= step:
                kept.append(line)
        if damaged:
            quarantine = quarantine_path(self.path)
            quarantine.write_bytes(b"".join(line + b"\n" for line in damaged))
            logger.warning(f"{self.path}: {len(damaged)} damaged lines are now in {quarantine.name}; the run continues")
        write_atomically(self.path, b"".join(line + b"\n" for line in kept))


def read_records(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the records of a file, without damaged lines; none if it cannot be read."""
    try:
        lines = read_small(path, MOST_RECORDS).splitlines()
    except OSError:
        return
    yield from filter(None, map(_parsed, lines))


def _parsed(line: bytes) -> dict[str, Any]:
    """Return a record; an empty one if the line is damaged."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return cast(dict[str, Any], record) if isinstance(record, dict) else {}


def _step_of(line: bytes) -> int | None:
    """Return the step of a record; None if the line is damaged."""
    step = _parsed(line).get("step")
    return step if type(step) is int else None
