"""Records of runs for a report: read from their folders, and the arithmetic of its charts and tables."""

import json
import logging
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import fsum
from pathlib import Path
from typing import Any

import tomli

from titanlite.metrics.clock import CATEGORIES
from titanlite.metrics.records import LAYERS, METRICS, SAVES, SCHEMA, VALIDATION, Field
from titanlite.runtime.errors import UserError
from titanlite.runtime.files import file_inside

logger = logging.getLogger(__name__)

Record = dict[str, Any]
FILES = {
    "metrics": METRICS,
    "validation": VALIDATION,
    "checkpoints": SAVES,
    "skipped": {},
    "layers": LAYERS,
    "hashes": {},
}
"""Files that a report reads, with the fields of their records."""
LEVELS = {"sources": 2, "layers": 3}
"""Tables within tables of a field, where there is more than one: sources[name]["loss"]."""
LARGEST = 1e300
"""Numbers beyond it are no measurements: their sums are not finite."""
LAST_STEP = 2**53
"""Steps beyond it are not whole numbers in JavaScript."""


@dataclass(frozen=True)
class RunRecords:
    """All records of a run."""

    name: str
    path: Path
    run_id: str
    starts: list[Record]
    """Starts in run.json, the first one first."""
    metrics: list[Record]
    validation: list[Record]
    saves: list[Record]
    skipped: list[Record]
    layers: list[Record]
    hashes: list[Record]
    config: Record

    def column(self, name: str) -> list[float | None]:
        """Return a metric of all records; None where it is missing."""
        return [record.get(name) for record in self.metrics]

    @property
    def steps(self) -> list[int]:
        """Steps of the records, ascending."""
        return [record["step"] for record in self.metrics]


def read_run(path: Path) -> RunRecords:
    """Read the folder of a run. The last line of a file may be half written: the run may still train.

    Raises:
        UserError: the folder is no run, has no records yet, or records of another schema, or a file is a link that
            leads out of it.
    """
    if not path.is_dir():
        raise UserError(f"no folder {path}: name the folder of a run, such as outputs/debug")
    if not (path / "metrics.jsonl").is_file():
        inside = sorted(found.parent.name for found in path.glob("*/metrics.jsonl"))
        advice = f": name one of {', '.join(inside)} in it" if inside else ""
        raise UserError(f"{path} is no folder of a run, or has no metrics.jsonl yet{advice}")
    files = {name: _read_lines(file_inside(path, f"{name}.jsonl"), fields) for name, fields in FILES.items()}
    metrics = files["metrics"]
    if not metrics:
        raise UserError(f"{path}/metrics.jsonl has no records yet")
    if other := next((it for it in metrics if it.get("schema", 1) != SCHEMA), None):
        raise UserError(
            f"{path}/metrics.jsonl has records of schema {other.get('schema', 1)}, of another version of titanlite, "
            f"and this one reads {SCHEMA}"
        )
    run = _read_json(file_inside(path, "run.json"))
    starts = run.get("starts")
    return RunRecords(
        name=Path(os.path.abspath(path)).name,
        path=path,
        run_id=run["id"] if isinstance(run.get("id"), str) else "",
        starts=[_start(start) for start in starts if isinstance(start, dict)] if isinstance(starts, list) else [],
        metrics=metrics,
        validation=files["validation"],
        saves=files["checkpoints"],
        skipped=files["skipped"],
        layers=files["layers"],
        hashes=files["hashes"],
        config=_read_config(file_inside(path, "config.toml")),
    )


def _read_lines(path: Path, fields: Mapping[str, Field]) -> list[Record]:
    """Return the records of a file, without damaged lines. A part of a line at its end is none of them."""
    if not path.is_file():  # a named pipe would never end
        return []
    *lines, _ = path.read_bytes().split(b"\n")
    records, damaged = [], 0
    for line in lines:
        try:
            records.append(_record(json.loads(line), fields))
        except (ValueError, TypeError, KeyError, RecursionError):
            damaged += 1
    if damaged:
        logger.warning(f"{path}: {damaged} damaged lines are left out")
    return records


def _record(found: Any, fields: Mapping[str, Field]) -> Record:
    """Return a record in which each field has its type, or is None. Numbers that are not finite are None, too.

    Raises:
        ValueError: it is no record of a step.
    """
    if not isinstance(found, dict) or type(found["step"]) is not int or not 0 <= found["step"] <= LAST_STEP:
        raise ValueError("not a record of a step")
    record: Record = dict(found)
    for name in fields.keys() & found.keys():
        value, kind = found[name], fields[name].type
        if kind is dict:
            record[name] = _numbers(value, LEVELS.get(name, 1)) or {}
        elif kind is float:
            record[name] = _numbers(value, 0)
        else:
            record[name] = value if type(value) is kind else None
    return record


def _numbers(value: Any, levels: int) -> Any:
    """Return a number, or a table of numbers with so many levels, without what is neither; None if nothing is left."""
    if levels and isinstance(value, dict):
        parts = {key: _numbers(part, levels - 1) for key, part in value.items()}
        return {key: part for key, part in parts.items() if part is not None} or None
    is_number = not levels and type(value) in (int, float) and abs(value) < LARGEST
    return value if is_number else None


def _start(found: Record) -> Record:
    """Return a start of run.json of which step, end and phase_seconds have their types, or are missing."""
    end, step = found.get("end"), found.get("step")
    known = {
        "end": end if isinstance(end, dict) else {},
        "step": step if type(step) is int and 0 <= step <= LAST_STEP else None,
        "phase_seconds": _numbers(found.get("phase_seconds"), 1),
    }
    return {**found, **known}


def _read_json(path: Path) -> Record:
    try:
        found = json.loads(path.read_bytes()) if path.is_file() else {}
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _read_config(path: Path) -> Record:
    try:
        config = tomli.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        return config if dict(flat(config)) else {}
    except (OSError, ValueError, RecursionError):
        return {}


# Arithmetic


def smoothed(values: Sequence[float | None]) -> list[float | None]:
    """Return the mean of each value and its neighbours, 2 % of all on either side.

    Near the ends it takes fewer, and as many before as after. So the line has no lag: it begins and ends at the values,
    and that of a run with fewer than 50 runs through all of them.

    Args:
        values: None is left out, and stays None.
    """
    known = [value for value in values if value is not None]
    most, means = len(known) // 50, []
    for at in range(len(known)):
        near = min(most, at, len(known) - 1 - at)
        means.append(fsum(known[at - near : at + near + 1]) / (2 * near + 1))
    found = iter(means)
    return [None if value is None else next(found) for value in values]


def restarts(run: RunRecords) -> list[tuple[int, str]]:
    """Return (step at which it resumed, end of the start before) of each start after the first."""
    found = []
    for before, start in zip(run.starts, run.starts[1:], strict=False):
        if start["step"] is not None:
            reason = before["end"].get("reason")
            found.append((start["step"], reason if isinstance(reason, str) else "was killed"))
    return found


def hashed_steps(path: Path) -> list[Record]:
    """Return the records of hashes.jsonl in the folder of a run; none if it has no such file."""
    return _read_lines(file_inside(path, "hashes.jsonl"), {})


def first_difference(hashes: Sequence[Record], others: Sequence[Record]) -> tuple[int, str] | None:
    """Return the first step at which the states of two runs differ, and the name of the first tensor that does.

    None if they are equal at every step at which both runs wrote a hash.
    """
    by_step = {it["step"]: it for it in others}
    for record in hashes:
        other = by_step.get(record["step"])
        if other and record.get("hash") != other.get("hash"):
            tensors, its = _hashes_of(record), _hashes_of(other)
            names = (name for name in (*tensors, *its) if tensors.get(name) != its.get(name))
            return record["step"], next(names, "")
    return None


def _hashes_of(record: Record) -> Record:
    found = record.get("tensors")
    return found if isinstance(found, dict) else {}


def phase_totals(run: RunRecords) -> dict[str, float]:
    """Return the seconds of all starts by phase.

    A start that ended by itself has left its times in run.json. Of one that was killed, the last record that is left
    has them: records of steps that a later start trained again are gone.
    """
    totals = dict.fromkeys(CATEGORIES, 0.0)
    starts = [start for start in run.starts if start["step"] is not None] or [{"step": 0}]
    ends = [*(start["step"] for start in starts[1:]), run.steps[-1]]
    for start, end in zip(starts, ends, strict=True):
        own = [record for record in run.metrics if start["step"] < record["step"] <= end]
        seconds = start.get("phase_seconds") or (own[-1].get("phase_seconds") if own else None) or {}
        for name in CATEGORIES:
            totals[name] += seconds.get(name, 0.0)
    return totals


def flat(config: Record, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield (dotted key, value) of each option."""
    for key, value in config.items():
        if isinstance(value, dict):
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, json.dumps(value, default=str)


def config_differences(runs: Sequence[RunRecords]) -> dict[str, list[str]]:
    """Return the options that are not the same in all runs, with the value in each."""
    configs = [dict(flat(run.config)) for run in runs]
    keys = sorted({key for config in configs for key in config})
    values = {key: [config.get(key, "") for config in configs] for key in keys}
    return {key: of_runs for key, of_runs in values.items() if len({*of_runs}) > 1 and key != "job.name"}


def slowest_ranks(run: RunRecords, count: int = 8) -> list[tuple[str, int]]:
    """Return the ranks that were slowest most often, with the number of records, the most frequent first."""
    named = [record for record in run.metrics if record.get("slowest_rank") is not None]
    found = Counter(f"rank {record['slowest_rank']} ({record.get('slowest_host', '')})" for record in named)
    return found.most_common(count)
