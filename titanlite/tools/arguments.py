"""Command lines, made from the signatures and docstrings of the functions that the commands run.

The source of a function is read, not imported: most import torch, which takes seconds. A parameter is an argument, a
keyword-only one is an option. Its type and default are those of the signature, its text is that of the docstring.
"""

import ast
import re
from argparse import ArgumentParser, ArgumentTypeError, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, NamedTuple, NoReturn, Union, get_args, get_origin

from titanlite.runtime.allocator import importing
from titanlite.runtime.errors import UserError, nearest_name

TOOLS = Path(__file__).parent


def at_least(least: int) -> Callable[[str], int]:
    """Return a parser of integers, which raises ArgumentTypeError for others."""

    def parse(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise ArgumentTypeError(f"expected a number of at least {least}, got {text!r}")
        return int(text)

    return parse


def between(least: float, most: float) -> Callable[[str], float]:
    """Return a parser of numbers, which raises ArgumentTypeError for others."""

    def parse(text: str) -> float:
        with suppress(ValueError):
            if least <= float(text) <= most:
                return float(text)
        raise ArgumentTypeError(f"expected a number from {least:g} to {most:g}, got {text!r}")

    return parse


# Types of parameters: a callable parses the word, a text is that of --help where the docstring has none.
Count = Annotated[int, at_least(1)]
Amount = Annotated[float, between(1e-6, 1e6)]
Index = Annotated[int, at_least(0)]
Stored = Annotated[
    str, "folder of a run, of its checkpoints (or their URL: s3://...), of several runs, or one checkpoint"
]
Weights = Annotated[str, "a checkpoint, the folder of a run (its newest complete one), or a URL of either (s3://...)"]
AnyWeights = Annotated[
    str,
    "a checkpoint, the folder of a run (its newest complete one), a URL of either (s3://...), or a Hugging Face folder",
]
RunConfig = Annotated[str, "config of the run, for checkpoints that do not keep it, or whose own names code or data"]
ModelFile = Annotated[str, "code of a model of your own (model.file): a checkpoint's own word is refused"]
OfAverage = Annotated[bool, "take the average of the weights, of a run with [average]"]
RunTokenizer = Annotated[str, "tokenizer, instead of the run's data.tokenizer"]
Inputs = Annotated[
    Sequence[str],
    "a file of text or JSON lines (also .gz or .zst), of tables (.parquet, .arrow, .feather) or WebDataset (.tar); a "
    "folder of MDS; a folder or glob of such files, also at a URL (s3://, hf://datasets/OWNER/REPO/...); what Hugging "
    "Face's save_to_disk wrote; hf://NAME[:CONFIG][:SPLIT]; reader://FILE:FUNCTION?PATH; or stdlib:// (stdlib://train, "
    "stdlib://validation)",
]


class Parameter(NamedTuple):
    """A parameter of a function; `default` is `...` if it must be given."""

    name: str
    annotation: Any
    default: Any
    is_option: bool


def parameters_of(function: ast.FunctionDef) -> Iterator[Parameter]:
    """Yield the parameters of a function. Their annotations are evaluated with the names of this file."""
    words, options = function.args.args, function.args.kwonlyargs
    missing = [None] * (len(words) - len(function.args.defaults))
    for number, (argument, default) in enumerate(
        zip([*words, *options], [*missing, *function.args.defaults, *function.args.kw_defaults], strict=True)
    ):
        assert argument.annotation is not None
        annotation = eval(ast.unparse(argument.annotation), globals())
        yield Parameter(argument.arg, annotation, ast.literal_eval(default) if default else ..., number >= len(words))


def read_function(module: str, name: str) -> ast.FunctionDef:
    """Return the signature and docstring of a function. Parsing whole files would take too long for --help."""
    source = Path(TOOLS, *module.split(".")).with_suffix(".py").read_text(encoding="utf-8")
    match = re.search(rf'^def {name}\(.*?^    """.*?"""$', source, re.S | re.M)
    assert match, f"no function {name} in {module}"
    [function] = ast.parse(match[0]).body
    assert isinstance(function, ast.FunctionDef)
    return function


class Parser(ArgumentParser):
    """Parser of a command, or of a group of commands. Its errors are `UserError`."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, allow_abbrev=False, formatter_class=RawDescriptionHelpFormatter, **options)
        self.commands: dict[str, Parser] = {}
        self.further_help: Callable[[], str] | None = None
        """Makes text for the end of --help that takes an import."""
        self._takes_overrides = False
        self._subparsers_action: Any = None

    def add_group(self, name: str, summary: str, **more: str | None) -> "Parser":
        """Add a group of commands; with a further description, a command."""
        if self._subparsers_action is None:
            self._subparsers_action = self.add_subparsers(title="commands", metavar="COMMAND")
        description = f"{summary[0].upper()}{summary[1:]}."
        self.commands[name] = self._subparsers_action.add_parser(
            name, help=summary, **{"description": description, **more}
        )
        return self.commands[name]

    def add_command(self, name: str, module: str, function_name: str) -> None:
        """Add a command that calls a function.

        Of its docstring, the first line and what follows it are the description, `Args` has the text of each option,
        with its placeholder in parentheses (default: its name, or N for a number), and `Example` the words after the
        name of the command.

        Args:
            module: of the function, below titanlite.tools.
        """
        function = read_function(module, function_name)
        description, *sections = re.split(r"^(\w+):\n", ast.get_docstring(function) or "", flags=re.M)
        section = dict(zip(sections[::2], sections[1::2], strict=True))
        summary = description.partition("\n")[0].rstrip(".")
        parser = self.add_group(name, summary[0].lower() + summary[1:], description=description.strip())
        examples = (f"\n  {parser.prog} {line.strip()}" for line in section["Example"].strip().splitlines())
        parser.epilog = f"example:{''.join(examples)}"
        texts = re.findall(r"^    (\w+)(?: \((.+?)\))?: (.+(?:\n {5,}.+)*)", section.get("Args", ""), re.M)
        about = {name: (metavar, " ".join(text.split())) for name, metavar, text in texts}
        parameters = {parameter.name: parameter for parameter in parameters_of(function)}
        if "overrides" in parameters:
            parser.add_config(parameters["config"].default)
        for parameter in parameters.values():
            if parameter.name != "overrides" and not ("overrides" in parameters and parameter.name == "config"):
                parser.add_parameter(parameter, *about.get(parameter.name, ("", "")))

        def run(options: Namespace) -> None:
            with importing():
                called = getattr(import_module(f"titanlite.tools.{module}"), function_name)
            called(**{name: getattr(options, name) for name in parameters})

        parser.set_defaults(run=run, command=name)

    def add_parameter(self, parameter: Parameter, metavar: str, text: str) -> None:
        """Add the argument or the option that sets a parameter."""
        name, annotation, default, is_option = parameter
        if get_origin(annotation) in (Union, UnionType):  # with None
            annotation = get_args(annotation)[0]
        parse: Any = annotation
        if get_origin(annotation) is Annotated:
            annotation, about = get_args(annotation)
            text, parse = (text or about, annotation) if isinstance(about, str) else (text, about)
        options: dict[str, Any] = {"metavar": metavar or ("N" if annotation is int else name.strip("_").upper())}
        if annotation is bool:
            options = {"action": "store_true"}
        elif get_origin(annotation) is Literal:
            options = {"choices": get_args(annotation)}
        elif get_origin(annotation) is Sequence:
            [of_each] = get_args(annotation)
            is_repeated = is_option and of_each is str  # --drop GLOB --drop GLOB; --weights 1 2
            parse_each = get_args(of_each)[1] if get_origin(of_each) is Annotated else of_each
            options |= {"action": "append"} if is_repeated else {"nargs": "+", "type": parse_each}
        elif get_origin(annotation) is tuple:
            options |= {"nargs": 2, "metavar": tuple(metavar.split())}
        elif annotation is not str:
            options["type"] = parse
        is_required = default is ...
        if not is_required:
            options["default"] = [] if default == () else default
        if default and not is_required and "default" not in text:
            text += f"; default: {default}"
        assert text, f"{self.prog}: {name} is not explained"
        options["help"] = text.replace("%", "%%")
        if is_option:
            options |= {"dest": name, "required": is_required}
        elif not is_required:
            options["nargs"] = "?"
        self.add_argument(f"--{name.strip('_').replace('_', '-')}" if is_option else name, **options)

    def add_config(self, default: Any) -> None:
        """Add the config, named by --config or as a word, and accept `--section.key=value` overrides.

        Args:
            default: config to take if none is named; `...` refuses that.
        """
        about = "a TOML file, or the name of a config that titanlite ships (llama3_8b)"
        if default not in (None, ...):
            about += f"; default: {default}"
        self.add_argument("config_word", metavar="CONFIG", nargs="?", help=about)
        self.add_argument("--config", metavar="CONFIG", default=None, help="the same")
        group = self.add_argument_group("options of the config")
        group.add_argument(
            "--section.key",
            metavar="VALUE",
            dest="section_key",
            help="set any option over the file, for example --training.steps=500 (all: titanlite train --help)",
        )
        self.set_defaults(default_config=default)
        self._takes_overrides = True

    def parse(self, words: Sequence[str]) -> Namespace:
        """Return the options of the command that the words name, with `run`; for a config also `overrides`.

        Raises:
            UserError: the words make no command.
            SystemExit: after --help or --version.
        """
        if self.commands:
            return self._command_of(words).parse(words[1:])
        words, overrides = split_overrides(words) if self._takes_overrides else (words, [])
        options, rest = self.parse_known_intermixed_args(words)
        if rest:
            self._refuse(rest[0])
        if self._takes_overrides:
            options.overrides = overrides
            if options.config and options.config_word:
                self.error(f"two configs, {options.config_word} and --config {options.config}: name one")
            named = [word for word in (options.config, options.config_word) if word is not None]
            if "" in named:
                self.error("the name of the config is empty")
            options.config = named[0] if named else options.default_config
            if options.config is ...:
                self.error("no config: name a TOML file, or one that titanlite ships (llama3_8b)")
        return options

    def error(self, message: str) -> NoReturn:
        """Raise UserError: the command and what is wrong, on one line."""
        raise UserError(f"{self.prog}: {message}")

    def format_help(self) -> str:
        """Return the text of --help."""
        return super().format_help() + (self.further_help() if self.further_help else "")

    def _command_of(self, words: Sequence[str]) -> "Parser":
        if words and words[0] in self.commands:
            return self.commands[words[0]]
        if words and not words[0].startswith("-"):
            near = nearest_name(words[0], self.commands)
            self.error(f"unknown command {words[0]!r}" + (f", did you mean {near!r}?" if near else ""))
        _, rest = self.parse_known_args(words)
        if rest:
            self._refuse(rest[0])
        self.error(f"name a command: {', '.join(self.commands)}")

    def _refuse(self, word: str) -> NoReturn:
        if not word.startswith("-"):
            self.error(f"unexpected argument {word!r}")
        name = word.partition("=")[0]
        if self._takes_overrides and "." in name and not name.startswith("--"):
            self.error(f"unknown option {name}: options of the config begin with two dashes, as -{name}")
        near = nearest_name(name, re.findall(r"--[\w-]+", self.format_usage()), cutoff=0.75)
        if near is None and self._takes_overrides:
            from titanlite.config.keys import nearest_key

            key = nearest_key(name.lstrip("-"))
            if key == name.lstrip("-"):
                self.error(f"{name} is a section: set one of its options, as --{key}.option=value")
            near = f"--{key}" if key else None
        self.error(f"unknown option {name}" + (f", did you mean {near}?" if near else ""))


def split_overrides(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return (words for argparse, overrides of the config).

    An override is `--section.key=value`, `--section.key value` or a bare `--section.key`.
    """
    others: list[str] = []
    overrides: list[str] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        name, equals, _ = word.partition("=")
        if not (name.startswith("--") and "." in name):
            others.append(word)
            continue
        overrides.append(word)
        if not equals and rest and not rest[0].startswith("--"):
            overrides.append(rest.pop(0))
    return others, overrides
