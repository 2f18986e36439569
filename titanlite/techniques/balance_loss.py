"""A balance loss of routers, `model.args.balance_loss`, which models/experts.py adds to the gradients.

It is an argument of the model, so that the models without experts do not know it.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from titanlite.runtime.errors import ConfigError, Problem
from titanlite.schema import Config
from titanlite.techniques.technique import Conflict, Technique, reads, refuse_accumulation

if TYPE_CHECKING:
    from titanlite.models.base import Model
    from titanlite.models.registry import ModelSpec

BALANCE_LOSS = "model.args.balance_loss"


class BalanceLoss(Technique):
    option = "model.args"

    def is_used(self, config: Config) -> bool:
        return bool(config.model.args.get("balance_loss"))

    @reads(option, "training", "parallelism", "debug.reproducible_layouts")
    def layout_conflicts(self, config: Config, world_size: int) -> Iterator[Conflict]:
        if self.is_used(config):
            yield from _conflicts(config, world_size)

    @reads("model", "training", "parallelism", "debug.reproducible_layouts")
    def check_model(self, config: Config, spec: "ModelSpec", model: "Model", world_size: int) -> None:
        """Check a loss that the flavor of a custom model has."""
        is_of_flavor = bool(getattr(spec.args, "balance_loss", 0)) and not self.is_used(config)
        if is_of_flavor and (problems := [Problem(*found) for found in _conflicts(config, world_size)]):
            raise ConfigError(problems)

    def summary(self, config: Config) -> str:
        return f"balance loss of routers (weight {config.model.args['balance_loss']:g})"


def _conflicts(config: Config, world_size: int) -> Iterator[Conflict]:
    others = {
        "parallelism.pipeline_parallel_degree": config.parallelism.pipeline_parallel_degree > 1,
        "debug.reproducible_layouts": config.debug.reproducible_layouts,
    }
    for key, is_set in others.items():
        if is_set:
            yield key, f"cannot be combined with {BALANCE_LOSS}: leave one of the two out"
    if not any(others.values()):  # they need several forward passes
        reason = "needs the tokens of each expert in the whole step before the first backward pass"
        yield from refuse_accumulation(BALANCE_LOSS, reason, config, world_size)


TECHNIQUE = BalanceLoss()
