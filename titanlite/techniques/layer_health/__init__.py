"""Health of layers; `measurement.py` measures it."""

from pathlib import Path
from typing import TYPE_CHECKING

from titanlite.schema import Config
from titanlite.techniques.technique import Observed, Parts, Technique

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from titanlite.observer import StepObserver


class HealthOfLayers(Technique):
    option = "metrics.layers.freq"

    def is_used(self, config: Config) -> bool:
        return config.metrics.layers.freq > 0

    def parts(self, config: Config, mesh: "DeviceMesh", run: Path) -> Parts:
        from titanlite.mesh import world_group
        from titanlite.techniques.layer_health.measurement import LayerHealth
        from titanlite.techniques.tensor.layers import count_output_replicas

        def observers(observed: Observed) -> "list[StepObserver]":
            observer = LayerHealth(
                observed.model,
                freq=config.metrics.layers.freq,
                file=observed.open_records("layers.jsonl"),
                replicas=observed.replicas,
                world=world_group(mesh),
                outputs=count_output_replicas(observed.model, mesh),
                device=observed.device,
            )
            return [observer]

        return Parts(observers=observers)


TECHNIQUE = HealthOfLayers()
