"""Charts and tables of a report as plain data: what the page draws with plotly.js, and tests read."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import median
from typing import Any

from titanlite.metrics.durations import CATEGORIES, format_seconds
from titanlite.techniques.layer_health.names import NAMES
from titanlite.tools.report.run_records import (
    RunRecords,
    config_differences,
    first_difference,
    phase_totals,
    restarts,
    slowest_ranks,
    smoothed,
)

Trace = dict[str, Any]
Chart = dict[str, Any]

LINES: dict[str, tuple[str, str, bool]] = {
    "grad_norm": ("Gradient norm", "L2 norm before clipping", True),
    "lr": ("Learning rate", "", False),
    "tokens_per_second": ("Speed", "tokens/s", False),
    "step_seconds": ("Time of a step", "s", False),
    "data_wait_seconds": ("Wait for data", "s a step", False),
    "mfu": ("MFU", "share of the peak", False),
    "memory_gib": ("Memory, highest of any rank", "GiB", False),
    "distill_loss": ("Divergence from the teacher", "nats a token", False),
    "busiest_expert": ("Busiest expert", "times the mean", False),
    "balance_loss": ("Balance loss of routers", "", False),
}
"""Charts of one metric: (title, unit, logarithmic axis). Those without values are left out."""


def report_of(runs: Sequence[RunRecords]) -> dict[str, Any]:
    """Return all that a report shows: {"tables": [...], "charts": [...]}."""
    return {"tables": [*_tables(runs)], "charts": [chart for chart in _charts(runs) if chart["traces"]]}


# Charts


def _charts(runs: Sequence[RunRecords]) -> Iterator[Chart]:
    yield {**_chart("loss", "Loss", "nats a token"), **_loss(runs), "wide": True}
    yield {**_chart("validation", "Validation by source", "nats a token"), "traces": [*_validation(runs)]}
    for name, (title, unit, is_log) in LINES.items():
        traces = [_line(run, name, color) for color, run in enumerate(runs)]
        yield {**_chart(name, title, unit), "log": is_log, "traces": [trace for trace in traces if trace]}
    yield {**_chart("data_shares", "Data, share of all sequences", "share of 1"), "traces": [*_shares(runs)]}
    yield {**_chart("phases", "Time by phase", "hours"), "kind": "bars", "traces": [*_phases(runs)]}
    yield {**_chart("slowest", "Slowest rank", "records"), "kind": "bars", "traces": [*_slowest(runs)]}
    for run in runs:
        yield from _heat_maps(run)


def _chart(name: str, title: str, unit: str) -> Chart:
    return {"name": name, "title": title, "unit": unit, "kind": "lines", "marks": []}


def _line(run: RunRecords, name: str, color: int) -> Trace | None:
    points = [(step, value) for step, value in zip(run.steps, run.column(name), strict=True) if value is not None]
    if not points:
        return None
    steps, values = zip(*points, strict=True)
    return {"name": run.name, "x": [*steps], "y": [*values], "color": color}


def _loss(runs: Sequence[RunRecords]) -> dict[str, Any]:
    traces: list[Trace] = []
    marks: list[dict[str, Any]] = []
    for color, run in enumerate(runs):
        losses = run.column("loss")
        traces.append({"name": f"{run.name}: each record", "x": run.steps, "y": losses, "color": color, "thin": True})
        traces.append({"name": run.name, "x": run.steps, "y": smoothed(losses), "color": color})
        averages = [{"step": record["step"], **record["average"]} for record in run.validation if record.get("average")]
        for what, symbol, records in (
            ("validation", "circle", run.validation),
            ("validation, average of weights", "circle-open", averages),
        ):
            if records:
                x, y = [record["step"] for record in records], [record.get("loss") for record in records]
                traces.append({"name": f"{run.name}: {what}", "x": x, "y": y, "color": color, "points": symbol})
        low = min((loss for loss in losses if loss is not None), default=0)
        for what, symbol, steps in (
            ("checkpoint", "triangle-up", [save["step"] for save in run.saves]),
            ("skipped step", "x", [skip["step"] for skip in run.skipped]),
        ):
            if steps:
                name = f"{run.name}: {what}"
                traces.append({"name": name, "x": steps, "y": [low] * len(steps), "color": color, "points": symbol})
        marks += [{"x": step, "text": f"{run.name}: {reason}", "color": color} for step, reason in restarts(run)]
        if color and (found := first_difference(run.hashes, runs[0].hashes)):
            marks.append({"x": found[0], "text": f"{run.name}: first hash that differs", "color": color})
    return {"traces": traces, "marks": marks}


def _validation(runs: Sequence[RunRecords]) -> Iterator[Trace]:
    for color, run in enumerate(runs):
        tables = [
            {name: numbers["loss"] for name, numbers in record.get("sources", {}).items() if "loss" in numbers}
            for record in run.validation
        ]
        steps = [record["step"] for record in run.validation]
        yield from _by_name(run, steps, tables, color if len(runs) > 1 else None)


def _shares(runs: Sequence[RunRecords]) -> Iterator[Trace]:
    for color, run in enumerate(runs):
        tables = [record.get("data_shares") or {} for record in run.metrics]
        yield from _by_name(run, run.steps, tables, color if len(runs) > 1 else None)


def _by_name(
    run: RunRecords, steps: Sequence[int], tables: Sequence[Mapping[str, float]], color: int | None
) -> Iterator[Trace]:
    """Yield a line for each name in tables of a run; none if there is one name only.

    Args:
        color: of the run, of which each line gets another dash; None: there is one run, and each line has its color.
    """
    names = sorted({name for table in tables for name in table})
    for number, name in enumerate(names if len(names) > 1 else []):
        points = [(step, table[name]) for step, table in zip(steps, tables, strict=True) if name in table]
        yield {
            "name": name if color is None else f"{run.name}: {name}",
            "x": [step for step, _ in points],
            "y": [value for _, value in points],
            "color": number if color is None else color,
            "dash": 0 if color is None else number,
        }


def _phases(runs: Sequence[RunRecords]) -> Iterator[Trace]:
    totals = [phase_totals(run) for run in runs]
    for number, phase in enumerate(CATEGORIES):
        if any(seconds[phase] for seconds in totals):
            hours = [seconds[phase] / 3600 for seconds in totals]
            yield {"name": phase, "x": hours, "y": [run.name for run in runs], "color": number}


def _slowest(runs: Sequence[RunRecords]) -> Iterator[Trace]:
    for color, run in enumerate(runs):
        found = slowest_ranks(run)
        if len(found) > 1:
            yield {"name": run.name, "x": [n for _, n in found], "y": [name for name, _ in found], "color": color}


def _heat_maps(run: RunRecords) -> Iterator[Chart]:
    tables = [record.get("layers", {}) for record in run.layers]
    layers = [*tables[-1]] if tables else []
    for kind in NAMES.values():
        rows = [[table.get(layer, {}).get(kind, {}).get("rms") for table in tables] for layer in layers]
        if any(value is not None for row in rows for value in row):
            trace = {"x": [record["step"] for record in run.layers], "y": layers, "z": rows}
            chart = _chart(f"{run.name}-{kind}", f"{run.name}: RMS of {kind}, by layer", "log10")
            yield {**chart, "kind": "heat", "traces": [trace]}


# Tables


def _tables(runs: Sequence[RunRecords]) -> Iterator[dict[str, Any]]:
    rows: dict[str, Callable[[RunRecords], str]] = {
        "step": lambda run: f"{run.steps[-1]:,} of {_steps_of(run)}",
        "loss": lambda run: _number(run.metrics[-1].get("loss"), 4),
        "loss, smoothed": lambda run: _number(smoothed(run.column("loss"))[-1], 4),
        "validation loss": _validation_loss,
        "tokens/s": lambda run: _number(_median(run.column("tokens_per_second")), 0),
        "MFU": lambda run: _share(_median(run.column("mfu"))),
        "memory": lambda run: _number(run.metrics[-1].get("memory_gib"), 2, " GiB"),
        "time": lambda run: format_seconds(sum(phase_totals(run).values())),
        "in steps": _in_steps,
        "restarts": lambda run: str(len(restarts(run))),
        "checkpoints": lambda run: str(len(run.saves)),
        "skipped steps": lambda run: str(len(run.skipped)),
        "ended": lambda run: _text((run.starts[-1]["end"] if run.starts else {}).get("reason"), "not yet"),
        "device": lambda run: f"{_start(run, 'processes')} x {_start(run, 'device')}",
        "hashes": lambda run: _compared_hashes(run, runs[0]),
        "commit": lambda run: _start(run, "git_commit")[:12],
        "id": lambda run: run.run_id[:12],
    }
    columns = ["", *(run.name for run in runs)]
    cells = {name: [*map(of, runs)] for name, of in rows.items()}
    yield {"title": "", "columns": columns, "rows": [[name, *its] for name, its in cells.items() if any(its)]}
    if differences := config_differences(runs) if len(runs) > 1 else {}:
        rows_of = [[key, *values] for key, values in differences.items()]
        yield {"title": "Options that differ", "columns": columns, "rows": rows_of}


def _validation_loss(run: RunRecords) -> str:
    """Return the loss of the last validation that has one: it may be of tasks alone."""
    losses = [record["loss"] for record in run.validation if record.get("loss") is not None]
    return _number(losses[-1] if losses else None, 4)


def _steps_of(run: RunRecords) -> str:
    training = run.config.get("training")
    steps = training.get("steps") if isinstance(training, dict) else None
    return f"{steps:,}" if isinstance(steps, int) else "?"


def _in_steps(run: RunRecords) -> str:
    totals = phase_totals(run)
    return _share((totals["compute"] + totals["data"]) / sum(totals.values())) if sum(totals.values()) else ""


def _compared_hashes(run: RunRecords, first: RunRecords) -> str:
    """Say how far the hashes of a run's state are those of the first run."""
    common = {record["step"] for record in run.hashes} & {record["step"] for record in first.hashes}
    if run is first or not common:
        return ""
    found = first_difference(run.hashes, first.hashes)
    return f"differ from step {found[0]:,} on ({found[1]})" if found else f"equal up to step {max(common):,}"


def _start(run: RunRecords, name: str) -> str:
    return _text((run.starts[-1] if run.starts else {}).get(name))


def _median(values: Sequence[float | None]) -> float | None:
    """Return the median of all but the first value: the first step of a run is slow."""
    found = [value for value in values[1:] or values if value is not None]
    return median(found) if found else None


def _number(value: float | None, digits: int, unit: str = "") -> str:
    return "" if value is None else f"{value:,.{digits}f}{unit}"


def _text(value: Any, missing: str = "") -> str:
    return str(value) if isinstance(value, str | int | float) else missing


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"
