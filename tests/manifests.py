"""Checkpoints as titanlite saves them, with contents that no process has trained."""

import time
import zlib

from titanlite.checkpoint.manifest import FileRecord, Manifest, folder_name
from titanlite.storage.storage import open_storage

CONTENTS = {"__0_0.distcp": b"x" * 3_000_000, ".metadata": b"67"}


def save(
    place: str, step: int, *, age: float = 200, contents: dict[str, bytes] = CONTENTS, publish: bool = True
) -> None:
    """Save a checkpoint of a step in a place; without `publish`, leave it in the staging folder."""
    storage = open_storage(place, owner="me")
    folder = storage.begin(folder_name(step))
    for name, content in contents.items():
        with storage.create(f"{folder}/{name}") as file:
            file.write(content)
    manifest = Manifest(
        step=step,
        samples=8000 * step,
        run_id="me",
        settings={"training.seq_len": 32},
        config_hash="c",
        mesh={"replicate": 1, "shard": 2},
        versions={"titanlite": "1", "torch": "2"},
        saved_at=time.time() - age,
        elapsed_seconds=0.25,
        load_step=None,
        files={name: FileRecord(len(data), f"{zlib.crc32(data):08x}") for name, data in contents.items()},
    )
    if publish:
        storage.publish(folder_name(step), manifest.to_json())
