"""`titanlite ladder`: train the sizes, fit the law, and print the prediction next to the truth."""

import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any

import numpy as np
from rich.table import Column, Table

from titanlite.metrics.clock import format_seconds
from titanlite.runtime.console import install_hint
from titanlite.runtime.errors import RunError, UserError
from titanlite.runtime.files import json_text, write_atomically
from titanlite.schema import dump
from titanlite.tools.arguments import Count, at_least, between
from titanlite.tools.ladder.law import Estimate, Law
from titanlite.tools.ladder.runs import command_of, finished, loss_of, slurm_script, train
from titanlite.tools.ladder.sizes import Rung, plan
from titanlite.tools.report.page import page
from titanlite.tools.report.parameter_table import show
from titanlite.tools.report.run_records import RunRecords, phase_totals


def ladder(
    config: str | None = None,
    overrides: Sequence[str] = (),
    *,
    sizes: Annotated[int, at_least(3)] = 4,
    tokens_per_parameter: Annotated[float, between(1e-3, 1e6)] = 20.0,
    factor: Annotated[float, between(1.1, 100)] = 2.0,
    seeds: Count = 1,
    standard: bool = False,
    train_target: bool = False,
    print_: bool = False,
    slurm: Path | None = None,
    processes: Count | None = None,
) -> None:
    """Predict the loss of a config's model from runs of smaller sizes.

    Makes smaller sizes of the model, trains each of them in turn, fits loss = E + A / N^alpha to their last losses, and
    predicts the loss of the config's own model, the target. With --train-target it trains that too, and prints the
    prediction against the truth. The runs, their configs, ladder.json and ladder.html are in
    <dump_folder>/<name>-ladder. The same command again resumes: finished runs are not repeated.

    N counts the parameters of the blocks, without embedding and head. Each size has its own tokens; warm-up, decay and
    validations keep their shares of the run. With the standard parametrization, the config's options are those of the
    target, and completep transfers them to the sizes.

    Args:
        sizes: sizes to train, without the target
        tokens_per_parameter (T): tokens of each run, for each parameter of its blocks
        factor (F): parameters of a size, relative to the size below
        seeds: runs of each size, with debug.seed and the numbers after it
        standard: keep the standard parametrization: the same learning rate at every size
        train_target: train the target, too
        print_: train nothing: write the configs, and print the commands of runs that are not finished
        slurm (FILE): train nothing: write the configs, and a script for sbatch with one job for each run
        processes: processes of each run; default: one for each GPU, else 1

    Raises:
        UserError: the config or an argument is wrong, or a run was trained with other options.
        RunError: a run failed.

    Example:
        ladder_example --sizes 4 --tokens-per-parameter 20 --train-target
        llama3_8b --factor 4 --slurm ladder.sbatch
    """
    if not config:
        raise UserError("titanlite ladder: name a config; see titanlite ladder --help")
    *rungs, target = plan(
        Path(config),
        overrides,
        sizes=sizes,
        factor=factor,
        seeds=seeds,
        tokens_per_parameter=tokens_per_parameter,
        standard=standard,
    )
    whole = [*rungs, target]
    jobs = whole if train_target else rungs
    folder = target.toml.parent
    unfinished = [rung for rung in jobs if finished(rung) is None]
    folder.mkdir(parents=True, exist_ok=True)
    for rung in whole:
        write_atomically(rung.toml, dump(rung.config))
    commands = {rung.name: command_of(rung, processes) for rung in unfinished}
    if slurm:
        write_atomically(slurm, slurm_script([rung.toml for rung in jobs], folder.name))
        print(f"wrote {slurm}: sbatch {shlex.quote(str(slurm))}")
        return
    if print_:
        print("\n".join(map(shlex.join, commands.values())))
        return
    if unfinished:
        show([_table(_run_records(whole))])
    for name, command in commands.items():
        train(name, command)
    found = {rung.name: run for rung in whole if (run := finished(rung))}
    if lost := next((rung for rung in jobs if rung.name not in found), None):
        raise RunError(f"{lost.folder} has no record of the end of step {lost.steps:,}, although the run ended")
    law = Law([rung.parameters for rung in rungs], [loss_of(found[rung.name]) for rung in rungs])
    record = _record(law, _run_records(whole, law, found), tokens_per_parameter)
    write_atomically(folder / "ladder.json", json_text(record, indent=1))
    lines = [_table([*record["runs"], record["target"]]), "", *_sentences(record)]
    if find_spec("plotly"):
        above = _page_parts(record, law)
        write_atomically(folder / "ladder.html", page([*found.values()], above=above, title=folder.name))
        lines.append(f"wrote       {folder / 'ladder.html'}")
    else:
        lines.append(f"no ladder.html, since plotly is not installed: {install_hint('report')}")
    show(lines)


def _run_records(
    rungs: Sequence[Rung], law: Law | None = None, found: Mapping[str, RunRecords] = MappingProxyType({})
) -> list[dict[str, Any]]:
    """Return each run as JSON values.

    Args:
        law, found: None and nothing before training.
    """
    keys = ("name", "width", "depth", "parameters", "tokens", "steps", "flops")
    records = []
    for rung in rungs:
        run, fitted = found.get(rung.name), law.predict(rung.parameters) if law else Estimate()
        loss = run and loss_of(run)
        records.append(
            {key: getattr(rung, key) for key in keys}
            | {"config": str(rung.toml), "loss": loss, "predicted": fitted.value, "interval": fitted[1:]}
            | {"error": fitted.value / loss - 1 if fitted.value and loss else None}
            | {"seconds": sum(phase_totals(run).values()) if run else None}
            | {"hash": run.hashes[-1].get("hash") if run and run.hashes else None}
        )
    return records


def _record(law: Law, runs: list[dict[str, Any]], tokens_per_parameter: float) -> dict[str, Any]:
    floor = law.predict(math.inf, of_run=False)
    fitted = {"E": floor.value, "E_interval": floor[1:], "A": law.amplitude}
    fitted |= {"alpha": law.alpha.value, "alpha_interval": law.alpha[1:]}
    return {"tokens_per_parameter": tokens_per_parameter, "law": fitted, "runs": runs[:-1], "target": runs[-1]}


def _sentences(record: dict[str, Any]) -> Iterator[str]:
    law, target = record["law"], record["target"]
    prediction = f"{target['predicted']:.4f}{_interval(target['interval'])}"
    floor, alpha = (f"{it} {law[it]:.4g}{_interval(law[f'{it}_interval'])}" for it in ("E", "alpha"))
    yield f"law         loss = E + A / N^alpha with {floor}, {alpha}, A {law['A']:.4g}"
    if law["A"] <= 0:
        yield "warning     the loss does not fall from size to size: the law predicts nothing"
    yield f"prediction  {prediction} for {target['parameters']:,} parameters"
    if target["loss"] is None:
        yield f"truth       the target is not trained yet (--train-target): {target['config']}"
    else:
        yield f"truth       {target['loss']:.4f}; the prediction differs from it by {target['error']:+.2%}"


def _interval(bounds: Sequence[float | None]) -> str:
    low, high = bounds
    return " (3 runs give no interval)" if low is None or high is None else f" (95 %: {low:.4g} to {high:.4g})"


COLUMNS = ("run", "width", "layers", "N", "tokens", "steps", "FLOPs", "loss", "law", "law / loss - 1", "time")


def _rows(runs: Sequence[dict[str, Any]]) -> list[list[str]]:
    forms = {"name": "", "width": "", "depth": "", "parameters": ",", "tokens": ",", "steps": ",", "flops": ".3g"}
    forms |= {"loss": ".4f", "predicted": ".4f", "error": "+.2%"}
    texts = [["" if it[key] is None else format(it[key], form) for key, form in forms.items()] for it in runs]
    return [[*row, format_seconds(it["seconds"]) if it["seconds"] else ""] for row, it in zip(texts, runs, strict=True)]


def _table(runs: Sequence[dict[str, Any]]) -> Table:
    numbers = (Column(name, justify="right") for name in COLUMNS[1:])
    table = Table(COLUMNS[0], *numbers, box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for row in _rows(runs):
        table.add_row(*row)
    return table


def _page_parts(record: dict[str, Any], law: Law) -> dict[str, Any]:
    """Return table and chart of the ladder for the page of the report."""
    runs, target = record["runs"], record["target"]
    sizes = np.geomspace(runs[0]["parameters"] / 1.2, target["parameters"] * 1.2, 100).tolist()
    fitted = [law.predict(size) for size in sizes]
    at, low, high = [target["parameters"]], *([it] for it in target["interval"])
    traces = [
        {"name": "law", "x": sizes, "y": [it.value for it in fitted], "color": 0},
        {"name": "95 % of runs, low", "x": sizes, "y": [it.low for it in fitted], "color": 0, "dash": 1},
        {"name": "95 % of runs, high", "x": sizes, "y": [it.high for it in fitted], "color": 0, "dash": 1},
        {"name": "runs", "x": [it["parameters"] for it in runs], "y": [it["loss"] for it in runs], "color": 0}
        | {"points": "circle"},
        {"name": "prediction, 95 %", "x": at * 2, "y": low + high, "color": 1},
        {"name": "prediction", "x": at, "y": [target["predicted"]], "color": 1, "points": "diamond"},
        {"name": "truth", "x": at, "y": [target["loss"]], "color": 2, "points": "x"},
    ]
    is_drawn = (any(value is not None for value in trace["y"]) for trace in traces)
    chart = {
        "name": "ladder", "title": "Loss by size", "unit": "nats a token", "x": "N, parameters of the blocks",
        "kind": "lines", "log": True, "log_x": True, "wide": True, "marks": [],
        "traces": [trace for trace, is_there in zip(traces, is_drawn, strict=True) if is_there],
    }  # fmt: skip
    rows = [*_rows([*runs, target]), *([sentence] for sentence in _sentences(record))]
    return {"tables": [{"title": "", "columns": COLUMNS, "rows": rows}], "charts": [chart]}
