"""Settings that must match when a run resumes from a checkpoint."""

from dataclasses import asdict
from typing import Any

from titanlite.config.optim_schema import Lora
from titanlite.config.schema import Config

LORA_ALPHA = "lora.alpha"
"""Setting with which adapters in a checkpoint compute."""


def resume_settings(
    config: Config, *, model_args: Any, data: dict[str, Any], teacher: str | None = None
) -> dict[str, Any]:
    """Return the settings that must match: with another value, a resumed run would be another experiment.

    Args:
        model_args: dataclass of the model's shape.
        data: fingerprints of the data sources.
        teacher: fingerprint of the teacher.
    """
    return {
        **model_settings(config.model.title, model_args),
        **data,
        **({"freeze.parameters": sorted(config.freeze.parameters)} if config.freeze.parameters else {}),
        **_lora_settings(config.lora),
        **({"teacher": teacher} if teacher else {}),
        "training.seq_len": config.training.seq_len,
        "training.global_batch_size": config.training.global_batch_size,
        "debug.seed": config.debug.seed,
    }


def model_settings(title: str, model_args: Any) -> dict[str, Any]:
    """Return the settings of a model that must match.

    Args:
        title: name of the model.
        model_args: dataclass of its shape.
    """
    args = {f"model.args.{name}": value for name, value in asdict(model_args).items() if name != "max_seq_len"}
    return {"model.name": title, **args}


def _lora_settings(lora: Lora) -> dict[str, Any]:
    if lora.rank is None:
        return {}
    quantized = {"lora.quantize_base": lora.quantize_base} if lora.quantize_base != "none" else {}
    return {"lora.rank": lora.rank, LORA_ALPHA: lora.alpha, "lora.targets": sorted(lora.targets), **quantized}
