"""Low-rank adaptation; `adapters.py` has the adapters."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, ClassVar

from titanlite.schema import Config, Lora
from titanlite.techniques.technique import Claim, Conflict, Technique, reads

if TYPE_CHECKING:
    from torch import nn

    from titanlite.models.base import Model


class LowRankAdapters(Technique):
    option = "lora.rank"

    def is_used(self, config: Config) -> bool:
        return config.lora.rank is not None

    def claims(self, config: Config) -> dict[Claim, str]:
        return {Claim.LAYERS: self.option, Claim.TRAINED: self.option}

    @reads("lora", "optimizer")
    def conflicts(self, config: Config) -> Iterator[Conflict]:
        lora, optimizer = config.lora, config.optimizer
        if lora.rank is None:
            if lora != Lora():
                yield self.option, "is not set, and without it [lora] has no effect: set it, for example to 16"
            return
        if "Muon" in optimizer.names:
            yield (
                "optimizer.name",
                "Muon is for whole matrices, and an adapter is two narrow ones: use AdamW with lora.rank",
            )

    @reads("freeze", "lora")
    def choose_trained(self, model: "Model", config: Config) -> None:
        from titanlite.techniques.lora.adapters import add_adapters

        add_adapters(model, config.lora, dtype=config.freeze.dtype)

    def summary(self, config: Config) -> str:
        return f"LoRA of rank {config.lora.rank}"

    def resume_settings(self, config: Config) -> dict[str, Any]:
        lora = config.lora
        return {"lora.rank": lora.rank, "lora.alpha": lora.alpha, "lora.targets": sorted(lora.targets)}

    facts: ClassVar[dict[str, Any]] = {"lora": False}
    """Whether the parameter belongs to an adapter."""

    def parameter_facts(self, model: "Model", config: Config) -> "dict[nn.Parameter, dict[str, Any]]":
        from titanlite.models.base import added_parameters

        return {parameter: {"lora": True} for parameter in added_parameters(model).values()}


TECHNIQUE = LowRankAdapters()
