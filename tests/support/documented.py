"""Commands in the documentation: those of each page, and why one is not run by any test.

A comment above a block of code gives the reason. The site does not show it:

    <!-- not run: needs a GPU -->
    <!-- not run: `pip install`, `git clone`: needs the network -->

The first form is about all commands of the block, the second about those that begin with the words in backticks.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "AGENTS.md", "examples/README.md")),
    *sorted((ROOT / "docs").glob("*.md")),
]
SHELL = ("", "sh", "bash", "console", "text")
"""Languages of fenced blocks that may have commands."""
PROGRAM = re.compile(
    r"(\S*/)?(titanlite|run_train\.sh|run_tests\.sh|python3?|torchrun|mkdocs|ruff|pre-commit)$"
    r"|(pip|git|docker|kubectl|sbatch|lm_eval|source|env|for|\.ci/run)$"
)
VARIABLES = re.compile(r"^([A-Z_]+=\S* )*")
NOT_RUN = re.compile(r"^ *<!-- not run: (?P<commands>(?:`[^`]+`(?:, )?)*)(?:: )?(?P<reason>.+?) -->$")


class Command(NamedTuple):
    page: str
    """Path below the root."""
    line: int
    text: str
    """One line: what a backslash continues is joined."""
    not_run: str
    """The reason why no test runs it; "" if a test must."""


class Block(NamedTuple):
    language: str
    """"" for a block that is indented, or fenced without a language."""
    lines: list[tuple[int, str]]
    """Numbers, and lines without the indent of the block."""
    notes: list[str]
    """Comments `not run` right above."""


def blocks(text: str) -> Iterator[Block]:
    """Yield the blocks of code of a page in Markdown: fenced, or indented by 4 columns."""
    block: Block | None = None
    fence = ""
    notes: list[str] = []
    for number, line in enumerate(text.splitlines(), 1):
        if fence:
            assert block is not None
            if line.strip() == fence:
                yield block
                block, fence, notes = None, "", []
            else:
                block.lines.append((number, line))
        elif opening := re.match(r" *(```+)\s*(\S*)", line):
            if block is not None:
                yield block
                notes = []
            fence, block = opening[1], Block(opening[2], [], notes)
        elif line.startswith("    "):
            block = block or Block("", [], notes)
            block.lines.append((number, line[4:]))
        elif line.strip():
            if block is not None:
                yield block
                block, notes = None, []
            notes = [*notes, line.strip()] if NOT_RUN.match(line) else []
    if block is not None:
        yield block


def commands(page: Path) -> list[Command]:
    """Return the commands of a page."""
    name = page.relative_to(ROOT).as_posix() if page.is_relative_to(ROOT) else page.name
    return [
        Command(name, number, text, reason_for(text, block.notes))
        for block in blocks(page.read_text())
        if block.language in SHELL
        for number, text in joined(block.lines)
        if is_command(text)
    ]


def joined(lines: list[tuple[int, str]]) -> Iterator[tuple[int, str]]:
    """Yield lines; those that a backslash continues are one."""
    start, before = 0, ""
    for number, line in lines:
        start = start if before else number
        if line.endswith("\\"):
            before += line.removesuffix("\\")
        else:
            yield start, " ".join(part for part in (before.strip(), line.strip()) if part)
            before = ""


def is_command(line: str) -> bool:
    first, _, rest = VARIABLES.sub("", line.removeprefix("$ ")).partition(" ")
    return bool(PROGRAM.match(first)) and (not rest.startswith(" ") or rest.lstrip().startswith("#"))


def reason_for(command: str, notes: list[str]) -> str:
    for note in notes:
        found = NOT_RUN.match(note)
        assert found
        about = re.findall(r"`([^`]+)`", found["commands"])
        if not about or command.removeprefix("$ ").startswith(tuple(about)):
            return found["reason"]
    return ""


def pages_with_commands() -> list[str]:
    """Return the pages with a command that a test runs: tests/distributed/test_pages.py."""
    names = [page.relative_to(ROOT).as_posix() for page in PAGES]
    return [name for name in names if commands_to_run(name)]


def commands_to_run(page: str) -> list[str]:
    return [command.text.removeprefix("$ ") for command in commands(ROOT / page) if not command.not_run]
