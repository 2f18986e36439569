"""Settings that must match when a run resumes from a checkpoint."""

from dataclasses import asdict
from typing import Any

from titanlite.config.schema import Config


def resume_settings(config: Config, *, model_args: Any, data: dict[str, Any]) -> dict[str, Any]:
    """Return the settings that must match: with another value, a resumed run would be another experiment.

    Args:
        model_args: dataclass of the model's shape.
        data: fingerprints of the data sources.
    """
    args = {f"model.args.{name}": value for name, value in asdict(model_args).items() if name != "max_seq_len"}
    return {
        "model.name": config.model.title,
        **args,
        **data,
        "training.seq_len": config.training.seq_len,
        "training.global_batch_size": config.training.global_batch_size,
        "debug.seed": config.debug.seed,
    }
