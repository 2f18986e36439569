"""Estimate: how much memory and time a config takes on given devices."""

import logging
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from math import lcm
from statistics import NormalDist
from typing import Any, NamedTuple

from titanlite.checks.memory import copies_in_memory
from titanlite.checks.preflight import select_model
from titanlite.config.load import load
from titanlite.data.tokenizer import load_tokenizer
from titanlite.loss import Targets
from titanlite.models.base import Model
from titanlite.models.registry import ModelSpec
from titanlite.runtime.errors import ConfigError
from titanlite.runtime.hardware import Hardware
from titanlite.schedule import known_steps
from titanlite.schema import Config, Degrees
from titanlite.techniques import choose_trained, places, used
from titanlite.techniques.distill.source import planned_teacher
from titanlite.techniques.pipeline.stages import rank_of_stage, stages_of
from titanlite.techniques.technique import Options
from titanlite.tools.convert.source import open_model
from titanlite.tools.plan.memory import Profile, profile
from titanlite.tools.plan.pipeline import blocks_of_ends, pipeline_time, stage_work, traced_ranks, with_buffers
from titanlite.tools.plan.recorder import Recorder
from titanlite.tools.plan.time import (
    CLOCK_SPREAD,
    Collective,
    StepTime,
    collective_time,
    host_time,
    kernel_time,
    replicas_of,
    step_time,
)
from titanlite.tools.plan.trace import Passes, trace_step, traced_micro_batches
from titanlite.tools.plan.unroll import Blocks, NotAlike, unrolled
from titanlite.tools.plan.workload import Traffic, Workload, traffic_of, workload_of

logger = logging.getLogger(__name__)

WORTH = 2
"""Blocks beyond the few from which on the record of few blocks is made: its second trace costs as much as these."""
OUTSIDE = 2 * 2**30
"""Bytes of a GPU that PyTorch cannot reserve: the CUDA context and the buffers of NCCL. On 8 H100s, 1.06 GB with one
communicator (github.com/NVIDIA/nccl issue 1685); each further one takes 0.7 GB (issue 964, A100s)."""
USABLE_ON_CPU = 0.93
"""Share of this machine's memory for tensors."""


@dataclass(frozen=True)
class Layout:
    """The devices that a config runs on."""

    world_size: int
    hardware: Hardware
    gpus_per_node: int

    @property
    def is_gpu(self) -> bool:
        return not self.hardware.measured

    @property
    def slowest(self) -> Hardware:
        """The device with the lowest clock, for which the others wait. The expected least of n normal numbers is Blom's
        approximation."""
        least = 1 + CLOCK_SPREAD * NormalDist().inv_cdf(0.625 / (self.world_size + 0.25))
        return replace(self.hardware, clock=self.hardware.clock * least) if self.is_gpu else self.hardware

    @property
    def usable(self) -> int:
        """Bytes of a device that PyTorch can reserve."""
        memory = self.hardware.memory
        return memory - OUTSIDE if self.is_gpu else int(USABLE_ON_CPU * memory)

    @property
    def in_last_node(self) -> int:
        """Devices in the last node."""
        return (self.world_size - 1) % self.gpus_per_node + 1


@dataclass(frozen=True)
class Trace:
    """One step of a config on rank 0, independent of the speed of the hardware."""

    profile: Profile
    workload: Workload
    traffic: Traffic
    parameters: int = 0
    """Elements of the whole model."""
    flops_per_token: float = 0.0
    """FLOPs as MFU counts them, those of a frozen model included."""
    received: int = 0
    """Bytes that a stage of a pipeline receives of a micro-batch, in memory that lasts."""


class StageMemory(NamedTuple):
    """Memory of a rank of a pipeline, in bytes."""

    rank: int
    """Number of the rank among all ranks."""
    allocated: int
    reserved: int


@dataclass(frozen=True, kw_only=True)
class Plan(Profile):
    """Memory and time of one step, on the rank with the largest shards. The profile is of device memory."""

    layout: Layout
    parameters: int
    """Elements of the whole model."""
    degrees: Degrees
    micro_batch_size: int
    accumulation: int
    host: int
    """Bytes in host memory, of one rank on a GPU."""
    state: int
    """Bytes that one rank saves."""
    copies: int
    """Bytes in host memory of one rank's local copies of its state (checkpoint.local_interval)."""
    disk: int
    """Bytes in files."""
    flops: float
    """Executed by all ranks in a step, recomputation included; causal attention counts as half."""
    model_flops: float
    """FLOPs of a step as MFU counts them: no recomputation, attention in full."""
    traffic: Traffic
    time: StepTime
    steps: int
    tokens: int
    """Tokens of a step, over all ranks."""
    mfu: float
    """Share of the device's peak for mixed_precision_param."""
    stages: list["StageMemory"] = field(default_factory=list)
    """Memory of ranks with different stages of a pipeline."""
    ends: tuple[int, int] | None = None
    """Blocks that embedding and head of a pipeline take as long as."""

    @property
    def fits(self) -> bool:
        return self.reserved <= self.layout.usable and self.host_of_node <= self.layout.hardware.node_memory

    @property
    def host_of_node(self) -> int:
        """Bytes in the host memory of a node."""
        return (self.host + self.copies) * min(self.layout.world_size, self.layout.gpus_per_node)

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
    """Return the model of a config, with the sequence length of its training.

    Raises:
        ConfigError: there is no such model.
    """
    tokenizer = None if "vocab_size" in config.model.args else load_tokenizer(config.data.tokenizer)
    spec = select_model(config.model, tokenizer)
    return spec._replace(args=replace(spec.args, max_seq_len=config.training.seq_len))


def with_options(config: Config, options: Options) -> Config:
    """Return the config with these options.

    Raises:
        ValueError: the options conflict.
    """
    tree = config.model_dump()
    for key, value in options.items():
        *path, last = key.split(".")
        section = tree
        for name in path:
            section = section[name]
        section[last] = value
    return Config.model_validate(tree)


def with_vocab_size(config: Config) -> Config:
    """Return the config with its vocabulary size set, so that `model_of` need not load a tokenizer each time."""
    args = config.model.args | {"vocab_size": model_of(config).args.vocab_size}
    return config.model_copy(update={"model": config.model.model_copy(update={"args": args})})


def plan(config: Config, layout: Layout) -> Plan:
    """Trace a step of the config on fake tensors, and estimate its memory and time on this hardware.

    Raises:
        UserError: the degrees do not fit the number of processes, or the step cannot be traced.
    """
    if config.parallelism.pipeline_parallel_degree > 1:
        return plan_stages(config, layout)
    return estimate(trace(config, layout), config, layout)


def plan_stages(config: Config, layout: Layout) -> Plan:
    """Return the plan of the rank of a pipeline that reserves the most memory, with the time of all.

    Raises:
        UserError: as `plan`.
    """
    spec, parallelism = model_of(config), config.parallelism
    degree = parallelism.pipeline_parallel_degree
    ranks, of_rank = traced_ranks(degree), layout.world_size // degree
    model, targets = trained_model(spec, config), planned_targets(config)
    _, accumulation = config.training.batch_split(parallelism.degrees(layout.world_size).data_parallel)
    untraced = accumulation - traced_micro_batches(config, accumulation)
    plans, workloads = list[Plan](), list[Workload]()
    for place in ranks:
        recorder = trace_step(
            config, *spec[:2], world_size=layout.world_size, gpu=layout.is_gpu, targets=targets, rank=place * of_rank
        )
        found = _traced(recorder, config, layout)
        found = replace(
            found,
            profile=with_buffers(found.profile, untraced * found.received),
            parameters=sum(parameter.numel() for parameter in model.parameters()),
            flops_per_token=model.flops_per_token(config.training.seq_len),
        )
        plans.append(estimate(found, config, layout))
        workloads.append(found.workload)
    stages = stages_of(model, parallelism)
    of_ranks = [
        sum(len(blocks) for number, blocks in enumerate(stages) if rank_of_stage(number, parallelism) == rank)
        for rank in ranks
    ]
    time = pipeline_time(
        workloads,
        parallelism,
        hardware=layout.slowest,
        gpus_per_node=layout.gpus_per_node,
        accumulation=accumulation,
        stages_of_rank=len(stages) // degree,
    )
    largest = max(plans, key=lambda plan: plan.reserved)
    flops = sum(count * plan.flops for count, plan in zip(ranks.values(), plans, strict=True))
    return replace(
        largest,
        time=time,
        mfu=largest.mfu * largest.time.total / time.total,
        flops=flops / degree,
        ends=blocks_of_ends([stage_work(workload, layout.hardware) for workload in workloads], of_ranks),
        stages=[
            StageMemory(place * of_rank, plan.peak, plan.reserved) for place, plan in zip(ranks, plans, strict=True)
        ],
    )


def trace(config: Config, layout: Layout) -> Trace:
    """Trace a step: of the whole model if it is small or its blocks differ, otherwise of a model with few blocks, whose
    passes are repeated for the others; see `unroll`. A frozen model beside it is always whole.

    Raises:
        UserError: as `plan`.
    """
    spec, seq_len = model_of(config), config.training.seq_len
    model, targets = trained_model(spec, config), planned_targets(config)
    return replace(
        _traced(record(config, spec, model, targets, layout), config, layout),
        parameters=sum(p.numel() for p in model.parameters()),
        flops_per_token=sum(
            network.flops_per_token(seq_len) for network in (model, targets.frozen if targets else None) if network
        ),
    )


def record(config: Config, spec: ModelSpec, model: Model, targets: Targets | None, layout: Layout) -> Recorder:
    """Return the record of a step of the whole model on rank 0."""
    make = partial(trace_step, config, spec.model_cls, world_size=layout.world_size, gpu=layout.is_gpu, targets=targets)
    args: Any = spec.args
    for blocks in few_blocks(config, spec, model):
        few = make(replace(args, n_layers=blocks.few))
        try:
            return unrolled(few, make(args, passes=Passes(few, blocks)), blocks)
        except NotAlike as reason:
            logger.debug(f"{blocks} do not stand for all: {reason}")
    return make(args)


def few_blocks(config: Config, spec: ModelSpec, model: Model) -> Iterator[Blocks]:
    """Yield which blocks to try in place of all: the fewest first, and none if that is not worth it."""
    depth, period, parallelism = len(model.layers), period_of(config, model), config.parallelism
    if parallelism.fsdp_min_unit_params or config.debug.reproducible_layouts or config.optimizer.in_backward:
        return  # only some blocks gather parameters, or the passes keep more than gradients for the update
    edge = 1 + max(parallelism.fsdp_forward_prefetch, parallelism.fsdp_backward_prefetch)
    for front in (first_blocks(model) + edge, first_blocks(model) + edge + 1):
        few = front + 2 * period + edge
        few += (depth - few) % period
        if depth > few + WORTH and can_vary(spec, config, model, few):
            yield Blocks(depth, few, front, period)


def _traced(recorder: Recorder, config: Config, layout: Layout) -> Trace:
    """Return what a record says of a step."""
    fuse, parallelism = config.compile.enable and layout.is_gpu, config.parallelism
    is_pipeline = parallelism.pipeline_parallel_degree > 1
    _, accumulation = config.training.batch_split(parallelism.degrees(layout.world_size).data_parallel)
    return Trace(
        profile(recorder, gpu=layout.is_gpu, compiled=fuse, hidden=[*_away(config, layout)]),
        workload_of(recorder, fuse=fuse, gpus_per_node=layout.gpus_per_node),
        traffic_of(recorder, accumulation=accumulation, gathers_once=parallelism.keeps_gathered and is_pipeline),
        received=recorder.kept_of_received() // recorder.micro_batches,
    )


def _away(config: Config, layout: Layout) -> dict[str, str]:
    """Return host or disk for each category that is not in the device's memory. That of a CPU is the host's."""
    return {category: place for category, place in places(config).items() if layout.is_gpu or place == "disk"}


def estimate(traced: Trace, config: Config, layout: Layout) -> Plan:
    """Estimate memory and time of a traced step on this hardware."""
    training, hardware, workload = config.training, layout.hardware, traced.workload
    degrees = config.parallelism.degrees(layout.world_size)
    micro_batch_size, accumulation = training.batch_split(degrees.data_parallel)
    time = step_time(
        workload.units,
        update=workload.update,
        hardware=layout.slowest,
        gpus_per_node=layout.gpus_per_node,
        accumulation=accumulation,
        whole=workload.whole,
    )
    away = _away(config, layout)
    sizes = {category: traced.profile.most(category) for category in away}
    host, disk = (sum(sizes[name] for name in away if away[name] == place) for place in ("host", "disk"))
    if host:
        forward, backward = (
            sum(kernel_time(kernel, layout.slowest) for unit in workload.units for kernel in getattr(unit, name))
            for name in ("forward", "backward")
        )
        ranks = min(layout.world_size, layout.gpus_per_node)
        added = host_time(used(config), config, sizes, accumulation, ranks=ranks, forward=forward, backward=backward)
        time = replace(time, total=time.total + added)
    traffic, workers = traced.traffic, degrees.replicate if config.outer.over_replicas else 1
    if workers > 1:  # their weights, in float32, which nothing hides
        exchange = Collective(
            "all_reduce", traced.profile.most("outer") // 2, replicas_of(degrees, layout.gpus_per_node)
        )
        each = collective_time(exchange, layout.slowest, layout.gpus_per_node) / config.outer.every
        changed = {name: getattr(time, name) + each for name in ("total", "exposed", "communication")}
        time = replace(time, **changed)
        traffic = traffic | {("all_reduce", "replicate"): exchange.bytes // config.outer.every}
    own, same = (sum(map(traced.profile.most, parts)) for parts in (("parameters", "optimizer"), ("outer", "average")))
    state = (own * workers + same) // degrees.replicate
    tokens = training.global_batch_size * training.seq_len
    model_flops = traced.flops_per_token * tokens
    peak = hardware.fp32_flops if training.mixed_precision_param == "float32" else hardware.bf16_flops
    return Plan(
        phases={name: {**found, **dict.fromkeys(away, 0)} for name, found in traced.profile.phases.items()},
        pools=traced.profile.pools,
        layout=layout,
        parameters=traced.parameters,
        degrees=degrees,
        micro_batch_size=micro_batch_size,
        accumulation=accumulation,
        host=host,
        state=state,
        copies=state * copies_in_memory(config, machines=-(-layout.world_size // layout.gpus_per_node)),
        disk=disk,
        flops=layout.world_size
        * accumulation
        * sum(kernel.flops for unit in workload.units for kernel in (*unit.forward, *unit.backward)),
        model_flops=model_flops,
        traffic=traffic,
        time=time,
        steps=known_steps(training) or training.steps,
        tokens=tokens,
        mfu=model_flops / (time.total * peak * layout.world_size),
    )


# Targets


def planned_targets(config: Config) -> Targets | None:
    """Return the targets of a config. Weights need not be there if a config of theirs is.

    Raises:
        UserError: there are no such weights, or they do not describe their model.
    """
    return planned_teacher(config, read_spec=_read_spec) if config.teacher.path else None


def _read_spec(path: str, config: str | None, section: str) -> ModelSpec:
    return open_model(path, None, section).spec if config is None else select_model(load(config).model, None)


# Models of few blocks in place of one of many


def period_of(config: Config, model: Model) -> int:
    """Return the number of blocks after which activation checkpointing, and what the attention of layers sees,
    repeat."""
    options = config.activation_checkpoint
    every_nth = options.selective_ac_option
    recomputed = every_nth if options.mode == "selective" and isinstance(every_nth, int) else 1
    layers = getattr(model, "attentions", [None])
    return lcm(recomputed, next(n for n in range(1, len(layers) + 1) if layers[n:] == layers[:-n]))


def first_blocks(model: Model) -> int:
    """Return the number of first blocks before those that all train the same parameters."""
    trained = _trained_by_blocks(model)
    return next(n for n in range(len(trained)) if all(length == trained[-1] for length in trained[n:]))


def can_vary(spec: ModelSpec, config: Config, model: Model, few: int) -> bool:
    """Return True if the number of blocks of a model can be changed to a few, which are like its first ones."""
    if getattr(spec.args, "n_layers", None) != len(model.layers):
        return False
    args: Any = spec.args
    try:
        smaller = trained_model(spec._replace(args=replace(args, n_layers=few)), config)
    except ConfigError:  # a pattern of the config names a block that the small model lacks
        return False
    return _trained_by_blocks(smaller) == _trained_by_blocks(model)[:few]


def _trained_by_blocks(model: Model) -> list[Any]:
    return [[(name, p.shape, p.requires_grad) for name, p in block.named_parameters()] for block in model.layers]


def trained_model(spec: ModelSpec, config: Config) -> Model:
    """Return the model with its adapters, and its frozen parameters marked."""
    model = spec.build()
    choose_trained(model, config)
    return model
