"""A commented config to start from: `titanlite init`. Generated from the schema."""

import textwrap
from pathlib import Path
from typing import Any

from titanlite.config.load import load
from titanlite.runtime.errors import UserError
from titanlite.tools.describe import first_sentence, tables, toml_text

OFTEN_SET = {
    "model.name", "model.flavor", "model.file",
    "data.path", "data.tokenizer", "data.packing", "data.document_mask", "data.num_workers",
    "training.steps", "training.seq_len", "training.global_batch_size", "training.local_batch_size",
    "training.max_norm", "training.mixed_precision_param", "guard.nonfinite",
    "parallelism.data_parallel_replicate_degree", "parallelism.data_parallel_shard_degree",
    "parallelism.fsdp_reshard_after_forward", "activation_checkpoint.mode", "compile.enable",
    "quantize.linear.float8.enable", "optimizer.name", "optimizer.lr", "optimizer.weight_decay",
    "lr_scheduler.warmup_steps", "lr_scheduler.decay_ratio", "lr_scheduler.decay_type", "lr_scheduler.min_lr_factor",
    "checkpoint.interval", "checkpoint.keep_latest_k", "checkpoint.initial_load_path",
    "validation.enable", "validation.path", "validation.freq", "metrics.log_freq", "metrics.loggers",
    "debug.seed",
}  # fmt: skip
"""Options that the file names even if the config it starts from leaves them at their defaults."""


def write_config(name: str, *, origin: Path) -> Path:
    """Write NAME.toml with the settings of another config, and with comments.

    Returns:
        the file.

    Raises:
        UserError: the name is no name of a file here, or the file exists.
        ConfigError: the config to start from has mistakes.
    """
    path = Path(f"{name.removesuffix('.toml')}.toml")
    text = starter_text(load(origin).model_dump(exclude_none=True), run=path.stem, origin=origin.stem)
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise UserError(f"{path} exists; choose another name") from None
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from None
    return path


def starter_text(settings: dict[str, Any], *, run: str, origin: str) -> str:
    """Return TOML with these settings, and with comments on them and on the options that are often set.

    Args:
        settings: all options by section, without those that are not set.
        run, origin: names of the run and of the config that the settings are from.
    """
    lines = [
        f"# {run}: a config of titanlite, from {origin}. Check it: titanlite check {run}.toml",
        f"# Train it: titanlite train {run}.toml. Options behind a # show their defaults.",
        "# All options: titanlite train --help",
    ]
    for table in tables():
        if "[[" in table.header:
            continue
        section: list[str] = []
        for option in table.options:
            if option.key in ("job.name", "base"):
                continue
            value = _value(settings, option.key)
            shown = None if value is None or value == {} else toml_text(value)
            is_default = shown is None or option.default == f"default {shown}" or value in ({}, [])
            if is_default and option.key not in OFTEN_SET:
                continue
            section += textwrap.wrap(
                first_sentence(option.description), 118, initial_indent="# ", subsequent_indent="# "
            )
            default = option.default.removeprefix("default ") if option.default.startswith("default ") else "..."
            section.append(f"#{option.name} = {default}" if is_default else f"{option.name} = {shown}")
        if section:
            lines += ["", table.header, *section]
    return "\n".join(lines) + "\n"


def _value(settings: dict[str, Any], key: str) -> Any:
    for part in key.split("."):
        settings = settings.get(part, {}) if isinstance(settings, dict) else {}
    return settings
