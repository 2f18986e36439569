"""An outer optimizer over rounds of steps; `optimizer.py` makes its steps."""

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titanlite.schema import Config
from titanlite.techniques.technique import Conflict, HostTraffic, Parts, Technique, reads

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class OuterRounds(Technique):
    option = "outer"

    def is_used(self, config: Config) -> bool:
        return config.outer.every > 0

    @reads("outer", "offload.parameters")
    def conflicts(self, config: Config) -> Iterator[Conflict]:
        if not self.is_used(config):
            yield self.option, "has no effect: set outer.every"
        elif config.offload.parameters == "disk":
            yield self.option, 'keeps weights in memory, so it cannot be combined with offload.parameters = "disk"'

    def summary(self, config: Config) -> str:
        return f"outer optimizer every {config.outer.every} steps"

    def resume_settings(self, config: Config) -> dict[str, Any]:
        return {"outer.every": config.outer.every}

    def parts(self, config: Config, mesh: "DeviceMesh", run: Path) -> Parts:
        from titanlite.techniques.outer.optimizer import OuterOptimizer

        return Parts(outer=partial(OuterOptimizer, config.outer))

    def places(self, config: Config) -> dict[str, str]:
        return {"outer": "host"} if config.training.enable_cpu_offload else {}

    def host_traffic(self, config: Config, sizes: Mapping[str, float], accumulation: int) -> HostTraffic:
        """The end of a round reads and writes the outer weights, their momentum and the weights."""
        return HostTraffic(memory=3 * sizes.get("outer", 0.0) / config.outer.every)


TECHNIQUE = OuterRounds()
