"""Records of runs for a report: read from their folders, and the arithmetic of its charts and tables."""

import json
import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli

from titanlite.metrics.clock import CATEGORIES
from titanlite.metrics.schema import SCHEMA
from titanlite.runtime.errors import UserError

logger = logging.getLogger(__name__)

Record = dict[str, Any]


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
    config: Record
    damaged: int
    """Lines that could not be read."""

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
        UserError: the folder is no run, has no records yet, or records of another schema.
    """
    if not path.is_dir():
        raise UserError(f"no folder {path}: name the folder of a run, such as outputs/debug")
    if not (path / "metrics.jsonl").exists():
        inside = sorted(found.parent.name for found in path.glob("*/metrics.jsonl"))
        advice = f": name one of {', '.join(inside)} in it" if inside else ""
        raise UserError(f"{path} is no folder of a run, or has no metrics.jsonl yet{advice}")
    names = ("metrics", "validation", "checkpoints", "skipped", "layers")
    files = {name: _read_lines(path / f"{name}.jsonl") for name in names}
    metrics, _ = files["metrics"]
    if not metrics:
        raise UserError(f"{path}/metrics.jsonl has no records yet")
    schemas = {record.get("schema", 1) for record in metrics}
    if schemas != {SCHEMA}:
        other = next(schema for schema in schemas if schema != SCHEMA)
        raise UserError(
            f"{path}/metrics.jsonl has records of schema {other}, of another version of titanlite, and this one reads "
            f"{SCHEMA}"
        )
    run = _read_json(path / "run.json")
    starts = run.get("starts")
    return RunRecords(
        name=path.name,
        path=path,
        run_id=str(run.get("id", "")),
        starts=[start for start in starts if isinstance(start, dict)] if isinstance(starts, list) else [],
        metrics=metrics,
        validation=files["validation"][0],
        saves=files["checkpoints"][0],
        skipped=files["skipped"][0],
        layers=files["layers"][0],
        config=_read_config(path / "config.toml"),
        damaged=sum(damaged for _, damaged in files.values()),
    )


def _read_lines(path: Path) -> tuple[list[Record], int]:
    """Return the records of a file, and the number of damaged lines. A part of a line at its end is none of them."""
    if not path.exists():
        return [], 0
    *lines, _ = path.read_bytes().split(b"\n")
    records, damaged = [], 0
    for line in lines:
        try:
            record = json.loads(line)
            records.append({**record, "step": int(record["step"])})
        except (ValueError, TypeError, KeyError, RecursionError):
            damaged += 1
    if damaged:
        logger.warning(f"{path}: {damaged} damaged lines are left out")
    return records, damaged


def _read_json(path: Path) -> Record:
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _read_config(path: Path) -> Record:
    try:
        return tomli.loads(path.read_text())
    except (OSError, ValueError):
        return {}


# Arithmetic


def smoothed(values: Sequence[float | None], span: float | None = None) -> list[float | None]:
    """Return the exponential moving average, without a bias towards the first value.

    Args:
        values: None is left out, and stays None.
        span: number of values over which the average extends: each new one has the weight 2 / (span + 1). None: 2 % of
            all, 5 at least.
    """
    span = span or max(5, len(values) / 50)
    keep, total, weight = 1 - 2 / (span + 1), 0.0, 0.0
    found: list[float | None] = []
    for value in values:
        if value is None:
            found.append(None)
            continue
        total, weight = keep * total + (1 - keep) * value, keep * weight + (1 - keep)
        found.append(total / weight)
    return found


def restarts(run: RunRecords) -> list[tuple[int, str]]:
    """Return (step at which it resumed, end of the start before) of each start after the first."""
    found = []
    for before, start in zip(run.starts, run.starts[1:], strict=False):
        if start.get("step") is not None:
            found.append((start["step"], str(before.get("end", {}).get("reason", "was killed"))))
    return found


def phase_totals(run: RunRecords) -> dict[str, float]:
    """Return the seconds of all starts by phase.

    A start that ended by itself has left its times in run.json. Of one that was killed, the last record that is left
    has them: records of steps that a later start trained again are gone.
    """
    totals = dict.fromkeys(CATEGORIES, 0.0)
    starts = [start for start in run.starts if start.get("step") is not None] or [{"step": 0}]
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
            yield prefix + key, json.dumps(value)


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


def best_validation(run: RunRecords) -> tuple[int, float] | None:
    """Return (step, loss) of the validation with the smallest loss."""
    found = [(record["loss"], record["step"]) for record in run.validation if record.get("loss") is not None]
    return (min(found)[1], min(found)[0]) if found else None
