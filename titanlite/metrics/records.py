"""JSON lines files of a run: metrics.jsonl, checkpoints.jsonl, validation.jsonl, skipped.jsonl."""

import json
import logging
import math
from pathlib import Path
from typing import IO, Any

from titanlite.runtime.files import quarantine_path

logger = logging.getLogger(__name__)


def reopen_records(path: Path, step: int) -> IO[str]:
    """Open a file to append, without the records of steps after `step`, which will come again.

    Damaged lines move to <name>.damaged-N with a warning: they never keep a run from resuming.
    """
    kept, damaged = [], []
    for line in path.read_bytes().splitlines() if path.exists() else []:
        record_step = _step_of(line)
        if record_step is None:
            damaged.append(line)
        elif record_step <= step:
            kept.append(line)
    if damaged:
        quarantine = quarantine_path(path)
        quarantine.write_bytes(b"".join(line + b"\n" for line in damaged))
        logger.warning(f"{path}: {len(damaged)} damaged lines are now in {quarantine.name}; the run continues")
    staging = path.with_name(f".{path.name}.staging")
    staging.write_bytes(b"".join(line + b"\n" for line in kept))
    staging.replace(path)
    return path.open("a")


def write_record(file: IO[str], record: dict[str, Any]) -> None:
    """Append a record. JSON has no NaN and no infinity: they become null."""
    print(json.dumps(_finite(record)), file=file, flush=True)


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
