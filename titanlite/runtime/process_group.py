"""Ranks, device, process group and random seed of this process."""

import gc
import hashlib
import os
import socket
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from titanlite.runtime.allocator import cores, keep_freed_memory
from titanlite.runtime.errors import RunError, UserError, whole_number
from titanlite.runtime.private_torch.process_groups import naming_open_run

DEVICE_BACKENDS = {"cpu": "cpu:gloo", "cuda": "cuda:nccl"}
"""Backend of the collectives on each kind of device."""


@dataclass(frozen=True)
class Ranks:
    """Ranks of this process, as torchrun numbers them. One process without torchrun is rank 0 of 1."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int


def read_ranks(environ: Mapping[str, str]) -> Ranks:
    """Read the ranks from torchrun's environment variables.

    Raises:
        UserError: a variable is not a number.
    """
    names = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
    return Ranks(*(whole_number(environ, name, least) for name, least in names.items()))


def ranks_of_open_group(device_type: str) -> Ranks:
    """Return the ranks of this process in the process group that its program has opened, such as Ray Train's.

    The place on the machine is that of LOCAL_RANK and LOCAL_WORLD_SIZE, where the program sets both; else that among
    the processes of hosts of this name.

    Args:
        device_type: of the devices that the run is for.

    Raises:
        UserError: the group has no backend for CPUs, or none for the devices.
    """
    backends = dist.get_backend_config()
    if missing := [name for name in {"cpu:gloo", DEVICE_BACKENDS[device_type]} if name not in backends.split(",")]:
        wanted = ",".join(sorted({"cpu:gloo", DEVICE_BACKENDS[device_type]}))
        raise UserError(
            f"the process group that is open has the backends {backends}, without {', '.join(sorted(missing))}: let "
            f'the program open it with the backend "{wanted}" (Ray Train: TorchConfig, Accelerate: '
            "InitProcessGroupKwargs, Lightning: DDPStrategy(process_group_backend=...))"
        )
    rank, world_size = dist.get_rank(), dist.get_world_size()
    hosts: list[Any] = [None] * world_size
    dist.all_gather_object(hosts, socket.gethostname())
    own = [other for other, host in enumerate(hosts) if host == hosts[rank]]
    ranks = {"LOCAL_RANK": own.index(rank), "LOCAL_WORLD_SIZE": len(own)}
    if all(name in os.environ for name in ranks):
        ranks = {name: whole_number(os.environ, name, 0) for name in ranks}
    return Ranks(rank, world_size, ranks["LOCAL_RANK"], ranks["LOCAL_WORLD_SIZE"])


def pick_device(ranks: Ranks) -> torch.device:
    """Return this process's GPU, or the CPU where there is none.

    Raises:
        UserError: there are GPUs, but fewer than processes.
    """
    if not torch.cuda.is_available():
        return torch.device("cpu")
    visible, is_worker = os.environ.get("CUDA_VISIBLE_DEVICES"), "RANK" in os.environ
    gpus = torch.cuda.device_count()
    return torch.device("cuda", gpu_index(ranks, gpus=gpus, visible=visible, is_worker=is_worker))


def gpu_index(ranks: Ranks, *, gpus: int, visible: str | None, is_worker: bool) -> int:
    """Return the number of this process's GPU among those that PyTorch sees: its rank on the machine.

    With `torchrun --virtual-local-rank` every worker sees its own GPU alone, and has the local rank 0.

    Args:
        visible: CUDA_VISIBLE_DEVICES, if that is set.
        is_worker: torchrun has started this process.

    Raises:
        UserError: there are fewer GPUs than processes.
    """
    if is_worker and gpus == 1 and ranks.local_rank == 0 and visible is not None:
        return 0
    processes = max(ranks.local_world_size, ranks.local_rank + 1)
    if processes > gpus:
        selected = "" if visible is None else f" (CUDA_VISIBLE_DEVICES is {visible})"
        raise UserError(
            f"{processes} processes on this machine, and PyTorch sees {gpus} GPU{'s'[: gpus > 1]}{selected}: start one "
            "process for each GPU, and let every process see all GPUs of its machine"
        )
    return ranks.local_rank


def why_no_gpu(*, has_gpus: bool, cuda_version: str | None, visible: str | None) -> str | None:
    """Return why PyTorch uses no GPU on a machine that has some; None if there are none, or they are hidden.

    Args:
        has_gpus: this process can reach a GPU's device file.
        cuda_version: CUDA that PyTorch is built for; None for a CPU build.
        visible: CUDA_VISIBLE_DEVICES, if that is set. "" and -1 hide all GPUs.
    """
    if not has_gpus or (visible is not None and visible.strip() in ("", "-1")):
        return None
    if cuda_version is None:
        reason = "this PyTorch is a CPU build: install the CUDA build"
    else:
        reason = f"PyTorch for CUDA {cuda_version} cannot use them: compare the driver's version in nvidia-smi"
    return f"training runs on the CPU, and this machine has NVIDIA GPUs. {reason}, or set CUDA_VISIBLE_DEVICES=-1"


@contextmanager
def process_group(
    ranks: Ranks,
    device: torch.device,
    *,
    deterministic: bool = False,
    timeout_seconds: float = 1800,
    watch: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Iterator[None]:
    """Start the process group, also for one process, and shut it down in order.

    On GPUs the communicator of all ranks starts at once, before data and checkpoints are read, and the groups of the
    mesh are split from it (`device_id` of `init_process_group`).

    The barrier at the end is necessary: a rank that leaves early breaks connections that others still use. After an
    error no rank waits, because the others may never arrive.

    A process group that the caller's program has opened is used, and left open: see `ranks_of_open_group`.

    Args:
        timeout_seconds: longest wait of a rank for another one, until `PhaseTimeouts` sets it.
        watch: returns a context that is entered while the group runs, its last barrier included.

    Raises:
        UserError: torchrun's environment variables are not complete, or the port is in use.
        RunError: the other ranks cannot be reached.
    """
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, cores() // ranks.local_world_size))
    if deterministic:
        use_deterministic_kernels()
    backend, bound = "gloo", None
    if device.type == "cpu":
        keep_freed_memory()
    else:
        torch.cuda.set_device(device)
        backend, bound = "cuda:nccl,cpu:gloo", device
    if dist.is_initialized():
        with naming_open_run(), watch():
            yield
            dist.barrier()
        return
    _check_environment(ranks, os.environ)
    if ranks.world_size == ranks.local_world_size:
        use_loopback(os.environ)
    alone: dict[str, Any] = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    try:
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout_seconds), device_id=bound, **alone)
    except dist.DistNetworkError as error:
        place = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')} (MASTER_ADDR, MASTER_PORT)"
        if "EADDRINUSE" in str(error):
            raise UserError(f"{place}: another process uses this port: name another, or let torchrun choose") from None
        raise RunError(f"{place}: {str(error).splitlines()[0]}") from None
    with naming_open_run(), watch():
        yield
        dist.barrier()
    dist.destroy_process_group()


def _check_environment(ranks: Ranks, environ: Mapping[str, str]) -> None:
    """Check that torchrun's environment variables are all there, or none of them."""
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    missing = [name for name in names if name not in environ]
    if missing and ("RANK" in environ or ranks.world_size > 1):
        there = ", ".join(name for name in names if name in environ)
        raise UserError(
            f"{there} without {', '.join(missing)}: several processes are started with torchrun, which sets all of them"
        )
    if ranks.rank >= ranks.world_size:
        raise UserError(f"RANK is {ranks.rank}, and WORLD_SIZE {ranks.world_size}: ranks begin at 0")
    if "RANK" in environ and whole_number(environ, "MASTER_PORT", 0) > 65535:
        raise UserError(f"MASTER_PORT: {environ['MASTER_PORT']} is no port")


def use_loopback(environ: MutableMapping[str, str]) -> None:
    """Let gloo, and NCCL's start, listen on the loopback interface only: for processes of one machine.

    What NCCL moves between GPUs of one machine does not go through sockets.
    """
    names = [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]
    try:
        socket.create_server(("127.0.0.1", 0)).close()
    except OSError:  # the interface is down
        return
    for name in names:
        environ.setdefault("GLOO_SOCKET_IFNAME", name)
        environ.setdefault("NCCL_SOCKET_IFNAME", name)


def use_deterministic_kernels() -> None:
    """Use deterministic kernels only. Operators without one raise an error. Call it before anything is computed."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS repeats with a workspace of fixed size only
    torch.use_deterministic_algorithms(True)
    # Filling uninitialized memory would find mistakes, and costs many writes.
    torch.utils.deterministic.fill_uninitialized_memory = False  # pyright: ignore[reportAttributeAccessIssue]
    torch.backends.cudnn.benchmark = False  # it picks kernels by timing them


def seed_step(seed: int, step: int, rank: int) -> None:
    """Make every random draw of a step, such as dropout, a function of (seed, step, rank).

    So there is no random state to save, and nothing between steps can shift it. `torch.manual_seed` would also keep a
    Python stack for each kind of device that this process does not use, which takes 0.1 to 0.3 ms.
    """
    digest = hashlib.sha256(f"{seed}/{step}/{rank}".encode()).digest()
    number = int.from_bytes(digest[:8], "little") >> 1
    torch.default_generator.manual_seed(number)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed(number)


def freeze_garbage_collector() -> None:
    """Exempt all objects that exist now from garbage collection, until `gc.unfreeze`.

    Call it after the first step, when everything that lives as long as the run exists. A full collection walks about
    300,000 objects: 0.2 s in the middle of a step, and at another step on each rank.
    """
    gc.collect()
    gc.freeze()
