"""Checkpoints on a disk of each node, until they are copied to the place that all nodes share.

A save is a folder <local_folder>/<run id>/step-00000100-1f2e3d4c on every node, with the files of that node's ranks.
The last part of its name belongs to this save alone, so that files of two attempts at one step never mix. The manifest,
on the node of rank 0, is written last. From then on the save is complete, and survives the end of its processes. It
counts as a checkpoint once it is copied and committed in the shared place.
"""

import logging
import re
import shutil
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist

from titanlite.checkpoint import manifest as manifests
from titanlite.checkpoint.dcp_write import ChecksumStream
from titanlite.checkpoint.manifest import CHUNK, FileRecord, Manifest, folder_name, step_of
from titanlite.runtime.errors import DamagedCheckpoint, RunError, UserError
from titanlite.runtime.files import checked_name
from titanlite.runtime.ranks import on_all, on_rank_0
from titanlite.storage.retry import retry
from titanlite.storage.storage import MANIFEST, LocalStorage, Storage, sync_folder

logger = logging.getLogger(__name__)

T = TypeVar("T")
NAME = re.compile(r"(step-\d{8,})-[0-9a-f]{8}")
"""Name of a save: that of its checkpoint, and a part of its own."""


@dataclass(frozen=True)
class LocalSave:
    """Files of a save on one node."""

    sizes: dict[str, int]
    manifest: bytes | None
    """Text of the manifest, on the node of rank 0."""


@dataclass(frozen=True)
class _Copy:
    """Copy of a complete save that a killed start has left."""

    name: str
    manifest: Manifest
    text: bytes
    ranks: dict[str, int]
    """The rank that copies each file: the lowest one that has it on its disk."""


class LocalFolder:
    """Folder on a disk of this node, for saves of one run.

    Args:
        folder: `checkpoint.local_folder`, resolved on this node.
    """

    def __init__(self, folder: str, run_id: str) -> None:
        self.storage = LocalStorage(str(Path(folder, checked_name(run_id))), run_id)

    def make(self, name: str) -> None:
        (self.storage.root / name).mkdir(parents=True, exist_ok=True)

    def sync(self, name: str) -> None:
        """Make the names of files durable. What is in the files is durable already."""
        sync_folder(self.storage.root / name)

    def delete(self, name: str) -> None:
        shutil.rmtree(self.storage.root / name, ignore_errors=True)

    def clear(self) -> None:
        shutil.rmtree(self.storage.root, ignore_errors=True)

    def saves(self) -> dict[str, LocalSave]:
        """Return the saves on this node by name, complete or not."""
        listing = {name: sizes for name, sizes in self.storage.list().items() if NAME.fullmatch(name)}
        return {
            name: LocalSave(sizes, self.storage.read(f"{name}/{MANIFEST}") if MANIFEST in sizes else None)
            for name, sizes in listing.items()
        }


def new_name(folder: str) -> str:
    """Return the name of a save of a checkpoint."""
    return f"{folder}-{uuid.uuid4().hex[:8]}"


def copy_and_commit(
    local: LocalFolder,
    storage: Storage,
    name: str,
    files: dict[str, FileRecord],
    *,
    group: dist.ProcessGroup,
    commit: Callable[[str], T],
) -> T:
    """Copy the files of a save to the shared place, each rank its own, and commit them there on rank 0.

    Args:
        files: those that this rank copies.
        commit: called on rank 0 with the folder that holds all files. Its result is returned on every rank.

    Raises:
        DamagedCheckpoint: a file on a local disk has changed since it was written. On every rank, as others.
        RunError: a file cannot be copied, for as long as it was tried.
    """
    folder = _checkpoint_of(name)
    try:
        target = on_rank_0(group, lambda: storage.begin(folder))

        def copy() -> None:
            for file, record in files.items():
                _copy_file(local.storage, f"{name}/{file}", storage, f"{target}/{file}", record)

        return on_all(group, copy, lambda _: commit(target))
    except Exception:
        if dist.get_rank(group) == 0:
            _discard(storage, folder)
        raise


def check_complete(storage: Storage, folder: str, files: dict[str, FileRecord]) -> None:
    """Check that all files of a checkpoint are there before it is committed.

    Raises:
        OSError: a file is missing or incomplete.
    """
    sizes = storage.list().get(folder, {})
    for name, record in files.items():
        if sizes.get(name) != record.size:
            problem = "is missing" if name not in sizes else f"has {sizes[name]} bytes instead of {record.size}"
            raise OSError(
                f"{storage.url_of(f'{folder}/{name}')} {problem}. All nodes must share the folder of checkpoints"
            )


def recover(local: LocalFolder, storage: Storage, *, group: dist.ProcessGroup) -> None:
    """Copy and commit the complete saves that a killed start of this run has left, and delete everything else.

    Ranks may be on other nodes than before: every file is copied by a rank that has it on its disk.

    Raises:
        RunError: a save cannot be copied. It stays where it is, for the next start.
    """
    for copy in on_all(group, local.saves, lambda of_ranks: _plan(storage, of_ranks)):
        step, rank = copy.manifest.step, dist.get_rank(group)
        files = {file: record for file, record in copy.manifest.files.items() if copy.ranks[file] == rank}

        def commit(target: str, copy: _Copy = copy) -> None:
            check_complete(storage, target, copy.manifest.files)
            storage.publish(folder_name(copy.manifest.step), copy.text)

        try:
            copy_and_commit(local, storage, copy.name, files, group=group, commit=commit)
        except DamagedCheckpoint as damage:
            _report_dropped(copy.name, str(damage), rank=rank)
        except RunError as error:
            raise RunError(f"the checkpoint of step {step} on the nodes' disks could not be copied: {error}") from error
        else:
            if rank == 0:
                logger.info(f"copied the checkpoint of step {step} from the nodes' disks, where a start had left it")
    on_all(group, local.clear)


def _plan(storage: Storage, of_ranks: list[dict[str, LocalSave]]) -> list[_Copy]:
    """Choose the saves to copy, oldest first; report the others. Runs on rank 0."""
    steps = manifests.committed_steps(storage.list())
    newest = manifests.read_newest(storage, steps)
    copies = []
    names = {name for saves in of_ranks for name in saves}
    for name in sorted(names, key=lambda name: (len(name), name)):  # by step
        found = [(rank, saves[name]) for rank, saves in enumerate(of_ranks) if name in saves]
        try:
            copy = _complete(name, found, run_id=storage.owner)
            if copy.manifest.step in steps:
                continue  # it was committed, and not deleted yet
            if newest and (copy.manifest.step < newest.step or copy.manifest.saved_at < newest.saved_at):
                raise ValueError(f"the run has continued elsewhere since, to step {newest.step}")
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            _report_dropped(name, str(error), rank=0)
        else:
            copies.append(copy)
    return copies


def _complete(name: str, found: list[tuple[int, LocalSave]], *, run_id: str) -> _Copy:
    """Return the copy of a save that is complete.

    Args:
        found: the ranks that have some of it, and what they have.

    Raises:
        ValueError: it is not complete, or is not of this run.
    """
    text = next((save.manifest for _, save in found if save.manifest is not None), None)
    if text is None:
        raise ValueError("it is not complete")
    try:
        manifest = Manifest.from_json(text)
    except UserError as error:
        raise ValueError(f"its manifest {error}") from None
    if manifest.run_id != run_id or manifest.step != step_of(_checkpoint_of(name)):
        raise ValueError(f"its manifest is of step {manifest.step} of the run {manifest.run_id}")
    ranks: dict[str, int] = {}
    for rank, save in reversed(found):
        ranks |= {file: rank for file, record in manifest.files.items() if save.sizes.get(file) == record.size}
    if missing := len(manifest.files) - len(ranks):
        raise ValueError(f"{missing} of its {len(manifest.files)} files are on no node of this start")
    return _Copy(name, manifest, text, ranks)


def _report_dropped(name: str, reason: str, *, rank: int) -> None:
    if rank == 0:
        logger.warning(f"checkpoint.local_folder: {name}, which was not copied yet, is deleted: {reason}")


def _copy_file(source: LocalStorage, name: str, storage: Storage, target: str, record: FileRecord) -> None:
    """Copy a file, and compare what was read with its size and checksum. A copy that fails is repeated.

    Raises:
        DamagedCheckpoint: the file has changed since it was written.
    """

    def copy() -> FileRecord:
        with storage.create(target) as file:
            stream = ChecksumStream(file)
            while stream.written.size < record.size:
                data = source.read(name, stream.written.size, min(CHUNK, record.size - stream.written.size))
                if not data:
                    break
                stream.write(data)
        return stream.written.record()

    if retry(copy, name=storage.url_of(target), patience=storage.PATIENCE) != record:
        raise DamagedCheckpoint(f"{source.url_of(name)} has changed since it was written")


def _checkpoint_of(name: str) -> str:
    """Return the name of the checkpoint of a save."""
    match = NAME.fullmatch(name)
    assert match
    return match[1]


def _discard(storage: Storage, folder: str) -> None:
    try:
        storage.discard(folder)
    except Exception as error:
        logger.warning(f"what was copied of {folder} could not be deleted: {error}")
