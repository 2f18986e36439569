"""TOML and command line -> Config, or all problems together, each with its place. Never imports torch."""

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from shlex import quote
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from titanlite.config.checks import find_conflicts
from titanlite.config.keys import REMOVED, nearest_key
from titanlite.config.source import Key, Tree, WrittenConfig, read_source
from titanlite.runtime.errors import DEFAULT_PLACE, SUGGESTED, ConfigError, Place, Problem, did_you_mean
from titanlite.schema import Config

TORCHTITAN_KEYS = {
    "job": "description print_config",
    "model": "tokenizer_path hf_assets_path converters",
    "training": "dataset dataset_path",
    "metrics": "enable_tensorboard save_tb_folder",
}
"""Keys by section that torchtitan's configs, which have the same sections, usually have and titanlite does not."""


def is_torchtitan(tree: dict[str, Any]) -> bool:
    """Return True if a TOML tree has at least two keys that only torchtitan has."""
    sections = {name: section for name, section in tree.items() if isinstance(section, dict)}
    return sum(key in sections.get(name, {}) for name, keys in TORCHTITAN_KEYS.items() for key in keys.split()) > 1


def migration_hint(path: Path) -> str:
    """Return the error message for a config of torchtitan, with the command that migrates the file."""
    new = quote(f"{path.stem}_titanlite.toml")
    return (
        f"{path} looks like a torchtitan config. Migrate it first: titanlite config migrate {quote(str(path))} "
        f"--out {new} --world-size N (N: the number of processes)"
    )


@dataclass
class Draft:
    """A config that may have mistakes. Later checks (preflight) add their problems, for one report."""

    config: Config
    """The config, with defaults in place of wrong options, so that all other options can be checked."""
    problems: list[Problem]
    bad_keys: set[str]
    """Options with a known problem, whose dependents are not checked. "" stands for all options."""
    places: dict[Key, Place]
    reported: int = 0
    """Number of problems that `new_problems` has returned already."""

    def place(self, key: Key) -> Place:
        """Return the place of a key; for a key that is not in the file, the place of its section, if that is."""
        for end in range(len(key), 0, -1):
            place = self.places.get(key[:end])
            if place and (end == len(key) or place.file != inf):
                return place
        return DEFAULT_PLACE

    def add(self, problems: Iterable[Problem]) -> None:
        """Add problems, and the places of their keys."""
        for problem in problems:
            place = problem.where or (self.place(tuple(problem.key.split("."))) if problem.key else None)
            self.problems.append(Problem(problem.key, problem.message, place))

    def new_problems(self) -> list[Problem]:
        """Return the problems that were not returned before, in the order of the file."""
        new, self.reported = self.problems[self.reported :], len(self.problems)
        return sorted(new, key=lambda problem: problem.where or DEFAULT_PLACE)

    def resolve(self) -> Config:
        """Return the config if it has no problems.

        Raises:
            ConfigError: lists all problems that were not reported before.
        """
        if self.problems:
            raise ConfigError(self.new_problems())
        return self.config


def read(path: str | Path, overrides: Sequence[str] = (), *, world_size: int | None = None) -> Draft:
    """Read a TOML file, apply `--section.key=value` overrides, and check everything. Problems go into the draft.

    Args:
        path: TOML file. `base = "other.toml"` at its top inherits from a file beside it.
        overrides: words of the command line; `--key value` and a bare `--key` (true) are read too.
        world_size: number of processes. None skips the checks that need it.
    """
    path = Path(path)
    source = read_source(path, overrides)
    if is_torchtitan(source.tree):
        return Draft(Config(), [Problem("", migration_hint(path))], {""}, {})
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


def check_tree(tree: Tree) -> Draft:
    """Check the names and types of a tree, without the files that it names. Wrong options are removed from it."""
    draft = Draft(Config(), [], set(), {})
    _validate(WrittenConfig(tree=tree), draft)
    draft.config = Config.model_validate(tree)
    return draft


def load(path: str | Path, overrides: Sequence[str] = (), *, world_size: int | None = None) -> Config:
    """Return the config of a TOML file and overrides, as `read` does.

    Raises:
        ConfigError: lists all problems.
    """
    return read(path, overrides, world_size=world_size).resolve()


def _validate(source: WrittenConfig, draft: Draft) -> None:
    """Add all problems of names and types to the draft, and remove the wrong keys from the tree."""
    tree = source.tree
    for dotted, (default, _) in REMOVED.items():
        section, _, name = dotted.rpartition(".")
        if isinstance(options := tree.get(section), dict) and name in options and options[name] == default:
            del options[name]
    unknown = 0
    while errors := _errors(tree):
        by_key: dict[Key, list[ErrorDetails]] = {}
        for error in errors:
            by_key.setdefault(_key_of(error["loc"], tree), []).append(error)
        wrong: list[Key] = []
        for key, details in by_key.items():
            words = source.words.get(key)
            if (
                words is not None
                and _get(tree, key) != words
                and all(error["type"] in TEXT_ERRORS for error in details)
            ):
                _get(tree, key[:-1])[_index(key[-1], _get(tree, key[:-1]))] = words  # --job.name=2026 was meant as text
                continue
            wrong.append(key)
            dotted = ".".join(part if re.fullmatch(r"[\w-]+", part) else _as_toml(part) for part in key)
            unknown += details[0]["type"] == "extra_forbidden"
            message, meant = _explain(dotted, details, suggests=unknown <= SUGGESTED)
            draft.problems.append(Problem(dotted, message, draft.place(key)))
            draft.bad_keys.update({dotted, meant or dotted})
        for key in wrong:
            _remove(tree, key)
    if (rest := unknown - SUGGESTED) > 0:
        draft.problems.append(Problem("", f"the nearest name was not looked for: of {rest} more unknown keys"))


def _errors(tree: Tree) -> list[ErrorDetails]:
    try:
        Config.model_validate(tree)
    except ValidationError as error:
        return error.errors(include_url=False)
    return []


def _key_of(loc: tuple[int | str, ...], tree: Tree) -> Key:
    """Return the part of Pydantic's location that is a path in the tree. The rest names branches of a union."""
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
    """Remove a key; for an entry of a list the whole list, so that no number changes; for no key everything."""
    node: Any = tree
    for end, part in enumerate(key):
        if part not in node:
            return  # it was removed with another key
        if end == len(key) - 1 or isinstance(node[part], list):
            del node[part]
            return
        node = node[part]
    tree.clear()


TEXT_ERRORS = "string_type", "list_type", "literal_error"
"""Types of Pydantic's errors for options that can be text."""
WORDS = {
    "bool_type": "true or false",
    "model_type": "a section",
    "dict_type": "a section",
    "too_short": "not empty",
    "string_too_short": "text that is not empty",
    "string_pattern_mismatch": "a name without / or \\ that does not begin with a dot",
}
"""What an option should be, by Pydantic's types of errors, where Pydantic's own words are not those of TOML."""


def _explain(dotted: str, details: list[ErrorDetails], *, suggests: bool) -> tuple[str, str | None]:
    """Return the problem in words, and for an unknown key the key that was probably meant, if `suggests`."""
    first = details[0]
    if (name := ".".join(part for part in dotted.split(".") if not part.isdecimal())) in REMOVED:
        return f"is gone: {REMOVED[name][1]}", None
    if first["type"] == "extra_forbidden":
        near = nearest_key(dotted) if suggests else None
        return f"unknown key, did you mean {near}?" if near else "unknown key", near
    if first["type"] == "missing":
        return f"{first['loc'][-1]} is missing", None
    if first["type"] in ("value_error", "assertion_error"):
        return str(first.get("ctx", {}).get("error", first["msg"])), None
    words = [WORDS.get(error["type"], error["msg"].removeprefix("Input should be ")) for error in details]
    got = _as_toml(first["input"])
    got = got if len(got) <= 100 else f"{got[:97]}..."
    return f"should be {' or '.join(dict.fromkeys(words))}, got {got}{_nearest_value(first['input'], details)}", None


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
