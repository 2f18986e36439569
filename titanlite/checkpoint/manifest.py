"""Manifest of a checkpoint, and the rule by which a checkpoint counts. Imports no torch.

A checkpoint is a folder step-00000100 with files of DCP, checksums.json, the resolved config.toml and manifest.json. It
counts if it has a manifest, which `Storage.publish` writes last: with the size and checksum of every other file, and a
checksum of itself.
"""

import json
import os
import re
import zlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, cast

import tomli

from titanlite.runtime.errors import DamagedCheckpoint, UserError, printable
from titanlite.runtime.files import SMALL, checked_name, file_inside, read_small
from titanlite.storage.storage import MANIFEST, Listing, Storage

CHECKSUMS = "checksums.json"
CONFIG = "config.toml"
METADATA = ".metadata"
FORMAT = 2
"""Schema of the manifest. A change that older versions must not read raises it, and reads the number before as well."""
FIRST_FORMAT = 2
"""Oldest schema with checksums. No release wrote the one before."""
DAMAGED, SUPERSEDED = "damaged", "superseded"  # reasons of a quarantine
CHUNK = 1 << 24  # bytes to read at once
KEPT_COPIES = 2
"""Local copies that stay: the newest one, and the one before, should a file of the newest be damaged."""

Settings = dict[str, Any]
"""Settings of a run by name, as JSON has them."""
TYPES: dict[str, type] = {
    "step": int, "samples": int, "run_id": str, "settings": dict, "config_hash": str, "mesh": dict, "versions": dict,
    "files": dict, "data": dict, "guard": dict,
}  # fmt: skip
"""Types of the entries of a manifest, on which code relies."""
SECONDS = ("saved_at", "elapsed_seconds")
LAST_SECOND = 2**38
"""Seconds that a manifest may have at most: a date in the year 10680."""


def checkpoints_of(run: str) -> str:
    """Return the path or URL of the checkpoints of the run in a local folder.

    It is the checkpoint.folder of its config.toml. Without one, as in other folders, it is that of its own checkpoints.
    """
    named = None
    with suppress(OSError, ValueError, LookupError, AttributeError, TypeError, UserError):  # it is no config of ours
        named = tomli.loads(read_small(file_inside(Path(run), CONFIG)).decode())["checkpoint"].get("folder")
    return named if isinstance(named, str) and named else os.path.join(run, "checkpoints")


@dataclass(frozen=True)
class FileRecord:
    size: int
    """Bytes."""
    crc32: str
    """Checksum of the whole file, in hexadecimal."""


@dataclass(frozen=True)
class Progress:
    """Position of a run."""

    step: int = 0
    samples_seen: int = 0
    """Sequences that the run has consumed: the position in the data."""
    data: dict[str, Any] = field(default_factory=dict[str, Any])
    """`Samples.state`: where the data was changed on the way."""
    guard: dict[str, Any] = field(default_factory=dict[str, Any])
    """`StepGuard.state` and `Step.checkpoint_state`, in one."""
    saved_at: float = field(default=0.0, compare=False)
    """`Manifest.saved_at` of the checkpoint that has it."""


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Description of a checkpoint; the fields have the order of the keys of manifest.json.

    A save begins with a draft. `ShardWriter.complete` adds the files, the hash, the versions and the times.
    """

    step: int
    samples: int
    """`Progress.samples_seen`."""
    run_id: str
    settings: Settings
    """Settings that must match on resume: the model's shape, the data, sequence length, batch, seed."""
    config_hash: str = ""
    """SHA-256 of the resolved config."""
    mesh: dict[str, int]
    versions: dict[str, str] = field(default_factory=dict[str, str])
    saved_at: float = 0.0
    """Seconds since 1970."""
    elapsed_seconds: float = 0.0
    """Time from the start of the save to the commit."""
    load_step: int | None = None
    """checkpoint.load_step of the process that saved it."""
    files: dict[str, FileRecord] = field(default_factory=dict[str, FileRecord])
    data: dict[str, Any] = field(default_factory=dict[str, Any])
    guard: dict[str, Any] = field(default_factory=dict[str, Any])
    format: int = FORMAT

    @property
    def progress(self) -> Progress:
        return Progress(self.step, self.samples, self.data, self.guard, self.saved_at)

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(record.size for record in self.files.values())

    def to_json(self) -> bytes:
        body = json.dumps(asdict(self), indent=1)
        return f'{body[:-2]},\n "crc32": "{_crc32(body.encode())}"\n}}\n'.encode()

    @staticmethod
    def from_json(text: bytes) -> "Manifest":
        """Return the manifest of a text.

        Raises:
            ValueError, TypeError, KeyError: the text has changed since it was written.
            UserError: the manifest has another format.
        """
        found = json.loads(text)
        if not isinstance(found, dict):
            raise ValueError("not a manifest")
        fields = cast(dict[str, Any], found)
        checksum = fields.pop("crc32", None)
        if checksum is not None and checksum != _crc32(json.dumps(fields, indent=1).encode()):
            raise ValueError("its own checksum is wrong")
        readable = range(max(FORMAT - 1, FIRST_FORMAT), FORMAT + 1)
        if (number := fields.get("format")) not in readable:
            reads = " and ".join(map(str, readable))
            raise UserError(f"has format {number}, and this version of titanlite reads {reads}: use one that reads it")
        for name in ("data", "guard"):  # the first manifests of this format lack them
            fields.setdefault(name, {})
        wrong = [name for name, kind in TYPES.items() if not isinstance(fields.get(name), kind)]
        wrong += [name for name in SECONDS if not _are_seconds(fields.get(name, 0))]
        if wrong or not all(_is_record(record) for record in fields["files"].values()):
            raise ValueError(f"{', '.join(wrong) or 'files'}: not of the right type")
        fields["files"] = {name: FileRecord(**record) for name, record in fields["files"].items()}
        for name in (fields["run_id"], *fields["files"]):
            checked_name(name)
        return Manifest(**fields)


def folder_name(step: int) -> str:
    return f"step-{step:08d}"


def absolute(url: str) -> str:
    """Return the URL or the absolute path of a folder of checkpoints."""
    return url if "://" in url else os.path.abspath(url)


def copies_name(run_id: str, url: str) -> str:
    """Return the name of the folder of a run's copies. A copied run folder has the same id, and another path.

    Args:
        url: of its checkpoints.
    """
    return f"{run_id}-{zlib.crc32(absolute(url).encode()):08x}"


def step_of(folder: str) -> int | None:
    """Return the step of a folder of a checkpoint; None for other folders."""
    match = re.fullmatch(r"step-(\d{8,})", folder)
    return int(match[1]) if match else None


def committed_steps(listing: Listing) -> list[int]:
    """Return the steps of the checkpoints that count, oldest first."""
    steps = [step_of(folder) for folder, files in listing.items() if MANIFEST in files]
    return sorted(step for step in steps if step is not None)


def without_manifest(listing: Listing, *, since: int) -> list[str]:
    """Return the folders of steps after `since` that have no manifest, not even one set aside."""
    steps = {
        folder: step_of(folder) for folder, files in listing.items() if not any(MANIFEST in name for name in files)
    }
    return [folder for folder, step in steps.items() if step is not None and step > since]


def read_manifest(storage: Storage, folder: str, size: int | None = None) -> Manifest:
    """Read and check a manifest.

    Args:
        size: its bytes, as the storage lists them.

    Raises:
        RunError: another number of bytes arrived.
        DamagedCheckpoint: the manifest has changed since it was written, or is of another folder.
        UserError: the manifest has another format.
    """
    name = f"{folder}/{MANIFEST}"
    try:
        if size is not None and size > SMALL:
            raise DamagedCheckpoint(f"{storage.url_of(name)} has {size:,} bytes")
        text = storage.read(name) if size is None else storage.read_exactly(name, 0, size, lambda _: True, "")
    except FileNotFoundError as error:
        raise DamagedCheckpoint(f"{storage.url_of(name)}: {error}") from None
    try:
        manifest = Manifest.from_json(text)
    except UserError as error:
        raise UserError(f"{storage.url_of(name)} {error}") from None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise DamagedCheckpoint(f"{storage.url_of(name)}: {printable(str(error))}") from None
    if manifest.step != step_of(folder):
        raise DamagedCheckpoint(f"{storage.url_of(name)} is the manifest of step {manifest.step}")
    return manifest


def check_sizes(storage: Storage, folder: str, manifest: Manifest, sizes: dict[str, int]) -> None:
    """Check that every file is there, with its size.

    Raises:
        DamagedCheckpoint: a file is missing, or has another size than the manifest states.
    """
    for name, record in manifest.files.items():
        if name not in sizes:
            raise DamagedCheckpoint(f"{storage.url_of(f'{folder}/{name}')} is missing")
        if sizes[name] != record.size:
            raise DamagedCheckpoint(
                f"{storage.url_of(f'{folder}/{name}')} has {sizes[name]} bytes, its manifest states {record.size}"
            )


def read_complete(storage: Storage, folder: str, sizes: dict[str, int]) -> Manifest:
    """Read the manifest of a checkpoint, and check that every file is there with its size.

    Args:
        sizes: bytes of each file, as the storage lists them.

    Raises:
        DamagedCheckpoint, RunError, UserError: see `read_manifest` and `check_sizes`.
    """
    if MANIFEST not in sizes:
        raise DamagedCheckpoint(f"{storage.url_of(folder)}/{MANIFEST} is missing")
    manifest = read_manifest(storage, folder, sizes[MANIFEST])
    check_sizes(storage, folder, manifest, sizes)
    return manifest


def read_checked(storage: Storage, folder: str, name: str, manifest: Manifest) -> bytes:
    """Read a whole small file.

    Raises:
        RunError: another number of bytes arrived.
        DamagedCheckpoint: the file has changed since it was written.
    """
    damage = f"{storage.url_of(f'{folder}/{name}')}: its checksum is not that of the manifest"
    if name not in manifest.files:
        raise DamagedCheckpoint(damage)
    record = manifest.files[name]
    return storage.read_exactly(f"{folder}/{name}", 0, record.size, lambda data: _crc32(data) == record.crc32, damage)


def verify(
    storage: Storage,
    folder: str,
    sizes: dict[str, int],
    *,
    on_read: Callable[[int], None] = lambda read: None,
) -> Manifest:
    """Read all of a checkpoint, and check it.

    Args:
        on_read: called with the number of bytes that each read returned.

    Raises:
        DamagedCheckpoint: naming the first file that has changed since it was written.
    """
    manifest = read_complete(storage, folder, sizes)
    for name in manifest.files:
        verify_file(storage, folder, name, manifest, on_read=on_read)
    return manifest


def verify_file(
    storage: Storage, folder: str, name: str, manifest: Manifest, *, on_read: Callable[[int], None] = lambda read: None
) -> None:
    """Read a file of a checkpoint, and check it; arguments and errors as of `verify`."""
    record, crc32 = manifest.files[name], 0
    for start in range(0, record.size, CHUNK):
        data = storage.read(f"{folder}/{name}", start, min(CHUNK, record.size - start))
        crc32 = zlib.crc32(data, crc32)
        on_read(len(data))
    if f"{crc32:08x}" != record.crc32:
        raise DamagedCheckpoint(f"{storage.url_of(f'{folder}/{name}')}: its checksum is not that of the manifest")


def to_delete(steps: list[int], *, keep_latest_k: int, keep_every: int) -> list[int]:
    """Return the steps whose checkpoints the retention rule deletes. The newest always stays.

    Args:
        keep_latest_k: number of the newest that stay; 0 keeps all.
        keep_every: multiples of this step stay, too; 0 for none.
    """
    older = sorted(steps)[: -max(keep_latest_k, 1)] if keep_latest_k else []
    return [step for step in older if not keep_every or step % keep_every]


def _is_record(value: Any) -> bool:
    if not isinstance(value, dict):
        return False
    record = cast(dict[str, Any], value)
    return isinstance(record.get("size"), int) and isinstance(record.get("crc32"), str)


def _are_seconds(value: Any) -> bool:
    return isinstance(value, int | float) and 0 <= value <= LAST_SECOND


def _crc32(data: bytes) -> str:
    return f"{zlib.crc32(data):08x}"
