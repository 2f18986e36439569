"""Low-rank adaptation; `adapters.py` has the adapters."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from titanlite.runtime.errors import UserError
from titanlite.schema import Config, Lora
from titanlite.techniques.technique import Claim, Conflict, Technique, reads

if TYPE_CHECKING:
    import torch
    from torch import nn

    from titanlite.models.base import Model


class LowRankAdapters(Technique):
    option = "lora.rank"

    def is_used(self, config: Config) -> bool:
        return config.lora.rank is not None

    def claims(self, config: Config) -> dict[Claim, str]:
        found = {Claim.LAYERS: self.option, Claim.TRAINED: self.option}
        return found | ({Claim.MATMULS: "lora.quantize_base"} if config.lora.quantize_base != "none" else {})

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

    @reads("lora")
    def check_machine(self, config: Config, device: "torch.device") -> None:
        import torch

        check_quantized_base(config, torch_version=torch.__version__)

    @reads("freeze", "lora")
    def choose_trained(self, model: "Model", config: Config) -> None:
        from titanlite.techniques.lora.adapters import add_adapters

        add_adapters(model, config.lora, dtype=config.freeze.dtype)

    def summary(self, config: Config) -> str:
        base = "" if config.lora.quantize_base == "none" else f" on {config.lora.quantize_base} weights"
        return f"LoRA of rank {config.lora.rank}{base}"

    def resume_settings(self, config: Config) -> dict[str, Any]:
        lora = config.lora
        quantized = {"lora.quantize_base": lora.quantize_base} if lora.quantize_base != "none" else {}
        return {"lora.rank": lora.rank, "lora.alpha": lora.alpha, "lora.targets": sorted(lora.targets), **quantized}

    facts: ClassVar[dict[str, Any]] = {"lora": False}
    """Whether the parameter belongs to an adapter."""

    def parameter_facts(self, model: "Model", config: Config) -> "dict[nn.Parameter, dict[str, Any]]":
        from titanlite.models.base import added_parameters

        return {parameter: {"lora": True} for parameter in added_parameters(model).values()}

    def parameter_note(self, facts: Mapping[str, Any]) -> str:
        return "LoRA" if facts["lora"] else ""


def check_quantized_base(config: Config, *, torch_version: str) -> None:
    """Refuse a quantized base where `fully_shard` takes parameters of floating-point dtypes only.

    Args:
        torch_version: as `torch.__version__`.

    Raises:
        UserError: this version of PyTorch does.
    """
    from torch.torch_version import TorchVersion

    if config.lora.quantize_base != "none" and TorchVersion(torch_version) < "2.12":
        raise UserError(
            f"lora.quantize_base: PyTorch {torch_version} shards floating-point parameters only: install PyTorch 2.12 "
            "or newer, or leave the base in freeze.dtype"
        )


TECHNIQUE = LowRankAdapters()
