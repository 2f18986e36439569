"""Commands in the documentation are commands: each one's words, options and options of the config are known.

Those of README.md, docs/tutorial.md and the guides to models and data are also run, in tests/distributed/test_docs.py
and test_commands.py. The others need a cluster, a GPU, weights that nobody may ship, or files of the reader's own.
"""

import re
import shlex
from pathlib import Path

import pytest

from titanlite.cli import make_parser
from titanlite.config.keys import dotted_keys, nearest_key
from titanlite.config.shipped import find_config
from titanlite.runtime.errors import UserError

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md")] + sorted((ROOT / "docs").glob("*.md"))
SCRIPT = re.compile(r"(?:^|\s)(?:\S*/)?(titanlite|run_train\.sh)(?=\s|$)")
PLACEHOLDER = re.compile(r"^(\[.*|[A-Z_]+|\.\.\.|N|<.*>)$")
KEYS = {key.replace(".N.", ".") for key in dotted_keys(inside_lists=True)}


def command_lines(text: str) -> list[str]:
    """Return the commands of titanlite in blocks of code; a line that ends with a backslash continues."""
    fenced = re.findall(r"```(?:sh|bash|console)?\n(.*?)```", text, re.DOTALL)
    indented = re.findall(r"(?:^    .*\n?)+", re.sub(r"```.*?```", "", text, flags=re.DOTALL), re.MULTILINE)
    lines = "\n".join([*fenced, *indented]).replace("\\\n", " ").splitlines()
    return [line.strip() for line in lines if starts_command(line.strip())]


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
    lines = command_lines(page.read_text())
    problems = {line: problem for line in lines if (problem := problem_of(line))}
    assert problems == {}


def test_commands_are_found_and_mistakes_are_seen() -> None:
    fenced = "```sh\ntitanlite plan llama3_8b \\\n  --wurld 3\n```\n"
    lines = command_lines(f"    NNODES=1 ./run_train.sh --training.stepss=3  # a comment\n\n    text\n\n{fenced}")
    assert [problem_of(line) for line in lines] == [
        "titanlite plan: unknown option --wurld",
        "training.stepss is no option, nearest training.steps",
    ]
    assert problem_of("titanlite check llama3_8c") == "no config llama3_8c"
    assert sum(len(command_lines(page.read_text())) for page in PAGES) > 150
