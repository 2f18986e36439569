"""What surrounds training: ranks, device, process group, seeds, and the folder of the run."""

import fcntl
import hashlib
import json
import os
import platform
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import titanlite
from titanlite.config.load import dump
from titanlite.config.schema import Config, Data
from titanlite.config.schema import Job as JobConfig
from titanlite.console import log_to_file
from titanlite.errors import UserError, whole_number
from titanlite.host import cores, keep_freed_memory, multiply_by_onednn

LOCK_PATIENCE = 15.0  # seconds


@dataclass(frozen=True)
class Ranks:
    """This process among all, as torchrun numbers them; one process without torchrun is rank 0 of 1."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int


def read_ranks(environ: Mapping[str, str]) -> Ranks:
    """Raises:
    UserError: one is not a number.
    """
    names = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
    return Ranks(*(whole_number(environ, name, least) for name, least in names.items()))


def pick_device(ranks: Ranks) -> torch.device:
    """This process's GPU, or the CPU where there is none.

    Raises:
        UserError: there are GPUs, but fewer than processes.
    """
    if not torch.cuda.is_available():
        return torch.device("cpu")
    if ranks.local_world_size > torch.cuda.device_count():
        raise UserError(f"{ranks.local_world_size} processes, but this machine has {torch.cuda.device_count()} GPUs")
    return torch.device("cuda", ranks.local_rank)


@contextmanager
def process_group(ranks: Ranks, device: torch.device, *, deterministic: bool = False) -> Iterator[None]:
    """Start the process group (also for one process: everything takes one path), and end it in good order.

    The barrier before the end is there because a rank that leaves early breaks connections that others still use.
    After an error nobody waits: the others may never come.
    """
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, cores() // ranks.local_world_size))
    if deterministic:
        use_deterministic_kernels()
    backend = "gloo"
    if device.type == "cpu":
        keep_freed_memory()
        multiply_by_onednn()
    else:
        torch.cuda.set_device(device)
        backend = "cuda:nccl,cpu:gloo"
    if ranks.world_size > 1 and "RANK" not in os.environ:
        raise UserError("WORLD_SIZE is set and RANK is not: several processes are started with torchrun")
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.barrier()
    dist.destroy_process_group()


def use_deterministic_kernels() -> None:
    """Before anything is computed. What has no such kernel raises an error then."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS repeats with a workspace of fixed size only
    torch.use_deterministic_algorithms(True)
    # Filling memory that nobody has written to would find mistakes, at the price of much writing.
    torch.utils.deterministic.fill_uninitialized_memory = False  # pyright: ignore[reportAttributeAccessIssue]
    torch.backends.cudnn.benchmark = False  # it picks kernels by timing them


def seed_step(seed: int, step: int, rank: int) -> None:
    """Make every random draw of a step (dropout, say) a function of (seed, step, rank): there is no random state to
    save, and nothing that happens between steps can shift it."""
    digest = hashlib.sha256(f"{seed}/{step}/{rank}".encode()).digest()
    torch.manual_seed(int.from_bytes(digest[:8], "little") >> 1)


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
    """Two jobs in one run's folder would overwrite each other's checkpoints. The system releases the lock with the
    process, however that ends.

    Raises:
        UserError: another process still holds it after some seconds, as the rest of a killed job may.
    """
    lock = open(path / ".lock", "a+")  # noqa: SIM115 (open as long as the run)
    deadline = time.monotonic() + LOCK_PATIENCE
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                lock.seek(0)
                holder = lock.read().strip()
                message = f"job.name: {path} is being trained by {holder}. Stop that, or give this run another name"
                raise UserError(message) from None
            time.sleep(0.1)
        except OSError:  # a file system without locks
            return None
        else:
            lock.truncate(0)
            print(f"process {os.getpid()} on {platform.node()}", file=lock, flush=True)
            return lock


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


def settings_of_meaning(config: Config, *, model_args: Any, data: dict[str, Any]) -> dict[str, Any]:
    """What gives a checkpoint its meaning: with anything of this changed, going on would be something else.

    Args:
        model_args: dataclass of the model's shape.
        data: what gives sample indices their meaning.
    """
    args = {f"model.args.{name}": value for name, value in asdict(model_args).items() if name != "max_seq_len"}
    return {
        "model.name": config.model.title,
        **args,
        **data,
        "training.seq_len": config.training.seq_len,
        "training.global_batch_size": config.training.global_batch_size,
        "debug.seed": config.debug.seed,
    }


def config_hash(config: Config) -> str:
    return hashlib.sha256(dump(config).encode()).hexdigest()


def check_same_everywhere(value: str, what: str, *, group: dist.ProcessGroup) -> None:
    """Raises:
    UserError: the value is not the same on all ranks (files that differ from node to node, say).
    """
    values: list[str] = [""] * group.size()
    dist.all_gather_object(values, value, group=group)
    if odd := [rank for rank, other in enumerate(values) if other != values[0]]:
        raise UserError(f"{what} of rank {odd[0]} is not that of rank 0 ({values[odd[0]]} and {values[0]})")


def write_atomically(path: Path, text: str) -> None:
    """The file holds the old text or the new, never a part."""
    staging = path.with_name(f".{path.name}.staging")
    staging.write_text(text)
    os.replace(staging, path)


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
