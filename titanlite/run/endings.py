"""End of a process of the command: its exit code, and what it prints of an error. Imports no torch."""

import logging
import os
import platform
import select
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn

from titanlite.run.proc import kill_stopped_descendants
from titanlite.runtime.errors import RunError, UserError, printable
from titanlite.runtime.files import lock_file
from titanlite.runtime.signals import STOPPED, kill_workers, remove_sockets

LAST_LINES = 8
"""Lines of a traceback on the console: four frames."""
MOST_CHARACTERS = 300
FAILED = 1
"""Exit code of an unexpected failure. A restart may follow it; after all other codes it would end the same way."""
ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
"""Environment variable of torchrun: ATTEMPT/LOCAL_RANK/error.json. The first process of a machine that fails leaves its
exit code in ATTEMPT/code."""
LAST_SECONDS = 2.0
"""Longest time that a process which ends at once waits for its log file and the console."""
HANG = "hang: "
"""First word of the note with which the watchdog's report is attached to an exception."""


def report_errors(command: Callable[[], None]) -> int:
    """Run a command and return its exit code.

    The user's mistakes become lines on standard error, errors of a disk one line with rank and path. Other exceptions
    become a few lines and a traceback in the log of this rank; without a log, the console gets the traceback.
    If the reader of the output has ended (`| head`), nothing is printed.
    """
    try:
        command()
    except (UserError, RunError) as error:
        with _first_to_fail(error.exit_code, str(error)) as reports:
            if reports and error.exit_code != STOPPED:  # rank 0 reports a stop of the run
                print_errors(str(error).splitlines())
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    except BaseException as error:
        if isinstance(error, SystemExit) and error.code in (None, 0):
            return 0  # --help, --version
        if _is_closed_output(error):
            return 1
        text = describe(error, os.environ, log=_log(logging.ERROR, "failed", error))
        _leave_for_torchrun(error)
        with _first_to_fail(1, text) as reports:
            if reports:
                print(text, file=sys.stderr, flush=True)
        return 1
    return 0


def describe(error: BaseException, environ: Mapping[str, str], *, log: Path | None) -> str:
    """Return lines about an exception: rank, host, step and phase, its last frames, and the place of the whole.

    An error of a disk is one line.

    Args:
        log: file that has the whole traceback. Without it, the lines have it.
    """
    notes = getattr(error, "__notes__", [])
    error.__notes__ = []  # the first line shows the notes
    lines = "".join(traceback.format_exception(error)).splitlines()
    cause = traceback.format_exception_only(error)[-1].strip().splitlines()[0]
    error.__notes__ = notes
    if isinstance(error, OSError):  # an error of a disk: its path says more than frames
        at = "".join(f" at {note}" for note in notes)
        whole = "" if log is None else f" (the whole traceback: {log})"
        place = f"rank {environ.get('RANK', 0)} on {platform.node()} failed{at}: " if "RANK" in environ or log else ""
        return f"error: {place}{' '.join(str(error).split())[:MOST_CHARACTERS]}{whole}"
    if log is None:
        where = f"[rank {environ['RANK']}] " if "RANK" in environ else ""
        return "\n".join(where + line for line in [*lines, *notes])
    hangs = [note for note in notes if note.startswith(HANG)]
    at = "".join(f" at {note}" for note in notes if note not in hangs)
    frames = [line for line in lines if line.startswith("  ") and set(line) - {" ", "^", "~"}]
    return "\n".join(
        [
            f"error: rank {environ.get('RANK', 0)} on {platform.node()} failed{at}: {cause[:MOST_CHARACTERS]}",
            *(f"  {hang}" for hang in hangs),
            *(line[:MOST_CHARACTERS] for line in frames[-LAST_LINES + len(hangs) :]),
            f"  the whole traceback: {log}",
        ]
    )


def _log(level: int, text: str, error: BaseException | None = None) -> Path | None:
    """Write to the log file of this process, an exception with its traceback; return its path, if there is one."""
    from titanlite.runtime.console import LOGGER, LogFileHandler

    about = (type(error), error, error.__traceback__) if error else None
    for handler in logging.getLogger(LOGGER).handlers:
        if isinstance(handler, LogFileHandler):
            handler.handle(logging.LogRecord(LOGGER, level, "", 0, text, (), about))
            return Path(handler.baseFilename)
    return None


def _leave_for_torchrun(error: BaseException) -> None:
    """Write an exception to the file that torchrun gives each worker, from which it names the first to fail."""
    if os.environ.get(ERROR_FILE) and isinstance(error, Exception):
        from torch.distributed.elastic.multiprocessing.errors import get_error_handler

        with suppress(Exception):
            get_error_handler().record_exception(error)


def _is_closed_output(error: BaseException) -> bool:
    """Return whether an exception is from writing to standard output after its reader has ended."""
    if isinstance(error, SystemExit):
        return isinstance(error.__context__, BrokenPipeError)  # rich turns the broken pipe into an exit
    if not isinstance(error, BrokenPipeError):
        return False
    poll = select.poll()  # the broken pipe may be a socket and not the output
    poll.register(sys.stdout.fileno(), 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


@contextmanager
def _first_to_fail(code: int, reason: str) -> Iterator[bool]:
    """Write the exit code to a file for run_train.sh, because torchrun turns every code into 1.

    The other processes of the machine wait until this context ends. torchrun ends all of them as soon as one has
    ended, and the first to fail must have written its code and its error by then.

    Yields:
        whether this process reports its error. Of the processes of a machine, the first to fail does: the others
        fail for the same reason. Without torchrun, each reports.
    """
    path = _exit_file()
    if path is None:
        yield True
        return
    with lock_file(path.with_name(f"{path.name}.lock")):
        is_first = not path.exists()
        if is_first:
            path.write_text(f"{code}\n{reason.partition(chr(10))[0]}")
        yield is_first


def read_end(exit_file: Path) -> tuple[int | None, str]:
    """Return (exit code, reason) of the first process of a machine that failed, and which processes were killed.

    The code is None if no process has left one.
    """
    killed = [f"{mark.name} was killed" for mark, is_alive in _marks(exit_file) if not is_alive]
    try:
        code, _, reason = exit_file.read_text().partition("\n")
    except FileNotFoundError:
        return None, "; ".join(killed) or "a process ended without an error of its own"
    return int(code), "; ".join([*killed, reason.removeprefix("error: ")])


@contextmanager
def leaving_mark() -> Iterator[None]:
    """Keep a file rank-N beside the exit file. It stays behind if this process is killed."""
    if mark := _own_mark():
        mark.write_text(str(os.getpid()))
    try:
        yield
    finally:
        if mark:
            mark.unlink(missing_ok=True)


def _exit_file() -> Path | None:
    name = os.environ.get(ERROR_FILE)
    return Path(name).parent.with_name("code") if name else None


def _own_mark() -> Path | None:
    path = _exit_file()
    return path.with_name(f"rank-{os.environ.get('RANK', '0')}") if path else None


def _marks(exit_file: Path) -> Iterator[tuple[Path, bool]]:
    """Yield the marks of processes that have not ended by themselves, and whether each process is alive."""
    for mark in sorted(exit_file.parent.glob("rank-*")):
        try:
            os.kill(int(mark.read_text()), 0)
        except ProcessLookupError:
            yield mark, False
        except (OSError, ValueError):  # the process ends or begins just now
            continue
        else:
            yield mark, True


def print_errors(lines: Iterable[object]) -> None:
    for line in lines:
        print(f"error: {printable(str(line))}", file=sys.stderr, flush=True)


def another_has_ended() -> bool:
    """Return whether another process of this machine has failed or was killed. torchrun ends this one then."""
    path = _exit_file()
    return path is not None and (path.exists() or not all(is_alive for _, is_alive in _marks(path)))


def _say(message: str) -> None:
    """Write a line to the log file of this process, then to the console."""
    _log(logging.WARNING, message)
    print(message, file=sys.stderr, flush=True)


def end_now(message: str, code: int) -> NoReturn:
    """End this process at once, on a signal."""
    with _first_to_fail(code, message) as reports:
        if reports and message:
            last_words = threading.Thread(target=_say, args=(message,), daemon=True)
            last_words.start()
            last_words.join(LAST_SECONDS)
        if mark := _own_mark():
            mark.unlink(missing_ok=True)
        kill_stopped_descendants()
        kill_workers()
        remove_sockets()
        os._exit(code)
