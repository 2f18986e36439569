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
from typing import Any

from titanlite.config.keys import Node, Option, bare, json_schema, tables, toml_text
from titanlite.config.load import load
from titanlite.runtime.errors import UserError
from titanlite.schema import Config

BASE = "Path of a TOML file to inherit from, relative to this one: it gives the keys that this file does not set."


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


def show(config: Config, *, only_changes: bool = False) -> str:
    """Return TOML that loads to the same config, with the description of each option as a comment.

    Args:
        only_changes: write only options that differ from their defaults, with the default as the comment.
    """
    return "\n".join(_lines(config, only_changes=only_changes)).strip() + "\n"


def start(config: Config, *, run: str, origin: str) -> str:
    """Return TOML that loads to the same config: the options that differ from their defaults, with comments.

    Args:
        run, origin: names of the run and of the config that the settings are from.
    """
    job = config.job.model_copy(update={"name": None})  # with its name, a copy of the file would resume the same run
    lines = [
        f"# {run}: a config of titanlite, from {origin}. Check it: titanlite check {run}.toml",
        f"# Train it: titanlite train {run}.toml. Options that are not here have their defaults, which are behind a #",
        "# beside those that are. All options: titanlite train --help",
        *_lines(config.model_copy(update={"job": job}), only_changes=True),
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


def _lines(config: Config, *, only_changes: bool = False) -> Iterator[str]:
    """Yield the lines of all sections."""
    tree = config.model_dump()
    for table in tables():
        found: Any = tree
        for name in table.header.strip("[]").split("."):
            found = found[name]
        is_list = isinstance(found, list)
        for values in found if is_list else [found]:
            parts = [
                part
                for option in table.options
                if (part := _option_lines(option, values[option.name], only_changes=only_changes))
            ]
            if is_list or any(part[0] for part in parts):
                yield from ("", table.header)
            for part in sorted(parts, key=lambda part: part[0] == ""):  # keys after a table would be the table's
                yield from part


def _option_lines(option: Option, value: Any, *, only_changes: bool) -> list[str]:
    """Return the lines of an option. Those of a table begin with an empty line."""
    if only_changes and not option.is_required and value == option.node["default"]:
        return []
    comment = [f"# {line}" for line in textwrap.wrap(first_sentence(option.description), 118)]
    was = f"  # {option.default}" if only_changes and not option.is_required else ""
    if isinstance(value, dict):
        pairs = [f"{bare(name)} = {toml_text(entry)}" for name, entry in value.items()]
        return ["", *comment, f"[{option.key.replace('.N.', '.')}]{was}", *pairs]
    if value and option.type == "list of tables":
        return []  # each is a table
    if value is None:
        return [*comment, f"# {option.name} is not set"]
    return [*comment, f"{option.name} = {toml_text(value)}{was}"]
