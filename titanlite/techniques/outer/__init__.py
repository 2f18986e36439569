"""An outer optimizer over rounds of steps; `optimizer.py` makes its steps."""

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titanlite.schedule import known_steps
from titanlite.schema import Config
from titanlite.techniques.technique import Claim, Conflict, HostTraffic, Parts, Technique, reads

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class OuterRounds(Technique):
    option = "outer"

    def is_used(self, config: Config) -> bool:
        return config.outer.every > 0

    @reads("outer", "offload.parameters", "training", "validation", "average", "debug.hash_freq")
    def conflicts(self, config: Config) -> Iterator[Conflict]:
        if not self.is_used(config):
            yield self.option, "has no effect: set outer.every"
        elif config.offload.parameters == "disk":
            yield self.option, 'keeps weights in memory, so it cannot be combined with offload.parameters = "disk"'
        if self.is_used(config) and config.outer.over_replicas:
            yield from _conflicts_of_workers(config)

    def claims(self, config: Config) -> dict[Claim, str]:
        return {Claim.GRADIENTS: OVER_REPLICAS} if config.outer.over_replicas else {}

    def summary(self, config: Config) -> str:
        workers = " of each replica" if config.outer.over_replicas else ""
        return f"outer optimizer every {config.outer.every} steps{workers}"

    def resume_settings(self, config: Config) -> dict[str, Any]:
        workers = config.parallelism.data_parallel_replicate_degree if config.outer.over_replicas else 0
        return {"outer.every": config.outer.every, "outer.workers": workers}

    def parts(self, config: Config, mesh: "DeviceMesh", run: Path) -> Parts:
        from titanlite.mesh import group_of_replica, has_replicas
        from titanlite.techniques.outer.optimizer import OuterOptimizer
        from titanlite.techniques.outer.worker import WorkerStep

        if not config.outer.over_replicas:
            return Parts(outer=partial(OuterOptimizer, config.outer))
        group_of_replica(mesh)  # groups are made here, because the plan has fake tensors later
        workers = mesh["replicate"] if has_replicas(mesh) else None
        return Parts(outer=partial(OuterOptimizer, config.outer, workers=workers), step_cls=WorkerStep)

    def places(self, config: Config) -> dict[str, str]:
        return {"outer": "host"} if config.training.enable_cpu_offload else {}

    def host_traffic(self, config: Config, sizes: Mapping[str, float], accumulation: int) -> HostTraffic:
        """The end of a round reads and writes the outer weights, their momentum and the weights."""
        return HostTraffic(memory=3 * sizes.get("outer", 0.0) / config.outer.every)


def _conflicts_of_workers(config: Config) -> Iterator[Conflict]:
    every, length = config.outer.every, f"training.{config.training.length}"
    steps = known_steps(config.training)
    if steps is None:
        yield length, f"{OVER_REPLICAS} needs a run that ends with a round: set training.steps or training.tokens"
    elif steps % every:
        yield length, f"the {steps} steps of the run are no multiple of outer.every = {every}: {ONE_MODEL}"
    if config.validation.enable and config.validation.freq % every:
        yield "validation.freq", f"is no multiple of outer.every = {every}: {ONE_MODEL}"
    if config.average.decay or config.average.window:
        yield OVER_REPLICAS, f"cannot be combined with average: {ONE_MODEL}"
    if config.debug.hash_freq:
        yield OVER_REPLICAS, f"cannot be combined with debug.hash_freq: {ONE_MODEL}"


OVER_REPLICAS = "outer.over_replicas"
ONE_MODEL = "workers have the same weights at the end of a round only"
TECHNIQUE = OuterRounds()
