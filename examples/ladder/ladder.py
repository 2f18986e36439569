"""Predict the loss of a config's model, the target, from runs of smaller sizes of it (docs/ladder.md).

    python examples/ladder/ladder.py CONFIG [--sizes 4] [--tokens-per-parameter 20] [--factor 2] [--seeds 1]
        [--standard] [--train-target] [--section.key=value ...]

It trains the sizes one after the other with ./run_train.sh, fits loss = E + A / N^alpha to their last losses, and
extrapolates. N counts the parameters of the blocks. The runs and ladder.json are in
<dump_folder>/<name>-ladder; law.py draws them. The same command again resumes: finished runs are not repeated.
"""

import argparse
import json
import math
import os
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import torch
from law import fit

import titanlite

RUN_TRAIN = Path(__file__).parents[2] / "run_train.sh"
WITHOUT_EFFECT = {
    "job", "checkpoint", "metrics", "profiling", "comm", "parallelism", "activation_checkpoint", "compile", "offload",
}  # fmt: skip
"""Sections that change no loss, but for rounding: a run that is finished may have had others."""


class Rung(NamedTuple):
    """A run of the ladder: a size with a seed."""

    name: str
    width: int
    depth: int
    parameters: int
    tokens: int
    steps: int
    flops: float
    config: titanlite.Config

    @property
    def folder(self) -> Path:
        return Path(self.config.job.dump_folder, self.name)


def plan(name: str, options: dict[str, Any], arguments: argparse.Namespace) -> list[Rung]:
    """Return the runs of the ladder, the smallest size first, and the target as the last one."""
    config = titanlite.load_config(name, options)
    if config.training.epochs is not None or config.checkpoint.initial_load_path is not None:
        raise titanlite.UserError("training.epochs, checkpoint.initial_load_path: a ladder can have neither")
    model = titanlite.build_model(config)
    width, depth = getattr(model.args, "dim", None), len(model.layers)
    if width is None:
        raise titanlite.UserError(f"{type(model.args).__name__} has no dim, and so no sizes (docs/add_a_model.md)")
    ladder, outputs = f"{config.job.name}-ladder", Path(config.job.dump_folder).resolve()
    options = options | {"job.dump_folder": outputs / ladder}
    options["data.cache_folder"] = config.data.cache_folder or outputs / "data_cache"
    if config.optimizer.parametrization == "standard" and not arguments.standard:
        options |= {"optimizer.parametrization": "completep"}
        options |= {"optimizer.base_width": width, "optimizer.base_depth": depth}
    runs = {
        f"rung-{number}" + (f"-seed-{seed}" if seed else ""): (shape, seed)
        for number, shape in enumerate(shapes(model, width, arguments))
        for seed in range(arguments.seeds)
    }
    rungs, old = [], asdict(model.args)
    for run, (shape, seed) in {**runs, "target": ((width, depth), 0)}.items():
        own = {"job.name": run, "debug.seed": config.debug.seed + seed}
        if config.checkpoint.folder:
            own["checkpoint.folder"] = f"{config.checkpoint.folder}/{ladder}/{run}"
        args = asdict(model.args.resized(width=shape[0], depth=shape[1]))
        own |= {f"model.args.{key}": value for key, value in args.items() if value != old[key]}
        rungs.append(rung(name, options | own, shape, arguments.tokens_per_parameter))
    counts = [rung.parameters for rung in rungs]
    if counts != sorted(counts) or len({*counts}) <= arguments.sizes:
        raise titanlite.UserError("sizes do not grow: lower --sizes, raise --factor, or take a larger model")
    return rungs


def shapes(model: titanlite.Model, width: int, arguments: argparse.Namespace) -> Iterator[tuple[int, int]]:
    """Yield (width, depth) of each size, the smallest first: those nearest to the wanted number of parameters, and to
    the proportion of width and depth of the whole model."""

    def parameters(width: int, depth: int) -> int:
        try:
            args = model.args.resized(width=width, depth=depth)
        except ValueError:  # there is no such shape: heads keep their size
            return 0
        with torch.device("meta"):
            return parameters_of(type(model)(args))

    whole, depth = parameters_of(model), len(model.layers)
    for number in range(arguments.sizes, 0, -1):
        wanted = arguments.factor**-number
        ideal = min(width, max(1, round(width * wanted ** (1 / 3))))
        found = []
        for candidates in (range(ideal, 0, -1), range(ideal + 1, width + 1)):
            if near := next((width for width in candidates if parameters(width, depth)), 0):
                layers = min(depth, max(1, round(depth * wanted * whole / parameters(near, depth))))
                size = math.log(parameters(near, layers) / whole / wanted)
                found.append((abs(size) + abs(math.log(near / width * depth / layers)) / 2, (near, layers)))
        yield min(found)[1]


def rung(name: str, options: dict[str, Any], shape: tuple[int, int], tokens_per_parameter: float) -> Rung:
    """Return the run of a size: its tokens follow from its parameters, and its schedule keeps its shares of the run."""
    config = titanlite.load_config(name, options)
    model, training = titanlite.build_model(config), config.training
    tokens = round(parameters_of(model) * tokens_per_parameter)
    if tokens < training.batch_sizes[0] * training.seq_len:
        raise titanlite.UserError(f"{config.job.name}: fewer tokens than one step: raise --tokens-per-parameter")
    share = tokens / length(config)[1]
    old = {f"lr_scheduler.{key}": value for key, value in config.lr_scheduler if key.endswith(("_steps", "_tokens"))}
    old["validation.freq"] = config.validation.freq if config.validation.enable else None
    ramps = {"training.batch_ramp": training.batch_ramp, "training.seq_len_ramp": training.seq_len_ramp}
    for key, parts in {**ramps, "data.stages": config.data.stages}.items():
        old |= {f"{key}.{number}.until_tokens": part.until_tokens for number, part in enumerate(parts)}
    new = {key: max(1, round(value * share)) for key, value in old.items() if value}
    config = titanlite.load_config(name, options | new | {"training.tokens": tokens})
    flops = tokens * model.flops_per_token(training.seq_len)
    return Rung(str(config.job.name), *shape, parameters_of(model), tokens, length(config)[0], flops, config)


def parameters_of(model: titanlite.Model) -> int:
    """Return N: the parameters of the blocks, without embedding and head."""
    return sum(parameter.numel() for parameter in model.layers.parameters())


def length(config: titanlite.Config) -> tuple[int, int]:
    """Return the steps and tokens of a whole run."""
    training, steps, tokens = config.training, 0, 0
    while tokens < training.tokens if training.tokens else steps < training.steps:
        sizes = (stage.global_batch_size for stage in training.batch_ramp if tokens < stage.until_tokens)
        steps, tokens = steps + 1, tokens + next(sizes, training.global_batch_size) * training.seq_len
    return steps, tokens


def finished(rung: Rung) -> titanlite.RunRecords | None:
    """Return the records of a run that is finished; None if it is not. One with other options is refused."""
    if (rung.folder / "config.toml").is_file():
        was, now = (config.model_dump() for config in (titanlite.load_config(rung.folder / "config.toml"), rung.config))
        keys = [(part, key) for part in now if part not in WITHOUT_EFFECT for key in now[part] if key != "cache_folder"]
        if others := [f"{part}.{key}" for part, key in keys if was[part][key] != now[part][key]]:
            raise titanlite.UserError(f"{rung.folder} had another {', '.join(others)}: delete it, or set --job.name")
    try:
        run = titanlite.read_run(rung.folder)
    except titanlite.UserError:  # it has no records yet
        return None
    return run if run.starts and run.starts[-1]["end"].get("code") == 0 and run.steps[-1] == rung.steps else None


def train(rung: Rung) -> None:
    """Train a run until its end, and pass signals on to it. If it does not end well, end with its exit code."""
    toml = rung.folder.with_name(f"{rung.name}.toml")
    toml.parent.mkdir(parents=True, exist_ok=True)
    toml.write_text(titanlite.dump(rung.config))
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    received: list[int] = []

    def pass_on(number: int, _: Any) -> None:
        received.append(number)
        process.send_signal(number)

    with subprocess.Popen([RUN_TRAIN, "--config", toml], env=os.environ | {"PATH": path}) as process:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP):
            signal.signal(number, pass_on)
    if process.returncode or received:  # a run that was in its last step when the signal came has ended well
        sys.exit(process.returncode or 75)


def loss_of(run: titanlite.RunRecords) -> float:
    """Return the last validation loss; without validation, the mean training loss of the last tenth of the steps."""
    losses = [record["loss"] for record in run.validation if record["step"] == run.steps[-1]]
    losses = losses or [record["loss"] for record in run.metrics if record["step"] > 0.9 * run.steps[-1]]
    if None in losses:
        raise titanlite.UserError(f"{run.path} has no finite loss at its end")
    return mean(losses)


def predict(rungs: Sequence[Rung], losses: Sequence[Any]) -> dict[str, Any]:
    """Return the law of the losses, and what it says of each run and of the target, as JSON values."""
    law = fit([rung.parameters for rung in rungs[:-1]], losses[:-1], [rung.parameters for rung in rungs])
    runs = [
        {key: value for key, value in rung._asdict().items() if key != "config"}
        | {"loss": loss, "predicted": value, "interval": bounds, "error": value / loss - 1 if loss else None}
        for rung, loss, (value, *bounds) in zip(rungs, losses, law.pop("losses"), strict=True)
    ]
    return {"law": law, "runs": runs[:-1], "target": runs[-1]}


def option(word: str) -> tuple[str, Any]:
    """Return key and value of a word such as --training.steps=20, whose value is TOML or text."""
    key, is_there, text = word.removeprefix("--").partition("=")
    try:
        return key, tomllib.loads(f"value = {text}")["value"] if is_there else True
    except tomllib.TOMLDecodeError:
        return key, text


def interval(estimate: Sequence[float | None]) -> str:
    value, low, high = estimate
    return f"{value:.4g}" + ("" if low is None or high is None else f" (95 %: {low:.4g} to {high:.4g})")


def show(record: dict[str, Any]) -> None:
    """Print the runs, the law, the prediction and the truth."""
    row = "{:<14}{:>6}{:>7}{:>15}{:>17}{:>10}{:>10}{:>9}{:>9}{:>16}"
    print(row.format("run", "width", "layers", "N", "tokens", "steps", "FLOPs", "loss", "law", "law / loss - 1"))
    forms = {"name": "", "width": "", "depth": "", "parameters": ",", "tokens": ",", "steps": ",", "flops": ".3g"}
    forms |= {"loss": ".4f", "predicted": ".4f", "error": "+.2%"}
    for run in [*record["runs"], target := record["target"]]:
        print(row.format(*("" if run[key] is None else format(run[key], form) for key, form in forms.items())))
    law = record["law"]
    warning = ": the loss does not fall from size to size, so it predicts nothing" if law["A"] <= 0 else ""
    print(f"law: E {interval(law['E'])}, alpha {interval(law['alpha'])}, A {law['A']:.4g}{warning}")
    print(f"prediction: {interval([target['predicted'], *target['interval']])}")
    print(f"truth: {format(target['loss'], '.4f') if target['loss'] else 'not known yet (--train-target)'}")


def main() -> None:
    parser = argparse.ArgumentParser(usage=__doc__, allow_abbrev=False)
    parser.add_argument("config")
    for name, default in {"sizes": 4, "tokens-per-parameter": 20.0, "factor": 2.0, "seeds": 1}.items():
        parser.add_argument(f"--{name}", type=type(default), default=default)
    for name in ("standard", "train-target"):
        parser.add_argument(f"--{name}", action="store_true")
    arguments, words = parser.parse_known_args()
    if arguments.sizes < 3 or arguments.factor < 1.1 or arguments.seeds < 1:
        parser.error("--sizes is at least 3, --factor 1.1 and --seeds 1")
    rungs = plan(arguments.config, dict(map(option, words)), arguments)
    jobs = rungs if arguments.train_target else rungs[:-1]
    for rung in [job for job in jobs if not finished(job)]:
        print(f"{rung.name}: {rung.parameters:,} parameters, {rung.steps:,} steps", flush=True)
        train(rung)
    losses = [run and loss_of(run) for run in map(finished, rungs)]
    if None in losses[:-1]:
        raise titanlite.UserError("a run ended without a record of its last step")
    record = {"tokens_per_parameter": arguments.tokens_per_parameter} | predict(rungs, losses)
    rungs[-1].folder.with_name("ladder.json").write_text(json.dumps(record, indent=1))
    show(record)


if __name__ == "__main__":
    try:
        main()
    except titanlite.UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
