"""The commit protocol. A checkpoint is a folder step-00000100 that holds DCP files and manifest.json.

It is written under a hidden name; the manifest comes last, and then the folder is renamed. So a folder of the right
name is whole, and everything else is ignored. No torch here.
"""

import json
import os
import re
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

MANIFEST = "manifest.json"
FORMAT = 1


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint says of itself."""

    step: int
    samples: int
    """Sequences that the run has consumed: the position in the data."""
    run_id: str
    data: str
    """Fingerprint of tokens, sequence length and order: what gives `samples` its meaning."""
    mesh: dict[str, int]
    versions: dict[str, str]
    files: dict[str, int]
    """Size in bytes of each file."""
    format: int = FORMAT


def folder_name(step: int) -> str:
    return f"step-{step:08d}"


def committed_steps(folder: Path) -> list[int]:
    """Steps of the whole checkpoints in a folder, oldest first."""
    names = os.listdir(folder) if folder.is_dir() else []
    steps = [int(match[1]) for name in names if (match := re.fullmatch(r"step-(\d{8,})", name))]
    return sorted(step for step in steps if (folder / folder_name(step) / MANIFEST).is_file())


def read_manifest(checkpoint: Path) -> Manifest:
    """Raises:
    ValueError: the manifest, or a file that it lists, is not as it was written.
    """
    try:
        fields: dict[str, Any] = json.loads((checkpoint / MANIFEST).read_text())
        manifest = Manifest(**fields)
    except (OSError, ValueError, TypeError) as error:
        raise ValueError(f"{checkpoint / MANIFEST}: {error}") from None
    if manifest.format != FORMAT:
        raise ValueError(f"{checkpoint} has format {manifest.format}, this version reads {FORMAT}")
    for name, size in manifest.files.items():
        path = checkpoint / name
        if not path.is_file() or path.stat().st_size != size:
            raise ValueError(f"{path} is missing or does not have the {size} bytes that {MANIFEST} states")
    return manifest


def staging_path(folder: Path, step: int) -> Path:
    """Where the files of a checkpoint are written before it counts."""
    return folder / f".staging-{folder_name(step)}"


def begin(folder: Path, step: int) -> Path:
    """An empty staging folder."""
    staging = staging_path(folder, step)
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    return staging


def file_sizes(staging: Path) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in sorted(staging.iterdir())}


def commit(folder: Path, manifest: Manifest) -> Path:
    """Make a staged checkpoint count. Its files must be on disk already (synced)."""
    staging, final = staging_path(folder, manifest.step), folder / folder_name(manifest.step)
    with open(staging / MANIFEST, "w") as file:
        json.dump(asdict(manifest), file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    _sync_folder(staging)
    if final.exists():  # damaged, or it would have been resumed from
        replaced = folder / f".replaced-{folder_name(manifest.step)}"
        shutil.rmtree(replaced, ignore_errors=True)
        os.rename(final, replaced)
        os.rename(staging, final)
        shutil.rmtree(replaced, ignore_errors=True)
    else:
        os.rename(staging, final)
    _sync_folder(folder)
    return final


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
