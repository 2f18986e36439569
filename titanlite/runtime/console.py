"""Output for people: one console for progress bars, one logger for lines.

One rank of several shares the console with the others. So its log gets a copy of all that it prints, also of what no
logger writes: prints of the user's code, lines of NCCL, the last words of a C++ library.
"""

import json
import logging
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from importlib.machinery import PathFinder
from importlib.metadata import requires
from pathlib import Path
from shlex import quote
from typing import Any, TextIO, cast

from rich.console import Console

from titanlite.runtime.files import put_aside_unless_file
from titanlite.runtime.output import queued
from titanlite.runtime.signals import shielding_children

# Secrets in URLs, which no file of a run may keep. Imports no torch.


SECRET = re.compile(
    r"(?<=://)[^/\s@'\"]+(?=@)"  # user:password@host
    r"|(?<=[?&])([\w-]*(?:key|token|secret|password|signature|credential)[\w-]*=)[^&\s'\"]+",
    re.IGNORECASE,
)


def hide_secrets(text: str) -> str:
    """Return a text with *** in place of user names, passwords and keys in its URLs."""
    return SECRET.sub(lambda match: f"{match[1] or ''}***", text)


def flat(tree: Any, prefix: str = "") -> dict[str, str]:
    """Return the values of a nested config as JSON, by dotted key. Keys and passwords in URLs are hidden."""
    items = tree.items() if isinstance(tree, Mapping) else enumerate(tree) if isinstance(tree, list | tuple) else None
    if items is None or not tree:
        return {prefix: hide_secrets(json.dumps(tree))}
    return {
        key: value
        for name, part in items
        for key, value in flat(part, f"{prefix}.{name}" if prefix else str(name)).items()
    }


LOGGER = "titanlite"
CHECKOUT = Path(__file__).resolve().parents[2]
"""Folder of the package titanlite: that of the repository, where it runs from one."""


@contextmanager
def progress_bar(
    text: str, total: float, *, done: float = 0, of_bytes: bool = True, shown: bool = True
) -> Iterator[Callable[..., None]]:
    """Show a bar on standard error, if that is a terminal, within the context, and yield the function that advances it,
    and may change its text."""
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    counts = (DownloadColumn(), TransferSpeedColumn()) if of_bytes else (MofNCompleteColumn(),)
    columns = TextColumn("{task.description}", markup=False), BarColumn(), *counts, TimeRemainingColumn()
    console = Console(stderr=True, quiet=not sys.stderr.isatty())
    with Progress(*columns, console=console, transient=True, disable=not shown) as progress:
        task = progress.add_task(text, total=total, completed=int(done))
        yield lambda advance, text=None: progress.update(task, advance=advance, description=text)


def shell_command(name: str) -> str:
    """Return a command of this environment as the user's shell finds it: by its name, else by its path."""
    here = Path(sys.executable).with_name(name)
    found = shutil.which(name)
    if not here.exists() or (found and here.samefile(found)):
        return name
    with suppress(FileNotFoundError, ValueError):  # the current folder was deleted, or is another
        here = here.relative_to(Path.cwd())
    return quote(str(here))


def install_hint(extra: str) -> str:
    """Return the command that installs the packages of an extra here: from the checkout, else package by package.

    titanlite is on no package index, so its name alone installs nothing.
    """
    install = f"{shell_command('pip')} install"
    # uv makes environments without pip. setuptools takes a search by other finders for pip's import, and PyTorch's
    # compiler could not import setuptools afterwards.
    if not PathFinder.find_spec("pip") and shutil.which("uv"):
        install = f"uv pip install --python {quote(sys.executable)}"
    if (CHECKOUT / "pyproject.toml").exists():
        return f"{install} -e {quote(f'{CHECKOUT}[{extra}]')}"
    needs = (entry.partition(";") for entry in requires("titanlite") or ())
    names = [name.strip() for name, _, marker in needs if re.search(rf"extra == ['\"]{extra}['\"]", marker)]
    return " ".join([install, *map(quote, names)])


ERASE_LINE = "\r\x1b[2K"
"""Moves a terminal's cursor to the begin of its line, and clears the line."""


class ConsoleHandler(logging.StreamHandler):
    """Writes lines to standard output. A run continues without them after the end of whoever read them (`| head`)."""

    _last_line = ""

    def redraw(self, text: str) -> None:
        """Show a text below all lines, in place of the one before. An empty text removes it."""
        with suppress(BrokenPipeError), self.lock or nullcontext():
            self.stream.write(ERASE_LINE + text)
            self.flush()
            self._last_line = text

    def emit(self, record: logging.LogRecord) -> None:
        """Write a line, above the text of `redraw`."""
        if not self._last_line:
            super().emit(record)
            return
        shown = self._last_line
        self.redraw("")
        super().emit(record)
        self.redraw(shown)

    def handleError(self, record: logging.LogRecord) -> None:
        """Ignore a closed pipe, and report other errors as `logging` does."""
        if not isinstance(sys.exc_info()[1], BrokenPipeError):
            super().handleError(record)


class _Formatter(logging.Formatter):
    """Formats lines without the secrets of URLs."""

    def format(self, record: logging.LogRecord) -> str:
        return hide_secrets(super().format(record))


class LogFileHandler(logging.FileHandler):
    """Writes lines to a file. A file that cannot be written is reported once, and the run continues."""

    _reported = False

    def handleError(self, record: logging.LogRecord) -> None:
        """Report the first error, on standard error."""
        if not self._reported:
            self._reported = True
            print(f"{self.baseFilename} cannot be written: {sys.exc_info()[1]}", file=sys.stderr, flush=True)


def start_logging(rank: int) -> None:
    """Log to standard output: all lines of rank 0, warnings of the other ranks."""
    handler = ConsoleHandler(sys.stdout)
    handler.setLevel(logging.INFO if rank == 0 else logging.WARNING)
    prefix = "" if rank == 0 else f"[rank {rank}] "
    handler.setFormatter(_Formatter(f"{prefix}%(message)s"))
    logger = logging.getLogger(LOGGER)
    logger.setLevel(logging.INFO)
    logger.handlers = [handler]
    logger.propagate = False


def terminal() -> ConsoleHandler | None:
    """Return the handler that writes lines of this process to a terminal; None if standard output is no terminal."""
    handlers = logging.getLogger(LOGGER).handlers
    return next((h for h in handlers if isinstance(h, ConsoleHandler) and h.stream.isatty()), None)


def log_to_file(folder: Path, rank: int) -> Path:
    """Log all lines of this rank, with the time, to logs/rank-N.log in the run's folder. Returns that file."""
    folder.mkdir(parents=True, exist_ok=True)
    if aside := put_aside_unless_file(folder / f"rank-{rank}.log"):
        logging.getLogger(LOGGER).warning(f"{folder / f'rank-{rank}.log'} is not a file: it is now {aside.name}")
    handler = LogFileHandler(folder / f"rank-{rank}.log")
    handler.setFormatter(_Formatter("%(asctime)s %(levelname)s %(message)s"))
    logging.getLogger(LOGGER).handlers.insert(0, handler)  # the file comes first, since the console may block
    return folder / f"rank-{rank}.log"


def copy_output(log: Path) -> None:
    """Copy what this process, its libraries and its workers print to a log file. The console gets the same.

    Python's own streams write to both. What is below Python goes through a process `tee` for each stream, which
    outlives this process: last words are not lost. Lines of the logger are in the log already.
    """
    if (tee := shutil.which("tee")) is None:
        return
    handlers = [handler for handler in logging.getLogger(LOGGER).handlers if isinstance(handler, ConsoleHandler)]
    sys.stdout, console = _copied(sys.stdout, 1, log, tee)
    sys.stderr, _ = _copied(sys.stderr, 2, log, tee)
    for handler in handlers:
        handler.setStream(console)


def _copied(stream: TextIO, number: int, log: Path, tee: str) -> tuple[TextIO, TextIO]:
    """Let a process copy what goes to a file descriptor. Returns a stream to both places, and one to the console."""
    stream.flush()
    direct = queued(stream)
    with shielding_children():
        child = subprocess.Popen([tee, "-a", str(log)], stdin=subprocess.PIPE, stdout=direct)
    assert child.stdin is not None
    os.dup2(child.stdin.fileno(), number)
    child.stdin.close()
    return cast(TextIO, _Both(direct, log.open("a", buffering=1, errors="backslashreplace"))), direct


class _Both:
    """Text stream of the console with a copy of its lines in a file. Progress bars are not copied."""

    def __init__(self, console: TextIO, copy: TextIO) -> None:
        self._console = console
        self._copy = copy

    def write(self, text: str) -> int:
        if "\x1b" not in text and "\r" not in text:
            with suppress(OSError):  # the disk may be full
                self._copy.write(text)
        return self._console.write(text)

    def flush(self) -> None:
        self._console.flush()

    def __getattr__(self, name: str) -> object:
        return getattr(self._console, name)
