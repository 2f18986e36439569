"""Ranks from srun and mpirun, under the names that torchrun gives them. Imports no torch.

`srun -n 2 titanlite train` and `mpirun -n 2 titanlite train` start processes that would otherwise be two runs.
"""

import os
import re
import zlib
from collections.abc import Mapping, MutableMapping

from titanlite.runtime.errors import UserError, whole_number

FIRST_PORT, PORTS = 20000, 10000
"""Ports from which one is taken that no other job of the machine is likely to take; Linux gives out others itself."""
MPI = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)
"""Variables of Open MPI, of MVAPICH, and of MPICH and Intel MPI."""
MPI_JOBS = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid")
"""Variables that are the same in all processes of one mpirun only."""


def use_ranks_of_launcher(environ: MutableMapping[str, str]) -> None:
    """Set torchrun's variables from those of mpirun or srun, in one of several processes that they have started.

    What is set already stays, such as MASTER_ADDR. mpirun comes first: in a job of Slurm, it starts its own daemons by
    srun, and processes inherit those daemons' ranks.

    Raises:
        UserError: mpirun has started processes on several machines, and MASTER_ADDR does not name the first.
    """
    if "RANK" in environ or "WORLD_SIZE" in environ:
        return
    if found := _of_mpi(environ) or _of_srun(environ):
        for name, value in found.items():
            environ.setdefault(name, value)


def _of_mpi(environ: Mapping[str, str]) -> dict[str, str] | None:
    for names in MPI:
        if all(name in environ for name in names):
            rank, size, local_rank, local_size = (whole_number(environ, name, 0) for name in names)
            if size == 1:
                return None
            if size > local_size and "MASTER_ADDR" not in environ:
                raise UserError(
                    f"mpirun has started {size} processes on several machines, and MASTER_ADDR does not name the first "
                    "one (Open MPI: mpirun -x MASTER_ADDR=node0)"
                )
            job = next((environ[name] for name in MPI_JOBS if name in environ), str(os.getppid()))
            return _variables(rank, size, local_rank, local_size, "127.0.0.1", zlib.crc32(job.encode()))
    return None


def _of_srun(environ: Mapping[str, str]) -> dict[str, str] | None:
    if not environ.get("SLURM_STEP_ID", "").isdecimal():  # no task of srun: a batch script has ranks of no processes
        return None
    size = whole_number(environ, "SLURM_STEP_NUM_TASKS", 0)
    if size <= 1:
        return None
    tasks = _tasks_of_nodes(environ["SLURM_STEP_TASKS_PER_NODE"])
    rank, node, local = (whole_number(environ, f"SLURM_{name}", 0) for name in ("PROCID", "NODEID", "LOCALID"))
    number = whole_number(environ, "SLURM_JOB_ID", 0) + int(environ["SLURM_STEP_ID"])
    return _variables(rank, size, local, tasks[node], first_host(environ["SLURM_STEP_NODELIST"]), number)


def _variables(
    rank: int, world_size: int, local_rank: int, local_world_size: int, address: str, number: int
) -> dict[str, str]:
    values = {"RANK": rank, "WORLD_SIZE": world_size, "LOCAL_RANK": local_rank, "LOCAL_WORLD_SIZE": local_world_size}
    return {
        **{name: str(value) for name, value in values.items()},
        "MASTER_ADDR": address,
        "MASTER_PORT": str(FIRST_PORT + number % PORTS),
    }


def _tasks_of_nodes(text: str) -> list[int]:
    """Return the tasks of each node from Slurm's text, such as 8(x2),4."""
    return [int(tasks) for tasks, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text) for _ in range(int(times or 1))]


def first_host(nodes: str) -> str:
    """Return the first of Slurm's list of nodes, such as rack[1-2]n[03,07-09],login1."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes)
    assert first is not None
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", first.group())
