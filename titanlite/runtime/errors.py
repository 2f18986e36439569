"""Errors that are for people: the command prints one clear line each, no traceback, and exits with the error's code."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from typing import ClassVar, NamedTuple


class UserError(ValueError):
    """Wrong config or input."""

    exit_code: ClassVar[int] = 2


class RunError(RuntimeError):
    """The run cannot go on, and neither config nor code is to blame: a full disk, say."""

    exit_code: ClassVar[int] = 1


class DamagedCheckpoint(ValueError):
    """A file of a checkpoint does not match its checksum or size; the message names the file."""


class RunStopped(RunError):
    """The run has ended itself, in good order, by a rule of its config."""

    exit_code: ClassVar[int] = 3


class Place(NamedTuple):
    """Where something was written. Places are in order: as in the file, then as in its base, then the command line."""

    file: float
    """0 is the config file, 1 its base, 2 the base of that; infinity is the command line."""
    line: float
    """Of the file, or which word of the command line."""
    text: str
    """For people: run.toml:12"""

    def __str__(self) -> str:
        return self.text


DEFAULT_PLACE = Place(inf, inf, "default")
"""Of what nobody wrote: the value is the default."""


def whole_number(environ: Mapping[str, str], name: str, least: int) -> int:
    """A variable of the environment; `least` if it is not set.

    Raises:
        UserError: it is no number, or less.
    """
    text = environ.get(name, str(least))
    if not text.isdecimal() or int(text) < least:
        raise UserError(f"the environment variable {name}: expected a number of at least {least}, got {text!r}")
    return int(text)


@dataclass(frozen=True)
class Problem:
    """One thing wrong with the config: its dotted key, what is wrong, and where it was written."""

    key: str
    message: str
    where: Place | None = None

    def __str__(self) -> str:
        text = f"{self.key}: {self.message}" if self.key else self.message
        return f"{text} ({self.where})" if self.where else text


class ConfigError(UserError):
    """Every problem found in a config, one a line."""

    def __init__(self, problems: list[Problem]) -> None:
        super().__init__("\n".join(map(str, problems)))
        self.problems = problems
