"""A changed config either loads with exactly the values written, or is refused with key and place.

In the environment, TITANLITE_FUZZ=50 makes it 50 times as many examples.
"""

import os
import re
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import tomli
import tomlkit
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from titanlite.config.keys import dotted_keys
from titanlite.config.load import read
from titanlite.runtime.errors import ConfigError
from titanlite.schema import dump

TEXTS = {path.name: path.read_text() for path in sorted(Path("train_configs").glob("*.toml"))}
TEXTS["rich.toml"] = """\
#:schema ./schema.json
[job]
name = "rich"
[model.args]
dim = 42
rope_theta = 1e4
"quoted key" = { a = [1, 2] }
[[data.sources]]
path = "stdlib://"
weight = 0.5
[[data.sources]]
path = ["train_configs/*.toml"]
name = "configs"
weight = 2.0
[parallelism]
fsdp_reshard_after_forward = 2
[quantize.linear.float8]
filter_fqns = ["wo",
  "wq"]
[checkpoint]
initial_load = []
[validation]
enable = true
sources = [{ path = "stdlib://validation" }]
"""
"""Forms that shipped configs do not have: lists of tables, tables in values, quoted keys, values of two lines."""

SECTIONS = {".".join(key.split(".")[:end]) for key in dotted_keys(inside_lists=True) for end in range(1, 6)}
LEAVES = sorted({key.rpartition(".")[2] for key in dotted_keys(inside_lists=True)})
VALUES: list[Any] = [
    0, 1, -1, 3, 10**30, 0.0, -0.5, 1.5, 1e400, float("nan"), True, False, "", "x", "1", "true", "stop", "Skip", "full",
    "s3://a", "no\x00such", "a\nb", "~nobody/x", "[", [], [1], ["x"], [""], [[]], {}, {"a": 1}, {"path": "x"}, [{}],
    [{"path": "stdlib://"}], [{"path": 1, "weight": -1}], tomli.loads("x = 2020-01-01")["x"],
]  # fmt: skip

run = settings(
    max_examples=60 * int(os.environ.get("TITANLITE_FUZZ", "1")),
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)


# The property


def check(folder: Path, text: str) -> None:
    """Load a changed config: either its values are those written, or every problem is named with its place."""
    path = folder / "run.toml"
    path.write_bytes(text.encode())
    draft = read(path, world_size=2)
    try:
        config = draft.resolve()
    except ConfigError as error:
        check_problems(error, text)
        return
    assert kept(tomli.loads(text), config.model_dump()), "it is not what was written"
    path.write_text(dump(config))
    assert same(read(path).resolve().model_dump(), config.model_dump()), "dump loses something"


def check_problems(error: ConfigError, text: str) -> None:
    lines = text.replace("\r\n", "\n").split("\n")
    assert error.problems
    assert len(set(error.problems)) == len(error.problems), "reported twice"
    assert [problem.where for problem in error.problems] == sorted(problem.where or () for problem in error.problems)
    for problem in error.problems:
        where = str(problem.where)
        line = ""
        if match := re.fullmatch(r"run\.toml:(\d+)", where):
            assert 1 <= int(match[1]) <= len(lines), problem
            line = lines[int(match[1]) - 1]
            parts = [part for part in problem.key.split(".") if not part.isdecimal()]
            assert not problem.key or "\\" in line or any(part in line for part in parts), f"another line: {problem}"
        else:
            assert where == "default", problem
            assert problem.key in dotted_keys(), problem
        if problem.key:
            part = problem.key.rpartition(".")[2].strip('"')
            written = part.isdecimal() or part in text or '"' in line or "\\" in line
            assert problem.key in SECTIONS or written, problem
        else:
            assert "not valid TOML" in problem.message, problem


def kept(written: Any, found: Any) -> bool:
    """Whether a value has arrived as it was written; an integer may have become a float. Keys are not all written."""
    if isinstance(written, dict):
        return isinstance(found, dict) and all(key in found and kept(written[key], found[key]) for key in written)
    if isinstance(written, list):
        return isinstance(found, list) and len(found) == len(written) and all(map(kept, written, found))
    return same(float(written) if type(written) is int and type(found) is float else written, found)


def same(a: Any, b: Any) -> bool:
    """Equality, but 1, 1.0 and true are three values, and nan equals itself."""
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b or (a != a and b != b)


# What is done to configs


def tables_of(tree: dict[str, Any]) -> list[dict[str, Any]]:
    """All tables in a tree, it included."""
    found = [tree]
    for value in tree.values():
        for inner in value if isinstance(value, list) else [value]:
            found += tables_of(inner) if isinstance(inner, dict) else []
    return found


@st.composite
def changed_trees(draw: st.DrawFn) -> str:
    """One to three changes to the keys and values of a config, as TOML."""
    tree = deepcopy(tomli.loads(draw(st.sampled_from(sorted(TEXTS.values())))))
    for _ in range(draw(st.integers(1, 3))):
        table = draw(st.sampled_from([table for table in tables_of(tree) if table] or [tree]))
        if not table:
            break
        key = draw(st.sampled_from(sorted(table)))
        match draw(st.sampled_from(["rename", "move", "value", "new", "delete", "swap"])):
            case "rename" if key:
                at = draw(st.integers(0, len(key) - 1))
                table[key[:at] + draw(st.sampled_from(["", "x", key[at] * 2])) + key[at + 1 :]] = table.pop(key)
            case "move":
                draw(st.sampled_from(tables_of(tree)))[key] = deepcopy(table[key])
                del table[key]
            case "value":
                table[key] = deepcopy(draw(st.sampled_from(VALUES)))
            case "new":
                table[draw(st.sampled_from([*LEAVES, *sorted(SECTIONS), "a b", "ü", ""]))] = deepcopy(
                    draw(st.sampled_from(VALUES))
                )
            case "delete":
                del table[key]
            case "swap":
                other = draw(st.sampled_from(sorted(table)))
                table[key], table[other] = table[other], table[key]
    try:
        return tomlkit.dumps(tree)
    except Exception:  # what tomlkit cannot write is no TOML that anyone could have written
        return ""


@st.composite
def changed_texts(draw: st.DrawFn) -> str:
    """One to four changes to the letters and lines of a config."""
    text = draw(st.sampled_from(sorted(TEXTS.values())))
    for _ in range(draw(st.integers(1, 4))):
        lines = text.split("\n")
        line = draw(st.integers(0, len(lines) - 1))
        at = draw(st.integers(0, max(0, len(text) - 1)))
        match draw(st.sampled_from(["double", "drop", "insert", "delete", "bracket", "quote", "case", "lines"])):
            case "double":
                lines.insert(draw(st.integers(0, len(lines))), lines[line])
                text = "\n".join(lines)
            case "drop":
                text = "\n".join(lines[:line] + lines[line + 1 :])
            case "lines":
                other = draw(st.integers(0, len(lines) - 1))
                lines[line], lines[other] = lines[other], lines[line]
                text = "\n".join(lines)
            case "insert":
                extra = draw(st.text("[]{}\"'=.#,\\\n\r\t 0e-_ax\x00\x85\u2028é", min_size=1, max_size=3))
                text = text[:at] + extra + text[at:]
            case "delete":
                text = text[:at] + text[at + draw(st.integers(1, 5)) :]
            case "bracket":
                text = text[:at] + text[at:].replace(draw(st.sampled_from("[]{}")), "", 1)
            case "quote":
                text = text[:at] + text[at:].replace('"', draw(st.sampled_from(["", "'", '"""'])), 1)
            case "case":
                text = text[:at] + text[at:].swapcase()
    return text


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz")


@pytest.mark.long
@run
@given(text=changed_trees())
def test_keys_and_values_that_were_changed(folder: Path, text: str) -> None:
    check(folder, text)


@pytest.mark.long
@run
@given(text=changed_texts())
def test_letters_and_lines_that_were_changed(folder: Path, text: str) -> None:
    check(folder, text)
