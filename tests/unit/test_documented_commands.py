"""Commands in the documentation are commands: each one's words, options and options of the config are known.

A test runs each of them, too, or a comment in the page gives the reason why none does: tests/support/documented.py.
"""

import re
import shlex
from pathlib import Path

import pytest

from tests.support.documented import PAGES, ROOT, commands
from titanlite.config.keys import dotted_keys, nearest_key
from titanlite.config.shipped import find_config
from titanlite.runtime.errors import UserError
from titanlite.tools.cli import make_parser

SCRIPT = re.compile(r"(?:^|\s)(?:\S*/)?(titanlite|run_train\.sh)(?=\s|$)")
PLACEHOLDER = re.compile(r"^(\[.*|[A-Z_]+|\.\.\.|N|<.*>)$")
PARSER = make_parser()
KEYS = {key.replace(".N.", ".") for key in dotted_keys(inside_lists=True)}


def command_lines(page: Path) -> list[str]:
    """Return the commands of titanlite on a page."""
    return [command.text for command in commands(page) if starts_command(command.text)]


def starts_command(line: str) -> bool:
    first = re.sub(r"^(\w+=\S* )*", "", line.removeprefix("$ ")).split(" ")
    return bool(SCRIPT.search(first[0])) or "-m titanlite " in line.split("#")[0]


def words_of(line: str) -> list[str]:
    """Return the words after `titanlite`; run_train.sh means `train`, unless a command follows."""
    line = line.removeprefix("$ ").split(" | ")[0].split(" > ")[0].split(" && ")[0]
    words = shlex.split(line, comments=True)
    index = next(i for i, word in enumerate(words) if word.endswith(("titanlite", "run_train.sh")))
    rest = words[index + 1 :]
    if words[index].endswith("run_train.sh") and rest[:1] != ["check"]:
        return ["train", *rest]
    return rest


def problem_of(line: str) -> str:
    """Return what is wrong with a command; "" if nothing is, or if it has placeholders."""
    words = words_of(line)
    if words[-1:] in (["--help"], ["--version"]) or any(PLACEHOLDER.match(word.split("=")[-1]) for word in words):
        return ""
    try:
        options = PARSER.parse(words)
    except UserError as error:
        return str(error)
    for word in getattr(options, "overrides", []):
        key = re.sub(r"\.\d+\.", ".", word.removeprefix("--").split("=")[0])
        if word.startswith("--") and key not in KEYS and not key.startswith("model.args."):
            return f"{key} is no option, nearest {nearest_key(key)}"
    config = getattr(options, "config", None)
    is_there = (
        not config or config.startswith("outputs/") or config.endswith(".toml") or find_config(config, ROOT).is_file()
    )
    return "" if is_there else f"no config {config}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_are_commands(page: Path) -> None:
    problems = {line: problem for line in command_lines(page) if (problem := problem_of(line))}
    assert problems == {}


def test_rows_of_tables_are_shown_as_tables() -> None:
    """A row after an empty line is text, and a code host ends a cell at each `|`, also within code."""
    for page in PAGES:
        text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
        for table in re.findall(r"(?:^\|.*\n?)+", text, flags=re.MULTILINE):
            heads = [line for line in table.splitlines()[1:2] if re.fullmatch(r"\|[-:| ]+\|", line)]
            assert heads, f"{page.name}: {table[:80]}"
            cells = {len(re.findall(r"(?<!\\)\|", line)) for line in table.splitlines()}
            assert len(cells) == 1, f"{page.name}: rows of {cells} cells: {table[:80]}"
