"""The command `titanlite parity`. With --where, run a config on both sides, and compare each module's values.

Each side is a run of its own, started as a user starts one, that writes a dump of one step.
"""

import math
import os
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from titanlite.config.load import load
from titanlite.runtime.errors import ConfigError, RunError, UserError, whole_number
from titanlite.schedule import known_steps
from titanlite.schema import Training
from titanlite.tools.arguments import Count
from titanlite.tools.report.parity import compare_layouts, layout_options, parity_options, start

LAYOUT = re.compile(r"(\d+)x(\d+)")
FURTHER = re.compile(r"--parallelism\.(?:context|pipeline)_parallel_degree=(\d+)")
"""Axes whose ranks are others than the replicas and shards."""


def parity(
    config: str | None = None,
    overrides: Sequence[str] = (),
    *,
    steps: Count = 20,
    processes: Count | None = None,
    tolerance: float | None = None,
    only: str = "",
    where: tuple[str, str] | None = None,
    dump: Path | None = None,
    step: Count = 1,
) -> None:
    """Train a config in every layout and compare losses step by step.

    Exit code 1 if a variant fails, or differs from its reference by more than it may.

    With --where, compare the values of one step on two sides, A and B. It prints the first tensor that differs (in the
    order of forward, gradients, updates), and a table by block. A side is a layout (2x2, replicas x shards),
    options of the config without dashes, both in quotes, or the folder of a dump. Exit code 1 if they differ.

    Args:
        steps: steps to train
        processes: processes of sharded variants; default: one a GPU, else 4
        tolerance (X): largest relative difference; default: 1e-5; with --where, 5e-2 in bfloat16
        only (TEXT): only variants whose name contains TEXT
        where (A B): name the first tensor that differs in A
        dump (FOLDER): write the values of one step; torchrun starts it on several processes
        step: step of --where and --dump

    Raises:
        UserError: the config or an argument is wrong.
        RunError: a variant failed, or differs by too much.

    Example:
        debug --steps 20 --processes 4
        debug --where 2x2 1x1
        debug --where '2x1 compile.enable=true' 1x1
        debug --dump dumps/before
        --where dumps/after dumps/before
    """
    if where and dump:
        raise UserError("titanlite parity: --where and --dump exclude each other")
    if where:
        compare_sides(config, overrides, where, step=step, tolerance=tolerance)
        return
    if not config:
        raise UserError(
            "titanlite parity: no config: name a TOML file, or one that titanlite ships, for example titanlite parity "
            "debug"
        )
    if dump:
        write_dump(config, overrides, folder=dump, step=step)
        return
    compare_layouts(config, overrides, steps, processes, 1e-5 if tolerance is None else tolerance, only)


@dataclass(frozen=True)
class Side:
    """One side of a comparison.

    Attributes:
        text: as the user wrote it.
        processes: 0 if the dump is there already.
    """

    text: str
    processes: int
    options: list[str]
    folder: Path


def parse_side(text: str, folder: Path) -> Side:
    """Read a side: a layout as 2x2 (replicas x shards), options of the config, or both; or the folder of a dump.

    Args:
        folder: of the dump that the side will write.

    Raises:
        UserError: the text is none of these.
    """
    if Path(text).is_dir():
        return Side(text, 0, [], Path(text))
    replicate, shard, options = 1, 1, list[str]()
    for word in text.split():
        if match := LAYOUT.fullmatch(word):
            replicate, shard = int(match[1]), int(match[2])
        elif "." in word.partition("=")[0]:
            options.append(f"--{word.lstrip('-')}")
        else:
            raise UserError(
                f"--where: {text!r} is no side: write a layout (2x2, replicas x shards), options "
                "(compile.enable=true), both in quotes, or the folder of a dump"
            )
    if not text.split() or not replicate * shard:
        raise UserError(f"--where: {text!r} is no side: write a layout as 2x2, replicas x shards")
    further = [int(match[1]) for option in options if (match := FURTHER.fullmatch(option))]
    processes = math.prod((replicate, shard, *further))
    return Side(text, processes, [*layout_options(replicate, shard), *options], folder)


def compare_sides(
    path: str | None, overrides: Sequence[str], sides: Sequence[str], *, step: int, tolerance: float | None
) -> None:
    """Run both sides where they are no dumps yet, compare them, and print the first difference and the table.

    Raises:
        UserError: the config or a side is wrong.
        RunError: a side failed, or they differ.
    """
    root = Path(".")
    if not all(Path(text).is_dir() for text in sides):
        if path is None:
            raise UserError("titanlite parity: --where runs a config: name one, or the folders of two dumps")
        job = load(path, overrides).job
        root = Path(job.dump_folder, f"{job.name}-where")
    one, other = (parse_side(text, root / name) for text, name in zip(sides, "ab", strict=True))
    running = [(path, side) for side in (one, other) if path and side.processes]
    for config, side in running:
        _check(config, overrides, side, step)
    for config, side in running:
        _run(config, overrides, side, step)
    from titanlite.tools.report.value_dump import read_dump
    from titanlite.tools.report.where import compare_dumps, summary, table

    compared = compare_dumps(read_dump(one.folder), read_dump(other.folder), tolerance=tolerance)
    print(f"A: {one.text}; B, the reference: {other.text}; step {step}" if path else f"A: {one.text}; B: {other.text}")
    for line in (*table(compared), *summary(compared)):
        print(line)
    if compared.first:
        raise RunError(f"not equal: first {compared.first.key}")


def _check(path: str, overrides: Sequence[str], side: Side, step: int) -> None:
    try:
        config = load(path, [*overrides, *side.options], world_size=side.processes)
    except ConfigError as error:
        raise UserError("\n".join(f"{side.text}: {problem}" for problem in error.problems)) from None
    _check_step(config.training, step)


def _check_step(training: Training, step: int) -> None:
    steps = known_steps(training)
    if steps is not None and steps < step:
        raise UserError(f"--step {step}: the run has {steps} steps (training.{training.length})")


def _run(path: str, overrides: Sequence[str], side: Side, step: int) -> None:
    """Write the dump of a side.

    Raises:
        RunError: the run failed.
    """
    shutil.rmtree(side.folder, ignore_errors=True)
    command = ["parity", "--config", path, "--dump", str(side.folder), "--step", str(step), *overrides, *side.options]
    if error := start(command, side.processes, side.folder.with_suffix(".log")):
        raise RunError(f"{side.text} failed: {error}")


def write_dump(path: str, overrides: Sequence[str], *, folder: Path, step: int) -> None:
    """Train on these processes until a step, and write its values. torchrun starts several processes.

    Raises:
        UserError: the config is wrong, or the step has too many values.
    """
    world_size = whole_number(os.environ, "WORLD_SIZE", 1)
    config = load(path, overrides)
    cache = config.data.cache_folder or Path(config.job.dump_folder, "data_cache")
    options = [*parity_options(), *overrides]
    own = [f"--job.dump_folder={folder}", "--job.name=run", f"--data.cache_folder={cache}"]
    _check_step(load(path, [*options, *own], world_size=world_size).training, step)
    from titanlite.tools.report.value_dump import dump_step  # not before: mistakes of the config are reported at once

    dump_step(path, [*options, *own], folder=folder, step=step)
