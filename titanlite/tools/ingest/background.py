"""Preparation of text in a process of its own, while training reads what is there (`data.prepare = "background"`)."""

import atexit
import json
import logging
import multiprocessing
import os
import threading
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from titanlite.data.tokens import GROWING, INDEX, ArrayFile, TokenStore
from titanlite.runtime.errors import RunError, UserError
from titanlite.runtime.files import read_small, write_atomically
from titanlite.runtime.signals import end_with_parent, shielding_children

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.2
REPORT_SECONDS = 20.0
"""Seconds of waiting before a reader names what it waits for, and between two such reports."""


def failure_of(folder: Path) -> Path:
    """Return the file with the reason why the preparation of a folder has ended."""
    return folder.with_name(f".{folder.name}.failed")


class GrowingStore(TokenStore):
    """Tokens of a folder that is complete, or that another process is writing beside its place.

    Args:
        folder: place of the complete folder.
        key: of all that the tokens depend on, as in the index. It is the fingerprint, before and after the end.
        may_mask: whether tokens may be left out of the loss.

    Raises:
        RunError: the preparation has failed.
    """

    def __init__(self, folder: Path, *, key: str, may_mask: bool) -> None:
        self.place = folder
        self.key = key
        self.may_mask = may_mask
        self.is_complete = False
        self.index = {"shards": []}
        super().__init__(folder)

    def _read_folder(self, folder: Path) -> None:
        self.wait_for(1)

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(type(self), key=self.key, may_mask=self.may_mask), (self.place,)

    @property
    def fingerprint(self) -> str:
        return f"key-{self.key}"

    @property
    def has_mask(self) -> bool:
        return self.may_mask

    def wait_for(self, tokens: int) -> None:
        """Wait until there are as many tokens, or all.

        Raises:
            RunError: the preparation has failed.
        """
        began = reported = time.monotonic()
        while not self.is_complete and (not self.index["shards"] or len(self) < tokens):
            if not self._refresh():
                if (failed := failure_of(self.place)).exists():
                    raise RunError(f"the preparation of {self.place} has failed: {read_small(failed).decode()}")
                time.sleep(POLL_SECONDS)
            if (now := time.monotonic()) > reported + REPORT_SECONDS:
                has = len(self) if self.index["shards"] else 0
                logger.warning(
                    f"data.prepare: waiting since {now - began:.0f} s for {self.place}, which has {has:,} tokens, and "
                    f"training needs {tokens:,} now"
                )
                reported = now

    def _refresh(self) -> bool:
        """Read what is there now; return whether it is more than before."""
        if (self.place / INDEX).is_file():
            super()._read_folder(self.place)
            self.is_complete = True
        elif (found := self._newest()) and (not self.index["shards"] or found[1] > len(self)):
            self.folder, _, self.index = found
            self._read_index()
        else:
            return False
        self._open.cache_clear()
        return True

    def _newest(self) -> tuple[Path, int, dict[str, Any]] | None:
        """Return (folder, tokens, index) of the host that has written most."""
        found = []
        for path in self.place.parent.glob(f".{self.place.name}.partial-*/{GROWING}"):
            try:
                index = json.loads(read_small(path))
                if index["key"] == self.key:
                    found.append((path.parent, sum(shard["tokens"] for shard in index["shards"]), index))
            except (OSError, ValueError, KeyError, TypeError):
                continue  # the folder was renamed just now
        return max(found, key=lambda candidate: candidate[1], default=None)

    def open_file(self, shard: int, kind: str) -> ArrayFile:
        try:
            return super().open_file(shard, kind)
        except UserError:  # the folder has been renamed to its final place
            self._refresh()
            return super().open_file(shard, kind)


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
        atexit.register(process.kill)  # at its own end, Python would wait for the process
        process.join()
        if (folder / INDEX).is_file():
            logger.info(f"data     {folder} is prepared")
            return
        if failed.exists():
            logger.error(f"the preparation of {folder} has failed: {read_small(failed).decode()}")
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
