"""TOML and command line -> Config, or every problem at once with the place it was written at. Never imports torch."""

import re
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, get_args, get_origin

import tomli
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from titanlite.config.checks import find_conflicts
from titanlite.config.schema import Config
from titanlite.errors import ConfigError, Problem

Tree = dict[str, Any]
Key = tuple[str, ...]
COMMAND_LINE = "command line"


def load(path: str | Path, overrides: Sequence[str] = (), *, world_size: int | None = None) -> Config:
    """Read a TOML file, apply `--section.key=value` overrides, and check all of it.

    Args:
        path: TOML file. `base = "other.toml"` at its top inherits from a file beside it.
        overrides: the command line, as strings; `--key value` and a bare `--key` (true) are read too.
        world_size: number of processes; the checks that need it are left out when it is None.

    Raises:
        ConfigError: naming all problems.
    """
    path = Path(path)
    tree, where = _read_toml(path, ())
    raw = _apply_overrides(tree, where, overrides)
    tree.setdefault("job", {})
    if isinstance(tree["job"], dict):
        tree["job"].setdefault("name", path.stem)
    problems, bad_keys = _validate(tree, where, raw)
    config = Config.model_validate(tree)  # without the parts that are wrong, so that the rest is checked too
    problems += [
        Problem(key, message, _place(where, tuple(key.split("."))))
        for key, message in find_conflicts(config, world_size, bad_keys)
    ]
    if problems:
        raise ConfigError(problems)
    return config


def dump(config: Config) -> str:
    """TOML text with every option, that loads to the same Config. An option that is None is left out."""
    import tomlkit

    return tomlkit.dumps(config.model_dump(exclude_none=True))


def dotted_keys(model: type[BaseModel] = Config, prefix: str = "", *, inside_lists: bool = False) -> Iterator[str]:
    """Every option as section.key.

    Args:
        inside_lists: also those of the tables in a list of tables, without their number.
    """
    for name, field in model.model_fields.items():
        kind = field.annotation
        element = next(iter(get_args(kind)), None) if get_origin(kind) is list else None
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from dotted_keys(kind, f"{prefix}{name}.", inside_lists=inside_lists)
        else:
            yield prefix + name
            if inside_lists and isinstance(element, type) and issubclass(element, BaseModel):
                yield from dotted_keys(element, f"{prefix}{name}.")


# Reading


def _read_toml(path: Path, below: tuple[Path, ...]) -> tuple[Tree, dict[Key, str]]:
    """The file merged over its base, and "file:line" of every key."""
    if path.resolve() in below:
        chain = " -> ".join(p.name for p in (*below, path))
        raise ConfigError([Problem("base", f"files inherit from each other in a circle: {chain}")])
    try:
        text = path.read_bytes().decode()
        tree = tomli.loads(text)
    except FileNotFoundError:
        raise ConfigError([Problem("", f"no config file {path}{_nearest_file(path)}")]) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError([Problem("", f"cannot read config file {path}: {error}")]) from None
    except tomli.TOMLDecodeError as error:
        raise ConfigError([Problem("", f"{path.name} is not valid TOML: {error}")]) from None
    where = {key: f"{path.name}:{line}" for key, line in _key_lines(text)}
    base = tree.pop("base", None)
    if base is None:
        return tree, where
    if not isinstance(base, str):
        problem = Problem("base", f"expected the name of a TOML file, got {base!r}", where.get(("base",)))
        raise ConfigError([problem])
    base_tree, base_where = _read_toml(path.parent / base, (*below, path.resolve()))
    return _merge(base_tree, tree), base_where | where


def _nearest_file(path: Path) -> str:
    names = sorted(p.name for p in path.parent.glob("*.toml")) if path.parent.is_dir() else []
    near = get_close_matches(path.name, names, n=1)
    return f", did you mean {path.parent / near[0]}?" if near else ""


def _key_lines(text: str) -> Iterator[tuple[Key, int]]:
    """(key path, line number) of each table header and each `key =` line, as people write TOML."""
    table: Key = ()
    counts: dict[Key, int] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        if match := re.match(r"\s*(\[\[?)\s*([^\[\]]+?)\s*\]", line):
            table = _split_key(match[2])
            if match[1] == "[[":
                counts[table] = counts.get(table, -1) + 1
                table += (str(counts[table]),)
            yield table, number
        elif match := re.match(r"\s*([\w.\"' -]+?)\s*=", line):
            yield table + _split_key(match[1]), number


def _split_key(text: str) -> Key:
    return tuple(part.strip().strip("\"'") for part in text.split("."))


def _merge(base: Tree, over: Tree) -> Tree:
    merged = dict(base)
    for key, value in over.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = _merge(merged[key], value) if both else value
    return merged


# Overrides


def _apply_overrides(tree: Tree, where: dict[Key, str], overrides: Sequence[str]) -> dict[Key, str]:
    """Set each override in the tree; returns what was written for each, unparsed."""
    raw: dict[Key, str] = {}
    problems: list[Problem] = []
    rest = list(overrides)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--") or not word.strip("-"):
            problems.append(Problem("", f"unexpected argument {word!r}: options are --section.key=value", COMMAND_LINE))
            continue
        name, equals, value = word[2:].partition("=")
        if not equals:
            value = "true" if not rest or rest[0].startswith("--") else rest.pop(0)
        key = tuple(name.split("."))
        if not _set(tree, key, _parse(value)):
            numbers = [part for part in key if part.isdecimal()]
            why = f"there is no number {numbers[0]} in the list" if numbers else "a section cannot stand inside a value"
            problems.append(Problem(name, why, COMMAND_LINE))
        raw[key] = value
        where[key] = COMMAND_LINE
    if problems:
        raise ConfigError(problems)
    return raw


def _parse(value: str) -> Any:
    try:
        return tomli.loads(f"value = {value}")["value"]
    except tomli.TOMLDecodeError:
        return value  # --data.path=tok/ needs no quotes


def _set(tree: Tree, key: Key, value: Any) -> bool:
    node: Any = tree
    for part in key[:-1]:
        if isinstance(node, dict):
            node = node.setdefault(part, {})
        elif _has(node, part):
            node = node[int(part)]
        else:
            return False
    if isinstance(node, dict):
        node[key[-1]] = value
    elif _has(node, key[-1]):
        node[int(key[-1])] = value
    else:
        return False
    return True


# Validation


def _validate(tree: Tree, where: dict[Key, str], raw: dict[Key, str]) -> tuple[list[Problem], set[str]]:
    """All problems of names and types. Removes what is wrong from the tree; returns the removed keys as well."""
    problems: list[Problem] = []
    bad: set[str] = set()
    while errors := _errors(tree):
        by_key: dict[Key, list[ErrorDetails]] = {}
        for error in errors:
            by_key.setdefault(_key_of(error["loc"], tree), []).append(error)
        wrong: list[Key] = []
        for key, details in by_key.items():
            if key in raw and _get(tree, key) != raw[key] and all(_wants_string(e) for e in details):
                _set(tree, key, raw[key])  # --job.name=2026: the words of the command line were meant as text
                continue
            dotted = ".".join(key)
            problems.append(Problem(dotted, _explain(dotted, details), _place(where, key)))
            bad.add(dotted)
            wrong.append(key)
        for key in sorted(wrong, key=lambda key: [part.zfill(9) for part in key], reverse=True):  # last of a list first
            del _get(tree, key[:-1])[int(key[-1]) if isinstance(_get(tree, key[:-1]), list) else key[-1]]
    return problems, bad


def _place(where: dict[Key, str], key: Key) -> str | None:
    """Where a key, or else something inside it, or else the table of a list that lacks it, was written."""
    inside = (place for other, place in where.items() if other[: len(key)] == key)
    table = key[:-1] if key[-2:-1] and key[-2].isdecimal() else None
    return where.get(key) or next(inside, None) or (where.get(table) if table else None)


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
    for part in loc:
        if not _has(node, part):
            break
        key.append(str(part))
        node = node[part]
    return tuple(key)


def _has(node: Any, part: int | str) -> bool:
    """Whether a table has a key, or a list a place (a number, also as text)."""
    if isinstance(node, list):
        return str(part).isdecimal() and int(part) < len(node)
    return isinstance(node, dict) and part in node


def _get(tree: Tree, key: Key) -> Any:
    node: Any = tree
    for part in key:
        node = node[int(part)] if isinstance(node, list) else node[part]
    return node


def _wants_string(error: ErrorDetails) -> bool:
    return error["type"] in ("string_type", "list_type", "literal_error")


def _explain(dotted: str, details: list[ErrorDetails]) -> str:
    if details[0]["type"] == "extra_forbidden":
        near = _nearest_key(dotted)
        return f"unknown key, did you mean {near}?" if near else "unknown key"
    if details[0]["type"] == "missing":
        return f"{details[0]['loc'][-1]} is missing"
    expected = " or ".join(dict.fromkeys(_expectation(error) for error in details))
    return f"expected {expected}, got {_as_toml(details[0]['input'])}"


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
        case "model_type" | "dict_type":
            return "a section"
        case kind:
            names = {"int": "an integer", "float": "a number", "bool": "true or false", "string": "text"}
            return names.get(kind.split("_")[0], "a list" if kind == "list_type" else error["msg"])


def _as_toml(value: Any) -> str:
    match value:
        case bool():
            return str(value).lower()
        case str():
            return f'"{value}"'
        case dict():
            return "a section"
        case list():
            return f"[{', '.join(map(_as_toml, value))}]"
    return str(value)


def _nearest_key(dotted: str) -> str | None:
    """The option or section that was probably meant: the same name in another section, else the closest spelling."""
    dotted = ".".join(part for part in dotted.split(".") if not part.isdecimal())
    options = list(dotted_keys(inside_lists=True))
    sections = sorted({option.rpartition(".")[0] for option in options})
    leaf = dotted.rpartition(".")[2]
    namesakes = get_close_matches(dotted, [name for name in options if name.rpartition(".")[2] == leaf], n=1, cutoff=0)
    of_same_depth = [name for name in options + sections if name.count(".") == dotted.count(".")]
    near = get_close_matches(dotted, of_same_depth, n=1, cutoff=0.8)
    leaves = {option.rpartition(".")[2]: option for option in reversed(options)}
    near_leaf = get_close_matches(leaf, leaves, n=1, cutoff=0.8)
    return (namesakes or near or [leaves[name] for name in near_leaf] or [None])[0]
