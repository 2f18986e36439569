"""What `titanlite plan` does: will it fit, how fast will it be, what layout is best? Without a GPU."""

import json
import sys
import time
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import tomlkit
import torch

from titanlite.config.load import dump, load
from titanlite.config.schema import Config
from titanlite.plan.estimate import USABLE, Layout, Plan, model_of, plan
from titanlite.plan.memory import Breakdown
from titanlite.plan.search import Found, Options, search, with_options
from titanlite.runtime.errors import ConfigError
from titanlite.runtime.files import write_atomically
from titanlite.runtime.hardware import Hardware, find_hardware, load_hardware

GIB = 2**30


def main(path: str, options: Namespace) -> None:
    """Run `titanlite plan PATH` with the options of its parser."""
    began = time.perf_counter()
    config, layout = _read(path, options)
    if options.search:
        found = search(config, layout)
        if options.json:
            print(json.dumps(_search_record(found), indent=1))
        else:
            print("\n".join(_search_lines(found, config, layout, seconds=time.perf_counter() - began)))
        if options.apply:
            write_best(Path(options.apply), path, config, found.best[0][0].options)
            print(f"wrote {options.apply}", file=sys.stderr)
    else:
        planned = _plan(config, layout)
        if options.json:
            print(json.dumps(record(planned), indent=1))
        else:
            print("\n".join(lines(planned, config)))


def _read(path: str, options: Namespace) -> tuple[Config, Layout]:
    hardware = load_hardware(Path(options.gpu_file)) if options.gpu_file else find_hardware(options.gpu)
    world_size = options.world_size
    if hardware.measured:
        hardware = _share(hardware, min(world_size, options.gpus_per_node))
    layout = Layout(world_size, hardware, options.gpus_per_node)
    # What a search is to find need not go with the number of processes yet.
    return load(path, options.overrides, world_size=None if options.search else world_size), layout


def _share(machine: Hardware, processes: int) -> Hardware:
    """What each of so many processes of a machine without GPUs has of it."""
    return replace(
        machine,
        memory=machine.memory // processes,
        bf16_flops=machine.bf16_flops / processes,
        fp32_flops=machine.fp32_flops / processes,
        memory_bandwidth=machine.memory_bandwidth / processes,
        link_bandwidth=machine.link_bandwidth / processes,
    )


def _plan(config: Config, layout: Layout) -> Plan:
    torch.set_num_threads(1)
    return plan(config, *model_of(config), layout)


def lines(planned: Plan, config: Config) -> Iterator[str]:
    """The plan, for people."""
    layout, time_ = planned.layout, planned.time
    hardware, usable = layout.hardware, USABLE * layout.hardware.memory
    replicate, shard = planned.degrees
    yield (
        f"{config.job.name}: {planned.parameters:,} parameters on {layout.world_size:,} x {hardware.name} "
        f"({layout.gpus_per_node} in a node), replicate {replicate} x shard {shard}, {planned.micro_batch_size} x "
        f"{config.training.seq_len:,} tokens in a forward pass, {planned.accumulation} of those in a step"
    )
    skip_reason = "fits" if planned.fits else "does not fit"
    yield (
        f"memory   {skip_reason}: peak {planned.peak / GIB:.1f} GiB ({said(planned.peak_phase)}), usable "
        f"{usable / GIB:.1f} ({hardware.memory / GIB:.1f} less {1 - USABLE:.0%} for CUDA, NCCL and gaps)"
    )
    for cause, size in sorted(planned.breakdown.items(), key=lambda item: -item[1]):
        if size:
            yield f"           {cause:15s}{size / GIB:8.2f} GiB{size / planned.peak:7.0%}"
    if planned.host:
        yield f"           in host memory {planned.host / GIB:8.2f} GiB: parameters, gradients, optimizer"
    if planned.disk:
        yield f"           on disk        {planned.disk / GIB:8.2f} GiB, and no time for it is in what follows"
    for name, phase in _highlights(planned):
        yield f"           at {said(name)}: {sum(phase.values()) / GIB:.1f} GiB"
    yield (
        f"step     {time_.total:.3f} s: kernels {time_.compute:.3f}, messages not hidden {time_.exposed:.3f} "
        f"(of {time_.communication:.3f}), update {time_.update:.3f}"
    )
    each = planned.tokens_per_second / layout.world_size
    yield f"speed    {planned.tokens_per_second:,.0f} tokens/s, {each:,.0f} a device, MFU {planned.mfu:.1%}"
    yield (
        f"compute  {planned.flops / layout.world_size / 1e12:,.1f} TFLOP a step and device, "
        f"{planned.flops / planned.model_flops:.2f} of the model's (more for what is computed again, less for causal "
        "attention)"
    )
    for (collective, axis), size in sorted(planned.sent.items(), key=lambda item: -item[1]):
        yield f"sent     {collective.replace('_', '-')} over {axis}: {_size(size)} a step"
    yield (
        f"run      {planned.steps:,} steps, {planned.tokens * planned.steps:,} tokens: {planned.days:,.2f} days, "
        f"{planned.gpu_hours:,.0f} GPU-hours"
    )
    yield "Memory is that of tensors, exact for the code as it is; times are estimates: docs/plan.md."


def said(phase: str) -> str:
    """A phase, in words."""
    kind, _, unit = phase.partition(" ")
    words = {"forward": "forward of", "backward": "backward of", "reduce": "reducing gradients of"}
    return {"update": "clipping and update", "step": "before forward"}.get(phase) or f"{words[kind]} {unit}"


def _highlights(planned: Plan) -> Iterator[tuple[str, Breakdown]]:
    """The highest moment of forward, backward and update, but for the highest of all."""
    for kind in ("forward", "backward", "update"):
        names = [name for name in planned.phases if name.startswith(kind)]
        name = max(names, key=lambda it: sum(planned.phases[it].values()))
        if name != planned.peak_phase:
            yield name, planned.phases[name]


def _size(size: float) -> str:
    if size >= GIB / 100:
        return f"{size / GIB:,.2f} GiB"
    return f"{size / 2**20:,.2f} MiB" if size >= 2**20 else f"{size:,} B"


def record(planned: Plan) -> dict[str, Any]:
    """The plan, for programs. Sizes in bytes, times in seconds, of one rank where nothing else is said."""
    layout = planned.layout
    return {
        "hardware": asdict(layout.hardware),
        "world_size": layout.world_size,
        "nodes_of": layout.gpus_per_node,
        "replicate": planned.degrees[0],
        "shard": planned.degrees[1],
        "parameters": planned.parameters,
        "micro_batch_size": planned.micro_batch_size,
        "accumulation": planned.accumulation,
        "fits": planned.fits,
        "memory": {
            "peak": planned.peak,
            "usable": round(USABLE * layout.hardware.memory),
            "at": planned.peak_phase,
            "by_cause": planned.breakdown,
            "by_phase": planned.phases,
            "host": planned.host,
            "disk": planned.disk,
        },
        "flops_of_all_ranks": planned.flops,
        "model_flops_of_all_ranks": planned.model_flops,
        "sent": [
            {"collective": collective, "axis": axis, "bytes": size} for (collective, axis), size in planned.sent.items()
        ],
        "time": asdict(planned.time),
        "tokens_per_second": planned.tokens_per_second,
        "mfu": planned.mfu,
        "steps": planned.steps,
        "tokens": planned.tokens * planned.steps,
        "days": planned.days,
        "gpu_hours": planned.gpu_hours,
    }


def _search_lines(found: Found, config: Config, layout: Layout, *, seconds: float) -> Iterator[str]:
    hardware = layout.hardware
    yield (
        f"{config.job.name} on {layout.world_size:,} x {hardware.name} ({layout.gpus_per_node} in a node), "
        f"{config.training.global_batch_size} sequences of {config.training.seq_len:,} tokens a step: "
        f"{found.tried} layouts in {seconds:.0f} s"
    )
    for number, (candidate, planned) in enumerate(found.best, start=1):
        yield ""
        each = planned.tokens_per_second / layout.world_size
        yield (
            f"{number}. {planned.tokens_per_second:,.0f} tokens/s ({each:,.0f} a device), "
            f"step {planned.time.total:.3f} s, peak {planned.peak / GIB:.1f} GiB: {candidate.title}"
        )
        yield from (f"    {line}" for line in toml_of(to_paste(candidate.options, config)).splitlines() if line)
    if found.losers:
        yield ""
        yield "Why the next ones lose:"
        yield from (f"   {candidate.title}: {reason}" for candidate, reason in found.losers)


def to_paste(options: Options, config: Config) -> Options:
    """Without switches that the config has in this position already."""
    tree = config.model_dump()

    def present(key: str) -> Any:
        value: Any = tree
        for name in key.split("."):
            value = value[name]
        return value

    layout = ("parallelism.", "activation_checkpoint.mode", "training.local_batch_size")
    return {key: value for key, value in options.items() if key.startswith(layout) or value != present(key)}


def toml_of(options: Options) -> str:
    """Dotted keys as TOML, section by section."""
    document = tomlkit.document()
    for key, value in options.items():
        set_key(document, key, value)
    return tomlkit.dumps(document)


def set_key(document: tomlkit.TOMLDocument, key: str, value: Any) -> None:
    """In the section where it belongs, which is made if it is not there. None takes the key away."""
    *path, last = key.split(".")
    table: Any = document
    for depth, name in enumerate(path):
        if name not in table:
            if value is None:
                return
            table[name] = tomlkit.table(is_super_table=depth < len(path) - 1)
        table = table[name]
    if value is None:
        table.pop(last, None)
    else:
        table[last] = value


def _search_record(found: Found) -> dict[str, Any]:
    return {
        "best": [{"options": candidate.options, **record(planned)} for candidate, planned in found.best],
        "losers": [{"options": candidate.options, "reason": reason} for candidate, reason in found.losers],
        "tried": found.tried,
    }


def write_best(out: Path, path: str, config: Config, options: Options) -> None:
    """Write the file again with these options, comments and all; or the whole config, if that is not the same.

    Args:
        config: what was searched; what the command line said about it is written too.
    """
    wanted = with_options(config, options | {"job.name": out.stem})
    document = tomlkit.parse(Path(path).read_text())
    for key, value in _differences(load(path).model_dump(), wanted.model_dump()):
        if key != "job.name":
            set_key(document, key, value)
    if "name" in document.get("job", {}):
        set_key(document, "job.name", out.stem)
    write_atomically(out, tomlkit.dumps(document))
    try:
        is_same = load(out) == wanted
    except ConfigError:
        is_same = False
    if not is_same:
        write_atomically(out, dump(wanted))


def _differences(before: dict[str, Any], after: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in after.items():
        key = f"{prefix}{name}"
        if isinstance(value, dict) and isinstance(before.get(name), dict):
            yield from _differences(before[name], value, f"{key}.")
        elif name not in before or before[name] != value:
            yield key, value
