"""The `titanlite plan` command: will it fit, how fast is it, which layout is best? Without a GPU."""

import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import torch

from titanlite.config.load import load
from titanlite.runtime.errors import UserError
from titanlite.runtime.files import json_text
from titanlite.runtime.hardware import Hardware
from titanlite.schema import Config
from titanlite.techniques.context import METHOD
from titanlite.techniques.context import TECHNIQUE as CONTEXT_PARALLEL
from titanlite.tools.arguments import Amount, Count
from titanlite.tools.plan.estimate import Layout, Plan, model_of, plan, with_options, with_vocab_size
from titanlite.tools.plan.goodput import goodput
from titanlite.tools.plan.hardware import find_hardware, load_hardware
from titanlite.tools.plan.layouts import check_techniques
from titanlite.tools.plan.output import format_size, plan_lines, plan_record, search_lines, search_record
from titanlite.tools.plan.search import search as find_layouts
from titanlite.tools.plan.suggestions import suggest as find_suggestions
from titanlite.tools.plan.suggestions import suggestion_lines


def plan_config(
    config: str | None = None,
    overrides: Sequence[str] = (),
    *,
    world_size: Count | None = None,
    gpu: str | None = None,
    gpus_per_node: Count = 8,
    json_: bool = False,
    search: bool = False,
    suggest: bool = False,
    failures_a_day: Amount | None = None,
    start_seconds: Amount = 60.0,
) -> None:
    """Predict memory, communication and step time of a config, without a GPU.

    --search finds the fastest layout that fits, and --suggest options that need less memory.

    Args:
        world_size: processes (GPUs); required
        gpu (NAME|FILE.toml): device, for example H100; cpu for this machine; or a TOML file that describes one
            (docs/plan.md)
        gpus_per_node: devices in each node
        json_: print JSON
        search: search for the fastest layout that fits
        suggest: find options that need less memory
        failures_a_day (N): failures of any machine of the run: print what they cost
        start_seconds (S): time from a failure until training goes on

    Example:
        llama3_8b --world-size 64 --gpu H100
        my.toml --world-size 64 --gpu H100 --search
    """
    given = {"a config (my.toml, llama3_8b)": config, "--world-size N": world_size, "--gpu NAME or FILE.toml": gpu}
    if missing := [name for name, value in given.items() if not value]:
        raise UserError(f"titanlite plan: missing: {', '.join(missing)}; see titanlite plan --help")
    assert config
    assert world_size
    assert gpu
    if search and suggest:
        raise UserError("titanlite plan: --search and --suggest exclude each other")
    layout = _layout(gpu, world_size, gpus_per_node)
    # A search sets the degrees, so those of the config need not match the number of processes.
    loaded = with_vocab_size(load(config, overrides, world_size=None if search else world_size))
    if search:
        _search(loaded, layout, as_json=json_)
        return
    torch.set_num_threads(1)
    check_techniques(loaded, world_size)
    planned = plan(loaded, layout)
    others = _other_methods(loaded, layout)
    found = find_suggestions(loaded, layout, planned) if suggest else []
    effect = None
    if failures_a_day:
        effect = goodput(planned, loaded.checkpoint, failures_a_day=failures_a_day, start_seconds=start_seconds)
    if json_:
        record = {"suggestions": [asdict(candidate) for candidate in found]} if suggest else {}
        record |= {"goodput": asdict(effect)} if effect else {}
        methods = {name: asdict(other.time) for name, other in others.items()}
        record |= {"context_parallel_methods": methods} if methods else {}
        print(json_text(plan_record(planned) | record, indent=1))
    else:
        print("\n".join([*plan_lines(planned, loaded), *(suggestion_lines(found) if suggest else ())]))
        for method, other in others.items():
            print(
                f"context  {other.time.total / planned.time.total - 1:+.1%} step time with "
                f'parallelism.context_parallel_method = "{method}", reserved {format_size(other.reserved)}'
            )
        if effect:
            print(
                f"goodput  {effect.share:.1%} of the time with {failures_a_day:g} failures a day: each costs "
                f"{effect.steps_lost:g} steps and {start_seconds:g} s; best are saves, or local copies, every "
                f"{effect.best_interval:,.0f} steps"
            )


def _other_methods(config: Config, layout: Layout) -> dict[str, Plan]:
    """Return the plans with other values of parallelism.context_parallel_method, by these."""
    spec, own = model_of(config), config.parallelism.context_parallel_method
    variants = [options for _, options in CONTEXT_PARALLEL.variants(config, spec, layout.hardware)]
    return {
        options[METHOD]: plan(with_options(config, options), layout) for options in variants if options[METHOD] != own
    }


def _search(config: Config, layout: Layout, *, as_json: bool) -> None:
    """Print the best layouts."""
    began = time.perf_counter()
    found = find_layouts(config, layout)
    seconds = time.perf_counter() - began
    if as_json:
        print(json_text(search_record(found), indent=1))
    else:
        print("\n".join(search_lines(found, config, layout, seconds=seconds)))


def _layout(gpu: str, world_size: int, gpus_per_node: int) -> Layout:
    hardware = load_hardware(Path(gpu)) if gpu.endswith(".toml") else find_hardware(gpu)
    if hardware.measured:
        hardware = share_of_process(hardware, min(world_size, gpus_per_node))
    return Layout(world_size, hardware, gpus_per_node)


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
