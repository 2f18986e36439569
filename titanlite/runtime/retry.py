"""Retries of calls to object stores, which fail now and then."""

import logging
import random
import sys
import time
from collections.abc import Callable
from threading import Event
from typing import Any, TypeVar

from titanlite.runtime.errors import UserError

logger = logging.getLogger(__name__)

T = TypeVar("T")
PATIENCE = 30.0
"""Seconds after which a call is given up."""
LOUD_AFTER = 0.3
"""Seconds of a pause from which a failure is reported: shorter ones are hiccups."""
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
    stop: Event | None = None,
) -> T:
    """Return `call()`, which is repeated while it fails. Pauses double; a random factor keeps ranks apart.

    Args:
        name: file or place, for error messages.
        patience: seconds after which the call is given up.
        counts_calls: whether the time of the calls themselves counts. A large upload may take longer than `patience`,
            so there the pauses alone count.
        stop: when set, gives up at the next failure.

    Raises:
        AccessDenied: credentials are missing or wrong. It is not retried.
        FileNotFoundError, FileExistsError, NotADirectoryError, IsADirectoryError: at once, with the name.
        RetriesExhausted: every attempt failed.
    """
    stop = stop or Event()
    started, paused, pause = time.monotonic(), 0.0, 0.05
    while True:
        try:
            return call()
        except PERMANENT as error:
            raise type(error)(f"{name}: {error}") from error
        except Exception as error:  # each object store has its own classes of errors
            if _is_denied(error):
                raise AccessDenied(f"{name}: access denied: {error}. {CREDENTIALS}") from error
            elapsed = time.monotonic() - started
            if stop.is_set() or (elapsed if counts_calls else paused) + pause > patience:
                raise RetriesExhausted(f"{name}: {error!r}, for {elapsed:.0f} s") from error
            if pause > LOUD_AFTER:
                logger.warning(f"{name}: {error!r}; trying again")
        stop.wait(pause * random.Random().uniform(0.5, 1.5))
        paused, pause = paused + pause, 2 * pause


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
