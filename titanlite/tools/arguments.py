"""Parsers of command lines: one for each subcommand, built without heavy imports, with errors of one line."""

import re
from argparse import ArgumentParser, ArgumentTypeError, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from titanlite.runtime.errors import UserError, nearest_name

Run = Callable[[Namespace], None]


class Parser(ArgumentParser):
    """Parser of a command, or of a group of commands. Its errors are `UserError`."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, allow_abbrev=False, formatter_class=RawDescriptionHelpFormatter, **options)
        self.commands: dict[str, Parser] = {}
        self.further_help: Callable[[], str] | None = None
        """Makes text for the end of --help that takes an import."""
        self._takes_overrides = False
        self._subparsers_action: Any = None

    def add_command(
        self, name: str, summary: str, run: Run | None = None, *, details: str = "", example: str = ""
    ) -> "Parser":
        """Add a command below this one, or a group of commands if there is nothing to run.

        Args:
            summary: one line for the list of commands.
            run: called with the parsed options.
            details: what else --help explains.
            example: command lines, without `titanlite`.
        """
        if self._subparsers_action is None:
            self._subparsers_action = self.add_subparsers(title="commands", metavar="COMMAND")
        shown = "".join(f"\n  titanlite {line}" for line in example.splitlines())
        parser: Parser = self._subparsers_action.add_parser(
            name,
            help=summary,
            description=f"{summary[0].upper()}{summary[1:]}." + (f"\n\n{details}" if details else ""),
            epilog=f"example:{shown}" if example else None,
        )
        parser.set_defaults(run=run, command=name)
        self.commands[name] = parser
        return parser

    def add_config(self, *, default: str | None = None) -> None:
        """Add the config, named by --config or as a word, and accept `--section.key=value` overrides.

        Args:
            default: config to take if none is named. With None, the command checks that one is.
        """
        about = "a TOML file, or the name of a config that titanlite ships (llama3_8b)"
        if default:
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
            known = self._names()
            near = nearest_name(words[0], self.commands) or nearest_name(words[0], known)
            self.error(f"unknown command {words[0]!r}" + (f", did you mean {known[near]!r}?" if near else ""))
        _, rest = self.parse_known_args(words)
        if rest:
            self._refuse(rest[0])
        self.error(f"name a command: {', '.join(self.commands)}")

    def _names(self) -> dict[str, str]:
        """Return the full name of each command below this one, by its last word."""
        below = {word: full for parser in self.commands.values() for word, full in parser._names().items()}
        return below | {name: parser.prog.partition(" ")[2] for name, parser in self.commands.items()}

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


def positive_int(text: str) -> int:
    """Parse an option that counts something.

    Raises:
        ArgumentTypeError: the text is no integer of at least 1.
    """
    if not text.isdecimal() or int(text) < 1:
        raise ArgumentTypeError(f"expected a number of at least 1, got {text!r}")
    return int(text)


def non_negative_int(text: str) -> int:
    """Parse an option that may be 0.

    Raises:
        ArgumentTypeError: the text is no integer of at least 0.
    """
    if not text.isdecimal():
        raise ArgumentTypeError(f"expected a number of at least 0, got {text!r}")
    return int(text)
