"""Errors that are for people: the command prints one clear line each, no traceback, and exits with the error's code."""

from dataclasses import dataclass
from typing import ClassVar


class UserError(ValueError):
    """Wrong config or input."""

    exit_code: ClassVar[int] = 2


class RunError(RuntimeError):
    """The run cannot go on, and neither config nor code is to blame: a full disk, say."""

    exit_code: ClassVar[int] = 1


class RunStopped(RunError):
    """The run has ended itself, in good order, by a rule of its config."""

    exit_code: ClassVar[int] = 3


@dataclass(frozen=True)
class Problem:
    """One thing wrong with the config: its dotted key, what is wrong, and where it was written."""

    key: str
    message: str
    where: str | None = None

    def __str__(self) -> str:
        text = f"{self.key}: {self.message}" if self.key else self.message
        return f"{text} ({self.where})" if self.where else text


class ConfigError(UserError):
    """Every problem found in a config, one a line."""

    def __init__(self, problems: list[Problem]) -> None:
        super().__init__("\n".join(map(str, problems)))
        self.problems = problems
