"""TOML and command line -> Config, or every problem at once with the place it was written at. Never imports torch."""

import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from titanlite.config.checks import find_conflicts
from titanlite.config.keys import nearest_key
from titanlite.config.schema import Config
from titanlite.config.source import Key, Source, Tree, read_source
from titanlite.runtime.errors import DEFAULT_PLACE, ConfigError, Place, Problem
from titanlite.runtime.nearest import did_you_mean


@dataclass
class Draft:
    """A config that may have mistakes. Who finds more of them (preflight) adds them, so that there is one report."""

    config: Config
    """With defaults in place of what is wrong, so that the rest can be checked too."""
    problems: list[Problem]
    bad_keys: set[str]
    """Options that are reported already: what depends on one is not worth checking. "" stands for all of them."""
    places: dict[Key, Place]
    told: int = 0
    """How many of the problems."""

    def place(self, key: Key) -> Place:
        """Where a key was written. What was not written is placed where its section begins, if it does."""
        for end in range(len(key), 0, -1):
            place = self.places.get(key[:end])
            if place and (end == len(key) or place.file != inf):
                return place
        return DEFAULT_PLACE

    def add(self, problems: Iterable[Problem]) -> None:
        """Add problems that know their key and not their place."""
        for problem in problems:
            place = problem.where or (self.place(tuple(problem.key.split("."))) if problem.key else None)
            self.problems.append(Problem(problem.key, problem.message, place))

    def tell(self) -> list[Problem]:
        """The problems so far that were not told before, in the order of the file."""
        new, self.told = self.problems[self.told :], len(self.problems)
        return sorted(new, key=lambda problem: problem.where or DEFAULT_PLACE)

    def settle(self) -> Config:
        """The config, if there is nothing wrong with it.

        Raises:
            ConfigError: naming all problems that were not told before.
        """
        if self.problems:
            raise ConfigError(self.tell())
        return self.config


def read(path: str | Path, overrides: Sequence[str] = (), *, world_size: int | None = None) -> Draft:
    """Read a TOML file, apply `--section.key=value` overrides, and check all of it. Raises nothing: see `settle`.

    Args:
        path: TOML file. `base = "other.toml"` at its top inherits from a file beside it.
        overrides: the command line, as strings; `--key value` and a bare `--key` (true) are read too.
        world_size: number of processes; the checks that need it are left out when it is None.
    """
    path = Path(path)
    source = read_source(path, overrides)
    job = source.tree.setdefault("job", {})
    if isinstance(job, dict):
        job.setdefault("name", path.stem)
    bad_keys = {problem.key for problem in source.problems} - {""}
    draft = Draft(Config(), source.problems, bad_keys, source.places)
    if not source.is_whole:
        draft.bad_keys.add("")
    _validate(source, draft)
    draft.config = Config.model_validate(source.tree)
    conflicts = find_conflicts(draft.config, world_size, draft.bad_keys)
    draft.add(Problem(*conflict) for conflict in conflicts)
    draft.bad_keys.update(key for key, _ in conflicts)
    return draft


def load(path: str | Path, overrides: Sequence[str] = (), *, world_size: int | None = None) -> Config:
    """As `read`, but there is nothing wrong with it.

    Raises:
        ConfigError: naming all problems.
    """
    return read(path, overrides, world_size=world_size).settle()


def dump(config: Config) -> str:
    """TOML text with every option, that loads to the same Config. An option that is None is left out."""
    import tomlkit

    return tomlkit.dumps(config.model_dump(exclude_none=True))


def config_hash(config: Config) -> str:
    """Return the SHA-256 of the resolved config, in hexadecimal."""
    return hashlib.sha256(dump(config).encode()).hexdigest()


# Validation


def _validate(source: Source, draft: Draft) -> None:
    """Report all problems of names and types, and remove what is wrong from the tree."""
    tree = source.tree
    while errors := _errors(tree):
        by_key: dict[Key, list[ErrorDetails]] = {}
        for error in errors:
            by_key.setdefault(_key_of(error["loc"], tree), []).append(error)
        wrong: list[Key] = []
        for key, details in by_key.items():
            words = source.words.get(key)
            if words is not None and _get(tree, key) != words and all(_wants_text(error) for error in details):
                _get(tree, key[:-1])[_index(key[-1], _get(tree, key[:-1]))] = words  # --job.name=2026 was meant as text
                continue
            wrong.append(key)
            dotted = ".".join(part if re.fullmatch(r"[\w-]+", part) else _as_toml(part) for part in key)
            message, meant = _explain(dotted, details)
            draft.problems.append(Problem(dotted, message, draft.place(key)))
            draft.bad_keys.update({dotted, meant or dotted})
        for key in wrong:
            _remove(tree, key)


def _errors(tree: Tree) -> list[ErrorDetails]:
    try:
        Config.model_validate(tree)
    except ValidationError as error:
        return error.errors(include_url=False)
    return []


def _key_of(loc: tuple[int | str, ...], tree: Tree) -> Key:
    """The part of pydantic's location that is a path in the tree (the rest names branches of a union)."""
    key: list[str] = []
    node: Any = tree
    part: Any
    for part in loc:
        is_there = part in node if isinstance(node, dict) else isinstance(node, list) and isinstance(part, int)
        if not is_there:
            break
        key.append(str(part))
        node = node[part]
    return tuple(key)


def _get(tree: Tree, key: Key) -> Any:
    node: Any = tree
    for part in key:
        node = node[_index(part, node)]
    return node


def _index(part: str, node: Any) -> str | int:
    return int(part) if isinstance(node, list) else part


def _remove(tree: Tree, key: Key) -> None:
    """Remove a key; of something in a list, the whole list: the others keep their numbers. No key means everything."""
    node: Any = tree
    for end, part in enumerate(key):
        if part not in node:
            return  # removed with something else
        if end == len(key) - 1 or isinstance(node[part], list):
            del node[part]
            return
        node = node[part]
    tree.clear()


# In words


def _wants_text(error: ErrorDetails) -> bool:
    return error["type"] in ("string_type", "list_type", "literal_error")


def _explain(dotted: str, details: list[ErrorDetails]) -> tuple[str, str | None]:
    """What is wrong, and the key that was meant, if that is the question."""
    first = details[0]
    if first["type"] == "extra_forbidden":
        near = nearest_key(dotted)
        return f"unknown key, did you mean {near}?" if near else "unknown key", near
    if first["type"] == "missing":
        return f"{first['loc'][-1]} is missing", None
    if first["type"] in ("value_error", "assertion_error"):
        return str(first.get("ctx", {}).get("error", first["msg"])), None
    expected = " or ".join(dict.fromkeys(_expectation(error) for error in details))
    got = _as_toml(first["input"])
    got = got if len(got) <= 100 else f"{got[:97]}..."
    return f"expected {expected}, got {got}{_nearest_value(first['input'], details)}", None


def _expectation(error: ErrorDetails) -> str:
    context = error.get("ctx", {})
    match error["type"]:
        case "literal_error":
            return context["expected"]
        case "greater_than":
            return f"a number above {context['gt']:g}"
        case "finite_number":
            return "a finite number"
        case "greater_than_equal":
            return f"a number of at least {context['ge']}"
        case "less_than_equal":
            return f"a number of at most {context['le']}"
        case "string_too_short":
            return "text that is not empty"
        case "too_short":
            return "a list that is not empty"
        case "model_type" | "model_attributes_type" | "dict_type":
            return "a section"
        case "list_type":
            return "a list"
        case kind:
            names = {"int": "an integer", "float": "a number", "bool": "true or false", "string": "text"}
            return names.get(kind.removesuffix("_type"), error["msg"].removeprefix("Input should be "))


def _nearest_value(value: Any, details: list[ErrorDetails]) -> str:
    if not isinstance(value, str):
        return ""
    words = [word for error in details for word in re.findall(r"'([^']*)'", error.get("ctx", {}).get("expected", ""))]
    is_truth = details[0]["type"] == "bool_type" and value.lower() in ("true", "false")
    return did_you_mean(value, ["true", "false"] if is_truth else words)


def _as_toml(value: Any) -> str:
    match value:
        case bool():
            return str(value).lower()
        case str():
            return json.dumps(value, ensure_ascii=False)
        case dict():
            return "a section"
        case list():
            return f"[{', '.join(map(_as_toml, value))}]"
    return str(value)
