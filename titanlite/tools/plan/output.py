"""Output of `titanlite plan`: text for people, records for programs."""

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from titanlite.config.keys import toml_text
from titanlite.schema import Config
from titanlite.techniques import places
from titanlite.techniques.technique import Options
from titanlite.tools.plan.estimate import OUTSIDE, Layout, Plan
from titanlite.tools.plan.memory import Breakdown
from titanlite.tools.plan.search import Found

GIB = 2**30


def plan_lines(planned: Plan, config: Config) -> Iterator[str]:
    """Yield the lines of a plan."""
    layout, time, less = planned.layout, planned.time, config.parallelism
    hardware = layout.hardware
    yield (
        f"{config.job.name}: {planned.parameters:,} parameters on {layout.world_size:,} x {hardware.name} "
        f"({layout.gpus_per_node} in a node), {planned.degrees}, {planned.micro_batch_size} x "
        f"{config.training.seq_len:,} tokens in a forward pass, {planned.accumulation} of those in a step"
    )
    outcome = "does not fit" if planned.reserved > layout.usable else "does not fit in host memory"
    rest = f"less {OUTSIDE / GIB:.0f} for the CUDA context and NCCL" if layout.is_gpu else "less a rest"
    yield (
        f"memory   {'fits' if planned.fits else outcome}: reserved {planned.reserved / GIB:.1f} GiB of "
        f"{layout.usable / GIB:.1f} ({hardware.memory / GIB:.1f} {rest}), allocated {planned.peak / GIB:.1f} "
        f"({phase_title(planned.peak_phase)})"
    )
    if planned.stages:
        of_ranks = (f"rank {stage.rank} {stage.reserved / GIB:.1f} GiB" for stage in planned.stages)
        yield f"           reserved by stages: {', '.join(of_ranks)}"
    if planned.ends and planned.ends != (
        less.pipeline_parallel_first_stage_less_layers,
        less.pipeline_parallel_last_stage_less_layers,
    ):
        first, last = (f"pipeline_parallel_{end}_stage_less_layers" for end in ("first", "last"))
        yield (
            f"stages   take equally long with parallelism.{first} = {planned.ends[0]} and {last} = {planned.ends[1]}, "
            "since embedding and head take as long as these numbers of blocks"
        )
    for category, size in sorted(planned.breakdown.items(), key=lambda item: -item[1]):
        if size:
            yield f"           {category:15s}{size / GIB:8.2f} GiB{size / planned.peak:7.0%}"
    if planned.host:
        there = [category for category, place in places(config).items() if place == "host"]
        yield f"           in host memory {planned.host / GIB:8.2f} GiB: {', '.join(there)}"
    if planned.copies:
        yield f"           local copies   {planned.copies / GIB:8.2f} GiB in host memory"
    if planned.host_of_node:
        yield (
            f"           host memory of a node: {planned.host_of_node / GIB:,.0f} GiB of "
            f"{hardware.node_memory / GIB:,.0f}, without data, the staging of checkpoints and the system"
        )
    if planned.disk:
        yield f"           on disk        {planned.disk / GIB:8.2f} GiB; the time below does not include the disk"
    for name, phase in _other_peaks(planned):
        yield f"           at {phase_title(name)}: {sum(phase.values()) / GIB:.1f} GiB"
    yield (
        f"step     {time.total:.3f} s: kernels {time.compute:.3f}, collectives not hidden {time.exposed:.3f} "
        f"(of {time.communication:.3f}), update {time.update:.3f}"
    )
    each = planned.tokens_per_second / layout.world_size
    yield f"speed    {planned.tokens_per_second:,.0f} tokens/s, {each:,.0f} a device, MFU {planned.mfu:.1%}"
    yield (
        f"compute  {planned.flops / layout.world_size / 1e12:,.1f} TFLOP a step and device, "
        f"{planned.flops / planned.model_flops:.2f} of the model's (recomputation adds, causal attention saves)"
    )
    for (collective, axis), size in sorted(planned.traffic.items(), key=lambda item: -item[1]):
        yield f"traffic  {collective.replace('_', '-')} over {axis}: {format_size(size)} a step"
    yield (
        f"run      {planned.steps:,} steps, {planned.tokens * planned.steps:,} tokens: {planned.days:,.2f} days, "
        f"{planned.gpu_hours:,.0f} GPU-hours"
    )
    if layout.world_size > layout.gpus_per_node != layout.in_last_node:
        yield (
            f"note     the last node has {layout.in_last_node} of {layout.gpus_per_node} GPUs: fewer network cards; "
            "the times assume full nodes"
        )
    yield "Allocated is the exact sum of all tensors. Times are estimates: docs/plan.md."


def phase_title(phase: str) -> str:
    """Return a phase in words."""
    name, _, unit = phase.partition(" ")
    words = {"forward": "forward of", "backward": "backward of", "reduce": "reducing gradients of"}
    return {"update": "clipping and update", "step": "before forward"}.get(phase) or f"{words[name]} {unit}"


def _other_peaks(planned: Plan) -> Iterator[tuple[str, Breakdown]]:
    """Yield the peaks of forward, backward and update, without the peak of the step."""
    for prefix in ("forward", "backward", "update"):
        names = [name for name in planned.phases if name.startswith(prefix)]
        name = max(names, key=lambda phase: sum(planned.phases[phase].values()))
        if name != planned.peak_phase:
            yield name, planned.phases[name]


def format_size(size: float) -> str:
    """Return a number of bytes in GiB, MiB or B."""
    if size >= GIB:
        return f"{size / GIB:,.2f} GiB"
    return f"{size / 2**20:,.2f} MiB" if size >= 2**20 else f"{size:,} B"


def plan_record(planned: Plan) -> dict[str, Any]:
    """Return a plan as JSON values: bytes and seconds, of one rank unless the name names all ranks."""
    layout = planned.layout
    values = "parameters", "micro_batch_size", "accumulation", "fits", "tokens_per_second", "mfu", "steps", "days"
    sizes = "peak", "reserved", "host", "copies", "host_of_node", "disk"
    return {
        "hardware": asdict(layout.hardware),
        "world_size": layout.world_size,
        "gpus_per_node": layout.gpus_per_node,
        **planned.degrees._asdict(),
        **{name: getattr(planned, name) for name in (*values, "gpu_hours")},
        "memory": {
            **{name: getattr(planned, name) for name in sizes},
            "allocated": planned.peak,
            "usable": layout.usable,
            "at": planned.peak_phase,
            "by_category": planned.breakdown,
            "by_phase": planned.phases,
        },
        "stages": [stage._asdict() for stage in planned.stages],
        "flops_of_all_ranks": planned.flops,
        "model_flops_of_all_ranks": planned.model_flops,
        "traffic": [
            {"collective": collective, "axis": axis, "bytes": size}
            for (collective, axis), size in planned.traffic.items()
        ],
        "time": asdict(planned.time),
        "tokens": planned.tokens * planned.steps,
    }


def search_lines(found: Found, config: Config, layout: Layout, *, seconds: float) -> Iterator[str]:
    """Yield the lines of a search.

    Args:
        seconds: time that the search took.
    """
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
            f"step {planned.time.total:.3f} s, reserved {planned.reserved / GIB:.1f} GiB: {candidate.title}"
        )
        yield from (f"    {line}" for line in toml_of(candidate.options).splitlines() if line)


def search_record(found: Found) -> dict[str, Any]:
    """Return a search as JSON values."""
    return {
        "best": [{"options": candidate.options, **plan_record(planned)} for candidate, planned in found.best],
        "tried": found.tried,
    }


def toml_of(options: Options) -> str:
    """Return dotted keys as TOML, section by section."""
    sections: dict[str, list[str]] = {}
    for key, value in options.items():
        section, _, name = key.rpartition(".")
        sections.setdefault(section, []).append(f"{name} = {toml_text(value)}")
    return "".join(f"[{section}]\n" + "\n".join(lines) + "\n" for section, lines in sections.items())
