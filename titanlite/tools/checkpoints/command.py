"""`titanlite checkpoint`: list, verify, show, hash and prune. Only `show` and `hash` import torch."""

import json
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import tomli
from rich.console import Console
from rich.table import Column, Table

from titanlite.checkpoint import manifest as manifests
from titanlite.checkpoint.manifest import DAMAGED, SUPERSEDED, Manifest, copies_name, folder_name
from titanlite.runtime.console import progress_bar
from titanlite.runtime.errors import DamagedCheckpoint, RunError, UserError, printable
from titanlite.runtime.files import checked_name, memory_folder, read_small
from titanlite.storage.storage import MANIFEST, LocalStorage, Storage, open_storage
from titanlite.tools.arguments import Count, Index, Stored

FOLDER = re.compile(r"(?:(\.staging|\.deleted)-)?step-(\d{8,})(?(1)-.*)")
QUARANTINED = {f"{MANIFEST}.{DAMAGED}": "damaged: quarantined earlier", f"{MANIFEST}.{SUPERSEDED}": "superseded"}
UNFINISHED = {".staging": "being written", ".owner": "being written", ".deleted": "being deleted"}
Check = Callable[[Storage, str, dict[str, int]], Manifest]


@contextmanager
def explaining_damage() -> Iterator[None]:
    """Turn damage and errors of a disk into errors for users."""
    try:
        yield
    except DamagedCheckpoint as damage:
        raise UserError(str(damage)) from None
    except BrokenPipeError:
        raise  # the reader of the output ended: `| head`
    except OSError as error:  # of a disk, or of an object store after many tries
        raise RunError(str(error)) from None


class Listed(NamedTuple):
    """A folder that is a checkpoint, will be one, or was one; with its manifest if it is complete."""

    step: int
    folder: str
    sizes: dict[str, int]
    state: str
    manifest: Manifest | None


@explaining_damage()
def list_checkpoints(path: Stored = "outputs") -> None:
    """List checkpoints with age, size and state. Sizes of files are compared, and not their checksums.

    Example:
        outputs/debug
        s3://bucket/run
    """
    console = Console(width=None if os.isatty(1) else 1000, markup=False, emoji=False, highlight=False)
    local = [*_local_copies(path)]
    try:
        runs = _find(path)
    except UserError:  # a run may have local copies before its first checkpoint
        if not local:
            raise
        runs = []
    for storage, founds in [*runs, *local]:
        numbers = [Column(name, justify="right", no_wrap=True) for name in ("step", "age", "size")]
        table = Table(*numbers, "state", box=None, pad_edge=False, padding=(0, 2, 0, 0))
        for step, _, sizes, state, manifest in founds:
            if manifest and (elsewhere := len(manifest.files.keys() - sizes.keys())):
                state = (
                    f"{len(manifest.files) - elsewhere} of {len(manifest.files)} files: others are on other machines"
                )
            table.add_row(str(step), _age(manifest.saved_at) if manifest else "", _size(*sizes.values()), state)
        console.print(storage.url, table, sep="\n")  # in a pipe, lines are not wrapped


@explaining_damage()
def verify(path: Stored) -> None:
    """Read every byte of checkpoints and compare checksums.

    Exit code 2 if a checkpoint is damaged.

    Example:
        outputs/debug
    """
    wrong = []
    for storage, founds in _find(path, counting=True):
        print(storage.url)
        for found in filter(None, (_look(storage, found.folder, found.sizes, check=_read_all) for found in founds)):
            about = f", {len(found.manifest.files)} files, {_size(found.manifest.size)}" if found.manifest else ""
            print(f"step {found.step}: {found.state}{about}", flush=True)
            if MANIFEST in found.sizes and not found.manifest:  # without one, it has been deleted meanwhile
                wrong.append(f"{storage.url_of(found.folder)}/{found.state.removeprefix('damaged: ')}")
    if wrong:
        raise UserError("\n".join(wrong))


@explaining_damage()
def show(path: Stored, *, tensors: bool = False) -> None:
    """Print the manifest of a checkpoint.

    Of several checkpoints, the newest complete one is shown.

    Args:
        tensors: also list every tensor with its shape and dtype

    Example:
        outputs/debug --tensors
    """
    storage, found, manifest = find_newest(path)
    from titanlite.checkpoint.dcp_read import ShardReader

    entries: Any = ShardReader(storage, found.folder, manifest).metadata.state_dict_metadata
    print(*map(printable, _description(storage.url_of(found.folder), manifest, entries, tensors=tensors)), sep="\n")


def _description(where: str, manifest: Manifest, entries: Any, *, tensors: bool) -> Iterator[str]:
    """Yield the lines of `show`. Their texts are those of a file that others may have written."""
    model = [entry.size.numel() for name, entry in entries.items() if name.startswith("model.")]
    saved_at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(manifest.saved_at))
    yield where
    yield f"step      {manifest.step}"
    yield f"samples   {manifest.samples:,}"
    yield f"run id    {manifest.run_id}"
    yield f"saved at  {saved_at}, {_age(manifest.saved_at)} ago; took {manifest.elapsed_seconds:.2f} s"
    yield f"mesh      {' x '.join(f'{axis} {degree}' for axis, degree in manifest.mesh.items())}"
    yield f"versions  {', '.join(f'{name} {version}' for name, version in manifest.versions.items())}"
    files = [f"  {name}  {record.size:,} bytes" for name, record in manifest.files.items()]
    yield f"files     {len(files)}, {_size(manifest.size)}"
    yield from files[:10]
    if len(files) > 10:
        yield f"  and {len(files) - 10} more"
    yield "settings"
    yield from (f"  {name} = {json.dumps(value)}" for name, value in manifest.settings.items())
    yield f"tensors   {len(entries)}; of the model {len(model)}, {sum(model):,} parameters"
    if tensors:
        yield from (f"  {name}  {[*entry.size]}  {entry.properties.dtype}" for name, entry in entries.items())


@explaining_damage()
def hash_checkpoint(path: Stored, *, tensors: bool = False) -> None:
    """Print the hash of the weights and optimizer states in a checkpoint.

    It is that of hashes.jsonl, and does not depend on the layout that saved it. Every byte is checked on the way.

    Args:
        tensors: also print the hash of every tensor

    Example:
        outputs/debug
    """
    storage, found, manifest = find_newest(path)
    from titanlite.checkpoint.dcp_read import ShardReader
    from titanlite.techniques.reproducible.state_hash import describe, indices_of_box, join_hashes, sum_of_part

    reader = ShardReader(storage, found.folder, manifest)
    sums = dict.fromkeys(reader.metadata.state_dict_metadata, 0)
    entries: dict[str, Any] = reader.metadata.state_dict_metadata
    with progress_bar(found.folder, len(reader.chunks), of_bytes=False) as advance:
        for index, sizes in reader.chunks.items():
            shape, offsets = entries[index.fqn].size, index.offset or ()
            part = reader.read_chunk(index)
            sums[index.fqn] += int(sum_of_part(index.fqn, part, indices_of_box(shape, offsets, sizes)))
            advance(1)
    hashes = {name: describe(entry.properties.dtype, entry.size, sums[name]) for name, entry in entries.items()}
    print(join_hashes(hashes))
    if tensors:
        print(*(printable(f"  {name} {text}") for name, text in sorted(hashes.items())), sep="\n")


def find_newest(path: str) -> tuple[Storage, Listed, Manifest]:
    """Return the newest complete checkpoint of a run, or the named one.

    Raises:
        UserError: there is none, or it is damaged.
    """
    [(storage, founds)] = _find(path, counting=True, single=True)
    found = next((found for found in reversed(founds) if found.manifest), founds[-1])
    if found.manifest is None:
        raise UserError(f"{storage.url_of(found.folder)} is not whole: {found.state}")
    return storage, found, found.manifest


@explaining_damage()
def prune(path: Stored, *, keep_latest_k: Count, keep_every: Index = 0, dry_run: bool = False) -> None:
    """Delete older checkpoints of a run.

    Nothing is deleted if the newest checkpoint is damaged, and nothing of another run than the newest one's. The run
    may continue meanwhile.

    Args:
        keep_latest_k (K): keep the newest K checkpoints
        keep_every: also keep steps divisible by N
        dry_run: only print what would be deleted

    Example:
        outputs/debug --keep-latest-k 3 --keep-every 1000 --dry-run
    """
    [(storage, every)] = _find(path, single=True, follows=False)
    founds = [found for found in every if MANIFEST in found.sizes and found.folder == folder_name(found.step)]
    if (newest := (founds or every)[-1]).manifest is None:
        raise UserError(
            f"nothing is deleted: the newest, {storage.url_of(newest.folder)}, is not whole: {newest.state}"
        )
    storage = open_storage(storage.url, owner=newest.manifest.run_id)  # whose sweep deletes what a killed prune leaves
    runs = {found.step: storage.run_of(found.folder, found.sizes) or storage.owner for found in founds}
    own = [found for found in founds if runs[found.step] == storage.owner]
    old = manifests.to_delete([found.step for found in own], keep_latest_k=keep_latest_k, keep_every=keep_every)
    for step in runs.keys() - {found.step for found in own}:
        print(f"step {step} stays: it is of another run, with the id {runs[step]}")
    for found in [found for found in own if found.step in old]:
        if not dry_run:
            with suppress(FileNotFoundError):  # the run was faster
                storage.delete(found.folder)
        print(f"{'would delete' if dry_run else 'deleted'} step {found.step}, {_size(*found.sizes.values())}")


def _find(
    path: str, *, counting: bool = False, single: bool = False, follows: bool = True
) -> list[tuple[Storage, list[Listed]]]:
    """Return the checkpoints of each run at a path or below it, by step.

    Args:
        follows: look where the config.toml at the path says, too. What is deleted is named by the user alone.
        counting: leave out what does not count.
        single: refuse more than one run. The folder of a run means its own checkpoints.
    """
    above, _, name = path.rstrip("/").rpartition("/")
    elsewhere = None
    is_one, is_local = manifests.step_of(name) is not None, "://" not in path
    if is_local and not os.path.isdir(path):
        raise UserError(f"no folder {path}")
    places = [above or "."] if is_one else [path]
    if is_local and not is_one:
        places = sorted(folder for folder, folders, _ in os.walk(path) if any(map(FOLDER.fullmatch, folders)))
        own = os.path.join(path, "checkpoints")
        elsewhere = place if (place := manifests.checkpoints_of(path)) != own and place not in places else None
        if elsewhere and follows and open_storage(elsewhere).list():
            own, places = elsewhere, [elsewhere, *places]
        places = [own] if single and own in places else places
    runs = []
    for place in places:
        try:
            storage = open_storage(place)
        except (ValueError, ImportError) as error:  # of fsspec
            raise UserError(f"{path}: {error}") from None
        listing = storage.list()
        folders = map(folder_name, manifests.committed_steps(listing)) if counting else listing
        looks = [_look(storage, folder, listing[folder]) for folder in folders if folder == name or not is_one]
        if founds := sorted(filter(None, looks), key=lambda found: found[:2]):
            runs.append((storage, founds))
    if not runs:
        named = f": its checkpoints are in {elsewhere}, name that" if elsewhere and not follows else ""
        raise UserError(f"no checkpoint {'that counts ' if counting else ''}in {path}{named}")
    if single and len(runs) > 1:
        urls = [storage.url for storage, _ in runs[:5]] + ["..."] * (len(runs) > 5)
        raise UserError(f"{path} holds {len(runs)} runs, name one: {', '.join(urls)}")
    return runs


def _local_copies(path: str) -> Iterator[tuple[Storage, list[Listed]]]:
    """Yield the local copies on this machine of each run at a path or below it, by step."""
    for record in [] if "://" in path else sorted(Path(path).rglob("run.json")):
        try:
            run_id = checked_name(json.loads(read_small(record))["id"])
            options = tomli.loads(read_small(record.with_name("config.toml")).decode())["checkpoint"]
            url = manifests.checkpoints_of(str(record.parent))
            folder = memory_folder(options.get("local_folder")) / copies_name(run_id, url)
            storage = LocalStorage(str(folder), run_id)
        except (OSError, ValueError, KeyError, TypeError, RuntimeError):  # not that of a run
            continue
        listing = {folder: sizes for folder, sizes in storage.list().items() if MANIFEST in sizes}
        founds = [_look(storage, folder, sizes, check=_read_part) for folder, sizes in listing.items()]
        if copies := sorted(filter(None, founds), key=lambda found: found[:2]):
            yield storage, copies


def _read_part(storage: Storage, folder: str, sizes: dict[str, int]) -> Manifest:
    """Read the manifest of a local copy: other machines have the rest of its files."""
    return manifests.read_manifest(storage, folder, sizes[MANIFEST])


def _look(
    storage: Storage, folder: str, sizes: dict[str, int], *, check: Check = manifests.read_complete
) -> Listed | None:
    """Check a folder, which a running job may change: look again if it did. Returns None if the folder is gone."""
    if (match := FOLDER.fullmatch(folder)) is None:
        return None
    signs = [match[1]] if match[1] else [name.partition("-")[0] for name in sizes if MANIFEST not in sizes]
    state, manifest = next((state for sign, state in (QUARANTINED | UNFINISHED).items() if sign in signs), ""), None
    try:
        manifest = None if state else check(storage, folder, sizes)
    except (DamagedCheckpoint, RunError, UserError, FileNotFoundError) as error:
        if (now := storage.list().get(folder, {})) != sizes:
            return _look(storage, folder, now, check=check) if now else None
        if isinstance(error, RunError):  # of the store, and not of the checkpoint
            raise
        state = printable(f"damaged: {str(error).removeprefix(f'{storage.url_of(folder)}/')}")
    return Listed(int(match[2]), folder, sizes, state or "whole", manifest)


def _read_all(storage: Storage, folder: str, sizes: dict[str, int]) -> Manifest:
    with progress_bar(folder, sum(sizes.values())) as advance:
        return manifests.verify(storage, folder, sizes, on_read=advance)


def _size(*counts: int) -> str:
    mib = sum(counts) / 2**20
    return f"{mib / 1024:,.1f} GiB" if mib >= 1024 else f"{mib:.{0 if mib >= 10 else 1}f} MiB"


def _age(then: float) -> str:
    seconds = max(time.time() - then, 0)
    unit, length = next(
        (unit for unit in {"days": 86400, "h": 3600, "min": 60}.items() if seconds >= 2 * unit[1]), ("s", 1)
    )
    return f"{seconds // length:.0f} {unit}"
