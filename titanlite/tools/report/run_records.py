"""Records of runs for a report: read from their folders, and the arithmetic of its charts and tables."""

import json
import logging
import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from html import escape
from importlib import import_module
from math import fsum, nan
from pathlib import Path
from typing import Any

import tomli

from titanlite.metrics.durations import CATEGORIES
from titanlite.run.records import MOST_RECORDS, SCHEMA
from titanlite.runtime.console import flat, shell_command
from titanlite.runtime.errors import UserError, did_you_mean
from titanlite.runtime.files import file_inside, read_small

logger = logging.getLogger(__name__)

Record = dict[str, Any]
FILES = ("metrics", "validation", "checkpoints", "skipped", "layers", "hashes")
"""Files that a report reads."""


@dataclass(frozen=True, repr=False)
class RunRecords:
    """All records of a run. A notebook shows them as a table."""

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

    def to_pandas(self, records: str = "metrics") -> Any:
        """Return records as a DataFrame by step. Nested metrics have names such as "data_shares/text".

        Args:
            records: metrics, validation, saves, skipped, layers or hashes.

        Raises:
            UserError: pandas is not installed, or there are no such records.
        """
        pandas = _optional("pandas")
        kinds = {field.name for field in fields(self) if field.type == list[Record]} - {"starts"}
        if records not in kinds:
            raise UserError(
                f"no records {records!r}{did_you_mean(records, kinds)}: there are {', '.join(sorted(kinds))}"
            )
        frame = pandas.json_normalize(getattr(self, records), sep="/")
        return frame.set_index("step") if len(frame) else frame

    def plot(self, metric: str = "loss", *, ax: Any = None) -> Any:
        """Draw a metric over the steps, the loss with that of validations. Return matplotlib's axes.

        Args:
            metric: name in the records.
            ax: axes to draw into, such as those of another run.

        Raises:
            UserError: matplotlib is not installed, or there is no such metric.
        """
        pyplot = _optional("matplotlib.pyplot")
        found = {record["step"]: record.get(metric) for record in self.metrics}
        known = {name for record in self.metrics for name, value in record.items() if isinstance(value, int | float)}
        if metric not in known:
            raise UserError(f"no metric {metric!r} in the records{did_you_mean(metric, known)}")
        ax = ax or pyplot.subplots()[1]
        numbers = [value if isinstance(value, int | float) else nan for value in found.values()]
        [line] = ax.plot([*found], numbers, label=self.name)
        if metric == "loss" and (validated := [one for one in self.validation if one.get("loss") is not None]):
            steps, losses = zip(*((one["step"], one["loss"]) for one in validated), strict=True)
            ax.plot(steps, losses, "o", color=line.get_color(), label=f"{self.name}, validation")
        ax.set(xlabel="step", ylabel=metric)
        ax.legend()
        return ax

    def _facts(self) -> dict[str, str]:
        last = self.metrics[-1]
        values = {
            "step": last["step"],
            "loss": last.get("loss"),
            "validation loss": next(
                (one["loss"] for one in self.validation[::-1] if one.get("loss") is not None), None
            ),
            "tokens/s": last.get("tokens_per_second"),
        }
        known = {name: value for name, value in values.items() if isinstance(value, int | float)}
        return {
            "run": self.name,
            **{name: f"{value:,.4f}" if "loss" in name else f"{value:,.0f}" for name, value in known.items()},
            "starts": str(len(self.starts)),
        }

    def __repr__(self) -> str:
        return f"RunRecords({', '.join(f'{name} {value}' for name, value in self._facts().items())})"

    def _repr_html_(self) -> str:
        cells = "".join(f"<tr><th>{name}</th><td>{escape(value)}</td></tr>" for name, value in self._facts().items())
        return f"<table>{cells}</table>"


def read_run(path: str | Path) -> RunRecords:
    """Read the folder of a run. The last line of a file may be half written: the run may still train.

    Raises:
        UserError: the folder is no run, has no records yet, or records of another schema, or a file is a link that
            leads out of it.
    """
    path = Path(path)
    if not path.is_dir():
        raise UserError(f"no folder {path}: name the folder of a run, such as outputs/debug")
    if not (path / "metrics.jsonl").is_file():
        inside = sorted(found.parent.name for found in path.glob("*/metrics.jsonl"))
        advice = f": name one of {', '.join(inside)} in it" if inside else ""
        raise UserError(f"{path} is no folder of a run, or has no metrics.jsonl yet{advice}")
    files = {name: _read_lines(file_inside(path, f"{name}.jsonl")) for name in FILES}
    metrics = files["metrics"]
    if not metrics:
        raise UserError(f"{path}/metrics.jsonl has no records yet")
    if other := next((record for record in metrics if record.get("schema", 1) != SCHEMA), None):
        raise UserError(
            f"{path}/metrics.jsonl has records of schema {other.get('schema', 1)}, of another version of titanlite, "
            f"and this one reads {SCHEMA}"
        )
    run = _read_tree(file_inside(path, "run.json"), json.loads)
    return RunRecords(
        name=Path(os.path.abspath(path)).name,
        path=path,
        run_id=run["id"] if isinstance(run.get("id"), str) else "",
        starts=[{"end": {}, "step": None, **start} for start in run.get("starts", [])],
        metrics=metrics,
        validation=files["validation"],
        saves=files["checkpoints"],
        skipped=files["skipped"],
        layers=files["layers"],
        hashes=files["hashes"],
        config=_read_tree(file_inside(path, "config.toml"), tomli.loads),
    )


def _optional(package: str) -> Any:
    """Return a module of a package that titanlite does without."""
    try:
        return import_module(package)
    except ImportError:
        name = package.partition(".")[0]
        raise UserError(f"{name} is not installed: {shell_command('pip')} install {name}") from None


def _read_lines(path: Path) -> list[Record]:
    """Return the records of a file, without damaged lines. A part of a line at its end is none of them."""
    if not path.is_file():
        return []
    try:
        *lines, _ = read_small(path, MOST_RECORDS).split(b"\n")
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None
    records, damaged = [], 0
    for line in lines:
        try:
            record = json.loads(line)
            records += [{**record, "step": int(record["step"])}]
        except (ValueError, TypeError, KeyError, RecursionError):
            damaged += 1
    if damaged:
        logger.warning(f"{path}: {damaged} damaged lines are left out")
    return records


def _read_tree(path: Path, parse: Callable[[str], Any]) -> Record:
    """Return the content of a file of JSON or TOML; nothing if there is no such file, or it is damaged."""
    try:
        tree = parse(read_small(path).decode()) if path.is_file() else {}
        return tree if isinstance(tree, dict) and flat(tree) else {}
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
    """For each start after the first, return the step at which it resumed, and how the start before it ended."""
    found = []
    for before, start in zip(run.starts, run.starts[1:], strict=False):
        if start["step"] is not None:
            reason = before["end"].get("reason")
            found.append((start["step"], reason if isinstance(reason, str) else "was killed"))
    return found


def first_difference(hashes: Sequence[Record], others: Sequence[Record]) -> tuple[int, str] | None:
    """Return the first step at which the states of two runs differ, and the name of the first tensor that does.

    None if they are equal at every step at which both runs wrote a hash.
    """
    by_step = {record["step"]: record for record in others}
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


def config_differences(runs: Sequence[RunRecords]) -> dict[str, list[str]]:
    """Return the options that are not the same in all runs, with the value in each."""
    configs = [flat(run.config) for run in runs]
    keys = sorted({key for config in configs for key in config})
    values = {key: [config.get(key, "") for config in configs] for key in keys}
    return {key: of_runs for key, of_runs in values.items() if len({*of_runs}) > 1 and key != "job.name"}


def slowest_ranks(run: RunRecords, count: int = 8) -> list[tuple[str, int]]:
    """Return the ranks that were slowest most often, with the number of records, the most frequent first."""
    named = [record for record in run.metrics if record.get("slowest_rank") is not None]
    found = Counter(f"rank {record['slowest_rank']} ({record.get('slowest_host', '')})" for record in named)
    return found.most_common(count)
