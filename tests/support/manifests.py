"""Checkpoints as titanlite saves them, with contents that no process has trained."""

import time
import zlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from titanlite.checkpoint.manifest import FileRecord, Manifest, folder_name, read_manifest
from titanlite.storage.storage import MANIFEST, open_storage

CONTENTS = {"__0_0.distcp": b"x" * 3_000_000, ".metadata": b"67"}


def manifest_of(step: int, contents: dict[str, bytes], *, saved_at: float = 1.5) -> Manifest:
    return Manifest(
        step=step,
        samples=8 * step,
        run_id="me",
        settings={"training.seq_len": 32},
        config_hash="c",
        mesh={"replicate": 1, "shard": 2},
        versions={},
        saved_at=saved_at,
        elapsed_seconds=0.25,
        load_step=None,
        files={name: FileRecord(len(data), f"{zlib.crc32(data):08x}") for name, data in contents.items()},
    )


def save(
    place: str,
    step: int,
    *,
    age: float = 200,
    contents: dict[str, bytes] = CONTENTS,
    publish: bool = True,
    run_id: str = "me",
) -> None:
    """Save a checkpoint of a step in a place; without `publish`, leave it in the staging folder."""
    storage = open_storage(place, owner=run_id)
    folder = storage.begin(folder_name(step))
    for name, content in contents.items():
        with storage.create(f"{folder}/{name}") as file:
            file.write(content)
    manifest = replace(manifest_of(step, contents, saved_at=time.time() - age), run_id=run_id)
    if publish:
        storage.publish(folder_name(step), manifest.to_json())


def forge(checkpoint: Path, changes: Mapping[str, bytes | None]) -> None:
    """Change files of a checkpoint as an attacker would, with checksums and sizes that fit. None removes a file."""
    manifest = read_manifest(open_storage(str(checkpoint.parent)), checkpoint.name)
    for name, data in changes.items():
        (checkpoint / name).unlink()
        del manifest.files[name]
        if data is not None:
            (checkpoint / name).write_bytes(data)
            manifest.files[name] = FileRecord(len(data), f"{zlib.crc32(data):08x}")
    (checkpoint / MANIFEST).write_bytes(manifest.to_json())


def flip(path: Path, at: int = -100) -> None:
    """Change one bit of a file."""
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)
