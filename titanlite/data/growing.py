"""Tokens that another process is still writing: readers wait for those that are not there yet.

Which tokens there will be depends on the text alone, so a run reads the same ones as if all had been prepared before.
"""

import json
import logging
import time
from functools import partial
from pathlib import Path
from typing import Any

from titanlite.data.tokens import GROWING, INDEX, RecordFile, TokenStore
from titanlite.runtime.errors import RunError, UserError

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
                    raise RunError(f"the preparation of {self.place} has failed: {failed.read_text()}")
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
                index = json.loads(path.read_text())
                if index["key"] == self.key:
                    found.append((path.parent, sum(shard["tokens"] for shard in index["shards"]), index))
            except (OSError, ValueError, KeyError):
                continue  # it was renamed just now
        return max(found, key=lambda it: it[1], default=None)

    def _open_file(self, shard: int, kind: str) -> RecordFile:
        try:
            return super()._open_file(shard, kind)
        except UserError:  # the folder has its place now
            self._refresh()
            return super()._open_file(shard, kind)
