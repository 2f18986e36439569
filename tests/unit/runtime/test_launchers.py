"""Ranks of srun and mpirun under torchrun's names. The variables are those of Slurm 22.05.8 and Open MPI 4.1.4."""

import pytest

from tests.support.helpers import mentions
from titanlite.runtime.errors import UserError
from titanlite.runtime.launchers import first_host, use_ranks_of_launcher
from titanlite.runtime.process_group import ranks_of_open_group

NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
SRUN = {
    "SLURM_JOB_ID": "31", "SLURM_STEP_ID": "2", "SLURM_STEP_NUM_TASKS": "3", "SLURM_STEP_TASKS_PER_NODE": "2,1",
    "SLURM_STEP_NODELIST": "tlc[1-2]", "SLURM_PROCID": "2", "SLURM_NODEID": "1", "SLURM_LOCALID": "0",
    "SLURM_NTASKS": "3",
}  # fmt: skip
MPIRUN = {
    "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "PMIX_NAMESPACE": "2713321473",
}  # fmt: skip


def ranks(environ: dict[str, str]) -> list[str | None]:
    environ = dict(environ)
    use_ranks_of_launcher(environ)
    return [environ.get(name) for name in NAMES]


def test_tasks_of_srun_are_ranks() -> None:
    assert ranks(SRUN) == ["2", "3", "0", "1", "tlc1", "20033"]
    first = SRUN | {"SLURM_PROCID": "1", "SLURM_NODEID": "0", "SLURM_LOCALID": "1"}
    assert ranks(first) == ["1", "3", "1", "2", "tlc1", "20033"]
    eight = {"SLURM_STEP_NUM_TASKS": "16", "SLURM_STEP_TASKS_PER_NODE": "8(x2)"}
    assert ranks(SRUN | eight)[:4] == ["2", "16", "0", "8"]
    assert ranks(SRUN | {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "5"})[4:] == ["10.0.0.1", "5"]


def test_processes_of_mpirun_are_ranks() -> None:
    given = ranks(MPIRUN)
    assert given[:5] == ["1", "2", "1", "2", "127.0.0.1"]
    assert given[5] == ranks(MPIRUN | {"OMPI_COMM_WORLD_RANK": "0"})[5] != ranks(MPIRUN | {"PMIX_NAMESPACE": "7"})[5]
    assert ranks(SRUN | MPIRUN)[:2] == ["1", "2"], "its daemons are tasks of srun"
    hydra = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
    assert ranks(hydra)[:4] == ["1", "2", "1", "2"]
    far = MPIRUN | {"OMPI_COMM_WORLD_SIZE": "4"}
    assert ranks(far | {"MASTER_ADDR": "node0"})[:5] == ["1", "4", "1", "2", "node0"]
    with pytest.raises(UserError, match="MASTER_ADDR"):
        ranks(far)


@pytest.mark.parametrize(
    "environ",
    [
        {},
        SRUN | {"SLURM_STEP_NUM_TASKS": "1"},
        {name: value for name, value in SRUN.items() if "STEP" not in name},  # a batch script
        MPIRUN | {"OMPI_COMM_WORLD_SIZE": "1"},
    ],
)
def test_one_process_has_no_ranks(environ: dict[str, str]) -> None:
    assert ranks(environ) == [None] * 6


def test_ranks_of_torchrun_stay() -> None:
    """run_train.sh, as a task of srun, starts torchrun."""
    assert ranks(SRUN | {"RANK": "5", "WORLD_SIZE": "8"})[:4] == ["5", "8", None, None]
    assert ranks(SRUN | {"WORLD_SIZE": "8"})[:2] == [None, "8"], "its check of the config"


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("tlc[1-2]", "tlc1"), ("a,b", "a"), ("rack[1-2]n[03,07-09],login1", "rack1n03"), ("gpu-007", "gpu-007")],
)
def test_the_first_host_of_a_list(nodes: str, first: str) -> None:
    assert first_host(nodes) == first


@pytest.mark.usefixtures("single_process_group")
def test_a_group_without_a_backend_for_the_devices_is_refused() -> None:
    assert ranks_of_open_group("cpu").world_size == 1
    with pytest.raises(UserError) as refusal:
        ranks_of_open_group("cuda")
    assert mentions(str(refusal.value), "cuda:nccl", '"cpu:gloo,cuda:nccl"')
