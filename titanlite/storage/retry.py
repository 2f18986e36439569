"""Retries of calls to object stores, which fail now and then."""

import logging
import random
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from math import inf
from threading import Event, Thread, current_thread
from typing import Any, TypeVar

from titanlite.runtime.errors import UserError

logger = logging.getLogger(__name__)

T = TypeVar("T")
PATIENCE = 30.0
"""Seconds after which a call is given up."""
LOUD_AFTER = 0.3
"""Seconds of a pause from which a failure is reported: shorter ones are hiccups. So is one after a call that took as
long."""
LONGEST_PAUSE = 5.0
COUNTED_SHARE = 0.1
"""Share of the patience that each call counts at most: 3 s of 30."""
QUIET = 5.0
"""Seconds without an answer after which a call that has a time limit is reported."""
PERMANENT = (FileNotFoundError, FileExistsError, NotADirectoryError, IsADirectoryError)
CREDENTIALS = "Check the credentials (for S3: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE)"


class AccessDenied(UserError):
    """An object store refuses access: credentials are missing, wrong, or not allowed to do this."""


class RetriesExhausted(OSError):
    """A call has failed for as long as it was retried."""


def retry(
    call: Callable[[], T],
    *,
    name: str,
    patience: float = PATIENCE,
    counts_calls: bool = False,
    longest: float = inf,
    stop: Event | None = None,
) -> T:
    """Return `call()`, which is repeated while it fails. Pauses double; a random factor keeps ranks apart.

    Args:
        name: file or place, for error messages.
        patience: seconds after which the call is given up. A large upload may take longer, so each call counts with a
            tenth of them at most, unless it ends by a timeout of its own.
        counts_calls: whether the whole time of a call that fails counts. One that succeeds may take as long as it does.
        longest: seconds after which the call is given up, however long each took. One that has not returned runs in a
            thread, and is left to itself.
        stop: when set, gives up at the next failure.

    Raises:
        AccessDenied: credentials are missing or wrong. It is not retried.
        FileNotFoundError, FileExistsError, NotADirectoryError, IsADirectoryError: at once, with the name.
        RetriesExhausted: every attempt failed.
    """
    stop = stop or Event()
    started, counted, pause = time.monotonic(), 0.0, 0.05
    failure = ""
    while True:
        began = time.monotonic()
        left = longest - (began - started)
        if failure and left <= 0:  # a pause took longer than it should
            raise RetriesExhausted(failure)
        try:
            return call() if longest == inf else _within(call, left, name)
        except RetriesExhausted:
            raise
        except PERMANENT as error:
            raise type(error)(f"{name}: {error}") from error
        except Exception as error:  # each object store has its own classes of errors
            if _is_denied(error):
                raise AccessDenied(f"{name}: access denied: {error}. {CREDENTIALS}") from error
            ended = time.monotonic()
            is_silent = "Timeout" in type(error).__name__  # of the library, after its own retries
            counted += ended - began if counts_calls or is_silent else min(ended - began, COUNTED_SHARE * patience)
            failure = f"{name}: {error!r}, for {ended - started:.0f} s"
            if stop.is_set() or counted + pause > patience or ended - started + pause > longest:
                raise RetriesExhausted(failure) from error
            if max(pause, ended - began) > LOUD_AFTER:
                logger.warning(f"{name}: {error!r}; trying again")
        stop.wait(pause * random.Random().uniform(0.5, 1.5))
        counted, pause = counted + pause, min(2 * pause, LONGEST_PAUSE)


def _within(call: Callable[[], T], seconds: float, name: str) -> T:
    """Return `call()`, if it returns within some seconds: libraries have retries of their own, and may never return."""
    answer: Future[T] = Future()

    def work() -> None:
        try:
            answer.set_result(call())
        except BaseException as error:
            answer.set_exception(error)

    Thread(target=work, name=f"{current_thread().name} call", daemon=True).start()
    wait([answer], min(QUIET, seconds))
    if not answer.done() and seconds > QUIET:
        logger.warning(f"{name}: no answer for {QUIET:.0f} s")
        wait([answer], seconds - QUIET)
    if not answer.done():
        raise RetriesExhausted(f"{name}: no answer for {seconds:.0f} s")
    return answer.result()


def _is_denied(error: Exception) -> bool:
    """Return whether credentials are the reason, so that another attempt cannot help."""
    if isinstance(error, PermissionError):  # fsspec's error for HTTP 401 and 403
        return True
    botocore: Any = sys.modules.get("botocore.exceptions")  # loaded by whoever raised its errors
    if botocore is None:
        return False
    if isinstance(error, botocore.ClientError):
        response: dict[str, Any] = vars(error)["response"]
        return response.get("ResponseMetadata", {}).get("HTTPStatusCode") in (401, 403)
    return isinstance(
        error,
        botocore.NoCredentialsError | botocore.PartialCredentialsError | botocore.ProfileNotFound,
    )
