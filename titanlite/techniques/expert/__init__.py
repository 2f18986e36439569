"""Expert parallelism; `exchange.py` gives ranks their experts."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from titanlite.schema import Config
from titanlite.techniques.technique import Conflict, Technique, reads

if TYPE_CHECKING:
    from titanlite.models.base import Model
    from titanlite.models.registry import ModelSpec


class ExpertParallel(Technique):
    option = "parallelism.expert_parallel_degree"

    def is_used(self, config: Config) -> bool:
        return config.parallelism.expert_parallel_degree > 1

    @reads("parallelism")
    def conflicts(self, config: Config) -> Iterator[Conflict]:
        if config.parallelism.fsdp_min_unit_params:
            yield (
                "parallelism.fsdp_min_unit_params",
                "cannot be combined with parallelism.expert_parallel_degree, whose experts are units of their own: "
                "leave it out",
            )
        keep = config.parallelism.fsdp_reshard_after_forward
        if isinstance(keep, int):
            yield (
                "parallelism.fsdp_reshard_after_forward",
                f"{keep} cannot be combined with parallelism.expert_parallel_degree: set it to always or never",
            )

    @reads("parallelism")
    def layout_conflicts(self, config: Config, world_size: int) -> Iterator[Conflict]:
        try:
            sharded = config.parallelism.degrees(world_size).sharded
        except ValueError:  # reported of the degrees
            return
        if sharded % (degree := config.parallelism.expert_parallel_degree):
            yield (
                self.option,
                f"{degree} does not divide the {sharded} processes that parameters are sharded over: set a divisor of "
                f"{sharded}",
            )

    def column_shards(self, config: Config, model: "Model", world_size: int) -> dict[str, tuple[str, int]]:
        from titanlite.models.base import ExpertLayer

        sharded = config.parallelism.degrees(world_size).sharded
        if sharded == config.parallelism.expert_parallel_degree:
            return {}
        layers = ((name, layer) for name, layer in model.named_modules() if isinstance(layer, ExpertLayer))
        return {f"{name}.{stack}": ("expert", sharded) for name, layer in layers for stack in layer.stacks}

    @reads("parallelism", "training.seq_len")
    def check_model(self, config: Config, spec: "ModelSpec", model: "Model", world_size: int) -> None:
        from titanlite.techniques.expert.exchange import check_experts

        parallelism = config.parallelism
        check_experts(
            model,
            parallelism.expert_parallel_degree,
            parallelism.degrees(world_size).sharded,
            tensor=parallelism.tensor_parallel_degree,
        )


TECHNIQUE = ExpertParallel()
