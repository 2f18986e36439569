"""Pages that are made from the code when the site is built: every option, every command, and every error and warning.

scripts/site_hooks.py adds them to the site. They are not committed.
"""

import argparse
import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from titanlite.tools.arguments import Parser
from titanlite.tools.cli import EXIT_CODES, make_parser
from titanlite.tools.describe import BASE, tables

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "titanlite"
RAISED = {"UserError": 0, "RunError": 0, "RunStopped": 0, "StoppedByGuard": 0, "Problem": 1}
"""Classes of errors, with the argument that is the text."""
RETURNED = re.compile(r"^(why_|_why_|check_|_check|find_conflicts|find_warnings|_find|conflicts$|layout_conflicts$)")
PAGES = {
    "tools": ("The command", "running.md"),
    "run": ("Starts, stops and restarts", "running.md"),
    "runtime": ("Processes, files and devices", "running.md"),
    "config": ("The config", "config.md"),
    "checks": ("Checks before the start", "troubleshooting.md"),
    "models": ("Models", "add_a_model.md"),
    "parallelize": ("FSDP, recomputation and compilation", "parallelism.md"),
    "techniques": ("Techniques", "parallelism.md"),
    "techniques/float8": ("Float8", "float8.md"),
    "techniques/distill": ("Distillation", "distill.md"),
    "optim": ("Optimizers", "optimizers.md"),
    "checkpoint": ("Checkpoints", "checkpoints.md"),
    "storage": ("Disks and object stores", "checkpoints.md"),
    "data": ("Reading data", "data.md"),
    "tools/ingest": ("Preparing text", "data.md"),
    "metrics": ("Metrics and loggers", "metrics.md"),
    "tools/plan": ("Plans", "plan.md"),
    "tools/convert": ("Weights in and out, generation, evaluation", "convert.md"),
    "tools/report": ("Reports, profiles and comparisons", "see_the_run.md"),
    "tools/migrate": ("Configs of torchtitan", "migrate.md"),
    "": ("Training", "troubleshooting.md"),
}
"""{folder below titanlite/: (heading, page that explains)}; "" stands for all other files. The longest match counts."""

INTRO = """\
# Every option

A config is a TOML file. Every option has a default; on the command line each is `--section.key=value`, the value read
as TOML (`--training.steps=500`, `--model.args.dim=512`, `--compile.enable`). Entries of lists have numbers, and the
next number makes a new one: `--data.sources.0.path=a --data.sources.1.path=b`.

The file may begin with `base = "other.toml"`. {base}

`titanlite config show` prints a config with all its options, `titanlite config show --diff` only those that are not the
default. Editors with Even Better TOML (Taplo) complete and check configs that begin with
`#:schema ./schema.json`; `titanlite config schema` writes that file.
"""


# Options


def option_page() -> str:
    """Return the page of every option."""
    lines = [INTRO.format(base=BASE)]
    for table in tables():
        if table.header:
            lines += [f"## {table.header}", ""]
            lines += [escaped(table.description), ""] if table.description else []
        for option in table.options:
            if table.header:
                default = re.sub(r"^default (.*)$", r"default `\1`", option.default)
                lines += [f"- **`{option.name}`** (`{option.type}`; {default}). {escaped(option.description)}", ""]
    return "\n".join(lines).rstrip() + "\n"


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
    """Return the page of every command."""
    lines = [
        "# Every command",
        "",
        "`titanlite COMMAND --help` prints the same.",
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
        folders = (str(folder) for folder in path.relative_to(PACKAGE).parents)
        area = next((folder for folder in folders if folder in PAGES), "")
        for text in error_texts(ast.parse(path.read_text())):
            plain = re.sub(r"(\.\.\.){2,}", "...", " ".join(text.split()))
            if len(re.sub(r"[^a-z]", "", plain)) >= 12:
                found.add(Listed(area, plain))
    order = list(PAGES)
    return sorted(found, key=lambda error: (order.index(error.area), error.text.lower()))


def error_page() -> str:
    """Return the page of every error."""
    lines = [
        "# Every error and warning",
        "",
        "`...` stands for what is filled in. An error names the option or the file first, then what is wrong, then "
        "what to do.",
        "[troubleshooting.md](troubleshooting.md) has symptoms.",
        "",
    ]
    listed = errors()
    for area, (heading, page) in PAGES.items():
        if texts := [error.text for error in listed if error.area == area]:
            lines += [f"## {heading}", "", f"Explained in [{page}]({page}).", ""]
            lines += [f"- ``{text.replace('``', '` `')}``" for text in texts] + [""]
    return "\n".join(lines).rstrip() + "\n"


GENERATED = {"config.md": option_page, "cli.md": command_page, "errors.md": error_page}
"""{page of the site: function that returns its Markdown}"""
