"""Health of layers; `measurement.py` measures it."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from titanlite.schema import Config
from titanlite.techniques.technique import Observed, Technique

if TYPE_CHECKING:
    from titanlite.observer import StepObserver


class HealthOfLayers(Technique):
    option = "metrics.layers.freq"

    def is_used(self, config: Config) -> bool:
        return config.metrics.layers.freq > 0

    def observers(self, config: Config, run: Observed) -> "Sequence[StepObserver]":
        from titanlite.mesh import world_group
        from titanlite.techniques.layer_health.measurement import LayerHealth
        from titanlite.techniques.tensor.layers import count_output_replicas

        observer = LayerHealth(
            run.model,
            freq=config.metrics.layers.freq,
            file=run.open_records("layers.jsonl"),
            replicas=run.replicas,
            world=world_group(run.mesh),
            outputs=count_output_replicas(run.model, run.mesh),
            device=run.device,
        )
        return [observer]


TECHNIQUE = HealthOfLayers()
