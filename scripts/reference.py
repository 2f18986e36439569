"""Pages of docs/ that are made from the code: every command, and every error and warning that a user can meet.

    python scripts/reference.py           # writes docs/cli.md and docs/errors.md

`tests/unit/test_reference.py` keeps them current.
"""

import argparse
import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from titanlite.tools.arguments import Parser
from titanlite.tools.cli import EXIT_CODES, make_parser

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "titanlite"
RAISED = {"UserError": 0, "RunError": 0, "RunStopped": 0, "StoppedByGuard": 0, "Problem": 1}
"""Classes of errors, with the argument that is the text."""
RETURNED = re.compile(r"^(why_|_why_|check_|_check|find_conflicts|find_warnings|_find)")
PAGES = {
    "cli": ("The command", "running.md"),
    "runtime": ("Processes, files and starts", "running.md"),
    "config": ("The config", "config.md"),
    "models": ("Models", "add_a_model.md"),
    "parallelize": ("Layouts and techniques", "parallelism.md"),
    "optim": ("Optimizers", "optimizers.md"),
    "checkpoint": ("Checkpoints", "checkpoints.md"),
    "data": ("Reading data", "data.md"),
    "ingest": ("Preparing text", "data.md"),
    "metrics": ("Metrics and loggers", "see_the_run.md"),
    "plan": ("Plans", "plan.md"),
    "convert": ("Weights in and out, generation, distillation", "convert.md"),
    "report": ("Reports, profiles and comparisons", "see_the_run.md"),
    "migrate": ("Configs of torchtitan", "migrate.md"),
    "": ("Training", "troubleshooting.md"),
}
"""{folder: (heading, page that explains)}; "" stands for all other files."""


# Commands


def commands(parser: Parser) -> Iterator[Parser]:
    """Yield the commands below a parser that do something, in their order."""
    for command in parser.commands.values():
        if command.commands:
            yield from commands(command)
        else:
            yield command


def escaped(text: str) -> str:
    """Return Markdown that shows the text as it is. Python-Markdown would keep the backslash of an escaped "<"."""
    return re.sub(r"([\[\]*])", r"\\\1", text).replace("<", "&lt;").replace(">", "&gt;")


def option_rows(parser: Parser) -> Iterator[str]:
    for action in parser._actions:
        if action.help in (None, argparse.SUPPRESS) or isinstance(action, argparse._HelpAction):
            continue
        metavar = action.metavar or ("" if action.nargs == 0 else action.dest.upper())
        value = " ".join(metavar) if isinstance(metavar, tuple) else str(metavar)
        if action.choices and action.metavar is None:
            value = " or ".join(map(str, action.choices))
        names = ", ".join(action.option_strings)
        word = f"{names} {value}".strip() if names else value
        text = " ".join(str(action.help).replace("%%", "%").split())
        yield f"| `{word}` | {escaped(text).replace('|', chr(92) + '|')} |"


def command_page() -> str:
    """Return docs/cli.md."""
    lines = [
        "# Every command",
        "",
        "Generated from the parsers by `python scripts/reference.py`. `titanlite COMMAND --help` prints the same.",
        "",
        EXIT_CODES.strip().capitalize() + ".",
        "",
    ]
    for parser in commands(make_parser()):
        lines += [f"## {parser.prog}", "", escaped(str(parser.description or "").strip()), ""]
        if rows := [*option_rows(parser)]:
            lines += ["| argument | meaning |", "|---|---|", *rows, ""]
        if parser.epilog:
            examples = parser.epilog.partition(":")[2].strip("\n").splitlines()
            lines += ["For example:", "", *(f"    {line.strip()}" for line in examples), ""]
    return "\n".join(line.rstrip() for line in lines).rstrip() + "\n"


# Errors and warnings


class Listed(NamedTuple):
    area: str
    text: str


def text_of(node: ast.expr | None) -> str | None:
    """Return a text with `...` for each part that is filled in; None if the expression is no text."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "..." for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left, right = text_of(node.left), text_of(node.right)
        return None if left is None and right is None else f"{left or '...'}{right or '...'}"
    return None


def texts_of(node: ast.expr, variables: Mapping[str, list[ast.expr]]) -> Iterator[str]:
    """Yield the texts that an expression can be.

    Args:
        variables: what the function assigns to its variables.
    """
    if isinstance(node, ast.IfExp):
        yield from texts_of(node.body, variables)
        yield from texts_of(node.orelse, variables)
    elif isinstance(node, ast.Name):
        for value in variables.get(node.id, []):
            if text := text_of(value):
                yield text
    elif text := text_of(node):
        yield text


def error_texts(tree: ast.Module) -> Iterator[str]:
    """Yield the texts of a file: of errors that it raises, of checks that return or yield them, and of warnings."""
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef):
            yield from function_texts(function)


def function_texts(function: ast.FunctionDef) -> Iterator[str]:
    variables: dict[str, list[ast.expr]] = {}
    for node in ast.walk(function):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            variables.setdefault(node.targets[0].id, []).append(node.value)
    for node in ast.walk(function):
        if isinstance(node, ast.Call):
            name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
            if name in RAISED and len(node.args) > RAISED[name]:
                yield from texts_of(node.args[RAISED[name]], variables)
            elif ast.unparse(node.func) == "logger.warning":
                yield from (f"warning: {text}" for text in texts_of(node.args[0], variables))
        elif isinstance(node, ast.Return | ast.Yield) and node.value and RETURNED.match(function.name):
            value = node.value.elts[-1] if isinstance(node.value, ast.Tuple) else node.value
            yield from texts_of(value, variables)


def errors() -> list[Listed]:
    """Return every text once, in the order of areas and of text."""
    found = set()
    for path in sorted(PACKAGE.rglob("*.py")):
        first = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        area = first if first in PAGES else ""
        for text in error_texts(ast.parse(path.read_text())):
            plain = re.sub(r"(\.\.\.){2,}", "...", " ".join(text.split()))
            if len(re.sub(r"[^a-z]", "", plain)) >= 12:
                found.add(Listed(area, plain))
    order = list(PAGES)
    return sorted(found, key=lambda error: (order.index(error.area), error.text.lower()))


def error_page() -> str:
    """Return docs/errors.md."""
    lines = [
        "# Every error and warning",
        "",
        "Generated from the code by `python scripts/reference.py`. `...` stands for what is filled in. An error names",
        "the option or the file first, then what is wrong, then what to do.",
        "[troubleshooting.md](troubleshooting.md) has symptoms.",
        "",
    ]
    listed = errors()
    for area, (heading, page) in PAGES.items():
        if texts := [error.text for error in listed if error.area == area]:
            lines += [f"## {heading}", "", f"Explained in [{page}]({page}).", ""]
            lines += [f"- ``{text.replace('``', '` `')}``" for text in texts] + [""]
    return "\n".join(lines).rstrip() + "\n"


def main() -> None:
    for name, text in (("cli.md", command_page()), ("errors.md", error_page())):
        (ROOT / "docs" / name).write_text(text)


if __name__ == "__main__":
    main()
