"""Texts generated from the schema: the help of `train`, the JSON schema for editors, and configs with comments, among
them those of `titanlite init`.

    python -m titanlite config schema > train_configs/schema.json

scripts/reference.py makes the site's page of all options from the same tables.
"""

import json
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from titanlite.config.keys import Node, bare, json_schema, tables, toml_text
from titanlite.config.load import load
from titanlite.runtime.errors import UserError
from titanlite.schema import Config

BASE = "Path of a TOML file to inherit from, relative to this one: it gives the keys that this file does not set."


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
"""Options that `titanlite init` names even if the config it starts from leaves them at their defaults."""


# JSON schema


def file_schema() -> Node:
    """Return the JSON schema (draft 2020-12) of the TOML file."""
    schema = json_schema()
    properties = {"base": {"type": "string", "minLength": 1, "description": BASE}, **schema["properties"]}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "properties": properties}


def json_schema_text() -> str:
    """Return the text of train_configs/schema.json."""
    return json.dumps(file_schema(), indent=2, ensure_ascii=False) + "\n"


# Markdown and help


def first_sentence(text: str) -> str:
    """Return the first sentence of a docstring, on one line."""
    text = " ".join(text.split())
    return re.split(r"(?<=\.)\s+(?![a-z])", text, maxsplit=1)[0]


# Help


def options_help() -> str:
    """Return the help: every option as it is set on the command line, by section."""
    lines = []
    for table in tables():
        if not table.header:
            continue
        lines += ["", table.header]
        for option in table.options:
            lines += [f"  --{option.key}  {option.type}; {option.default}"]
            description = textwrap.wrap(first_sentence(option.description), 112)
            lines += textwrap.indent("\n".join(description), " " * 8).splitlines()
    return "\n".join(lines) + "\n"


# A config with comments


Form = Literal["all", "changes", "start"]


def show(config: Config, *, only_changes: bool = False) -> str:
    """Return TOML that loads to the same config, with the description of each option as a comment.

    Args:
        only_changes: write only options that differ from their defaults, with the default as the comment.
    """
    return "\n".join(_section_lines(config, "", "", "changes" if only_changes else "all")).strip() + "\n"


def start(config: Config, *, run: str, origin: str) -> str:
    """Return TOML that loads to the same config, with comments, and with those defaults that are often changed.

    Args:
        run, origin: names of the run and of the config that the settings are from.
    """
    lines = [
        f"# {run}: a config of titanlite, from {origin}. Check it: titanlite check {run}.toml",
        f"# Train it: titanlite train {run}.toml. Options behind a # show their defaults.",
        "# All options: titanlite train --help",
        *_section_lines(config, "", "", "start"),
    ]
    return "\n".join(lines) + "\n"


def write_config(name: str, *, origin: Path) -> Path:
    """Write NAME.toml with the settings of another config, and with comments.

    Returns:
        the file.

    Raises:
        UserError: the name is no name of a file here, or the file exists.
        ConfigError: the config to start from has mistakes.
    """
    path = Path(f"{name.removesuffix('.toml')}.toml")
    text = start(load(origin), run=path.stem, origin=origin.stem)
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise UserError(f"{path} exists; choose another name") from None
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from None
    return path


def _section_lines(section: BaseModel, header: str, key: str, form: Form) -> Iterator[str]:
    """Yield the lines of a section. Its own keys come before its inner sections: TOML gives later keys to those."""
    lines: list[str] = []
    inner: list[str] = []
    for name, field in type(section).model_fields.items():
        value, default = getattr(section, name), field.get_default()
        path = f"{key}.{name}" if key else name
        if isinstance(value, BaseModel):
            inner += _section_lines(value, f"[{path}]", path, form)
            continue
        is_default = value == default
        if form == "start" and path == "job.name":
            continue  # a copy of the file would go on with the same run
        if is_default and (form == "changes" or (form == "start" and path not in OFTEN_SET)):
            continue
        wrapped = textwrap.wrap(first_sentence(field.description or ""), 118)
        comment = [] if form == "changes" else [f"# {line}" for line in wrapped]
        was = f"  {_default_comment(default)}".rstrip() if form == "changes" else ""
        if isinstance(value, dict):
            inner += ["", *comment, f"[{path}]{was}"]
            inner += [f"{bare(own)} = {toml_text(entry)}" for own, entry in value.items()]
        elif isinstance(value, list) and value and isinstance(value[0], BaseModel):
            for entry in value:
                inner += _section_lines(entry, f"[[{path}]]", path, form)
        elif form == "start" and is_default:
            lines += [*comment, f"#{name} = {'...' if value is None else toml_text(value)}"]
        elif value is None:
            lines += [*comment, f"# {name} is not set"]
        else:
            lines += [*comment, f"{name} = {toml_text(value)}{was}"]
    if header and (lines or header.startswith("[[")):
        yield from ("", header)
    yield from lines
    yield from inner


def _default_comment(default: Any) -> str:
    if default is PydanticUndefined:
        return ""
    return f"# default: {'not set' if default is None else toml_text(default)}"
