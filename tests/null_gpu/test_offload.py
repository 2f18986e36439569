"""Where states in files are, beside a GPU."""

import json

import pytest

from tests.null_gpu.conftest import RunPython

pytestmark = pytest.mark.null_gpu

MOMENTS = """
import json, tempfile, torch
from pathlib import Path
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from titanlite.runtime.private_torch.tensors import local_tensor
from titanlite.techniques.offload.disk import DiskMemory
torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
with tempfile.TemporaryDirectory() as folder:
    mesh = torch.distributed.device_mesh.init_device_mesh("cuda", (4,))
    model = nn.Linear(64, 64, bias=False)
    fully_shard(model, mesh=mesh, offload_policy=CPUOffloadPolicy(pin_memory=False))
    memory = DiskMemory(Path(folder))
    [moments] = memory.zeros("optimizer", model.parameters(), torch.float32, copies=2).values()
    tensors = [*moments, *(tensor for [tensor] in memory.zeros("parameters", model.parameters()).values())]
    parts = [local_tensor(tensor) for tensor in tensors]
    mapped = [
        any(file.address <= part.data_ptr() < file.address + len(file.map) for file in memory._files) for part in parts
    ]
    print(json.dumps([[str(part.device) for part in parts], mapped, [[*tensor.shape] for tensor in tensors]]))
"""


def test_states_in_files_stay_there(run_python: RunPython) -> None:
    devices, mapped, shapes = json.loads(run_python("-c", MOMENTS).stdout.splitlines()[-1])
    assert devices == ["cpu"] * 3
    assert mapped == [True] * 3
    assert shapes == [[64, 64]] * 3
