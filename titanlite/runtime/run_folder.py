"""The run folder, outputs/<run>/: its files, its lock, and the record of each start."""

import json
import platform
import subprocess
import sys
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import titanlite
from titanlite.config.load import dump
from titanlite.config.schema import Config, Data
from titanlite.config.schema import Job as JobConfig
from titanlite.runtime.console import log_to_file
from titanlite.runtime.errors import UserError
from titanlite.runtime.files import FileLocked, lock_file, write_atomically
from titanlite.runtime.process_group import Ranks

LOCK_TIMEOUT = 15.0
"""Seconds to wait for the lock of a run folder: a killed job may need them to end."""


@dataclass(frozen=True)
class RunFolder:
    """outputs/<run>/: everything that a run leaves."""

    path: Path
    run_id: str
    data_cache: Path
    lock: IO[str] | None = None
    """Held by rank 0 as long as the process lives, or the object."""

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def saves(self) -> Path:
        return self.path / "checkpoints.jsonl"

    @property
    def validation(self) -> Path:
        return self.path / "validation.jsonl"

    @property
    def skipped(self) -> Path:
        return self.path / "skipped.jsonl"

    @property
    def has_saved(self) -> bool:
        """Whether the run has saved a checkpoint in an earlier start."""
        return self.saves.exists() and self.saves.stat().st_size > 0

    @property
    def logs(self) -> Path:
        return self.path / "logs"


def open_run_folder(job: JobConfig, data: Data, *, rank: int) -> RunFolder:
    """Create the folder of the run, or open it again; start a log file for each rank."""
    outputs = Path(job.dump_folder)
    path = outputs / str(job.name)
    path.mkdir(parents=True, exist_ok=True)
    lock = None
    told: list[Any] = [None]
    if rank == 0:
        try:
            lock = _lock(path)
            told = [_read_run(path)["id"]]
        except UserError as error:
            told = [error]
    dist.broadcast_object_list(told)
    if isinstance(told[0], UserError):
        raise told[0]
    data_cache = Path(data.cache_folder or outputs / "data_cache")
    folder = RunFolder(path, run_id=str(told[0]), data_cache=data_cache, lock=lock)
    log_to_file(folder.logs, rank)
    return folder


def _lock(path: Path) -> IO[str] | None:
    """Lock a run folder: two jobs in one folder would overwrite each other's checkpoints.

    Returns:
        the lock, held until it is closed or the process ends; None on a file system without locks.

    Raises:
        UserError: another process still holds it after LOCK_TIMEOUT.
    """
    try:
        return lock_file(path / ".lock", timeout=LOCK_TIMEOUT)
    except FileLocked as error:
        message = f"job.name: {path} is being trained by {error.holder}. Stop that, or give this run another name"
        raise UserError(message) from None
    except OSError:
        return None


def record_start(folder: RunFolder, config: Config, *, ranks: Ranks, device: torch.device, mesh: DeviceMesh) -> None:
    """Write config.toml (resolved), and add this start to run.json."""
    if ranks.rank != 0:
        return
    run: dict[str, Any] = {**_read_run(folder.path), "id": folder.run_id}
    run["starts"].append(
        {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "command": sys.argv,
            "mesh": dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=True)),
            "processes": ranks.world_size,
            "host": platform.node(),
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
            "versions": {
                "titanlite": titanlite.__version__,
                "torch": torch.__version__,
                "python": platform.python_version(),
            },
            "git_commit": _git_commit(),
        }
    )
    write_atomically(folder.path / "config.toml", dump(config))
    write_atomically(folder.path / "run.json", json.dumps(run, indent=1))


def _read_run(path: Path) -> dict[str, Any]:
    record = path / "run.json"
    return json.loads(record.read_text()) if record.exists() else {"id": uuid.uuid4().hex, "starts": []}


def _git_commit() -> str | None:
    """The commit of titanlite's own checkout, with + when files differ from it; None outside of git."""
    command = [
        "git",
        "-C",
        str(Path(titanlite.__file__).parent),
        "describe",
        "--always",
        "--dirty=+",
        "--abbrev=40",
    ]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.strip() or None
