"""`titanlite parity`: train one config in many variants, and compare losses and gradient norms step by step. With
--where, compare the values of one step on two sides.

Every variant and side is a run of its own, started as a user starts one. A variant that only trades memory or time must
give the same bits. A variant that sums in another order may differ by rounding.
"""

import math
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

from titanlite.config.load import load
from titanlite.runtime.errors import ConfigError, RunError, UserError, whole_number
from titanlite.runtime.files import json_text
from titanlite.schedule import known_steps
from titanlite.schema import Config
from titanlite.tools.arguments import Count
from titanlite.tools.report.run_records import first_difference, read_run

ONE = "1 process"
LAYOUT = re.compile(r"(\d+)x(\d+)")
FURTHER = re.compile(r"parallelism\.(?:context|tensor|pipeline)_parallel_degree=(\d+)")
"""Axes besides replicate and shard."""
COMPARED = (
    "training.mixed_precision_param=float32",
    "debug.deterministic=true",
    "metrics.log_freq=1",
    "metrics.loggers=[]",
    "checkpoint.enable=false",
    "validation.enable=false",
)
"""Overrides of all runs that are compared, before those of the user."""
RESHARD = "parallelism.fsdp_reshard_after_forward=default"
AXES = ("context", "expert", "tensor", "pipeline")
ONE_OF_EACH = tuple(f"parallelism.{axis}_parallel_degree=1" for axis in AXES)
"""Overrides without further axes."""
FurtherLayout = tuple[str, tuple[str, ...]]
"""Name, and the degrees of the further axes as overrides. All other processes shard parameters."""


@dataclass(frozen=True)
class Variant:
    """A way to train the config.

    Attributes:
        options: overrides, without the leading dashes.
        reference: name of the variant to compare with.
        exact: it must equal its reference bit by bit.
    """

    name: str
    processes: int
    options: tuple[str, ...]
    reference: str = ONE
    exact: bool = False


@dataclass(frozen=True)
class Curve:
    """Losses and gradient norms by step; None where a value is not finite.

    Attributes:
        hashes: of weights and optimizer states by step; empty without `debug.reproducible_layouts`.
    """

    losses: list[float | None]
    grad_norms: list[float | None]
    hashes: list[str] = field(default_factory=list)


class Comparison(NamedTuple):
    """Largest relative differences from the reference at any step, and whether they are allowed."""

    loss: float
    grad_norm: float
    is_equal: bool


def variants(
    global_batch_size: int, processes: int, *, on_gpu: bool, further: Iterable[FurtherLayout] = ()
) -> list[Variant]:
    """Return all variants that the batch and the processes allow, each after its reference.

    Args:
        further: layouts with further axes of the mesh.
    """
    found = [
        Variant(ONE, 1, ()),
        Variant("the same again", 1, (), exact=True),
        Variant("activation checkpoint: full", 1, ("activation_checkpoint.mode=full",), exact=True),
        Variant("activation checkpoint: op", 1, _selective("op"), exact=True),
        Variant("activation checkpoint: every 2nd", 1, _selective("2"), exact=True),
        Variant("2 data workers", 1, ("data.num_workers=2",), exact=True),
        *_accumulated("2 micro-batches", global_batch_size, 1, ()),
        Variant("compile", 1, ("compile.enable=true",)),
    ]
    if processes == 1:
        return found
    ddp, fsdp, hsdp = (f"{name} {mesh}" for name, mesh in (
        ("DDP", f"{processes} x 1"), ("FSDP", f"1 x {processes}"), ("HSDP", f"2 x {processes // 2}")
    ))  # fmt: skip
    found += [Variant(ddp, processes, _degrees(processes)), Variant(fsdp, processes, _degrees(1))]
    policies = ["always", "never", *(["2"] if processes % 2 == 0 else [])]
    for name, option in (
        *((f"reshard {policy}", f"parallelism.fsdp_reshard_after_forward={policy}") for policy in policies),
        ("forward prefetch 2", "parallelism.fsdp_forward_prefetch=2"),
        ("backward prefetch 2", "parallelism.fsdp_backward_prefetch=2"),
        ("activation checkpoint: full", "activation_checkpoint.mode=full"),
        ("CPU offload", "training.enable_cpu_offload=true"),
    ):
        same_kernels = not (on_gpu and "offload" in option)  # the optimizer runs on the CPU there
        found.append(Variant(f"FSDP, {name}", processes, (*_degrees(1), option), fsdp, same_kernels))
    if processes % 2 == 0 and processes > 2:
        found += [
            Variant(hsdp, processes, _degrees(2)),
            *_accumulated(f"{hsdp}, 2 micro-batches", global_batch_size, processes, _degrees(2)),
        ]
    return [*found, *(Variant(name, processes, (*_degrees(1), *options)) for name, options in further)]


def further_layouts(path: str, overrides: Sequence[str], processes: int) -> Iterator[FurtherLayout]:
    """Yield the layouts with one or two further axes that the config, its model and the processes allow."""
    from titanlite.tools.plan.layouts import layouts_with  # imports torch

    config, some = load(path, [*overrides, f"--{RESHARD}"]), sorted({2, processes})
    pairs = ("context", "tensor"), ("context", "expert"), ("expert", "tensor")
    tried = [{"context": some}, {"expert": some}, {"tensor": [2]}, *({one: [2], other: [2]} for one, other in pairs)]
    for axes in [*tried, {"pipeline": [2], "tensor": [1, 2]}]:
        for options in layouts_with(config, processes, axes):
            degrees = {axis: degree for axis in axes if (degree := options[f"parallelism.{axis}_parallel_degree"]) > 1}
            rest = processes // math.prod(degree for axis, degree in degrees.items() if axis != "expert")
            name = " x ".join([*(f"{axis} {degree}" for axis, degree in degrees.items()), f"FSDP {rest}"])
            yield name, tuple(f"{key}={value}" for key, value in options.items())


def with_equal_bits(found: Iterable[Variant]) -> list[Variant]:
    """Return the variants of a config with `debug.reproducible_layouts`: every layout must equal one process.

    Those that compute with other kernels (compiled ones, an optimizer on another device) stay as they are. Those with
    another local batch size are left out, since the option needs 1.
    """
    kept = (run for run in found if not any(option.startswith("training.local_batch_size") for option in run.options))
    return [replace(run, exact=run.exact or (run.reference == ONE and run.name != "compile")) for run in kept]


def _degrees(replicate: int) -> tuple[str, ...]:
    names = "parallelism.data_parallel_replicate_degree", "parallelism.data_parallel_shard_degree"
    return f"{names[0]}={replicate}", f"{names[1]}=-1", *ONE_OF_EACH


def _selective(option: str) -> tuple[str, ...]:
    return "activation_checkpoint.mode=selective", f"activation_checkpoint.selective_ac_option={option}"


def _accumulated(name: str, global_batch_size: int, processes: int, options: tuple[str, ...]) -> list[Variant]:
    """Return a variant of two micro-batches, or no variant if a rank's share of the batch is odd."""
    share = global_batch_size // processes
    return [] if share % 2 else [Variant(name, processes, (*options, f"training.local_batch_size={share // 2}"))]


def compare(curve: Curve, reference: Curve, *, exact: bool, tolerance: float) -> Comparison:
    """Compare two curves step by step.

    Only losses have a tolerance: gradient norms are small differences of large sums, and differ by more.
    """
    loss, grad_norm = (
        _difference(*values) for values in ((curve.losses, reference.losses), (curve.grad_norms, reference.grad_norms))
    )
    return Comparison(loss, grad_norm, is_equal=curve == reference if exact else loss < tolerance)


def _difference(values: list[float | None], others: list[float | None]) -> float:
    """Return the largest relative difference; infinity where one of a pair is missing or not finite."""
    pairs = zip_longest(values, others)
    relative = [abs(a - b) / abs(b) if b and a is not None and b is not None else math.inf for a, b in pairs]
    return max(relative, default=math.inf)


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


def compare_layouts(
    path: str, overrides: Sequence[str], steps: int, processes: int | None, tolerance: float, only: str
) -> None:
    """Run and compare all variants of a config, and print the table."""
    config = load(path, overrides)
    import torch  # not before: the import takes seconds, and mistakes of the config are reported at once

    gpus = torch.cuda.device_count()
    processes = processes or gpus or 4
    if (batch := config.training.global_batch_size) % processes:
        raise UserError(f"--processes: {batch} (training.global_batch_size) is not a multiple of {processes}")
    further = further_layouts(path, overrides, processes) if processes > 1 else ()
    found = variants(batch, processes, on_gpu=gpus > 0, further=further)
    if config.debug.reproducible_layouts:
        found = with_equal_bits(found)
    chosen = _select(found, only)
    folder = Path(config.job.dump_folder, f"{config.job.name}-parity")
    base = [
        f"training.steps={steps}",
        f"lr_scheduler.warmup_steps={min(config.lr_scheduler.warmup_steps, steps // 2)}",
        *COMPARED,
        f"debug.hash_freq={int(config.debug.reproducible_layouts)}",
        f"data.cache_folder={_cache(config)}",
    ]
    commands: dict[str, list[str]] = {}
    for variant in chosen:
        own = [*_degrees(1), RESHARD, *variant.options, f"job.dump_folder={folder}", f"job.name={_slug(variant.name)}"]
        options = [*_dashed(base), *overrides, *_dashed(own)]
        _checked(path, options, variant)
        commands[variant.name] = ["train", "--config", path, *options]
    device = "GPU" if gpus else "CPU"
    print(" ".join([f"{path}: {steps} steps, torch {torch.__version__}, {device}", *overrides]))
    curves, failed = _run_all(chosen, commands, folder, tolerance)
    (folder / "parity.json").write_text(json_text({name: vars(curve) for name, curve in curves.items()}, indent=1))
    print(f"every step of every variant: {folder / 'parity.json'}")
    if failed:
        raise RunError(f"not equal: {', '.join(failed)}")


def _select(found: list[Variant], only: str) -> list[Variant]:
    """Return the variants whose names contain a text, with their references.

    Raises:
        UserError: there are none.
    """
    if not any(only in variant.name for variant in found):
        names = ", ".join(variant.name for variant in found)
        raise UserError(f"--only: no variant's name contains {only!r}; there are: {names}")
    wanted = {ONE, *(name for v in found if only in v.name for name in (v.name, v.reference))}
    return [variant for variant in found if variant.name in wanted]


def _run_all(
    chosen: list[Variant], commands: dict[str, list[str]], folder: Path, tolerance: float
) -> tuple[dict[str, Curve], list[str]]:
    """Run variants one by one, with a row of the table for each.

    Returns:
        (curves by variant, names of variants that failed or differ).
    """
    print(_row("variant", "loss, first", "loss, last", "norm, last", "loss differs", "norm differs", "must be", ""))
    print(_row(*["---"] * 8))
    curves: dict[str, Curve] = {}
    failed = []
    for variant in chosen:
        curve = _run(commands[variant.name], variant.processes, folder / _slug(variant.name))
        if isinstance(curve, str):
            failed.append(variant.name)
            print(_row(variant.name, *[""] * 6, f"FAILED: {curve}"), flush=True)
            continue
        curves[variant.name] = curve
        ends = [_as_text(value) for value in (curve.losses[0], curve.losses[-1], curve.grad_norms[-1])]
        if variant.name == ONE:
            print(_row(variant.name, *ends, *[""] * 4), flush=True)
            continue
        reference = curves.get(variant.reference, Curve([], []))
        found = compare(curve, reference, exact=variant.exact, tolerance=tolerance)
        must = f"equal to {variant.reference}" if variant.exact else f"within {tolerance:g}"
        failed += [] if found.is_equal else [variant.name]
        differences = f"{found.loss:.1e}", f"{found.grad_norm:.1e}"
        print(_row(variant.name, *ends, *differences, must, "yes" if found.is_equal else "NO"), flush=True)
        hashes = (read_run(folder / _slug(name)).hashes for name in (variant.name, variant.reference))
        if variant.exact and curve.hashes != reference.hashes != [] and (first := first_difference(*hashes)):
            print(f"    step {first[0]}: first tensor that differs: {first[1]}", flush=True)
    return curves, failed


def _cache(config: Config) -> str | Path:
    return config.data.cache_folder or Path(config.job.dump_folder, "data_cache")


def _dashed(options: Iterable[str]) -> list[str]:
    return [f"--{option}" for option in options]


def _checked(path: str, options: Sequence[str], variant: Variant) -> Config:
    """Return the config of a variant.

    Raises:
        UserError: the config and the variant exclude each other.
    """
    try:
        return load(path, options, world_size=variant.processes)
    except ConfigError as error:
        raise UserError("\n".join(f"{variant.name}: {problem}" for problem in error.problems)) from None


def _row(*cells: str) -> str:
    widths = (36, 11, 10, 10, 12, 12, 21, 3)
    return "| " + " | ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)) + " |"


def _as_text(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.6f}"


def _slug(name: str) -> str:
    return "".join(letter if letter.isalnum() else "-" for letter in name).strip("-")


def _run(command: list[str], processes: int, run: Path) -> Curve | str:
    """Train from the start in the folder `run`. Return losses and norms, or the first line of an error."""
    if error := start(command, processes, run):
        return error
    found = read_run(run)
    return Curve(found.column("loss"), found.column("grad_norm"), [record["hash"] for record in found.hashes])


def start(command: list[str], processes: int, folder: Path) -> str | None:
    """Run a command of titanlite on some processes, which writes to a new folder; what they print goes to a file beside
    it. Return the first line of an error, if it fails.
    """
    shutil.rmtree(folder, ignore_errors=True)
    log = folder.with_suffix(".log")
    log.parent.mkdir(parents=True, exist_ok=True)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
    with log.open("w") as output:
        arguments = [sys.executable, *(launcher if processes > 1 else []), "-m", "titanlite", *command]
        environment = {name: value for name, value in os.environ.items() if name != "TORCHELASTIC_ERROR_FILE"}
        result = subprocess.run(arguments, stdout=output, stderr=output, env=environment, check=False)
    if result.returncode:
        return f"{error_in(log.read_text().splitlines()) or f'exit code {result.returncode}'} ({log})"
    return None


def error_in(lines: list[str]) -> str | None:
    """Return the first line that titanlite reports as an error; without one, the first that names an error."""
    found = [line for line in lines if line.startswith("error:")] or [line for line in lines if "rror" in line]
    return found[0] if found else None


# --where


def parse_side(text: str) -> Variant:
    """Read a side: a layout as 2x2 (replicas x shards), options of the config, or both.

    Raises:
        UserError: the text is neither.
    """
    replicate, shard, options = 1, 1, list[str]()
    for word in text.split():
        if match := LAYOUT.fullmatch(word):
            replicate, shard = int(match[1]), int(match[2])
        elif "." in word.partition("=")[0]:
            options.append(word.lstrip("-"))
        else:
            raise UserError(
                f"--where: {text!r} is no side: write a layout (2x2, replicas x shards), options "
                "(compile.enable=true), both in quotes, or the folder of a dump"
            )
    if not text.split() or not replicate * shard:
        raise UserError(f"--where: {text!r} is no side: write a layout as 2x2, replicas x shards")
    shards = f"parallelism.data_parallel_shard_degree={shard}"
    further = [int(match[1]) for option in options if (match := FURTHER.fullmatch(option))]
    layout = *_degrees(replicate), shards, RESHARD
    return Variant(text, math.prod((replicate, shard, *further)), (*layout, *options))


def compare_sides(
    path: str | None, overrides: Sequence[str], sides: Sequence[str], *, step: int, tolerance: float | None
) -> None:
    """Run both sides where they are no dumps yet, compare them, and print the table and the first difference.

    Raises:
        UserError: the config or a side is wrong.
        RunError: a side failed, or they differ.
    """
    folders, runs = list[Path](), list[tuple[Variant, Path, list[str]]]()
    for name, text in zip("ab", sides, strict=True):
        folders.append(Path(text))
        if folders[-1].is_dir():
            continue
        if path is None:
            raise UserError("titanlite parity: --where runs a config: name one, or the folders of two dumps")
        side = parse_side(text)
        options = [*overrides, *_dashed(side.options)]
        config = _checked(path, options, side)
        _check(config, step)
        folders[-1] = Path(config.job.dump_folder, f"{config.job.name}-where", name)
        command = ["parity", "--config", path, "--dump", str(folders[-1]), "--step", str(step), *options]
        runs.append((side, folders[-1], command))
    for side, folder, command in runs:
        if error := start(command, side.processes, folder):
            raise RunError(f"{side.name} failed: {error}")
    from titanlite.tools.report.compare import compare_dumps, read_dump, report

    compared = compare_dumps(*map(read_dump, folders), tolerance=tolerance)
    one, other = sides
    print(f"A: {one}; B, the reference: {other}; step {step}" if runs else f"A: {one}; B: {other}")
    for line in report(compared):
        print(line)
    if compared.first:
        raise RunError(f"not equal: first {compared.first.key}")


def _check(config: Config, step: int) -> None:
    """Check that the values of a step can be compared.

    Raises:
        UserError: they cannot.
    """
    steps = known_steps(config.training)
    if steps is not None and steps < step:
        raise UserError(f"--step {step}: the run has {steps} steps (training.{config.training.length})")
    if config.parallelism.tensor_parallel_degree > 1:
        raise UserError("parallelism.tensor_parallel_degree: values of parts of layers cannot be compared yet: set 1")


def write_dump(path: str, overrides: Sequence[str], *, folder: Path, step: int) -> None:
    """Train on these processes until a step, and write its values. torchrun starts several processes.

    Raises:
        UserError: the config is wrong, its parts do not fit together, or the step has too many values.
    """
    own = [f"job.dump_folder={folder}", "job.name=run", f"data.cache_folder={_cache(load(path, overrides))}"]
    world_size = whole_number(os.environ, "WORLD_SIZE", 1)
    config = load(path, [*_dashed(COMPARED), *overrides, *_dashed(own)], world_size=world_size)
    _check(config, step)
    # Not before: mistakes of the config are reported at once.
    from titanlite.checks.preflight import preflight
    from titanlite.runtime.console import start_logging
    from titanlite.runtime.process_group import pick_device, process_group, read_ranks
    from titanlite.tools.assemble import assemble
    from titanlite.tools.convert.source import open_model
    from titanlite.tools.ingest.inputs import find_files
    from titanlite.tools.report.compare import record

    ranks = read_ranks(os.environ)
    start_logging(ranks.rank)
    device = pick_device(ranks)
    inputs = preflight(config, ranks, device, find_text=find_files, open_model=open_model)
    if ranks.rank == 0:
        shutil.rmtree(folder / "run", ignore_errors=True)
    with process_group(ranks, device, deterministic=config.debug.deterministic):
        record(assemble(config, inputs, ranks=ranks, device=device), folder=folder, step=step)
