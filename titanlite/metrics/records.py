"""JSON lines files of a run: metrics.jsonl, checkpoints.jsonl, validation.jsonl, skipped.jsonl."""

import json
import logging
import math
from pathlib import Path
from typing import IO, Any

from titanlite.runtime.files import quarantine_path

logger = logging.getLogger(__name__)


class RecordFile:
    """A file of records, to append to. It is created with its first record.

    Records of steps after the one at which the run resumes are dropped: they will come again. Damaged lines move to
    <name>.damaged-N with a warning, and never keep a run from resuming.

    Args:
        step: step at which the run resumes; None keeps all records.
    """

    def __init__(self, path: Path, step: int | None) -> None:
        self.path = path
        self._file: IO[str] | None = None
        if step is not None and path.exists():
            self._clean(step)

    def write(self, record: dict[str, Any]) -> None:
        """Append a record. JSON has no NaN and no infinity: they become null."""
        self._file = self._file or self.path.open("a")
        print(json.dumps(_finite(record)), file=self._file, flush=True)

    def close(self) -> None:
        if self._file:
            self._file.close()

    def _clean(self, step: int) -> None:
        kept, damaged = [], []
        for line in self.path.read_bytes().splitlines():
            record_step = _step_of(line)
            if record_step is None:
                damaged.append(line)
            elif record_step <= step:
                kept.append(line)
        if damaged:
            quarantine = quarantine_path(self.path)
            quarantine.write_bytes(b"".join(line + b"\n" for line in damaged))
            logger.warning(f"{self.path}: {len(damaged)} damaged lines are now in {quarantine.name}; the run continues")
        staging = self.path.with_name(f".{self.path.name}.staging")
        staging.write_bytes(b"".join(line + b"\n" for line in kept))
        staging.replace(self.path)


def _step_of(line: bytes) -> int | None:
    """Return the step of a record; None if the line is damaged."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    step = record.get("step") if isinstance(record, dict) else None
    return step if type(step) is int else None


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(part) for name, part in value.items()}
    if isinstance(value, list):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
