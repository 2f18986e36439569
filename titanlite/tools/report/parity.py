"""`titanlite parity`: train one config in many variants, and compare losses and gradient norms step by step.

Every variant is a run of its own, started as a user starts one. A variant that only trades memory or time must give
the same bits. A variant that sums in another order may differ by rounding.
"""

import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from titanlite.config.load import load
from titanlite.runtime.errors import ConfigError, RunError, UserError
from titanlite.runtime.files import json_text
from titanlite.tools.report.run_records import first_difference, hashed_steps

ONE = "1 process"
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


@dataclass(frozen=True)
class Comparison:
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
        same_kernels = not (on_gpu and "offload" in option)  # the optimizer is another one there
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
            degrees = {axis: it for axis in axes if (it := options[f"parallelism.{axis}_parallel_degree"]) > 1}
            rest = processes // math.prod(degree for axis, degree in degrees.items() if axis != "expert")
            name = " x ".join([*(f"{axis} {it}" for axis, it in degrees.items()), f"FSDP {rest}"])
            yield name, tuple(f"{key}={it}" for key, it in options.items())


def with_equal_bits(found: Iterable[Variant]) -> list[Variant]:
    """Return the variants of a config with `debug.reproducible_layouts`: every layout must equal one process.

    Those that compute with other kernels (compiled ones, an optimizer on another device) stay as they are. Those with
    another local batch size are left out, since the option needs 1.
    """
    kept = (it for it in found if not any(option.startswith("training.local_batch_size") for option in it.options))
    return [replace(it, exact=it.exact or (it.reference == ONE and it.name != "compile")) for it in kept]


def _degrees(replicate: int) -> tuple[str, ...]:
    names = "parallelism.data_parallel_replicate_degree", "parallelism.data_parallel_shard_degree"
    return f"{names[0]}={replicate}", f"{names[1]}=-1", *ONE_OF_EACH


def layout_options(replicate: int, shard: int) -> list[str]:
    """Return the overrides that replace the layout of a config."""
    shards = f"parallelism.data_parallel_shard_degree={shard}"
    return [f"--{option}" for option in (*_degrees(replicate), shards, RESHARD)]


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
    same_length = len(curve.losses) == len(reference.losses)
    loss = _difference(curve.losses, reference.losses) if same_length else float("inf")
    grad_norm = _difference(curve.grad_norms, reference.grad_norms) if same_length else float("inf")
    return Comparison(loss, grad_norm, is_equal=curve == reference if exact else loss < tolerance)


def _difference(values: list[float | None], others: list[float | None]) -> float:
    """Return the largest relative difference; infinity where one of a pair is not finite."""
    pairs = zip(values, others, strict=True)
    relative = [abs(a - b) / abs(b) if b and a is not None and b is not None else float("inf") for a, b in pairs]
    return max(relative, default=float("inf"))


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
        *_base_options(steps, warmup_steps=config.lr_scheduler.warmup_steps),
        f"debug.hash_freq={int(config.debug.reproducible_layouts)}",
        f"data.cache_folder={config.data.cache_folder or Path(config.job.dump_folder, 'data_cache')}",
        f"job.dump_folder={folder}",
    ]
    commands = {variant.name: _command(path, base, overrides, variant) for variant in chosen}
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
        records, others = (hashed_steps(folder / _slug(name)) for name in (variant.name, variant.reference))
        if variant.exact and (first := first_difference(records, others)):
            print(f"    step {first[0]}: first tensor that differs: {first[1]}", flush=True)
    return curves, failed


def _base_options(steps: int, *, warmup_steps: int) -> list[str]:
    """Return options of all variants, before those of the user: few steps in float32, every step logged."""
    warmup = f"lr_scheduler.warmup_steps={min(warmup_steps, steps // 2)}"
    return [f"training.steps={steps}", warmup, *(option.removeprefix("--") for option in parity_options())]


def parity_options() -> list[str]:
    """Return overrides of all runs that are compared, before those of the user."""
    return [
        "--training.mixed_precision_param=float32",
        "--debug.deterministic=true",
        "--metrics.log_freq=1",
        "--metrics.loggers=[]",
        "--checkpoint.enable=false",
        "--validation.enable=false",
    ]


def _command(path: str, base: list[str], overrides: Sequence[str], variant: Variant) -> list[str]:
    """Return the words of `titanlite` that train a variant.

    Raises:
        UserError: the config and the variant exclude each other.
    """
    layout = [*_degrees(1), RESHARD]  # instead of the layout of the config
    options = [*(f"--{option}" for option in base), *overrides]
    options += [f"--{option}" for option in (*layout, *variant.options)]
    options += [f"--{option}" for option in base if option.startswith("job.")] + [f"--job.name={_slug(variant.name)}"]
    try:
        load(path, options, world_size=variant.processes)
    except ConfigError as error:
        raise UserError("\n".join(f"{variant.name}: {problem}" for problem in error.problems)) from None
    return ["train", "--config", path, *options]


def _row(*cells: str) -> str:
    widths = (36, 11, 10, 10, 12, 12, 21, 3)
    return "| " + " | ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)) + " |"


def _as_text(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.6f}"


def _slug(name: str) -> str:
    return "".join(letter if letter.isalnum() else "-" for letter in name).strip("-")


def _run(command: list[str], processes: int, run: Path) -> Curve | str:
    """Train from the start in the folder `run`. Return losses and norms, or the first line of an error."""
    shutil.rmtree(run, ignore_errors=True)
    if error := start(command, processes, run.with_suffix(".log")):
        return error
    records: list[dict[str, Any]] = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    losses, norms = ([record[key] for record in records] for key in ("loss", "grad_norm"))
    return Curve(losses, norms, [record["hash"] for record in hashed_steps(run)])


def start(command: list[str], processes: int, log: Path) -> str | None:
    """Run a command of titanlite on some processes. Return the first line of an error, if it fails.

    Args:
        log: file for what the processes print.
    """
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
