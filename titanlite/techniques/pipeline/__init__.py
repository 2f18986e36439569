"""Pipeline parallelism; `stages.py` cuts a model, `passes.py` makes the passes of a step."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from titanlite.schema import Config
from titanlite.techniques.technique import Claim, Conflict, Parts, Technique, reads

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from titanlite.models.base import Model
    from titanlite.models.registry import ModelSpec


SPLIT_BACKWARD = "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"
"""Schedules that compute gradients of weights later than those of activations."""


class PipelineParallel(Technique):
    option = "parallelism.pipeline_parallel_degree"

    def is_used(self, config: Config) -> bool:
        return config.parallelism.pipeline_parallel_degree > 1

    def claims(self, config: Config) -> dict[Claim, str]:
        return {Claim.GRADIENTS: self.option}

    @reads("parallelism", "compile.enable", "teacher", "metrics.layers", "offload")
    def conflicts(self, config: Config) -> Iterator[Conflict]:
        if not self.is_used(config):
            return
        key, schedule = "parallelism.pipeline_parallel_schedule", config.parallelism.pipeline_parallel_schedule
        later = f"{schedule} computes gradients of weights later,"
        if schedule in SPLIT_BACKWARD and config.compile.enable:
            hint = "set another schedule or compile.enable = false"
            yield key, f"{later} which PyTorch cannot do in compiled blocks: {hint}"
        if schedule in SPLIT_BACKWARD and not config.parallelism.keeps_gathered:
            hint = 'set another schedule or parallelism.fsdp_reshard_after_forward = "never"'
            yield key, f"{later} and would lose those of weights that FSDP has freed: {hint}"
        others = {
            "teacher.path": config.teacher.path is not None,
            "metrics.layers.freq": config.metrics.layers.freq > 0,
            "offload": "disk" in (config.offload.parameters, config.offload.optimizer),
            "parallelism.fsdp_min_unit_params": config.parallelism.fsdp_min_unit_params > 0,
            "parallelism.fsdp_forward_prefetch": config.parallelism.fsdp_forward_prefetch > 0,
            "parallelism.fsdp_backward_prefetch": config.parallelism.fsdp_backward_prefetch > 0,
        }
        for key, is_set in others.items():
            if is_set:
                yield key, f"cannot be combined with {self.option} = {config.parallelism.pipeline_parallel_degree} yet"

    @reads("parallelism", "training.global_batch_size", "training.local_batch_size", "training.batch_ramp")
    def layout_conflicts(self, config: Config, world_size: int) -> Iterator[Conflict]:
        degree = config.parallelism.pipeline_parallel_degree
        try:
            ranks = config.parallelism.degrees(world_size).data_parallel
            size, _ = config.training.batch_split(ranks)
        except ValueError:  # reported of the degrees, or of the batch
            return
        counts = {batch // (size * ranks) for batch in config.training.batch_sizes}
        step = 1 if config.parallelism.pipeline_parallel_schedule in ("1F1B", "GPipe") else degree
        if self.is_used(config) and (wrong := [count for count in counts if count < degree or count % step]):
            largest = config.training.global_batch_size // (ranks * degree)
            hint = f"set training.local_batch_size = {largest} or a divisor of it" if largest else "raise the batch"
            needed = f"a multiple of {degree}" if step > 1 else f"at least {degree}"
            yield (
                self.option,
                f"{config.parallelism.pipeline_parallel_schedule} on {degree} ranks needs {needed} micro-batches in a "
                f"step, and there are {wrong[0]} of {size} sequences: {hint}",
            )

    @reads("parallelism")
    def check_model(self, config: Config, spec: "ModelSpec", model: "Model", world_size: int) -> None:
        from titanlite.techniques.pipeline.stages import check_stages

        if self.is_used(config):
            check_stages(model, config.parallelism)

    def summary(self, config: Config) -> str:
        parallelism = config.parallelism
        return f"pipeline of {parallelism.pipeline_parallel_degree} ranks, {parallelism.pipeline_parallel_schedule}"

    def parts(self, config: Config, mesh: "DeviceMesh", run: Path) -> Parts:
        from titanlite.techniques.pipeline.passes import PipelineStep

        return Parts(step_cls=PipelineStep)


TECHNIQUE = PipelineParallel()
