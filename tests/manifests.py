"""Checkpoints as titanlite saves them, with contents that no process has trained."""

import time
import zlib

from titanlite.checkpoint.manifest import FileRecord, Manifest, folder_name
from titanlite.storage.storage import open_storage

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
    place: str, step: int, *, age: float = 200, contents: dict[str, bytes] = CONTENTS, publish: bool = True
) -> None:
    """Save a checkpoint of a step in a place; without `publish`, leave it in the staging folder."""
    storage = open_storage(place, owner="me")
    folder = storage.begin(folder_name(step))
    for name, content in contents.items():
        with storage.create(f"{folder}/{name}") as file:
            file.write(content)
    manifest = manifest_of(step, contents, saved_at=time.time() - age)
    if publish:
        storage.publish(folder_name(step), manifest.to_json())
