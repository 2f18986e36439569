"""Errors for users: the command prints each as one line without a traceback, and exits with its exit code."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from math import inf
from typing import ClassVar, NamedTuple

# Suggestions for misspelt names.

SUGGESTED = 20
"""Names of a file for which the nearest known one is looked for, which takes milliseconds. A file with thousands of
unknown names was not misspelt."""


def nearest_name(name: str, known: Iterable[str], *, cutoff: float = 0.6) -> str | None:
    """Return the known name that `name` is most like, ignoring case; None if it is like none.

    Args:
        cutoff: least similarity, from 0 to 1, as in `difflib.get_close_matches`.
    """
    by_lower_case = {option.lower(): option for option in reversed([*known])}
    near = get_close_matches(name.lower(), by_lower_case, n=1, cutoff=cutoff)
    return by_lower_case[near[0]] if near else None


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return ", did you mean X?" for the nearest known name, or "": the end of an error message."""
    near = nearest_name(name, known)
    return f", did you mean {near}?" if near else ""


def printable(text: str) -> str:
    """Return a text with what a terminal would obey instead of showing it escaped: others may have written it."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


class UserError(ValueError):
    """Wrong config or input."""

    exit_code: ClassVar[int] = 2


class RunError(RuntimeError):
    """A run that cannot continue for a reason outside config and code, for example a full disk."""

    exit_code: ClassVar[int] = 1


class DamagedCheckpoint(ValueError):
    """A file of a checkpoint does not match its checksum or size; the message names the file."""


class RunStopped(RunError):
    """A run that was ended with everything saved: by a rule of its config, or by a signal.

    Args:
        taken: the last step that the optimizer made; weights and optimizer are those of its end.
    """

    exit_code: ClassVar[int] = 3

    def __init__(self, message: str, *, taken: int) -> None:
        super().__init__(message)
        self.taken = taken


class Place(NamedTuple):
    """Place of a key. Places sort as the config file, then its base, then the command line."""

    file: float
    """0 is the config file, 1 its base, 2 the base of that; infinity is the command line."""
    line: float
    """Line of the file, or number of the word on the command line."""
    text: str
    """Text for error messages, for example run.toml:12."""

    def __str__(self) -> str:
        return self.text


DEFAULT_PLACE = Place(inf, inf, "default")
"""Place of options that are not set anywhere."""


def whole_number(environ: Mapping[str, str], name: str, least: int) -> int:
    """Return an environment variable as a number; `least` if it is not set.

    Raises:
        UserError: the variable is not a number, or is less than `least`.
    """
    text = environ.get(name, str(least))
    if not text.isdecimal() or int(text) < least:
        raise UserError(f"the environment variable {name}: expected a number of at least {least}, got {text!r}")
    return int(text)


@dataclass(frozen=True)
class Problem:
    """One problem of a config: the dotted key, an error message, and the place of the key."""

    key: str
    message: str
    where: Place | None = None

    def __str__(self) -> str:
        text = f"{self.key}: {self.message}" if self.key else self.message
        return f"{text} ({self.where})" if self.where else text


class ConfigError(UserError):
    """All problems of a config, one per line."""

    def __init__(self, problems: list[Problem]) -> None:
        super().__init__("\n".join(map(str, problems)))
        self.problems = problems
