"""The run folder, outputs/<run>/: its files, its lock, and the record of each start."""

import json
import logging
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from titanlite.data.tokenizer import COPY, Tokenizer, copy_tokenizer, files_of, find_tokenizer, is_copy, is_shipped
from titanlite.run.restarts import CrashLoop, are_starts, begin_start, check_progress, end_last, is_own
from titanlite.runtime.console import copy_output, hide_secrets, log_to_file
from titanlite.runtime.errors import RunError, UserError
from titanlite.runtime.files import (
    NO_LOCKS,
    FileLocked,
    checked_name,
    lock_file,
    quarantine_path,
    read_small,
    write_atomically,
)
from titanlite.runtime.process_group import Ranks
from titanlite.schema import Data
from titanlite.schema import Job as JobConfig
from titanlite.version import PACKAGE, __version__

logger = logging.getLogger(__name__)

LOCK_TIMEOUT = 15.0
"""Seconds to wait for the lock of a run folder: a killed job may need them to end."""

NewestSaved = Callable[[Path], tuple[int, str | None]]
"""Returns (step, run id) of the newest checkpoint in a run's folder; (0, None) if there is none."""
Claim = Callable[[Path, str], IO[str] | None]
"""Given a run's folder and its id, claims the folder of its checkpoints; returns what holds that."""


@dataclass(frozen=True)
class RunFolder:
    """Folder of a run, outputs/<run>/, with everything that the run leaves."""

    path: Path
    run_id: str
    data_cache: Path
    earlier: Sequence[int | None] = ()
    """Steps at which the starts before this one resumed; None: it is not known."""
    lock: IO[str] | None = None
    """Lock of the run, held by rank 0 until the process ends or the object is deleted."""
    claim: IO[str] | None = None
    """The same of a folder of checkpoints elsewhere."""

    def release(self) -> None:
        """Let other processes train in the folder."""
        for held in (self.lock, self.claim):
            if held is not None:
                held.close()

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def records(self, name: str) -> Path:
        """Return the file of the run's records: of metrics, validation, checkpoints or skipped steps."""
        return self.path / f"{name}.jsonl"

    @property
    def has_saved(self) -> bool:
        """Return whether the run has saved a checkpoint in an earlier start."""
        saves = self.records("checkpoints")
        return saves.exists() and saves.stat().st_size > 0

    @property
    def tokenizer(self) -> Path:
        """Return the folder of the tokenizer's copy; there is none of a tokenizer that titanlite ships."""
        return self.path / COPY

    @property
    def logs(self) -> Path:
        return self.path / "logs"


def open_run_folder(
    job: JobConfig,
    data: Data,
    rank: int,
    newest_saved: NewestSaved = lambda run: (0, None),
    claim: Claim = lambda run, run_id: None,
) -> RunFolder:
    """Create the folder of the run, or open it again. Start a log file for each rank.

    Args:
        newest_saved: returns the newest checkpoint's step, for restarts without progress, and the run's id in it, for a
            run whose run.json is damaged.
        claim: claims the folder of checkpoints on rank 0.

    Raises:
        UserError: the folder cannot be created or written, or another job trains in it or in that of the checkpoints.
        CrashLoop: the restarts before this one made no progress.
    """
    outputs = Path(job.dump_folder)
    path = outputs / str(job.name)
    lock = claimed = None
    shared: list[Any] = [None]
    if rank == 0:
        try:
            _make_folder(path)
            lock = _lock(path)
            shared = [begun := _begin(path, job, newest_saved)]
            claimed = claim(path, begun[0])
        except (UserError, CrashLoop, RunError) as error:
            shared = [error]
        except OSError as error:
            shared = [RunError(f"rank 0: {error}")]
    dist.broadcast_object_list(shared)
    if isinstance(shared[0], Exception):
        raise shared[0]
    data_cache = Path(data.cache_folder or outputs / "data_cache")
    run_id, earlier = shared[0]
    folder = RunFolder(path, run_id=run_id, data_cache=data_cache, earlier=earlier, lock=lock, claim=claimed)
    _make_folder(folder.logs)
    log = log_to_file(folder.logs, rank)
    if "TORCHELASTIC_RUN_ID" in os.environ:  # one of several processes, started by torchrun
        copy_output(log)
    return folder


def _begin(path: Path, job: JobConfig, newest_saved: NewestSaved) -> tuple[str, list[int | None]]:
    """Begin the record of this start in run.json. Return the run's id, and where earlier starts resumed.

    Raises:
        CrashLoop: the restarts before this one made no progress.
    """
    run = _read_run(path, newest_saved)
    starts = run["starts"]
    end_last(starts, os.environ)
    check_progress(
        starts,
        environ=os.environ,
        limit=job.max_failed_restarts,
        newest_step=lambda: newest_saved(path)[0],
        logs=path / "logs",
    )
    earlier = [start.get("step") for start in starts]
    starts.append(begin_start(os.environ))
    _write_run(path, run)
    return str(run["id"]), earlier


def _make_folder(path: Path) -> None:
    """Create a folder that can be written.

    Raises:
        UserError: naming the options, the folder and the reason.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise UserError(f"job.dump_folder, job.name: the run needs a folder {path}: {error.strerror}") from None


def _lock(path: Path) -> IO[str] | None:
    """Lock a run folder: two jobs in one folder would overwrite each other's checkpoints.

    Returns:
        the lock, held until it is closed or the process ends; None on a file system without locks.

    Raises:
        UserError: another process still holds it after LOCK_TIMEOUT, or it is not known whether one does.
    """
    try:
        return lock_file(path / ".lock", timeout=LOCK_TIMEOUT)
    except FileLocked as error:
        message = f"job.name: {path} is being trained by {error.holder}. Stop that job, or give this run another name"
        raise UserError(message) from None
    except OSError as error:
        if error.errno in NO_LOCKS:
            logger.warning(f"{path} is on a file system without locks: let no other job train in it")
            return None
        raise UserError(f"job.dump_folder, job.name: {path / '.lock'} cannot be locked: {error.strerror}") from None


def record_start(
    folder: RunFolder,
    whole_config: str,
    *,
    tokenizer: Tokenizer,
    step: int,
    ranks: Ranks,
    device: torch.device,
    mesh: DeviceMesh,
) -> None:
    """Write config.toml (resolved) and a copy of the tokenizer, and complete the record of this start in run.json.

    Args:
        whole_config: text of config.toml.
        step: step at which the run resumes.
    """
    if ranks.rank != 0:
        return
    run: dict[str, Any] = {**_read_run(folder.path), "id": folder.run_id}
    if not is_own(run["starts"]):  # the beginning of this start could not be recorded
        run["starts"].append(begin_start(os.environ))
    run["starts"][-1] |= {
        "step": step,
        "command": [hide_secrets(word) for word in sys.argv],
        "mesh": dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=True)),
        "processes": ranks.world_size,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "versions": {
            "titanlite": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "git_commit": _git_commit(),
    }
    _write(folder.path / "config.toml", whole_config)
    _write_run(folder.path, run)
    _keep_tokenizer(folder.tokenizer, tokenizer, step)


def _keep_tokenizer(copy: Path, tokenizer: Tokenizer, step: int) -> None:
    """Keep the files of a tokenizer that is a path. Those that earlier checkpoints were trained with stay beside."""
    if is_shipped(tokenizer.name):
        return
    try:
        path = find_tokenizer(tokenizer.name)
        files = files_of(path) if path else {}
        if is_copy(files, copy):
            return
        if copy.exists():
            earlier = copy.with_name(f"{copy.name}-until-step-{step}")
            shutil.rmtree(earlier, ignore_errors=True)
            copy.rename(earlier)
            logger.warning(f"the tokenizer has other files now: the former are in {earlier}, for earlier checkpoints")
        copy_tokenizer(files, copy, fingerprint=tokenizer.fingerprint)
    except (OSError, UserError) as error:
        logger.error(f"{copy}: the tokenizer could not be copied: {error}. Commands on checkpoints need --tokenizer")


def _write_run(path: Path, run: dict[str, Any]) -> None:
    _write(path / "run.json", json.dumps(run, indent=1))


def _write(path: Path, text: str) -> None:
    try:
        write_atomically(path, text, mode=0o600)
    except OSError as error:  # a record that cannot be written must not end the run
        logger.error(f"{path} cannot be written: {error.strerror}. The run continues without it")


def _read_run(path: Path, newest_saved: NewestSaved = lambda run: (0, None)) -> dict[str, Any]:
    """Return run.json, or what a new run.json begins with. A damaged one is renamed, and keeps no run from resuming."""
    record = path / "run.json"
    try:
        run = json.loads(read_small(record))
    except FileNotFoundError:
        if (run_id := newest_saved(path)[1]) is not None:
            logger.info(f"{record} is not there: the run continues with the id of its newest checkpoint, {run_id}")
        return {"id": run_id or uuid.uuid4().hex, "starts": []}
    except (ValueError, RecursionError):
        run = None
    if not isinstance(run, dict):
        run = {}
    try:
        run_id = checked_name(run.get("id"))  # the id becomes a part of paths
    except ValueError:
        run_id = None
    if run_id and are_starts(run.get("starts")):
        return run
    damaged = quarantine_path(record)
    record.rename(damaged)
    run_id = run_id or newest_saved(path)[1] or uuid.uuid4().hex
    logger.warning(f"{record} is damaged: it is now {damaged.name}, and the run continues with id {run_id}")
    run = {"id": run_id, "starts": []}
    write_atomically(record, json.dumps(run, indent=1), mode=0o600)
    return run


def _git_commit() -> str | None:
    """Return the commit of titanlite's own checkout, with + when files differ from it; None outside of git."""
    command = [
        "git",
        "-C",
        str(PACKAGE),
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
