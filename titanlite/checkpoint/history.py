"""What continues a run: the one rule by which loading, retention and rollbacks choose checkpoints and local copies.

A shared checkpoint continues the run that has saved it. A folder of checkpoints belongs to one run, which claims it for
as long as it trains. A local copy continues the run only while its `History` is that of the run. Imports no torch.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from titanlite.checkpoint import manifest as manifests
from titanlite.checkpoint.manifest import DAMAGED, Manifest, folder_name
from titanlite.runtime.errors import DamagedCheckpoint, UserError
from titanlite.runtime.files import NO_LOCKS, FileLocked
from titanlite.schema import Checkpoint
from titanlite.storage.storage import MANIFEST, Storage, open_storage

logger = logging.getLogger(__name__)

CLAIM_TIMEOUT = 15.0
"""Seconds to wait for another run in the same folder: a killed job may need them to end."""


@dataclass(frozen=True)
class History:
    """What a local copy continues (history.json)."""

    step: int
    """Of the newest shared checkpoint; 0 if there was none."""
    saved_at: float
    """Its `Manifest.saved_at`."""
    saving: int | None
    """Step of the save that was under way."""
    start: int
    """Number of starts of the run before the one that made the copy."""


@dataclass
class RunHistory:
    """What this run went through. A rollback changes it."""

    storage: Storage
    """Of its shared checkpoints, with the id of the run."""
    starts: Sequence[int | None]
    """Steps at which the starts resumed that are over; None: it is not known."""
    load_step: int | None
    """checkpoint.load_step: the branch that this start continues."""
    has_saved: bool
    """The run has saved checkpoints before."""

    def __post_init__(self) -> None:
        self.start = len(self.starts)
        """Number of this start."""

    def go_back(self, *, has_saved: bool) -> None:
        """Let the local copies of this start count, as those of starts that are over do."""
        self.starts, self.has_saved = [*self.starts[: self.start], None], has_saved

    def continues(self, copy: Manifest, history: History) -> bool:
        """Return whether a local copy continues this run: its branch, and what it went through. Settings aside."""
        left_behind = [step for step in self.starts[history.start + 1 :] if step is not None and step < copy.step]
        return (
            history.start < len(self.starts)
            and not left_behind
            and self.load_step in (None, copy.load_step)
            and self._has_shared(history)
        )

    def _has_shared(self, history: History) -> bool:
        """Return whether the shared checkpoints at the time of a local copy are those of this storage."""
        listing = self.storage.list()
        steps = manifests.committed_steps(listing)
        folder = folder_name(history.step)
        files = listing.get(folder, {})
        if not steps and not history.step:
            return not self.has_saved
        if history.saving in steps or f"{MANIFEST}.{DAMAGED}" in files:
            return True
        if MANIFEST not in files:
            return False
        try:
            return manifests.read_manifest(self.storage, folder).saved_at == history.saved_at
        except DamagedCheckpoint:  # it is there, and does not say otherwise
            return True


def claim(config: Checkpoint, run: Path, run_id: str) -> IO[str] | None:
    """Claim the folder of a run's checkpoints, on rank 0, before anything is read or changed in it.

    Args:
        run: folder of the run.
        run_id: its id.

    Returns:
        what holds the claim until it is closed, or the process ends; None if nothing needs to.

    Raises:
        UserError: another run trains with this folder, or its newest checkpoint is of another run.
    """
    if not config.enable:
        return None
    storage, hold = open_storage(config.folder or str(run / "checkpoints"), owner=run_id), None
    try:
        if config.folder is not None:  # the lock of the run's folder protects the one in it
            hold = storage.claim(CLAIM_TIMEOUT)
    except FileLocked as error:
        raise UserError(
            f"checkpoint.folder: {storage.url} is in use by {error.holder}. Give each run a folder of its own: leave "
            "checkpoint.folder out, or name another. If no such job runs, delete that file"
            if "://" in storage.url
            else f"checkpoint.folder: {storage.url} is in use by {error.holder}. Stop that job, or give each run a "
            "folder of its own: leave checkpoint.folder out, or name another"
        ) from None
    except OSError as error:
        if "://" in storage.url:  # the store does not answer
            raise
        if error.errno not in NO_LOCKS:
            raise UserError(f"checkpoint.folder: {storage.url}: {error.strerror or error}") from None
        logger.warning(f"{storage.url} is on a file system without locks: let no other run save in it")
    listing = storage.list()
    saved = sorted((step, folder) for folder in listing if (step := manifests.step_of(folder)) is not None)
    found = (storage.run_of(folder, listing[folder]) for _, folder in reversed(saved))
    if (other := next(filter(None, found), run_id)) != run_id:
        raise UserError(
            f"checkpoint.folder: {storage.url} has checkpoints of another run (id {other}), which stay as they are. "
            f'To begin with its weights, set checkpoint.initial_load_path = "{storage.url}" and another '
            'checkpoint.folder; with checkpoint.initial_load = ["model", "optimizer", "progress"] as well, training '
            "continues at its step"
        )
    return hold
