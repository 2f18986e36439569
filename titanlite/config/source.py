"""Merge TOML files and the command line into one tree, with the place of every key. No option is interpreted here.

Problems are collected; reading continues after a problem where it can.
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from math import inf
from os.path import exists, relpath
from pathlib import Path
from typing import Any

import tomli

from titanlite.config.keys import expects_list
from titanlite.config.shipped import find_config, nearest_config
from titanlite.runtime.errors import Place, Problem
from titanlite.runtime.files import read_small

FILE_OPTIONS = [
    tuple(key.split("."))
    for key in (
        "model.file", "training.loss", "metrics.loggers.*", "optimizer.name", "optimizer.groups.*.name", "data.path",
        "data.sources.*.path", "validation.path", "validation.sources.*.path", "data.chat_template",
        "validation.tasks.*",
    )
]  # fmt: skip
"""Options that can name a file of the user's code or data; `*` stands for each entry of a list."""
CODE_FILE = re.compile(r"(?P<scheme>(?:(?:python|reader)://)?)(?P<file>[^/~:][^:?]*\.py)(?P<name>(?::\w+)?(?:\?.*)?)")

Tree = dict[str, Any]
Key = tuple[str, ...]


@dataclass
class WrittenConfig:
    """A config as written, before validation."""

    tree: Tree = field(default_factory=dict)
    places: dict[Key, Place] = field(default_factory=dict)
    """Places of all keys, sections and entries of lists."""
    words: dict[Key, str] = field(default_factory=dict)
    """Text of each value from the command line, before it is read as TOML."""
    problems: list[Problem] = field(default_factory=list)
    is_whole: bool = True
    """False if a file could not be read, so that the tree may lack keys that were written."""


def read_source(path: Path, overrides: Sequence[str]) -> WrittenConfig:
    """Read a TOML file and its bases, and apply the command line. Raises nothing: see `WrittenConfig.problems`."""
    source = WrittenConfig()
    source.tree, source.places = _read_file(path, source, folder=path.parent)
    _apply_overrides(source, overrides)
    for key in FILE_OPTIONS:  # those of the command line are relative to the current folder
        _make_absolute(source.tree, key, Path())
    return source


# Files


def _read_file(
    path: Path, source: WrittenConfig, *, folder: Path, below: tuple[Path, ...] = (), named_at: Place | None = None
) -> tuple[Tree, dict[Key, Place]]:
    """Return the file merged over its base, and the place of each key.

    Args:
        folder: folder of the config file. Messages name base files relative to it.
        below: files that inherit from this one.
        named_at: place of the `base` that names this file; None for the config file itself.
    """
    name = path.name if named_at is None else Path(relpath(path, folder)).as_posix()
    rank = len(below)
    key = "" if named_at is None else "base"
    text = ""

    def give_up(problem: Problem) -> tuple[Tree, dict[Key, Place]]:
        source.problems.append(problem)
        source.is_whole = False
        return {}, {}

    try:
        if path.resolve() in below:
            chain = " -> ".join(p.name for p in (*below, path))
            return give_up(Problem(key, f"files inherit from each other in a circle: {chain}", named_at))
        if path.is_dir():
            return give_up(Problem(key, f"{path} is a folder: name a TOML file in it", named_at))
        text = read_small(path).decode("utf-8-sig").replace("\r\n", "\n")
        tree = tomli.loads(text)
    except FileNotFoundError:
        near = nearest_config(path)
        hint = f", did you mean {near}?" if near else ""
        return give_up(Problem(key, f"no config file {path}{hint}", named_at))
    except (tomli.TOMLDecodeError, RecursionError) as error:
        return give_up(_syntax_problem(name, rank, text, str(error)))
    except (OSError, ValueError) as error:
        return give_up(Problem(key, f"cannot read config file {str(path)!r}: {error}", named_at))
    places = {key: Place(rank, line, f"{name}:{line}") for key, line in key_lines(text).items()}
    for key in FILE_OPTIONS:
        _make_absolute(tree, key, path.parent)
    if named_at is not None and isinstance(tree.get("job"), dict):  # otherwise the run of the base would be resumed
        tree["job"].pop("name", None)
        places.pop(("job", "name"), None)
    base = tree.pop("base", None)
    if base is None:
        return tree, places
    place = places.pop(("base",))
    if not isinstance(base, str) or not base:
        message = f"expected the name of a TOML file, got {base!r}"
        give_up(Problem("base", message, place))
        return tree, places
    below = (*below, path.resolve())
    base_tree, base_places = _read_file(
        find_config(base, path.parent), source, folder=folder, below=below, named_at=place
    )
    still_there = {key: place for key, place in base_places.items() if not _is_replaced(key, tree)}
    return _merge(base_tree, tree), still_there | places


def _make_absolute(node: Any, key: Key, folder: Path) -> None:
    """Replace the name of a file that is relative to the folder by its absolute path: a file of code, or of data that
    the current folder does not have.

    The run's own copy of the config is read from another folder.
    """
    part, *rest = key
    places: list[Any] = []
    if isinstance(node, list) and part == "*":
        places = [*range(len(node))]
    elif isinstance(node, dict) and part in node:
        places = [part]
    for place in places:
        value = node[place]
        if rest:
            _make_absolute(value, tuple(rest), folder)
            continue
        if not isinstance(value, str):
            continue
        match = CODE_FILE.fullmatch(value)
        is_data = (part in ("path", "chat_template") or value.endswith(".jsonl")) and value and not exists(value)
        if is_data and exists(beside := folder / value):
            node[place] = str(beside.resolve())
        elif match and bool(match["scheme"]) == (part == "path"):
            node[place] = f"{match['scheme']}{(folder / match['file']).resolve()}{match['name']}"


def _syntax_problem(name: str, rank: int, text: str, message: str) -> Problem:
    """Return the problem of tomli's error message, with the text of the line that the message names by number."""
    lines = text.split("\n")
    line = len(lines)
    if match := re.search(r" \(at line (\d+), column \d+\)$", message):
        line = int(match[1])
    why = re.sub(r" \(at [^)]*\)$", "", message)
    statement = lines[line - 1].strip()
    quoted = f", in {statement}" if statement else ""
    return Problem("", f"{name} is not valid TOML: {why}{quoted}", Place(rank, line, f"{name}:{line}"))


TOKEN = re.compile(
    r'"""(?:\\.|[^\\])*?"{3,5}' r"|'''.*?'{3,5}" r'|"(?:\\.|[^"\\])*"' r"|'[^']*'" r"|#[^\n]*|[\[\]{}\n]", re.DOTALL
)
"""What decides where a statement of TOML ends: strings and comments are one, brackets open and close."""


def _statements(text: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of each statement of a valid file."""
    begin, line, number, depth = 0, 1, 1, 0
    for token in TOKEN.finditer(text):
        depth += (token[0] in ("[", "{")) - (token[0] in ("]", "}"))
        number += token[0].count("\n")
        if token[0] == "\n" and depth == 0:
            yield line, text[begin : token.end()]
            begin, line = token.end(), number
    yield line, text[begin:]


def key_lines(text: str) -> dict[Key, int]:
    """Return the line of every key, section and entry of a list of a valid file.

    tomli itself parses the text statement by statement, so that quoted keys, dotted keys and values of several lines
    are read as in the whole file.
    """
    found: dict[Key, int] = {}
    counts: dict[Key, int] = {}  # for each [[list of tables]], the number of its newest entry
    table: Key = ()
    for number, statement in _statements(text):
        parsed = tomli.loads(statement)
        if statement.lstrip().startswith("["):
            table = _header(parsed, counts, found, number)
            found[table] = number
        else:
            for key in _paths(parsed):
                found.setdefault(table + key, number)
    return found


def _header(parsed: Any, counts: dict[Key, int], found: dict[Key, int], number: int) -> Key:
    """Return the key of the table that a [header] or [[header]] opens. A list of tables on the path stands for its
    newest entry."""
    key: Key = ()
    while parsed:
        [(part, parsed)] = parsed.items()
        key += (part,)
        found.setdefault(key, number)
        if isinstance(parsed, list):
            counts[key] = counts.get(key, -1) + 1
            parsed = parsed[0]
        if key in counts:
            key += (str(counts[key]),)
    return key


def _paths(value: Any, key: Key = ()) -> Iterator[Key]:
    """Yield the keys of all tables and the numbers of all list entries in a value, at any depth."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for part, inner in inside:
        yield (*key, str(part))
        yield from _paths(inner, (*key, str(part)))


def _merge(base: Tree, over: Tree) -> Tree:
    merged = dict(base)
    for key, value in over.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = _merge(merged[key], value) if both else value
    return merged


def _is_replaced(key: Key, over: Tree) -> bool:
    """Return True if the inheriting file has another value in place of this key of its base."""
    node: Any = over
    for part in key:
        if not isinstance(node, dict):
            return True
        if part not in node:
            return False
        node = node[part]
    return not isinstance(node, dict)


# Command line


def _apply_overrides(source: WrittenConfig, overrides: Sequence[str]) -> None:
    rest = list(overrides)
    while rest:
        place = Place(inf, len(overrides) - len(rest), "command line")
        word = rest.pop(0)
        name, equals, value = word[2:].partition("=")
        key = tuple(name.split("."))
        if not word.startswith("--") or not all(key):
            message = f"unexpected argument {word!r}: options are --section.key=value"
            source.problems.append(Problem("", message, place))
            continue
        if not equals:
            value = "true" if not rest or rest[0].startswith("--") else rest.pop(0)
        if name == "base":
            source.problems.append(Problem(name, "can be set in the file only, not on the command line", place))
            continue
        parsed = parse_value(value)
        if problem := _set(source.tree, key, parsed):
            source.problems.append(Problem(name, problem, place))
            continue
        source.words[key] = value
        source.places = {other: at for other, at in source.places.items() if other[: len(key)] != key}
        for end in range(1, len(key)):
            source.places.setdefault(key[:end], place)
        source.places[key] = place
        for inner in _paths(parsed, key):
            source.places[inner] = place


def parse_value(value: str) -> Any:
    """Return a value of the command line, read as TOML, else as text: --data.path=tok/ needs no quotes."""
    try:
        tree = tomli.loads(f"value = {value}")
    except (ValueError, RecursionError):
        return value
    if "#" in value:
        with suppress(tomli.TOMLDecodeError):
            tomli.loads(f"value = {value} ]")  # this is valid only if # begins a comment
            return value
    return tree["value"] if len(tree) == 1 else value


def _set(tree: Tree, key: Key, value: Any) -> str | None:
    """Set a value, and create sections and the next entry of a list on the path to it.

    Returns:
        the problem, if there is one. The tree is then unchanged.
    """
    node: Any = tree
    made: tuple[Any, Any] | None = None  # the first container and key that were created on the path
    for end, part in enumerate(key, start=1):
        place: Any = part
        if isinstance(node, list) and part.isdecimal() and len(part) < 10 and int(part) <= len(node):
            place = int(part)
            is_new = place == len(node)
        elif isinstance(node, dict):
            is_new = part not in node
        else:
            if made:
                del made[0][made[1]]
            return _why_not(node, part)
        if is_new:
            made = made or (node, place)
            fresh: Any = [] if expects_list(key[:end]) else {}
            if isinstance(node, list):
                node.append(fresh)
            else:
                node[part] = fresh
        if end == len(key):
            node[place] = value
        node = node[place]
    return None


def _why_not(node: Any, part: str) -> str:
    if not isinstance(node, list):
        return "a value cannot contain a section"
    if not part.isdecimal():
        return f"entries of a list have numbers; the next is {len(node)}"
    return f"the list has no entry {part}; the next is {len(node)}"
