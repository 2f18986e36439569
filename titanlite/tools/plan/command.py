"""The `titanlite plan` command: will it fit, how fast is it, which layout is best? Without a GPU."""

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

from titanlite.config.load import load
from titanlite.runtime.errors import ConfigError
from titanlite.runtime.files import write_atomically
from titanlite.runtime.hardware import Hardware
from titanlite.schema import Config, dump
from titanlite.tools.plan.candidates import Options
from titanlite.tools.plan.estimate import Layout, estimate, plan, with_vocab_size
from titanlite.tools.plan.hardware import find_hardware, load_hardware
from titanlite.tools.plan.output import indented_toml, plan_lines, plan_record, search_lines, search_record, set_key
from titanlite.tools.plan.recompute_search import GIB, choose_policies
from titanlite.tools.plan.search import search, with_options
from titanlite.tools.plan.suggestions import suggest, suggestion_lines


def main(path: str, options: Namespace) -> None:
    """Run `titanlite plan PATH` with the options of its parser."""
    config, layout = _read(path, options)
    if options.search:
        changes = _search(config, layout, as_json=options.json)
    elif options.memory_budget_gib:
        changes = _choose_recomputation(config, layout, gib=options.memory_budget_gib, as_json=options.json)
    else:
        changes = {}
        torch.set_num_threads(1)
        planned = plan(config, layout, whole=True)
        found = suggest(config, layout, planned) if options.suggest else []
        if options.json:
            record = {"suggestions": [asdict(it) for it in found]} if options.suggest else {}
            print(json.dumps(plan_record(planned) | record, indent=1))
        else:
            print("\n".join([*plan_lines(planned, config), *(suggestion_lines(found) if options.suggest else ())]))
    if options.apply:
        write_config(Path(options.apply), path, config, changes)
        print(f"wrote {options.apply}", file=sys.stderr)


def _search(config: Config, layout: Layout, *, as_json: bool) -> Options:
    """Print the best layouts, and return the options of the first."""
    began = time.perf_counter()
    found = search(config, layout)
    seconds = time.perf_counter() - began
    if as_json:
        print(json.dumps(search_record(found), indent=1))
    else:
        print("\n".join(search_lines(found, config, layout, seconds=seconds)))
    return found.best[0][0].options


def _choose_recomputation(config: Config, layout: Layout, *, gib: float, as_json: bool) -> Options:
    """Print the least recomputation within a memory budget, and return its options."""
    torch.set_num_threads(1)
    chosen = choose_policies(config, layout, budget=int(gib * GIB))
    section = chosen.activation_checkpoint
    options: Options = {f"activation_checkpoint.{name}": getattr(section, name) for name in ("mode", "per_block")}
    changed = with_options(config, options)
    planned = estimate(chosen.trace, changed, layout)
    if as_json:
        print(json.dumps({"options": options, **plan_record(planned)}, indent=1))
    else:
        print("\n".join([str(chosen), *indented_toml(options), *plan_lines(planned, changed)]))
    return options


def _read(path: str, options: Namespace) -> tuple[Config, Layout]:
    hardware = load_hardware(Path(options.gpu)) if options.gpu.endswith(".toml") else find_hardware(options.gpu)
    world_size = options.world_size
    if hardware.measured:
        hardware = share_of_process(hardware, min(world_size, options.gpus_per_node))
    layout = Layout(world_size, hardware, options.gpus_per_node)
    # A search sets the degrees, so those of the config need not match the number of processes.
    return with_vocab_size(load(path, options.overrides, world_size=None if options.search else world_size)), layout


def share_of_process(machine: Hardware, processes: int) -> Hardware:
    """Return the share of each process of a machine without GPUs."""
    return replace(
        machine,
        memory=machine.memory // processes,
        bf16_flops=machine.bf16_flops / processes,
        fp32_flops=machine.fp32_flops / processes,
        memory_bandwidth=machine.memory_bandwidth / processes,
        link_bandwidth=machine.link_bandwidth / processes,
    )


def write_config(out: Path, path: str, config: Config, options: Options) -> None:
    """Write a copy of a config file with some options changed, comments included.

    Where that would not load as the same config, write the whole resolved config instead.

    Args:
        config: the file with the overrides of the command line, which are written too.
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
