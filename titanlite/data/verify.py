"""Check of the tokens and packing plans of a run beside training: every checksum once, by one process of those that see
the files.

A start checks the sizes of files only: to read terabytes would take hours. This thread reads them at a low priority and
a bounded speed, and a file that has changed ends the run. What was verified is noted beside the folder, so that the
next start does not read it again.
"""

import hashlib
import json
import logging
import os
import sys
import threading
import time
from collections.abc import Generator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from titanlite.batch import Batch
from titanlite.data.packing import PLAN, BestFit, PackingPlan
from titanlite.data.samples import Source
from titanlite.data.sources import store_of
from titanlite.data.tokens import INDEX, TokenStore
from titanlite.runtime.errors import UserError
from titanlite.runtime.files import FileLocked, lock_file, quarantine_path, read_small, write_atomically
from titanlite.runtime.process_group import Ranks

logger = logging.getLogger(__name__)

NICE = 10
"""Nice value of the thread: training comes first."""
CHUNK = 1 << 22
BYTES_PER_SECOND = 1 << 27
"""Speed of reading: a terabyte in about two hours."""
VALID_SECONDS = 7 * 86400.0
"""Time for which a verified folder is not read again, if sizes and times of its files are the same."""
LARGE = 1 << 28
"""Size in bytes from which a folder is noted, logged and read by one process only. Smaller ones are read at every
start, without a word."""


Checked = TokenStore | PackingPlan


class TokenCheck:
    """Check of token folders, and of packing plans, in a thread, which ends with the process.

    Args:
        cache_folder: folders in it are titanlite's own: one that is damaged is renamed, so that the next start makes
            it again.
    """

    def __init__(self, stores: Sequence[Checked], cache_folder: Path) -> None:
        self.cache_folder = cache_folder
        self._stores = list({store.folder: store for store in stores}.values())
        self._stop = threading.Event()
        self._damaged: tuple[Checked, Path] | None = None
        self._thread = threading.Thread(target=self._run, name="token check", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the check, whether it is complete or not."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join()

    def wait(self) -> None:
        """Wait until all is read."""
        self._thread.join()

    def raise_if_damaged(self) -> None:
        """Raise what the thread has found, if anything.

        Raises:
            UserError: a file does not have its checksum. Every rank ends with this one.
        """
        if self._damaged is None:
            return
        store, path = self._damaged
        is_plan = isinstance(store, PackingPlan)
        if is_plan or store.folder.parent.resolve() == self.cache_folder.resolve():
            aside = quarantine_path(store.folder)
            store.folder.rename(aside)
            fix = f"The folder is now {aside.name}, and the next start makes it again"
        else:
            fix = f"Restore it, or prepare the text again (titanlite data prepare ... --out {store.folder})"
        key, index, what = ("data.packing", PLAN, "a plan") if is_plan else ("data.path", INDEX, "tokens")
        raise UserError(
            f"{key}: {path} does not have the checksum that {index} states: training has read {what} that changed "
            f"after being prepared. {fix}. checkpoint.load_step goes back to a step before that"
        )

    def _run(self) -> None:
        if sys.platform == "linux":  # other systems have priorities of processes only
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
        for store in self._stores:
            try:
                damaged = self._check(store)
            except (OSError, MemoryError) as error:  # if it matters, reading fails in training as well
                logger.warning(f"the checksums of {store.folder} could not be verified: {error}")
                continue
            if damaged is not None:
                self._damaged = store, damaged
                return

    def _check(self, store: Checked) -> Path | None:
        """Return the first file that has changed; None if there is none, or if another process checks them."""
        size = sum(size for _, size, _ in store.files())
        state = {path.name: [(about := path.stat()).st_size, about.st_mtime_ns] for path, _, _ in store.files()}
        if size < LARGE:
            return self._read(store)[0]
        name = f".{store.folder.name}-{store.fingerprint}.verified"
        notes = [store.folder.parent / name, self.cache_folder / name]
        if any(_is_verified(note, state) for note in notes):
            return None
        note = next((note for note in notes if os.access(note.parent, os.W_OK)), notes[-1])
        try:
            lock = _lock(note)
        except FileLocked:
            return None
        logger.info(f"verifying the checksums of {size / 2**30:,.1f} GiB of tokens beside training: {store.folder}")
        damaged, is_complete = self._read(store)
        if is_complete and damaged is None:
            logger.info(f"the checksums of {store.folder} are right")
            with suppress(OSError):  # a note that cannot be written costs the next start another reading
                write_atomically(note, json.dumps({"verified_at": time.time(), "files": state}))
        if lock is not None:
            lock.close()
        return damaged

    def _read(self, store: Checked) -> tuple[Path | None, bool]:
        """Return the first file that has changed, and whether the check was not stopped before its end."""
        for path, _, checksum in store.files():
            if (digest := self._digest(path)) is None:
                return None, False
            if digest != checksum:
                return path, True
        return None, True

    def _digest(self, path: Path) -> str | None:
        """Return the SHA-256 of a file; None if the check was stopped."""
        digest, done, started = hashlib.sha256(), 0, time.monotonic()
        with open(path, "rb", buffering=0) as file:
            while data := file.read(CHUNK):
                digest.update(data)
                if sys.platform == "linux":  # memory is for what training reads
                    os.posix_fadvise(file.fileno(), done, len(data), os.POSIX_FADV_DONTNEED)
                done += len(data)
                if self._stop.wait(max(0.0, started + done / BYTES_PER_SECOND - time.monotonic())):
                    return None
        return digest.hexdigest()


def while_checking(
    batches: Generator[Batch, None, None], sources: Sequence[Source], cache_folder: Path, ranks: Ranks
) -> Generator[Batch, None, None]:
    """Yield batches. From the first on, one process of a node verifies the checksums of the tokens of all sources, and
    of their packing plans.

    Raises:
        UserError: a file of tokens, or of a plan, has changed.
    """
    opened = [store for source in sources if (store := store_of(source)) is not None and store.is_complete]
    plans = [source.sequences.plan for source in sources if isinstance(source.sequences, BestFit)]
    checked = [*plans, *(part for store in opened for part in store.parts)] if ranks.local_rank == 0 else []
    check = TokenCheck(checked, cache_folder)
    check.start()
    try:
        for batch in batches:
            check.raise_if_damaged()
            yield batch
    finally:
        batches.close()
        check.stop()


def _is_verified(note: Path, state: dict[str, Any]) -> bool:
    """Return whether a note is young, and is about files of these sizes and times."""
    try:
        found = json.loads(read_small(note))
        return found["files"] == state and 0 <= time.time() - found["verified_at"] < VALID_SECONDS
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return False


def _lock(note: Path) -> IO[str] | None:
    """Lock the record of a check. Return None if the file system has no locks.

    Raises:
        FileLocked: another process has the lock, and reads the files.
    """
    try:
        return lock_file(note.with_name(f"{note.name}.lock"), timeout=0)
    except OSError:
        return None
