"""Preparation of text in a process of its own, while training reads what is there (`data.prepare = "background"`)."""

import atexit
import logging
import multiprocessing
import os
import threading
import traceback
from collections.abc import Callable
from pathlib import Path

from titanlite.data.growing import GrowingStore, failure_of
from titanlite.data.tokens import INDEX
from titanlite.runtime.errors import RunError, UserError
from titanlite.runtime.files import write_atomically
from titanlite.runtime.signals import end_with_parent, shielding_children

logger = logging.getLogger(__name__)

NICE = 10
"""Nice value of the process: training comes first."""
MOST_STARTS = 4
"""Times that the process may be killed."""


def prepare_in_background(work: Callable[[], object], folder: Path, *, key: str, may_mask: bool) -> GrowingStore:
    """Begin to prepare a folder unless it is there, and return what there will be, once there is something.

    Args:
        work: makes the folder. One process of a host calls it; it resumes what an earlier one has left.

    Other arguments: see `GrowingStore`.

    Raises:
        RunError: it has failed.
    """
    if not (folder / INDEX).is_file() and int(os.environ.get("LOCAL_RANK", "0")) == 0:
        folder.parent.mkdir(parents=True, exist_ok=True)
        failure_of(folder).unlink(missing_ok=True)
        threading.Thread(target=_supervise, args=(work, folder), name="data prepare", daemon=True).start()
    return GrowingStore(folder, key=key, may_mask=may_mask)


def _supervise(work: Callable[[], object], folder: Path) -> None:
    """Start the process again where it was killed. The thread lives as long as this process."""
    failed = failure_of(folder)
    for _ in range(MOST_STARTS):
        with shielding_children():
            process = multiprocessing.get_context("spawn").Process(target=_run, args=(work, failed))
            process.start()
        atexit.register(process.kill)  # otherwise Python would wait for its end
        process.join()
        if (folder / INDEX).is_file():
            logger.info(f"data     {folder} is prepared")
            return
        if failed.exists():
            logger.error(f"the preparation of {folder} has failed: {failed.read_text()}")
            return
        logger.warning(f"the process that prepares {folder} was killed (exit code {process.exitcode}); it resumes")
    write_atomically(failed, f"its process was killed {MOST_STARTS} times, for want of memory most likely")


def _run(work: Callable[[], object], failed: Path) -> None:
    end_with_parent()
    os.nice(NICE)
    with open(os.devnull, "w") as nowhere:  # no progress bar among training's lines
        for stream in (1, 2):
            os.dup2(nowhere.fileno(), stream)
    try:
        work()
    except (UserError, RunError) as error:
        write_atomically(failed, str(error))
    except Exception:
        write_atomically(failed, traceback.format_exc())
