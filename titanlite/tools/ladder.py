"""`titanlite ladder`: train small sizes of a model, fit the law of their losses, and predict the loss of the model.

Each size is a run with a config of its own, which inherits from that of the model. Every size is trained on the same
number of tokens for each parameter, so that the loss is a function of the size alone.
"""

import json
import math
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from statistics import mean
from types import MappingProxyType
from typing import Annotated, Any, NamedTuple

import numpy as np
import tomlkit
import torch
from rich.table import Column, Table

from titanlite.config.load import load
from titanlite.metrics.clock import format_seconds
from titanlite.models.registry import ModelSpec
from titanlite.runtime.console import CHECKOUT, install_hint
from titanlite.runtime.errors import ConfigError, RunError, UserError
from titanlite.runtime.files import write_atomically
from titanlite.runtime.signals import STOP_SIGNALS, STOPPED, StoppedBySignal, stop_with_launcher
from titanlite.schedule import BatchSizes, known_steps
from titanlite.schema import Config
from titanlite.tools.arguments import Count, at_least, between
from titanlite.tools.plan.estimate import model_of, resized_options, trained_model, with_options
from titanlite.tools.report.page import page
from titanlite.tools.report.parameter_table import show
from titanlite.tools.report.run_records import RunRecords, phase_totals, read_run

LAST_SHARE = 0.1
"""Share of the steps at the end of a run whose mean training loss counts, where the config has no validation."""
TARGET = "target"


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
    fit: bool = False,
    print_: bool = False,
    slurm: Path | None = None,
    processes: Count | None = None,
    json_: bool = False,
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
        fit: train nothing
        print_: train nothing: write the configs, and print the commands of runs that are not finished
        slurm (FILE): train nothing: write the configs, and a script for sbatch with one job for each run
        processes: processes of each run; default: one for each GPU, else 1
        json_: print JSON; the output of the runs goes to standard error

    Raises:
        UserError: the config or an argument is wrong, or a run was trained with other options.
        RunError: a run failed.

    Example:
        ladder --sizes 4 --tokens-per-parameter 20 --train-target
        llama3_8b --factor 4 --slurm ladder.sbatch
        llama3_8b --factor 4 --fit
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
    if fit and (names := [rung.name for rung in unfinished]):
        raise UserError(f"titanlite ladder: {', '.join(names)} in {folder} did not finish: train without --fit")
    folder.mkdir(parents=True, exist_ok=True)
    for rung in whole:
        write_atomically(rung.toml, rung.text)
    commands = {rung.name: command_of(rung, processes) for rung in unfinished}
    if slurm:
        write_atomically(slurm, slurm_script([rung.toml for rung in jobs], folder.name))
        print(f"wrote {slurm}: sbatch {shlex.quote(str(slurm))}")
        return
    if print_:
        print("\n".join(map(shlex.join, commands.values())))
        return
    if unfinished and not json_:
        show([_table(_run_records(whole))])
    for name, command in commands.items():
        train(name, command, to_stderr=json_)
    found = {rung.name: run for rung in whole if (run := finished(rung))}
    if lost := next((rung for rung in jobs if rung.name not in found), None):
        raise RunError(f"{lost.folder} has no record of the end of step {lost.steps:,}, although the run ended")
    law = Law([rung.parameters for rung in rungs], [loss_of(found[rung.name]) for rung in rungs])
    record = _record(law, _run_records(whole, law, found), tokens_per_parameter)
    write_atomically(folder / "ladder.json", json.dumps(record, indent=1))
    lines = [_table([*record["runs"], record["target"]]), "", *_sentences(record)]
    if find_spec("plotly"):
        above = _page_parts(record, law)
        write_atomically(folder / "ladder.html", page([*found.values()], above=above, title=folder.name))
        lines.append(f"wrote       {folder / 'ladder.html'}")
    else:
        lines.append(f"no ladder.html, since plotly is not installed: {install_hint('report')}")
    show(record if json_ else lines)


# Sizes


@dataclass(frozen=True)
class Rung:
    """A run of the ladder: a size with a seed."""

    name: str
    width: int
    depth: int
    parameters: int
    """Those of the blocks."""
    tokens: int
    steps: int
    flops: float
    """Floating point operations of the whole run, as MFU counts them."""
    config: Config
    text: str
    """TOML of the config: what differs from the config that it inherits from."""

    @property
    def toml(self) -> Path:
        return Path(self.config.job.dump_folder, f"{self.name}.toml")

    @property
    def folder(self) -> Path:
        return Path(self.config.job.dump_folder, self.name)


def plan(
    path: Path,
    overrides: Sequence[str],
    *,
    sizes: int,
    factor: float,
    seeds: int,
    tokens_per_parameter: float,
    standard: bool,
) -> list[Rung]:
    """Return the runs of the ladder, the smallest size first, and the target as the last one.

    Raises:
        UserError: the model has no such sizes, or the config sets what a ladder cannot have.
    """
    config = load(path, overrides)
    if config.training.epochs is not None:
        raise UserError("training.epochs: a ladder trains each size on its own number of tokens: set training.steps")
    if config.checkpoint.initial_load_path is not None:
        raise UserError("checkpoint.initial_load_path: a ladder trains from initial weights: leave it out")
    spec = model_of(config)
    width, depth = getattr(spec.args, "dim", None), len(spec.build().layers)
    if width is None:
        raise UserError(
            f"titanlite ladder: {type(spec.args).__name__} has no dim, and so no sizes (docs/add_a_model.md)"
        )
    if config.optimizer.parametrization == "standard" and not standard:
        rule = {"parametrization": "completep", "base_width": width, "base_depth": depth}
        config = with_options(config, {f"optimizer.{key}": value for key, value in rule.items()})
    ladder, outputs = f"{config.job.name}-ladder", Path(config.job.dump_folder).resolve()
    common = {"job.dump_folder": str(outputs / ladder)}
    common["data.cache_folder"] = config.data.cache_folder or str(outputs / "data_cache")
    rungs: list[Rung] = []
    try:
        for number, shape in enumerate([*_shapes(spec, width, depth, sizes=sizes, factor=factor), (width, depth)]):
            for seed in range(1 if number == sizes else seeds):
                name = TARGET if number == sizes else f"rung-{number}" + (f"-seed-{seed}" if seed else "")
                own = {"job.name": name, "debug.seed": config.debug.seed + seed}
                if config.checkpoint.folder:
                    own["checkpoint.folder"] = f"{config.checkpoint.folder}/{ladder}/{name}"
                size = resized_options(spec, width=shape[0], depth=shape[1])
                rungs.append(_rung(path, with_options(config, common | own | size), *shape, tokens_per_parameter))
    except ConfigError:
        raise
    except ValueError as error:
        raise UserError(f"titanlite ladder: {error}") from error
    for small, large in pairwise(rung for rung in rungs if "-seed-" not in rung.name):
        if small.parameters >= large.parameters:
            raise UserError(
                f"titanlite ladder: {small.name} and {large.name} have {small.parameters:,} and {large.parameters:,} "
                "parameters: lower --sizes, raise --factor, or take a larger model"
            )
    return rungs


def _rung(path: Path, config: Config, width: int, depth: int, tokens_per_parameter: float) -> Rung:
    """Return the run of a config that has its size already.

    Args:
        path: config file that it inherits from.
    """
    training = config.training
    model = trained_model(model_of(config), config)
    parameters = sum(it.numel() for it in model.layers.parameters())
    tokens = round(parameters * tokens_per_parameter)
    if tokens < (least := training.batch_sizes[0] * training.seq_len):
        raise ValueError(
            f"{config.job.name} has {parameters:,} parameters and {tokens:,} tokens, less than the {least:,} of one "
            "step: raise --tokens-per-parameter, or lower training.global_batch_size"
        )
    whole = BatchSizes.of(training).after(0, known_steps(training) or 0) * training.seq_len

    def share(number: int | None) -> int | None:
        return number and max(1, round(number * tokens / whole))

    ramp = [it.model_dump() | {"until_tokens": share(it.until_tokens)} for it in training.batch_ramp]
    scheduler = config.lr_scheduler
    options = {
        "training.tokens": tokens,
        "training.batch_ramp": ramp,
        "lr_scheduler.warmup_steps": share(scheduler.warmup_steps),
        "lr_scheduler.decay_steps": share(scheduler.decay_steps),
        "validation.freq": share(config.validation.freq),
    }
    config = with_options(config, options)
    return Rung(
        name=str(config.job.name),
        width=width,
        depth=depth,
        parameters=parameters,
        tokens=tokens,
        steps=known_steps(config.training) or 0,
        flops=tokens * model.flops_per_token(training.seq_len),
        config=config,
        text=_toml(path, config),
    )


def _shapes(spec: ModelSpec, width: int, depth: int, *, sizes: int, factor: float) -> Iterator[tuple[int, int]]:
    """Yield (width, depth) of each size, the smallest first: those nearest to the wanted number of parameters, and to
    the proportion of width and depth of the whole model.

    Raises:
        ValueError: the model has no smaller sizes.
    """

    def parameters(width: int, depth: int) -> int:
        args = spec.args.resized(width=width, depth=depth)
        return sum(it.numel() for it in spec._replace(args=args).build().layers.parameters())

    whole = parameters(width, depth)
    for number in range(sizes, 0, -1):
        wanted = factor**-number
        ideal = min(width, max(1, round(width * wanted ** (1 / 3))))
        found = []
        for candidates in (range(ideal, 0, -1), range(ideal + 1, width + 1)):
            if near := next((it for it in candidates if _is_width(spec, it, depth)), None):
                layers = min(depth, max(1, round(depth * wanted * whole / parameters(near, depth))))
                size = math.log(parameters(near, layers) / whole / wanted)
                proportion = math.log(near / width * depth / layers)
                found.append((abs(size) + abs(proportion) / 2, (near, layers)))
        yield min(found)[1]


def _is_width(spec: ModelSpec, width: int, depth: int) -> bool:
    try:
        spec.args.resized(width=width, depth=depth)
    except ValueError:
        return False
    return True


def _toml(path: Path, config: Config) -> str:
    """Return TOML that inherits from a file, and has each option of the config that is another one there."""
    of_file = dict(_options(load(path).model_dump()))
    tree: dict[str, Any] = {"base": str(path.resolve())}
    for key, value in _options(config.model_dump()):
        if value != of_file.get(key) and key != ("job", "name"):
            section = tree
            for part in key[:-1]:
                section = section.setdefault(part, {})
            section[key[-1]] = value
    return tomlkit.dumps(tree)


def _options(tree: dict[str, Any], above: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _options(value, (*above, key))
        else:
            yield (*above, key), value


# Runs


def finished(rung: Rung) -> RunRecords | None:
    """Return the records of a run that is finished; None if it is not, or has not begun.

    Raises:
        UserError: it was trained with other options.
    """
    if (rung.folder / "config.toml").is_file():
        was = dict(_options(load(rung.folder / "config.toml").model_dump()))
        now = dict(_options(rung.config.model_dump()))
        others = [".".join(it) for it in {**was, **now} if it[0] != "job" and was.get(it) != now.get(it)]
        if others:
            raise UserError(
                f"{rung.folder} was trained with another {', '.join(others)}: delete that folder, or make another "
                "ladder with --job.name"
            )
    try:
        run = read_run(rung.folder)
    except UserError:  # it has none yet
        return None
    is_done = bool(run.starts) and run.starts[-1]["end"].get("code") == 0 and run.steps[-1] == rung.steps
    return run if is_done else None


def loss_of(run: RunRecords) -> float:
    """Return the last validation loss of a run; without validation, the mean training loss of its last records.

    Raises:
        UserError: it is not finite.
    """
    last = run.steps[-1]
    losses = [record.get("loss") for record in run.validation if record["step"] == last]
    if not losses:
        pairs = zip(run.steps, run.column("loss"), strict=True)
        losses = [loss for step, loss in pairs if step > (1 - LAST_SHARE) * last]
    finite = [loss for loss in losses if loss is not None]
    if len(finite) < len(losses):
        raise UserError(f"{run.path} has no finite loss at its end")
    return mean(finite)


def command_of(rung: Rung, processes: int | None) -> list[str]:
    """Return the command that trains a run, as ./run_train.sh calls it."""
    number = processes or torch.cuda.device_count() or 1
    if number == 1:
        return [sys.executable, "-m", "titanlite", "train", "--config", str(rung.toml)]
    launcher = [sys.executable, "-m", "titanlite.tools.launch", "1", str(number), "localhost:0", "0"]
    return [*launcher, "--config", str(rung.toml)]


def train(name: str, command: Sequence[str], *, to_stderr: bool) -> None:
    """Train a run until its end. Signals that stop a run are passed on to it.

    Raises:
        RunError: it failed.
        StoppedBySignal: it was stopped, with a checkpoint.
    """
    sys.stdout.flush()
    with (
        subprocess.Popen(command, stdout=sys.stderr if to_stderr else None, preexec_fn=stop_with_launcher) as process,
        _passing_on(process),
    ):
        code = process.wait()
    if code == STOPPED:
        raise StoppedBySignal(f"{name} was stopped", taken=0)
    if code:
        raise (UserError if code == 2 else RunError)(f"titanlite ladder: {name} ended with exit code {code}")


@contextmanager
def _passing_on(process: "subprocess.Popen[bytes]") -> Iterator[None]:
    before = {it: signal.signal(it, lambda number, _: process.send_signal(number)) for it in STOP_SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def slurm_script(configs: Sequence[Path], name: str) -> str:
    """Return a script for sbatch: an array of jobs, each of which is scripts/slurm.sh with a config.

    Raises:
        UserError: this titanlite has no scripts, since it runs from a wheel.
    """
    script = CHECKOUT / "scripts" / "slurm.sh"
    if not script.is_file():
        raise UserError(f"--slurm: there is no {script}: call titanlite of a checkout")
    options = [line for line in script.read_text().splitlines() if line.startswith("#SBATCH")]
    others = [line for line in options if not line.startswith(("#SBATCH --job-name", "#SBATCH --nodes"))]
    return "\n".join(
        [
            "#!/bin/bash",
            f"# {len(configs)} runs of a ladder, a job each, by scripts/slurm.sh. Options of sbatch stand before FILE.",
            f"#SBATCH --job-name={name}",
            f"#SBATCH --array=0-{len(configs) - 1}",
            "#SBATCH --nodes=1",
            *others,
            f"configs=({shlex.join(map(str, configs))})",
            f"export TITANLITE_ROOT=${{TITANLITE_ROOT:-{shlex.quote(str(CHECKOUT))}}}",
            'exec "$TITANLITE_ROOT/scripts/slurm.sh" --config "${configs[$SLURM_ARRAY_TASK_ID]}" "$@"',
            "",
        ]
    )


# The law


class Prediction(NamedTuple):
    """Loss of a size, and its 95 % interval; None without spare runs."""

    loss: float | None = None
    low: float | None = None
    high: float | None = None


class Law:
    """loss = E + A / N^alpha, by least squares of relative differences.

    For a given alpha the law is a straight line in N^-alpha, so alpha is searched on a grid and E and A are exact. E is
    at least 0. Intervals are those of the profile likelihood with Student's t: all values for which the squared
    differences grow by at most t^2 times their mean over the runs beyond three (Seber and Wild, Nonlinear Regression,
    1989, section 5.4). With three runs there is none.

    Args:
        sizes: N of each run.
        losses: of each run.
    """

    def __init__(self, sizes: Sequence[float], losses: Sequence[float]) -> None:
        self.scale = math.exp(mean(map(math.log, sizes)))
        self.sizes, self.losses = np.array(sizes) / self.scale, np.array(losses)
        self.alphas = np.geomspace(0.01, 4, 1500)
        self._solve()
        near = self.alphas[max(0, self.best - 1)], self.alphas[min(self.best + 1, self.alphas.size - 1)]
        self.alphas = np.unique([*self.alphas, *np.geomspace(*near, 1501)])
        self._solve()
        self.spare = len(self.losses) - 3
        most = self.squares[self.best] * (1 + student_t(self.spare) ** 2 / self.spare) if self.spare else 0.0
        self._room = most - self.squares

    def _solve(self) -> None:
        """Find E and A of each alpha."""
        weights, y = 1 / self.losses**2, self.losses
        x = self.sizes ** -self.alphas[:, None]  # [alphas, runs]
        total, self._mean = weights.sum(), (x @ weights) / weights.sum()
        centered = x - self._mean[:, None]
        self._spread = (centered**2) @ weights
        slope = (centered @ (weights * y)) / self._spread
        floor = (weights @ y) / total - slope * self._mean
        self._bounded = floor < 0
        self._power = (x**2) @ weights
        self.slope = np.where(self._bounded, (x @ (weights * y)) / self._power, slope)
        self.floor = np.where(self._bounded, 0.0, floor)
        self._total = total
        self.squares = ((y - self.floor[:, None] - self.slope[:, None] * x) ** 2) @ weights
        self.best = int(self.squares.argmin())

    @property
    def alpha(self) -> Prediction:
        inside = self.alphas[self._room >= 0]
        return Prediction(self.alphas[self.best], *((inside.min(), inside.max()) if self.spare else (None, None)))

    @property
    def amplitude(self) -> float:
        """A, for N in parameters."""
        return self.slope[self.best] * self.scale ** self.alphas[self.best]

    def predict(self, size: float, *, of_run: bool = True) -> Prediction:
        """Return the loss of a size; of infinity, E.

        Args:
            of_run: whether the interval is that of a further run, which differs from the law as the others do.
        """
        x = (size / self.scale) ** -self.alphas
        means = self.floor + self.slope * x
        variance = np.where(self._bounded, x**2 / self._power, 1 / self._total + (x - self._mean) ** 2 / self._spread)
        half = np.sqrt(np.maximum(self._room, 0) * (variance + means**2 * of_run))
        inside = self._room >= 0
        bounds = ((means - half)[inside].min(), (means + half)[inside].max()) if self.spare else (None, None)
        return Prediction(means[self.best], *bounds)


def student_t(degrees: int) -> float:
    """Return the two-sided 95 % quantile of Student's t, from 1 degree of freedom on."""
    table = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
    return table[degrees - 1] if degrees <= len(table) else 1.96 + 2.7 / degrees


# Output


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
        run, fitted = found.get(rung.name), law.predict(rung.parameters) if law else Prediction()
        loss = run and loss_of(run)
        records.append(
            {key: getattr(rung, key) for key in keys}
            | {"config": str(rung.toml), "loss": loss, "law": fitted.loss, "interval": fitted[1:]}
            | {"error": fitted.loss / loss - 1 if fitted.loss and loss else None}
            | {"seconds": sum(phase_totals(run).values()) if run else None}
            | {"hash": run.hashes[-1].get("hash") if run and run.hashes else None}
        )
    return records


def _record(law: Law, runs: list[dict[str, Any]], tokens_per_parameter: float) -> dict[str, Any]:
    floor = law.predict(math.inf, of_run=False)
    fitted = {"E": floor.loss, "E_interval": floor[1:], "A": law.amplitude}
    fitted |= {"alpha": law.alpha.loss, "alpha_interval": law.alpha[1:]}
    return {"tokens_per_parameter": tokens_per_parameter, "law": fitted, "runs": runs[:-1], "target": runs[-1]}


def _sentences(record: dict[str, Any]) -> Iterator[str]:
    law, target = record["law"], record["target"]
    floor, alpha = (f"{it} {law[it]:.4g}{_interval(law[f'{it}_interval'])}" for it in ("E", "alpha"))
    yield f"law         loss = E + A / N^alpha with {floor}, {alpha}, A {law['A']:.4g}"
    if law["A"] <= 0:
        yield "warning     the loss does not fall from size to size: the law predicts nothing"
    yield f"prediction  {target['law']:.4f}{_interval(target['interval'])} for {target['parameters']:,} parameters"
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
    forms |= {"loss": ".4f", "law": ".4f", "error": "+.2%"}
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
        {"name": "law", "x": sizes, "y": [it.loss for it in fitted], "color": 0},
        {"name": "95 % of runs, low", "x": sizes, "y": [it.low for it in fitted], "color": 0, "dash": 1},
        {"name": "95 % of runs, high", "x": sizes, "y": [it.high for it in fitted], "color": 0, "dash": 1},
        {"name": "runs", "x": [it["parameters"] for it in runs], "y": [it["loss"] for it in runs], "color": 0}
        | {"points": "circle"},
        {"name": "prediction, 95 %", "x": at * 2, "y": low + high, "color": 1},
        {"name": "prediction", "x": at, "y": [target["law"]], "color": 1, "points": "diamond"},
        {"name": "truth", "x": at, "y": [target["loss"]], "color": 2, "points": "x"},
    ]
    is_drawn = (any(value is not None for value in trace["y"]) for trace in traces)
    chart = {
        "name": "ladder",
        "title": "Loss by size",
        "unit": "nats a token",
        "kind": "lines",
        "marks": [],
        "log": True,
    }
    chart |= {"log_x": True, "x": "N, parameters of the blocks", "wide": True}
    chart["traces"] = [trace for trace, is_there in zip(traces, is_drawn, strict=True) if is_there]
    rows = [*_rows([*runs, target]), *([sentence] for sentence in _sentences(record))]
    return {"tables": [{"title": "", "columns": COLUMNS, "rows": rows}], "charts": [chart]}
