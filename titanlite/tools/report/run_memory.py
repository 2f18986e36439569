"""Memory by phase of a run, beside the plan's, for `titanlite inspect RUN --memory`."""

import json
from collections.abc import Collection, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.table import Column, Table

from titanlite.config.foreign import load_of_run
from titanlite.metrics.records import MEMORY, find_faults
from titanlite.runtime.errors import UserError
from titanlite.tools.plan.estimate import Layout, on_host, trace, with_vocab_size
from titanlite.tools.plan.hardware import find_hardware
from titanlite.tools.plan.memory import Profile
from titanlite.tools.plan.output import format_size
from titanlite.tools.plan.teacher import PREFIX
from titanlite.tools.report.parameter_table import show

TENSORS = ("parameters", "gradients", "optimizer")
"""Categories that a run measures, and a plan has."""
OF_SOURCE = {"allocator": ("allocated", "reserved", "peak"), "process": ("resident",)}
NOTES = {
    "allocator": "allocated, reserved: at the end of the phase. peak: most allocated within it. Gathered parameters, "
    "activations and temporary tensors are in it.",
    "process": "resident: memory of the whole process at the end of the phase, Python and libraries included. A CPU "
    "has no count of its tensors, so the plan's peaks have nothing measured beside them.",
}


def print_memory(run: Path, *, as_json: bool) -> None:
    """Print the newest record of a run's memory, and the plan of the run's config.

    Raises:
        UserError: there is no such record, it is damaged, or the run's config names code or has no plan.
    """
    record = newest_record(run)
    of_run = with_vocab_size(load_of_run(run, world_size=record["world_size"]))
    torch.set_num_threads(1)
    on_gpu = record["source"] == "allocator"
    device = replace(find_hardware("H100"), measured=not on_gpu)  # memory depends on whether it is a GPU, not on which
    profile = trace(of_run, Layout(record["world_size"], device, gpus_per_node=8)).profile
    planned = planned_memory(profile, hidden=on_host(of_run) if on_gpu else [])
    show({**record, "plan": planned} if as_json else memory_lines(record, planned, name=str(run)))


def newest_record(run: Path) -> dict[str, Any]:
    """Return the newest record of memory.jsonl.

    Raises:
        UserError: there is none, or it is damaged.
    """
    file = run / "memory.jsonl"
    try:
        record = json.loads(file.read_text().splitlines()[-1])
    except (FileNotFoundError, IndexError):
        what = "its first two steps are not done, or an older version started it"
        raise UserError(f"{file}: no record of this run's memory: {what}") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{file}: the last line is damaged ({error})") from None
    faults = find_faults(record, MEMORY) if isinstance(record, dict) else ["not a record"]
    if faults or record["source"] not in OF_SOURCE or not _are_sizes(record["phases"]):
        raise UserError(f"{file}: the last line is no record of memory ({faults[0] if faults else 'phases or source'})")
    return record


def _are_sizes(phases: dict[str, Any]) -> bool:
    return all(isinstance(it, dict) and all(isinstance(size, int) for size in it.values()) for it in phases.values())


def planned_memory(profile: Profile, *, hidden: Collection[str]) -> dict[str, dict[str, int]]:
    """Return the bytes of a plan: the peak of each phase that a run names, and the most of each category.

    Args:
        hidden: categories that are not in the device's memory.
    """
    peaks: dict[str, int] = {}
    for name, sizes in profile.phases.items():
        if (phase := _phase_of(name)) is not None:
            total = sum(size for category, size in sizes.items() if category not in hidden)
            peaks[phase] = max(peaks.get(phase, 0), total)
    return {"peaks": peaks, "tensors": {category: profile.most(category) for category in TENSORS}}


def _phase_of(name: str) -> str | None:
    """Return the phase of training that a plan's phase is a part of."""
    kind, _, unit = name.partition(" ")
    if kind == "forward" and unit.startswith(PREFIX):
        return "teacher"
    return {"step": "data", "forward": "forward", "backward": "backward", "reduce": "backward", "update": "update"}.get(
        kind
    )


def memory_lines(record: dict[str, Any], planned: dict[str, dict[str, int]], *, name: str) -> Iterator[str | Table]:
    """Yield what the console prints."""
    measured = OF_SOURCE[record["source"]]
    yield f"{name}: memory of rank 0 of {record['world_size']} at step {record['step']}, at the end of each phase"
    shares = ["of plan"] if "peak" in measured else []
    columns = [Column(it, justify="right", no_wrap=True) for it in (*TENSORS, *measured, "plan's peak", *shares)]
    table = Table("phase", *columns, box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for phase, sizes in record["phases"].items():
        plan = planned["peaks"].get(phase)
        peak = sizes.get("peak")
        cells = [format_size(sizes[it]) if it in sizes else "" for it in (*TENSORS, *measured)]
        share = f"{peak / plan:.1%}" if peak is not None and plan else ""
        table.add_row(phase, *cells, "none" if plan is None else format_size(plan), *([share] if shares else []))
    most = [format_size(planned["tensors"][it]) for it in TENSORS]
    table.add_row("plan, most", *most)
    yield table
    yield NOTES[record["source"]]
