"""What was written, before anyone asks what it means: TOML files and the command line -> one tree, and the place of
every key in it. Mistakes are collected, and reading goes on where it can."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import inf
from os.path import relpath
from pathlib import Path
from typing import Any

import tomli

from titanlite.config.keys import expects_list
from titanlite.config.shipped import find_config, nearest_config
from titanlite.runtime.errors import Place, Problem

CODE = [
    tuple(key.split("."))
    for key in (
        "model.file", "training.loss", "metrics.loggers.*", "optimizer.name", "optimizer.groups.*.name", "data.path",
        "data.sources.*.path", "validation.path", "validation.sources.*.path",
    )
]  # fmt: skip
"""Options that can name a file of the user's code."""
CODE_FILE = re.compile(r"(?P<scheme>(?:python://)?)(?P<file>[^/~:][^:]*\.py)(?P<name>(?::\w+)?)")

Tree = dict[str, Any]
Key = tuple[str, ...]


@dataclass
class Source:
    """A config as it was written."""

    tree: Tree = field(default_factory=dict)
    places: dict[Key, Place] = field(default_factory=dict)
    """Of every key, section, and entry of a list."""
    words: dict[Key, str] = field(default_factory=dict)
    """What the command line says of a key, before it is read as TOML."""
    problems: list[Problem] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    """The config file, its base, the base of that, as they are named to people."""
    is_whole: bool = True
    """False when a file could not be read: what is not in the tree may have been written all the same."""


def read_source(path: Path, overrides: Sequence[str]) -> Source:
    """Read a TOML file and its bases, and set what the command line says. Raises nothing: see its problems."""
    source = Source()
    source.tree, source.places = _read_file(path, source, folder=path.parent)
    _apply_overrides(source, overrides)
    return source


# Files


def _read_file(
    path: Path, source: Source, *, folder: Path, below: tuple[Path, ...] = (), named_at: Place | None = None
) -> tuple[Tree, dict[Key, Place]]:
    """The file merged over its base, and where each key was written.

    Args:
        folder: of the config file; those it inherits from are named as seen from there.
        below: the files that inherit from this one.
        named_at: where `base` names this file.
    """
    name = path.name if named_at is None else Path(relpath(path, folder)).as_posix()
    rank = len(source.files)
    source.files.append(name)
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
        text = path.read_bytes().decode("utf-8-sig").replace("\r\n", "\n")
        tree = tomli.loads(text)
    except FileNotFoundError:
        near = nearest_config(path)
        hint = f", did you mean {near}?" if near else ""
        return give_up(Problem(key, f"no config file {path}{hint}", named_at))
    except IsADirectoryError:
        return give_up(Problem(key, f"{path} is a folder: name a TOML file", named_at))
    except (tomli.TOMLDecodeError, RecursionError) as error:
        return give_up(_syntax_problem(name, rank, text, str(error)))
    except (OSError, ValueError) as error:
        return give_up(Problem(key, f"cannot read config file {str(path)!r}: {error}", named_at))
    places = {key: Place(rank, line, f"{name}:{line}") for key, line in _key_lines(text).items()}
    for key in CODE:
        _anchor(tree, key, path.parent)
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


def _anchor(node: Any, key: Key, folder: Path) -> None:
    """Files of code are relative to the TOML file that names them."""
    part, *rest = key
    places: list[Any] = []
    if isinstance(node, list) and part == "*":
        places = [*range(len(node))]
    elif isinstance(node, dict) and part in node:
        places = [part]
    for place in places:
        value = node[place]
        if rest:
            _anchor(value, tuple(rest), folder)
            continue
        match = CODE_FILE.fullmatch(value) if isinstance(value, str) else None
        if match and bool(match["scheme"]) == (part == "path"):
            node[place] = f"{match['scheme']}{(folder / match['file']).resolve()}{match['name']}"


def _syntax_problem(name: str, rank: int, text: str, message: str) -> Problem:
    """tomli's message, with the line that it speaks of instead of its number."""
    lines = text.split("\n")
    line = len(lines)
    if match := re.search(r" \(at line (\d+), column \d+\)$", message):
        line = int(match[1])
    why = re.sub(r" \(at [^)]*\)$", "", message)
    said = lines[line - 1].strip()
    quoted = f", in {said}" if said else ""
    return Problem("", f"{name} is not valid TOML: {why}{quoted}", Place(rank, line, f"{name}:{line}"))


def _key_lines(text: str) -> dict[Key, int]:
    """The line of every key, section and entry of a list. TOML is read statement by statement with tomli itself, so
    that quoted keys, dotted keys and values of several lines are what they are to it."""
    found: dict[Key, int] = {}
    counts: dict[Key, int] = {}  # number of the newest entry of each [[list of tables]]
    table: Key = ()
    lines = enumerate(text.split("\n"), start=1)
    for number, statement in lines:
        while (parsed := _parsed(statement)) is None:
            _, more = next(lines, (0, None))
            if more is None:
                return found
            statement += f"\n{more}"
        if statement.lstrip().startswith("["):
            table = _header(parsed, counts, found, number)
            found[table] = number
        else:
            for key in _paths(parsed):
                found.setdefault(table + key, number)
    return found


def _parsed(statement: str) -> Tree | None:
    try:
        return tomli.loads(statement)
    except tomli.TOMLDecodeError:
        return None


def _header(parsed: Any, counts: dict[Key, int], found: dict[Key, int], number: int) -> Key:
    """Where the keys below a [header] or [[header]] belong. A list of tables on the way there means its newest one."""
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
    """The keys of all tables and the numbers of all lists in a value, at any depth."""
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
    """Whether another value stands where the base has this key."""
    node: Any = over
    for part in key:
        if not isinstance(node, dict):
            return True
        if part not in node:
            return False
        node = node[part]
    return not isinstance(node, dict)


# Command line


def _apply_overrides(source: Source, overrides: Sequence[str]) -> None:
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
            source.problems.append(Problem(name, "stands in the file only, not on the command line", place))
            continue
        parsed = parse_value(value)
        if problem := _set(source.tree, key, parsed):
            source.problems.append(Problem(name, problem, place))
            continue
        source.words[key] = value
        for other in [other for other in source.places if other[: len(key)] == key]:
            del source.places[other]  # what stood there is gone
        for end in range(1, len(key)):
            source.places.setdefault(key[:end], place)
        source.places[key] = place
        for inner in _paths(parsed, key):
            source.places[inner] = place


def parse_value(value: str) -> Any:
    """A word of the command line as TOML, or as the text that it is: --data.path=tok/ needs no quotes."""
    try:
        tree = tomli.loads(f"value = {value}")
        if "#" in value and _parsed(f"value = {value} ]") is not None:
            return value  # the rest would be taken for a comment
    except (ValueError, RecursionError):
        return value
    return tree["value"] if len(tree) == 1 else value


def _set(tree: Tree, key: Key, value: Any) -> str | None:
    """Set a value; makes sections, and the next entry of a list, on the way. Returns what is wrong, if something is.
    Then the tree is as it was."""
    node: Any = tree
    made: tuple[Any, Any] | None = None  # the first thing that was made on the way
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
        return "a section cannot stand inside a value"
    if not part.isdecimal():
        return f"entries of a list have numbers, the next would be {len(node)}"
    return f"there is no number {part} in the list, the next would be {len(node)}"
