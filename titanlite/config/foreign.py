"""Configs that came with a checkpoint or a run. They may be of others: no code that one names is imported, no `base` is
read, and no path of data or of a tokenizer is followed. Imports no torch.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import tomli

from titanlite.config.load import Draft, check_tree, load
from titanlite.config.source import Tree
from titanlite.data.tokenizer import find_copy, is_shipped
from titanlite.runtime.errors import Problem, UserError
from titanlite.runtime.files import file_inside, read_small
from titanlite.schema import Config

KEPT = {
    "model": None,
    "data": ("tokenizer", "add_bos", "add_eos", "text_field", "packing", "document_mask", "chat_template"),
    "training": ("seq_len", "mixed_precision_param", "dtype"),
    "validation": ("enable", "freq", "sequences", "path", "sources"),
    "checkpoint": ("initial_load_path",),
}
"""Sections and options that commands read in the config of a checkpoint. None: the whole section."""
OWN_NAME = re.compile(r"[.:/]")
"""Part of a name that stands for code of the user's own: package.module.Class or file.py:Class."""
SHIPPED = re.compile(r"torch\.optim\.\w+")
"""Optimizers of PyTorch, which a config may name in full."""
STDLIB = ("stdlib://", "stdlib://train", "stdlib://validation")
"""Data that every machine has: the source of Python's standard library."""


@dataclass(frozen=True)
class ForeignConfig:
    """The part of a checkpoint's config that commands use."""

    draft: Draft
    refused: dict[str, str] = field(default_factory=dict)
    """Options that name data or templates, which were left out, with their values."""


def read_foreign(text: bytes, *, model_file: str | None) -> ForeignConfig:
    """Read the config of a checkpoint.

    Args:
        model_file: the user's own word for `model.file`.

    Raises:
        UserError: the config names a base, or code that `model_file` does not replace.
    """
    try:
        tree = tomli.loads(text.decode())
    except (ValueError, RecursionError) as error:
        return ForeignConfig(Draft(Config(), [Problem("", f"not valid TOML: {error}")], {""}, {}))
    _refuse({"base": tree["base"]} if "base" in tree else {}, "with --config")
    model = tree.get("model")
    if isinstance(model, dict):
        if model_file is not None:
            model["file"] = model_file
        elif model.get("file"):
            _refuse({"model.file": model["file"]}, "with --model-file or --config")
    kept = {name: _part(tree[name], options) for name, options in KEPT.items() if name in tree}
    problems = check_tree(kept).problems  # wrong options are removed from the tree
    refused = _take_data(kept)
    draft = check_tree(kept)
    return ForeignConfig(replace(draft, problems=problems), refused)


def load_of_run(run: Path, *, world_size: int) -> Config:
    """Return the whole config of a run's folder, to plan what the run does.

    Raises:
        UserError: the config is wrong, or names code or a base.
    """
    path = run / "config.toml"
    try:
        tree = tomli.loads(read_small(file_inside(run, path.name)).decode())
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} cannot be read: {error}") from None
    try:
        _refuse(dict(_code(tree)), f"with titanlite plan {path}")
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    found = load(path, world_size=world_size)
    if is_shipped(found.data.tokenizer):
        return found
    try:
        copy = find_copy([run], found.data.tokenizer)
    except UserError as error:
        raise UserError(
            f"{path}: the tokenizer: {error}; or name the config yourself, with titanlite plan {path}"
        ) from None
    return found.model_copy(update={"data": found.data.model_copy(update={"tokenizer": str(copy)})})


def _refuse(named: dict[str, Any], fix: str) -> None:
    for key, value in named.items():
        shown = json.dumps(value, ensure_ascii=True, default=str)[:200]
        raise UserError(
            f"the config names {key} = {shown}, and it may be of others: refused, nothing was run. If you trust it, "
            f"name it yourself, {fix}"
        )


def _code(tree: Tree) -> Iterator[tuple[str, Any]]:
    """Yield the options that name a base, code, or the weights of a teacher, whose config could."""
    for key in ("base", "model.file", "training.loss", "teacher.path", "teacher.config", "teacher.cache"):
        if value := _get(tree, key):
            yield key, value
    optimizer = _get(tree, "optimizer")
    groups = optimizer.get("groups") if isinstance(optimizer, dict) else None
    entries = [optimizer, *(groups if isinstance(groups, list) else [])]
    names = [("optimizer.name", entry.get("name")) for entry in entries if isinstance(entry, dict)]
    loggers = _get(tree, "metrics.loggers")
    names += [("metrics.loggers", name) for name in (loggers if isinstance(loggers, list) else [])]
    for key, name in names:
        if isinstance(name, str) and OWN_NAME.search(name) and not SHIPPED.fullmatch(name):
            yield key, name


def _get(tree: Any, key: str) -> Any:
    for part in key.split("."):
        tree = tree.get(part) if isinstance(tree, dict) else None
    return tree


def _part(section: Any, options: tuple[str, ...] | None) -> Any:
    if options is None or not isinstance(section, dict):
        return section
    return {name: value for name, value in section.items() if name in options}


def _take_data(kept: Tree) -> dict[str, str]:
    """Take what names data or a template out of a checked tree, and return it."""
    refused = {}
    data, validation = kept.get("data", {}), kept.get("validation", {})
    if data.get("chat_template", "tokenizer") != "tokenizer":
        refused["data.chat_template"] = str(data.pop("chat_template"))
    sources = validation.get("sources") or [{"path": validation.get("path", STDLIB[0])}]
    paths = [path for source in sources for path in _as_list(source["path"]) if path not in STDLIB]
    if paths:
        refused["validation"] = ", ".join(paths)
        del kept["validation"]
    return refused


def _as_list(path: str | list[str]) -> list[str]:
    return [path] if isinstance(path, str) else path
