"""`plan`: what a config will need and how long it will take, on so many devices of a kind."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from titanlite.config.schema import Config, Offload
from titanlite.models.base import Model, ModelArgs, build_on_meta
from titanlite.models.registry import ModelSpec, resolve_model
from titanlite.parallelize import RecomputePolicy
from titanlite.plan.memory import Profile, extend, profile
from titanlite.plan.recorder import Recorder
from titanlite.plan.time import Kernel, StepTime, Unit, message_time, offload_time, step_time
from titanlite.plan.trace import trace_step
from titanlite.plan.workload import Work, work_of
from titanlite.runtime.hardware import Hardware

USABLE = 0.93
"""Of a GPU's memory. The rest is for what the allocator does not count: the CUDA context, buffers of NCCL (1 to 2 GiB
together on most systems), and gaps between tensors."""
ON_HOST = ("parameters", "gradients", "optimizer")
"""What CPU offload keeps in host memory, unless it is on disk."""


@dataclass(frozen=True)
class Layout:
    """Where a config is to run."""

    world_size: int
    hardware: Hardware
    gpus_per_node: int
    """Devices in a node."""


@dataclass(frozen=True)
class Trace:
    """What rank 0 does in a step of a config, before any hardware is known."""

    profile: Profile
    work: Work
    sent: dict[tuple[str, str], int]
    """Bytes of whole tensors in a step, by (collective, axis)."""
    on_disk: dict[str, int] = field(default_factory=dict)
    """Bytes by cause of what is in files, and not in the profile."""


@dataclass(frozen=True, kw_only=True)
class Plan(Profile):
    """Figures of one rank, the one with the largest shards, where nothing else is said. Memory is the device's."""

    layout: Layout
    parameters: int
    """Of the whole model."""
    degrees: tuple[int, int]
    """(replicate, shard)."""
    micro_batch_size: int
    accumulation: int
    host: int
    """Bytes in host memory, with CPU offload."""
    disk: int
    """Bytes in files."""
    flops: float
    """Arithmetic that a step makes, with what is computed again; causal attention counts as half."""
    model_flops: float
    """As MFU counts, of a step: nothing computed again, attention in full."""
    sent: dict[tuple[str, str], int]
    time: StepTime
    steps: int
    tokens: int
    """In a step, over all ranks."""
    mfu: float
    """Of the device's peak for mixed_precision_param."""

    @property
    def fits(self) -> bool:
        return self.peak <= USABLE * self.layout.hardware.memory

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.time.total

    @property
    def days(self) -> float:
        return self.steps * self.time.total / 86400

    @property
    def gpu_hours(self) -> float:
        return self.days * 24 * self.layout.world_size


def model_of(config: Config) -> ModelSpec:
    """The model of a config, for its sequences.

    Raises:
        ConfigError: there is no such model.
    """
    selected = config.model
    kind, args = resolve_model(selected.name, selected.flavor, selected.args, selected.file)
    return ModelSpec(kind, replace(args, max_seq_len=config.training.seq_len))


def plan(config: Config, kind: type[Model], args: ModelArgs, layout: Layout) -> Plan:
    """A step of the real model by the real code on fake tensors, and what it means on this hardware.

    Raises:
        UserError: the degrees do not fit the number of processes, or nothing is within the budget of memory.
    """
    sketched = sketch(
        config, kind, args, world_size=layout.world_size, gpus_per_node=layout.gpus_per_node, gpu=is_gpu(layout)
    )
    return appraise(sketched, config, kind, args, layout)


def is_gpu(layout: Layout) -> bool:
    return not layout.hardware.measured


def sketch(
    config: Config,
    kind: type[Model],
    args: ModelArgs,
    *,
    world_size: int,
    gpus_per_node: int,
    gpu: bool,
    levels: Sequence[RecomputePolicy] | None = None,
) -> Trace:
    """Rehearse the step: of the whole model if it is small or its blocks differ, else of two with few blocks.

    Args:
        levels: what each block computes again. None: as the config says; of mode budget, they are chosen first.

    Raises:
        UserError: nothing is within the budget.
    """
    if config.activation_checkpoint.mode == "budget" and levels is None:
        from titanlite.plan.budget import choose_levels  # which begins with sketches of the other modes

        return choose_levels(config, kind, args, world_size=world_size, gpus_per_node=gpus_per_node, gpu=gpu).sketch
    depth = whole_depth = len(build_on_meta(kind, args).layers)
    period = _period(config)
    edge = max(2, period)
    few = 2 * edge + (depth - 2 * edge) % period
    models = [args]
    if levels is None and depth > few + period and _can_vary(kind, args):
        models = [replace(args, n_layers=few), replace(args, n_layers=few + period)]  # pyright: ignore[reportCallIssue]
    profiles, works, sents = [], [], []
    _, accumulation = config.training.batch_split(world_size)
    for shape in models:
        rehearsal = trace_step(config, kind, shape, world_size=world_size, gpu=gpu, levels=levels)
        depth = rehearsal.blocks
        profiles.append(profile(rehearsal.recorder, depth))
        works.append(work_of(rehearsal.recorder, fuse=config.compile.enable and gpu, gpus_per_node=gpus_per_node))
        sents.append(_sent(rehearsal.recorder, rehearsal.micro_batches, accumulation))
    if len(models) == 1:
        return _with_disk(Trace(profiles[0], works[0], sents[0]), config.offload)
    factor = (whole_depth - depth) / period
    whole = Trace(
        extend(profiles[0], profiles[1], whole_depth, edge),
        _extend_work(*works, blocks=whole_depth, few=depth, edge=edge, period=period),
        {key: round(size + (size - sents[0].get(key, 0)) * factor) for key, size in sents[1].items()},
    )
    return _with_disk(whole, config.offload)


def _with_disk(sketched: Trace, offload: Offload) -> Trace:
    """A rehearsal makes no files: what would be in one is taken out of memory here. The few slices that an update works
    on are not counted."""
    causes = {"parameters": offload.parameters, "optimizer": offload.optimizer}
    on_disk = {cause: sketched.profile.most(cause) for cause, place in causes.items() if place == "disk"}
    phases = {name: {**there, **dict.fromkeys(on_disk, 0)} for name, there in sketched.profile.phases.items()}
    return replace(sketched, profile=replace(sketched.profile, phases=phases), on_disk=on_disk)


def appraise(sketched: Trace, config: Config, kind: type[Model], args: ModelArgs, layout: Layout) -> Plan:
    """What a sketch means on this hardware."""
    training, hardware = config.training, layout.hardware
    model, work = build_on_meta(kind, args), sketched.work
    micro_batch_size, accumulation = training.batch_split(layout.world_size)
    time = step_time(
        work.units,
        update=work.update,
        hardware=hardware,
        gpus_per_node=layout.gpus_per_node,
        accumulation=accumulation,
    )
    waiting = sum(message_time(message, hardware, layout.gpus_per_node) for message in work.whole)
    time = replace(time, total=time.total + waiting, exposed=time.exposed + waiting)
    phases, host, disk = sketched.profile.phases, 0, sum(sketched.on_disk.values())
    if training.enable_cpu_offload and is_gpu(layout):
        host = sum(sketched.profile.most(cause) for cause in ON_HOST)
        parameters = sketched.profile.most("parameters") + sketched.on_disk.get("parameters", 0)
        time = replace(time, total=time.total + offload_time(parameters, host + disk, accumulation=accumulation))
        phases = {name: {**causes, **dict.fromkeys(ON_HOST, 0)} for name, causes in phases.items()}
    tokens = training.global_batch_size * training.seq_len
    model_flops = model.flops_per_token(training.seq_len) * tokens
    peak = {"bfloat16": hardware.bf16_flops, "float32": hardware.fp32_flops}[training.mixed_precision_param]
    return Plan(
        phases=phases,
        blocks=sketched.profile.blocks,
        layout=layout,
        parameters=sum(p.numel() for p in model.parameters()),
        degrees=config.parallelism.degrees(layout.world_size),
        micro_batch_size=micro_batch_size,
        accumulation=accumulation,
        host=host,
        disk=disk,
        flops=layout.world_size * accumulation * sum(it.flops for it in _kernels(work.units)),
        model_flops=model_flops,
        sent=sketched.sent,
        time=time,
        steps=training.steps,
        tokens=tokens,
        mfu=model_flops / (time.total * peak * layout.world_size),
    )


def _kernels(units: Iterable[Unit]) -> Iterable[Kernel]:
    return (kernel for unit in units for kernel in (*unit.forward, *unit.backward))


def _period(config: Config) -> int:
    """After so many blocks, activation checkpointing begins anew."""
    options = config.activation_checkpoint
    every_nth = options.selective_ac_option
    return every_nth if options.mode == "selective" and isinstance(every_nth, int) else 1


def _can_vary(kind: type[Model], args: Any) -> bool:
    """Whether the number of blocks can be changed, and all blocks have the same parameters."""
    blocks = getattr(args, "n_layers", None)
    layers = build_on_meta(kind, args).layers
    if blocks != len(layers):
        return False
    shapes = [[(name, p.shape) for name, p in block.named_parameters()] for block in layers]
    return all(shape == shapes[0] for shape in shapes)


def _sent(recorder: Recorder, made: int, accumulation: int) -> dict[tuple[str, str], int]:
    """Of a step with all its micro-batches."""
    total: dict[tuple[str, str], int] = {}
    for it in recorder.sent:
        each_time = it.unit and it.collective != "all_reduce"
        size = it.bytes * accumulation // made if each_time else it.bytes
        total[it.collective, it.axis] = total.get((it.collective, it.axis), 0) + size
    return total


def _extend_work(small: Work, large: Work, *, blocks: int, few: int, edge: int, period: int) -> Work:
    """The units of a model with `blocks` blocks, from those of one with `few`."""
    place = next(index for index, unit in enumerate(large.units) if unit.name == "layers.0")
    templates = large.units[place : place + few]
    units = list(large.units[:place])
    for block in range(blocks):
        like = block if block < few - edge else few - edge + (block - (few - edge)) % period
        if block >= blocks - edge:
            like = block - blocks + few
        units.append(replace(templates[like], name=f"layers.{block}"))
    units += large.units[place + few :]
    factor = (blocks - few) / period
    totals = []
    for name in ("flops", "bytes", "launches"):
        less, more = (sum(getattr(kernel, name) for kernel in work.update) for work in (small, large))
        totals.append(round(more + (more - less) * factor))
    update = Kernel("memory", totals[0], totals[1], "float32", totals[2])
    return Work(tuple(units), (update,), large.whole)
