"""Commands in the documentation are commands: each one's words, options and options of the config are known.

A test runs each of them, too, or a comment in the page gives the reason why none does: tests/documented.py.
"""

import re
import shlex
from pathlib import Path

import pytest

from tests.documented import EXECUTED, PAGES, ROOT, commands, commands_to_run, unused_notes
from titanlite.config.keys import dotted_keys, nearest_key
from titanlite.config.shipped import find_config
from titanlite.runtime.errors import UserError
from titanlite.tools.cli import make_parser

SCRIPT = re.compile(r"(?:^|\s)(?:\S*/)?(titanlite|run_train\.sh)(?=\s|$)")
PLACEHOLDER = re.compile(r"^(\[.*|[A-Z_]+|\.\.\.|N|<.*>)$")
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
        options = make_parser().parse(words)
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


def test_commands_are_found_and_mistakes_are_seen(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    fenced = "```sh\ntitanlite plan llama3_8b \\\n  --wurld 3\n```\n"
    page.write_text(f"    NNODES=1 ./run_train.sh --training.stepss=3  # a comment\n\n    text\n\ntext\n\n{fenced}")
    assert [problem_of(line) for line in command_lines(page)] == [
        "training.stepss is no option, nearest training.steps",
        "titanlite plan: unknown option --wurld",
    ]
    assert problem_of("titanlite check llama3_8c") == "no config llama3_8c"
    assert sum(len(command_lines(page)) for page in PAGES) > 100


def test_a_closing_fence_opens_no_block(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("```python\ntitanlite = 1\n```\ntext\n```sh\ntitanlite check debug\n```\n")
    assert [(command.line, command.text) for command in commands(page)] == [(6, "titanlite check debug")]
    assert {name: len(commands(ROOT / name)) for name in ("docs/add_a_model.md", "docs/data.md")} == {
        "docs/add_a_model.md": 3,
        "docs/data.md": 5,
    }


def test_reasons_are_those_right_above_a_block(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "<!-- not run: needs a GPU -->\n\n    titanlite check a\n    titanlite check b\n\n"
        "text\n\n    titanlite check c\n\n"
        "<!-- not run: `pip`, `git`: needs the network -->\n```sh\npip install x\ntitanlite check d\n```\n"
        "<!-- not run: needs nothing -->\ntext\n"
    )
    assert [command.not_run for command in commands(page)] == [
        "needs a GPU",
        "needs a GPU",
        "",
        "needs the network",
        "",
    ]
    assert unused_notes(page) == ["<!-- not run: needs nothing -->"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_each_command_is_run_by_a_test_or_marked_with_the_reason_why_not(page: Path) -> None:
    name = page.relative_to(ROOT).as_posix()
    to_run = commands_to_run(name)
    assert bool(to_run) == (name in EXECUTED), f"in no test, and not marked as not run: {to_run}"
    assert unused_notes(page) == []


def test_tests_that_run_commands_are_there() -> None:
    for test in EXECUTED.values():
        path, _, function = test.partition("::")
        assert f"\ndef {function}(" in (ROOT / path).read_text(), test
    assert {ROOT / page for page in EXECUTED} <= set(PAGES)
