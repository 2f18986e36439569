"""Frozen parameters; `parameters.py` freezes them."""

from typing import TYPE_CHECKING, Any

from titanlite.schema import Config
from titanlite.techniques.technique import Claim, Technique, reads

if TYPE_CHECKING:
    from titanlite.models.base import Model


class FrozenParameters(Technique):
    option = "freeze.parameters"

    def is_used(self, config: Config) -> bool:
        return bool(config.freeze.parameters)

    def claims(self, config: Config) -> dict[Claim, str]:
        return {Claim.TRAINED: self.option}

    @reads("freeze")
    def choose_trained(self, model: "Model", config: Config) -> None:
        from titanlite.techniques.freeze.parameters import freeze

        freeze(model, config.freeze)

    def summary(self, config: Config) -> str:
        return f"frozen parameters {', '.join(config.freeze.parameters)}"

    def resume_settings(self, config: Config) -> dict[str, Any]:
        return {"freeze.parameters": sorted(config.freeze.parameters)}


TECHNIQUE = FrozenParameters()
