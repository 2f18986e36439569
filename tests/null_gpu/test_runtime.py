"""Set-up of a run on GPUs: the allocator, the device of each process, and communicators."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.null_gpu.conftest import RunPython
from tests.null_gpu.runs import metrics, train

pytestmark = pytest.mark.null_gpu

PROBE = """
import json, os, torch
from titanlite.loss import token_loss

def loss(*tensors, **labels):
    result = token_loss(*tensors, **labels)
    segments = torch.cuda.memory_snapshot()
    found = {
        "expandable": sorted({segment["is_expandable"] for segment in segments}),
        "devices": sorted({segment["device"] for segment in segments}),
        "current": torch.cuda.current_device(),
        "workspace": os.environ.get("CUBLAS_WORKSPACE_CONFIG"),
    }
    with open(f"found-{os.environ.get('RANK', 0)}", "w") as file:
        json.dump(found, file)
    return result
"""


def probed(run_python: RunPython, folder: Path, *options: str, devices: int = 1, **environ: str) -> list[Any]:
    """Train, and return what a loss function of the user's own finds on each rank."""
    (folder / "probe.py").write_text(PROBE)
    train(
        run_python, f"--training.loss={folder}/probe.py:loss", "--training.steps=3", "--validation.freq=100",
        *options, devices=devices, **environ,
    )  # fmt: skip
    return [json.loads((folder / f"found-{rank}").read_text()) for rank in range(devices)]


def test_segments_are_expandable_and_processes_use_their_own_device(run_python: RunPython, tmp_path: Path) -> None:
    found = probed(run_python, tmp_path, "--debug.deterministic", devices=2)
    assert found == [
        {"expandable": [True], "devices": [rank], "current": rank, "workspace": ":4096:8"} for rank in range(2)
    ]
    assert [record["num_alloc_retries"] for record in metrics(tmp_path)] == [0, 0, 0]


def test_the_allocator_settings_of_the_user_stay(run_python: RunPython, tmp_path: Path) -> None:
    [found] = probed(run_python, tmp_path, PYTORCH_CUDA_ALLOC_CONF="max_split_size_mb:512")
    assert found["expandable"] == [False]


def test_the_first_lines_name_the_device(run_python: RunPython) -> None:
    lines = train(run_python, "--training.steps=1", "--validation.enable=false").stdout.splitlines()
    [device] = [line for line in lines if line.startswith("device")]
    assert device.startswith("device   NVIDIA H100 80GB HBM3, 79.2 GiB; float32 matmuls of highest precision; NCCL ")
    assert device.endswith("; allocator expandable_segments:True (PYTORCH_ALLOC_CONF)")


def test_groups_of_the_mesh_are_split_from_the_first_communicator(run_python: RunPython, tmp_path: Path) -> None:
    """Two replicas on two devices: one axis is the world, the other is split from it. No rank warns."""
    result = train(
        run_python, "--training.steps=2", "--validation.enable=false", "--checkpoint.enable=false",
        "--parallelism.data_parallel_replicate_degree=2", devices=2, NULL_GPU_RECORD=str(tmp_path / "record"),
    )  # fmt: skip
    by_rank = [
        dict(line.split("\t")[1:3] for line in path.read_text().splitlines() if line.startswith("communicator"))
        for path in tmp_path.glob("record.*")
    ]
    assert [found for found in by_rank if found] == [{"of 2": "1", "split": "1", "of 1": "1"}] * 2
    assert "ProcessGroupGloo::split" not in result.stderr


def test_the_flight_recorder_writes_to_the_folder_of_the_logs(run_python: RunPython, tmp_path: Path) -> None:
    """A pipe asks PyTorch for the traces that it writes at a timeout. The implementation that is new in 2.15 has no
    such pipe."""
    (tmp_path / "logs").mkdir()
    code = """
import os, time, torch, torch.distributed as dist
from pathlib import Path
from titanlite.run.watchdog import keep_traces

keep_traces(os.environ, Path("logs"))
device = torch.device("cuda", 0)
dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=device)
dist.all_reduce(torch.ones(1000, device=device))
while not (pipes := list(Path().glob("pipe-*"))):
    time.sleep(0.1)
pipes[0].write_text("1")
while not os.listdir("logs"):
    time.sleep(0.1)
os._exit(0)
"""
    run_python("-c", code, timeout=120, TORCH_NCCL_DEBUG_INFO_PIPE_FILE="pipe-", TORCH_DIST_USE_NCCL2="0")
    assert [path.name for path in (tmp_path / "logs").iterdir()] == ["nccl-rank-0"]


def test_collectives_of_nccl_are_counted_and_named(run_python: RunPython) -> None:
    """Both name a hang. Releases before 2.15 record NCCL's collectives elsewhere, and write them at a timeout."""
    code = """
import json, os, torch, torch.distributed as dist
from titanlite.runtime.private_torch.process_groups import count_collectives, recent_collectives

device = torch.device("cuda", 0)
dist.init_process_group("cuda:nccl", store=dist.HashStore(), rank=0, world_size=2, device_id=device)
for _ in range(3):
    dist.all_reduce(torch.ones(1000, device=device))
assert [*count_collectives().values()] == [3], count_collectives()
if type(dist.group.WORLD._get_backend(device)).__name__ == "ProcessGroupNCCL2":
    names = [record["profiling_name"] for record in json.loads(recent_collectives())["entries"]]
    assert names == ["nccl2:all_reduce"] * 3, names
os._exit(0)
"""
    run_python("-c", code, timeout=120)
