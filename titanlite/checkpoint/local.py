# pyright: reportUnknownMemberType=false
"""Copies of the newest states near the ranks: in the memory, or on a disk, of each machine and of its neighbour.

A copy has the form of a checkpoint, but a machine has the files of its own ranks only, and with `local_copies = 2`
those of the machine before it. Every machine has the manifest, which names all files with their checksums. At a start
the newest copy counts of which each file is whole on some machine. A rank that needs a file of another machine gets it
before it reads.
"""

import json
import logging
import os
import shutil
import stat
import uuid
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult

from titanlite.checkpoint import manifest as manifests
from titanlite.checkpoint.dcp_read import ShardReader
from titanlite.checkpoint.dcp_write import ShardWriter
from titanlite.checkpoint.history import History, RunHistory
from titanlite.checkpoint.manifest import (
    DAMAGED,
    KEPT_COPIES,
    Manifest,
    Progress,
    absolute,
    committed_steps,
    copies_name,
    folder_name,
)
from titanlite.checkpoint.resume import Candidate, RunSettings, load_checkpoint
from titanlite.checkpoint.save import Part, Saved, Saver, saved_of
from titanlite.run.timeouts import COPY_GROUP
from titanlite.runtime.errors import DamagedCheckpoint, RunError, UserError, printable
from titanlite.runtime.files import Room, memory_folder, read_small, room_in
from titanlite.runtime.ranks import gather, on_all, on_each, on_rank_0
from titanlite.state import State, TrainingState
from titanlite.storage.storage import LocalStorage

logger = logging.getLogger(__name__)

T = TypeVar("T")
HISTORY = "history.json"
SMALL = (manifests.METADATA, manifests.CHECKSUMS, manifests.CONFIG, HISTORY)
"""Files of a copy that every machine has, beside the manifest."""
PIECE = 1 << 24
"""Bytes that are sent at once."""
COPY_SECONDS = 600
"""Longest wait of a rank for another one that makes a copy."""
CLOSE_SECONDS = 60.0
"""Longest wait at the end of a run for a copy in flight."""
TOKEN = "machine"
PLACE = "of"
"""File beside the copies that names the folder of the run's checkpoints."""
LONGEST_PLACE = 2**16
"""Bytes of a path that is read at most."""


@dataclass(frozen=True)
class Copy:
    """A copy of which each file is whole on some machine."""

    manifest: Manifest
    owners: dict[str, list[str]]
    """Machines with a whole copy of each file, by its name."""

    @property
    def folder(self) -> str:
        return folder_name(self.manifest.step)


@dataclass(frozen=True)
class Machines:
    """Machines of a job: ranks that share a folder of copies are on the same one."""

    of_rank: Sequence[str]
    """Id of each rank's machine."""
    rank: int
    """This process's rank."""

    @property
    def own(self) -> str:
        return self.of_rank[self.rank]

    @property
    def count(self) -> int:
        return len({*self.of_rank})

    def ranks(self, machine: str) -> list[int]:
        return [rank for rank, other in enumerate(self.of_rank) if other == machine]

    @property
    def leads(self) -> bool:
        """Whether this rank is the first of its machine, which makes and deletes folders."""
        return self.ranks(self.own)[0] == self.rank

    @cached_property
    def neighbours(self) -> list[int]:
        """For each rank, the rank on the next machine that keeps a second copy of its file."""
        ranks = {machine: self.ranks(machine) for machine in dict.fromkeys(self.of_rank)}
        following = dict(zip(ranks, [*ranks][1:] + [*ranks][:1], strict=True))
        found = [0] * len(self.of_rank)
        for machine, own in ranks.items():
            there = ranks[following[machine]]
            for number, rank in enumerate(own):
                found[rank] = there[number % len(there)]
        return found


@dataclass(frozen=True)
class Transfer:
    """A file that one rank sends to another."""

    name: str
    size: int
    source: int
    target: int


class LocalCopies:
    """The local copies of a run. All ranks call each method together, but `wait_until_staged`.

    Copies of other runs are in other folders: `copies_name`.

    Args:
        shared: saver of the run's checkpoints.

    Raises (from the constructor):
        RunError, UserError: on every rank, if a folder cannot be made.
    """

    def __init__(
        self,
        state: TrainingState,
        *,
        shared: Saver,
        history: RunHistory,
        settings: RunSettings,
        timeout_seconds: float,
    ) -> None:
        config = shared.config
        self._state, self._shared, self._history, self._settings = state, shared, history, settings
        self._rejected: list[Manifest] = []
        # Copies are made beside shared saves: their collectives must not mix.
        timeout = timedelta(seconds=min(timeout_seconds, COPY_SECONDS))
        group = dist.new_group(backend="gloo", timeout=timeout, group_desc=COPY_GROUP)
        assert isinstance(group, dist.ProcessGroup)
        self.group = group
        place, run_id = on_rank_0(group, lambda: absolute(shared.storage.url)), shared.storage.owner
        folder = memory_folder(config.local_folder) / copies_name(run_id, place)
        self.storage = LocalStorage(str(folder), run_id)
        self._is_default = config.local_folder is None
        machines = self._of_all(lambda: _open_folder(folder, is_default=self._is_default))
        self.machines = Machines(machines, dist.get_rank(group))
        self._place = place
        on_each(group, lambda: self._begin() if self.machines.leads else None)
        self._saver = _LocalSaver(
            config, self.storage, group, shared.device, pin=shared.pin, flush=None, whole_config=shared.whole_config,
            copies=self,
        )  # fmt: skip
        self.is_doubled = config.local_copies > 1 and self.machines.count > 1
        self._in_flight: Future[Saved] | None = None
        self._has_warned = self._has_stopped = False
        self.fetched = 0
        """Files that machines got from others."""
        places = f"{self.machines.count} machines" if self.machines.count > 1 else "this machine"
        places += ", and on the next one" if self.is_doubled else ""
        logger.info(f"local    copies every {config.local_interval:,} steps in {folder} of {places}")

    def _begin(self) -> None:
        """Delete what a killed process of the run has left. Name the copies of runs that are gone, which nobody else
        would: they take memory until they are deleted."""
        self.storage.sweep()
        self.open_folder()
        for folder in self.storage.root.parent.iterdir():
            with suppress(OSError, ValueError):
                other = read_small(folder / PLACE, LONGEST_PLACE).decode()
                if "://" not in other and not os.path.exists(os.path.dirname(other)):
                    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
                    logger.warning(
                        f"{folder} has {_mib(size)} of local copies of a run that is gone ({printable(other)}): delete "
                        "the folder, unless that place is only not mounted"
                    )

    def wait_until_staged(self) -> None:
        """Return when the state may change."""
        self._saver.staging.wait()

    def save(
        self, state: Callable[[], State], draft: Callable[[], Manifest], history: History, *, waits: bool = False
    ) -> None:
        """Begin to copy a state, unless the copy before is still being made. A failure is a warning.

        Args:
            history: is written by rank 0.
            waits: wait for the copy before.
        """
        if self._has_stopped:
            return
        if self._in_flight is not None:
            if waits:
                wait([self._in_flight])
            is_done = self._in_flight.done()
            has_failed = is_done and self._in_flight.exception() is not None
            flags = torch.tensor([not is_done, has_failed], dtype=torch.int32)
            dist.all_reduce(flags, op=dist.ReduceOp.MAX)
            is_running, has_failed = bool(flags[0]), bool(flags[1])
            if is_running and has_failed:  # a collective failed, not a file: the process group is unusable
                self._has_stopped = True
                logger.warning("no more local copies are made in this start: one of them failed on some ranks only")
            if is_running:
                return
            self._end_save()
        self._saver.history = history
        self._in_flight = self._saver.start(state(), draft(), background=True)

    def is_whole(self) -> bool:
        """Wait for the copy in flight, and return whether it is whole on all machines."""
        is_whole = self._in_flight is not None and self._in_flight.exception() is None
        self._end_save()
        flag = torch.tensor(is_whole)
        dist.all_reduce(flag, op=dist.ReduceOp.MIN)
        return bool(flag)

    def close(self, *, saved: int) -> None:
        """Wait for the copy in flight, and delete all copies if a shared checkpoint has replaced them.

        Args:
            saved: step of the newest shared checkpoint.
        """
        if self._in_flight is not None and not wait([self._in_flight], CLOSE_SECONDS).done:
            return  # another rank has failed
        self._end_save()
        self._saver.close()
        if self.machines.leads and max(committed_steps(self.storage.list()), default=0) <= saved:
            shutil.rmtree(self.storage.root, ignore_errors=True)

    def _end_save(self) -> None:
        if self._in_flight is None:
            return
        error, self._in_flight = self._in_flight.exception(), None
        if error is not None:
            level = logging.INFO if self._has_warned or self.machines.rank else logging.WARNING
            logger.log(level, f"no local copy was made: {error}. A failure costs the steps since the newest checkpoint")
            self._has_warned = True

    # At a start.

    def newest(self, after: int) -> Candidate | None:
        """Return the newest copy that continues this run, as a source."""
        for copy in self.search(after):
            if copy.manifest in self._rejected:
                continue
            try:
                continues = on_rank_0(self.group, partial(self._continues, copy, self.history(copy)))
            except (DamagedCheckpoint, RunError) as damage:
                self._reject(copy.manifest, damage)
                continue
            if continues:
                load, reject = partial(self._load, copy, after), partial(self._reject, copy.manifest)
                return Candidate(copy.manifest.step, load, reject)
        return None

    def _continues(self, copy: Copy, history: History) -> bool:
        """Return whether a copy continues this run. Settings that changed are an error then."""
        step = copy.manifest.step
        if not self._history.continues(copy.manifest, history):
            logger.info(f"the local copy of step {step} does not continue this run, and does not count")
            return False
        self._settings.check(copy.manifest, self.storage.url_of(copy.folder))
        return True

    def _load(self, copy: Copy, saved: int) -> Progress:
        try:
            reader = partial(_CopyReader, self, copy)  # it gets files from other machines when it reads
            load_checkpoint(self._state, copy.manifest, reader, settings=self._settings, group=self._shared.group)
        except RunError as error:
            raise DamagedCheckpoint(str(error)) from error
        logger.info(
            f"local    copies of step {copy.manifest.step} in {self.storage.root} are taken"
            + (f" ({self.fetched} files from other machines)" if self.fetched else "")
            + f": they save {copy.manifest.step - saved} steps"
        )
        return copy.manifest.progress

    def _reject(self, manifest: Manifest, error: Exception) -> None:
        self._rejected.append(manifest)
        logger.warning(f"the local copy of step {manifest.step} cannot be read: {error}")

    def search(self, after: int) -> Iterator[Copy]:
        """Yield the copies of steps after `after`, the newest first. Each of their files is whole on some machine.

        The ranks of a machine share the reading of its files. A damaged one is set aside, with a warning.
        """
        self._end_save()

        def newest_first(found: list[list[bytes]]) -> list[bytes]:
            texts = {text for of_rank in found for text in of_rank}
            return sorted(texts, key=lambda text: (Manifest.from_json(text).step, text), reverse=True)

        for text in on_all(self.group, lambda: self._manifests(after), newest_first):
            manifest = Manifest.from_json(text)
            copy = Copy(manifest, self._owners(manifest))
            if lost := [name for name, machines in copy.owners.items() if not machines]:
                logger.info(f"the local copy of step {manifest.step} does not count: no machine has {', '.join(lost)}")
            else:
                yield copy

    def history(self, copy: Copy) -> History:
        """Return what a copy continues, and get the files that every machine needs of it. Raises as `fetch`."""
        self.fetch(copy, SMALL)
        read = partial(manifests.read_checked, self.storage, copy.folder, HISTORY, copy.manifest)
        return History(**json.loads(on_each(self.group, read)))

    def fetch(self, copy: Copy, needed: Iterable[str]) -> None:
        """Get the files that this rank needs and its machine lacks from other machines.

        Raises:
            DamagedCheckpoint, RunError: on every rank, if a file could not be sent or written.
        """
        missing: dict[str, set[str]] = {}
        for machine, names in zip(self.machines.of_rank, gather([*needed], self.group), strict=True):
            missing.setdefault(machine, set()).update(name for name in names if machine not in copy.owners[name])
        transfers: list[Transfer] = []
        for machine, names in missing.items():
            for number, name in enumerate(sorted(names)):
                sources = self.machines.ranks(copy.owners[name][number % len(copy.owners[name])])
                targets = self.machines.ranks(machine)
                source, target = sources[number % len(sources)], targets[number % len(targets)]
                transfers.append(Transfer(name, copy.manifest.files[name].size, source, target))
        if not transfers:
            return
        self.fetched += len(transfers)
        arrived = self.exchange(copy.folder, transfers)

        def check() -> None:
            for name, crc32 in arrived().items():
                if f"{crc32:08x}" != copy.manifest.files[name].crc32:
                    raise DamagedCheckpoint(f"{self.storage.url_of(f'{copy.folder}/{name}')} has arrived damaged")

        on_each(self.group, check)
        for transfer in transfers:
            copy.owners[transfer.name].append(self.machines.of_rank[transfer.target])

    def continue_at(self, step: int) -> None:
        """Delete the copies that the run leaves behind: those of later steps than the one at which it continues. From
        now on, the copies that it makes count, and those up to that step."""
        self._saver.continue_at(step)

    def exchange(self, folder: str, transfers: Sequence[Transfer]) -> Callable[[], dict[str, int]]:
        """Send and receive files of a folder. All ranks give the same transfers, and none waits for a failed one.

        Returns:
            a function that returns the CRC-32 of each file that this rank has received, or raises its error.
        """
        rank, errors = self.machines.rank, list[Exception]()
        own = {tag: transfer for tag, transfer in enumerate(transfers) if rank in (transfer.source, transfer.target)}
        sums = {transfer.name: 0 for transfer in own.values() if transfer.target == rank}
        contents: dict[int, Any] = {}
        for tag, transfer in own.items():
            try:
                path = self.storage.root / folder / transfer.name
                contents[tag] = _mapped(path, transfer.size, is_new=transfer.name in sums)
            except (OSError, ValueError) as error:
                errors.append(error)
        for start in range(0, max((transfer.size for transfer in own.values()), default=0), PIECE):
            pieces = {tag: range(start, min(start + PIECE, of.size)) for tag, of in own.items() if start < of.size}
            works: list[tuple[Any, Transfer, torch.Tensor]] = []
            for tag, piece in pieces.items():
                # After an error, zeros are sent, whose checksum is wrong.
                data = contents[tag][piece.start : piece.stop] if tag in contents else np.zeros(len(piece), np.uint8)
                tensor, transfer = torch.from_numpy(data), own[tag]
                if transfer.source == rank:
                    work = dist.isend(tensor, transfer.target, self.group, tag)
                else:
                    work = dist.irecv(tensor, transfer.source, self.group, tag)
                works.append((work, transfer, tensor))
            for work, transfer, tensor in works:
                work.wait()
                if transfer.target == rank:
                    sums[transfer.name] = zlib.crc32(tensor.numpy().data, sums[transfer.name])

        def arrived() -> dict[str, int]:
            if errors:
                raise errors[0]
            return sums

        return arrived

    def open_folder(self) -> None:
        """Make the folder of this machine again, where it was deleted."""
        _open_folder(self.storage.root, is_default=self._is_default, machine=self.machines.own)
        if not (self.storage.root / PLACE).exists():
            (self.storage.root / PLACE).write_text(self._place)

    def _of_all(self, act: Callable[[], T]) -> list[T]:
        """Call a function on every rank, and return the results of all. Raises as `on_all`."""
        return on_all(self.group, act, lambda results: results)

    def _manifests(self, after: int) -> list[bytes]:
        """Return the manifests on this machine of copies of steps after `after`."""
        found: list[bytes] = []
        for step in committed_steps(self.storage.list() if self.machines.leads else {}):
            with suppress(DamagedCheckpoint, UserError, OSError):
                manifest = manifests.read_manifest(self.storage, folder_name(step))
                if step > after and manifest.run_id == self.storage.owner:
                    found.append(manifest.to_json())
        return found

    def _owners(self, manifest: Manifest) -> dict[str, list[str]]:
        """Return the machines with a whole copy of each file, by its name."""
        owners: dict[str, list[str]] = {name: [] for name in manifest.files}
        whole = self._of_all(lambda: self._whole_files(manifest))
        for machine, names in zip(self.machines.of_rank, whole, strict=True):
            for name in names:
                owners[name].append(machine)
        return owners

    def _whole_files(self, manifest: Manifest) -> list[str]:
        """Read this rank's share of the files on its machine, and return the names of those that are whole."""
        folder, is_own = folder_name(manifest.step), False
        with suppress(DamagedCheckpoint, UserError, OSError):
            is_own = manifests.read_manifest(self.storage, folder) == manifest
        there = sorted(manifest.files.keys() & self.storage.list().get(folder, {}).keys())
        ranks = self.machines.ranks(self.machines.own)
        whole: list[str] = []
        for name in there[ranks.index(self.machines.rank) :: len(ranks)]:
            try:
                manifests.verify_file(self.storage, folder, name, manifest)
                whole.append(name)
            except (DamagedCheckpoint, OSError) as damage:
                if not is_own:  # it may be of another copy of this step
                    continue
                logger.warning(f"damaged local copy: {damage}. It is set aside")
                with suppress(OSError):
                    self.storage.rename(folder, name, f"{name}.{DAMAGED}")
        return whole


def build_copies(
    state: TrainingState, *, shared: Saver, history: RunHistory, settings: RunSettings, timeout_seconds: float
) -> LocalCopies | None:
    """Return the local copies of a run; None, with a warning, if there can be none. Args: as of `LocalCopies`."""
    try:
        return LocalCopies(state, shared=shared, history=history, settings=settings, timeout_seconds=timeout_seconds)
    except (RunError, UserError) as error:
        logger.warning(f"checkpoint.local_interval: no local copies are made: {error}")
        return None


class _CopyReader(ShardReader):
    def __init__(self, copies: LocalCopies, copy: Copy) -> None:
        super().__init__(copies.storage, copy.folder, copy.manifest)
        self._copies, self._copy = copies, copy

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> torch.futures.Future[None]:
        places = self.metadata.storage_data
        self._copies.fetch(self._copy, {places[item.storage_index].relative_path for item in plan.items})
        return super().read_data(plan, planner)


@dataclass
class _LocalSaver(Saver):
    """Saves to the folder of each machine: its first rank makes the folder, commits it, and deletes old ones."""

    copies: LocalCopies
    history: History | None = None
    """Of the save in flight."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._metadata = b""
        """Of the copy before, on each machine's first rank: it changes with the plan only."""
        self._sent = b""
        """The same on rank 0, while all machines have it."""
        self._from, self._made = 0, set[int]()
        """Step at which the run continued, and those of the copies that it has made since."""

    def continue_at(self, step: int) -> None:
        """See `LocalCopies.continue_at`. No copy is in flight."""
        self._from, self._made = step, set()
        self._thread.submit(self.retain).result()

    def begin(self, final: str) -> str:
        def make() -> str:
            if not self.copies.machines.leads:
                return final
            self.copies.open_folder()
            return self.storage.begin(final)

        return on_all(self.group, make, lambda names: names[0])

    def writer(self, folder: str, read: Callable[[str], Tensor]) -> ShardWriter:
        return _CopyWriter(self, folder, read)

    def ask_for_room(self, size: int) -> None:
        """Check that each machine has room for its part of the next copy. Call it on every rank. Of the copies that are
        there, the newest alone stays where more leave no room.

        Args:
            size: bytes that this rank writes.

        Raises:
            UserError: on every rank, if one has no room. Nothing was taken from it.
        """
        machines, root = self.copies.machines, self.copies.storage.root

        def without_room(of_all: list[tuple[int, Room]]) -> dict[str, str]:
            needed = dict.fromkeys(machines.of_rank, 0)
            for rank, (written, _) in enumerate(of_all):
                for keeper in {rank, machines.neighbours[rank]} if self.copies.is_doubled else {rank}:
                    needed[machines.of_rank[keeper]] += written
            return {
                machines.of_rank[
                    rank
                ]: f"{root}, of rank {rank}'s machine, has {_mib(room.free)} of {_mib(room.whole)} "
                f"free, and a copy takes {_mib(needed[machines.of_rank[rank]])}, with some room for others"
                for rank, (_, room) in enumerate(of_all)
                if needed[machines.of_rank[rank]] > room.usable
            }

        def ask() -> dict[str, str]:
            return on_all(self.group, lambda: (size, room_in(root)), without_room)

        if machines.own in (lacking := ask()):
            self.retain(most=1)
        if lacking and (lacking := ask()):
            raise UserError(next(iter(lacking.values())))

    def commit(self, writer: ShardWriter, draft: Manifest, part: Part, started: float) -> Saved:
        """Send each file to the neighbour, and commit the folder of each machine. It raises as `Saver.commit`."""
        parts: list[Part] = []  # of all ranks, on rank 0

        def sizes(of_all: list[Part]) -> list[dict[str, int]]:
            parts.extend(of_all)
            return [{name: file.size for name, file in part.files.items() if name not in SMALL} for part in of_all]

        written = on_all(self.group, lambda: part, sizes)
        transfers = [
            Transfer(name, size, rank, self.copies.machines.neighbours[rank])
            for rank, files in enumerate(written if self.copies.is_doubled else ())
            for name, size in files.items()
        ]
        arrived = self.copies.exchange(writer.folder, transfers)

        def complete(of_all: list[dict[str, int]]) -> tuple[Saved, bytes, dict[str, bytes]]:
            assert self.history is not None
            writer.write_file(HISTORY, json.dumps(asdict(self.history)).encode())
            others = [part.files for part in parts]
            manifest = writer.complete(draft, self.whole_config, started=started, others=others)
            for name, crc32 in (item for sums in of_all for item in sums.items()):
                if f"{crc32:08x}" != manifest.files[name].crc32:
                    raise RunError(f"{name} has arrived damaged at the next machine")
            small = {name: self.storage.read(f"{writer.folder}/{name}") for name in SMALL}
            sent, self._sent = self._sent, b""  # after a failure, it is sent again
            if small[manifests.METADATA] == sent:
                del small[manifests.METADATA]
            return saved_of(manifest, parts, started), manifest.to_json(), small

        saved, manifest, small = on_all(self.group, arrived, complete)

        def publish() -> None:
            self._metadata = small.get(manifests.METADATA, self._metadata)
            for name, data in ({} if parts else {manifests.METADATA: self._metadata, **small}).items():
                writer.write_file(name, data)  # on rank 0 they are there
            self.storage.publish(folder_name(draft.step), manifest)
            self._made.add(draft.step)

        on_each(self.group, publish if self.copies.machines.leads else lambda: None)
        self._sent = self._metadata
        return saved

    def discard(self, folder: str) -> None:
        """Delete what a failed copy has left, also where it was committed."""
        if self.copies.machines.leads:
            self.storage.discard(folder)
            with suppress(OSError, RunError):
                self.storage.delete(folder)

    def retain(self, most: int = KEPT_COPIES) -> None:
        """Keep the newest copies of this machine that continue the run, which are whole on all machines; delete the
        others."""
        if not self.copies.machines.leads:
            return
        folders = {folder: manifests.step_of(folder) for folder in self.storage.list()}
        steps = {step for step in folders.values() if step is not None and (step <= self._from or step in self._made)}
        for folder, step in folders.items():
            if step is not None and step not in sorted(steps)[-most:]:
                with suppress(OSError, RunError):
                    self.storage.delete(folder)


class _CopyWriter(ShardWriter):
    """Writer that asks for room, on all ranks together, and reserves it, before it writes the first byte."""

    def __init__(self, saver: _LocalSaver, folder: str, read: Callable[[str], Tensor]) -> None:
        super().__init__(saver.storage, folder, dist.get_rank(saver.group), read)
        self._saver = saver

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> torch.futures.Future[list[WriteResult]]:
        self.reserved = self.size_of(plan.items)
        self._saver.ask_for_room(self.reserved)
        return super().write_data(plan, planner)


def _mib(size: float) -> str:
    return f"{size / 2**20:,.1f} MiB"


def _open_folder(folder: Path, *, is_default: bool, machine: str | None = None) -> str:
    """Make the folder of a run's copies, which nobody else may read, and return the id of its machine.

    Args:
        is_default: it is in /dev/shm, where others can make folders and links of any name.
        machine: the id. By default, a new folder gets a new one.

    Raises:
        UserError: it, or the folder above it, belongs to someone else.
    """
    folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    for place in [folder.parent, folder] if is_default else [folder]:
        place.mkdir(mode=0o700, exist_ok=True)
        about = os.lstat(place)
        if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.getuid():
            raise UserError(f"{place} is no folder of this user: set checkpoint.local_folder")
    folder.chmod(0o700)
    if machine and (folder / TOKEN).exists():
        return machine
    new = folder / f".{uuid.uuid4().hex}"
    new.write_text(machine or uuid.uuid4().hex)
    with suppress(FileExistsError):  # another rank was first
        os.link(new, folder / TOKEN)
    new.unlink()
    return (folder / TOKEN).read_text()


def _mapped(path: Path, size: int, *, is_new: bool) -> Any:
    """Return the bytes of a file as an array: of a new one, which is written by changing it, or of one to read.

    Raises:
        OSError, ValueError: there is no room for it, or it is shorter.
    """
    if is_new:
        path.parent.mkdir(exist_ok=True)
        with open(path, "wb") as file:
            os.posix_fallocate(file.fileno(), 0, size)  # without room, a change would end the process (SIGBUS)
    return np.memmap(path, np.uint8, "r+" if is_new else "c", shape=(size,))
