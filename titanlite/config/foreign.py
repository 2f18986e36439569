"""Configs that came with a checkpoint or a run, which somebody else may have written: no code that one names is
imported, no `base` is read, and no path of data or of a tokenizer is followed. Imports no torch.
"""

import json
import os
import re
from dataclasses import replace
from typing import Any, NoReturn

import tomli

from titanlite.config.load import Draft, check_tree
from titanlite.config.source import Tree
from titanlite.runtime.errors import Problem, UserError
from titanlite.schema import Config

KEPT = {
    "model": None,
    "data": ("tokenizer", "add_bos", "add_eos", "text_field", "packing", "document_mask", "chat_template"),
    "training": ("seq_len", "mixed_precision_param", "dtype"),
    "validation": ("enable", "freq", "sequences", "path", "sources"),
    "checkpoint": ("initial_load_path",),
}
"""Sections and options that commands read in the config of a checkpoint. None: the whole section."""
STDLIB = ("stdlib://", "stdlib://train", "stdlib://validation")
"""Data that every machine has: the source of Python's standard library."""
MODEL_TYPE = re.compile(r"\w+", re.ASCII)
"""What `model.path` may be in such a config: a model type of transformers, and no folder."""


def read_foreign(text: bytes, *, model_file: str | None) -> tuple[Draft, dict[str, str]]:
    """Return the part of a checkpoint's config that commands use, and the options that name data or templates, which
    are left out of it, with their values.

    Args:
        model_file: replaces `model.file`, because the user named it.

    Raises:
        UserError: the config names a base, or code that `model_file` does not replace.
    """
    try:
        tree = tomli.loads(text.decode())
    except (ValueError, RecursionError) as error:
        return Draft(Config(), [Problem("", f"not valid TOML: {error}")], {""}, {}), {}
    if "base" in tree:
        _refuse("base", tree["base"], "with --config")
    model = tree.get("model")
    if isinstance(model, dict):
        if model_file is not None:
            model["file"] = model_file
        elif model.get("file"):
            _refuse("model.file", model["file"], "with --model-file or --config")
        path = model.get("path")
        if path is not None and (not MODEL_TYPE.fullmatch(str(path)) or os.path.lexists(str(path))):
            _refuse("model.path", path, "with --config")
    kept = {name: _part(tree[name], options) for name, options in KEPT.items() if name in tree}
    problems = check_tree(kept).problems  # wrong options are removed from the tree
    refused = _take_data(kept)
    return replace(check_tree(kept), problems=problems), refused


def _refuse(key: str, value: Any, fix: str) -> NoReturn:
    shown = json.dumps(value, ensure_ascii=True, default=str)[:200]
    raise UserError(
        f"the config names {key} = {shown}, and it may be of others: refused, nothing was run. If you trust it, "
        f"name it yourself, {fix}"
    )


def _part(section: Any, options: tuple[str, ...] | None) -> Any:
    if options is None or not isinstance(section, dict):
        return section
    return {name: value for name, value in section.items() if name in options}


def _take_data(kept: Tree) -> dict[str, str]:
    """Remove options that name data or templates from a checked config, and return them."""
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
