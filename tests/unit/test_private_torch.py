"""PyTorch's private API does what titanlite/runtime/private_torch.py relies on."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from titanlite.runtime.private_torch import local_tensor


@pytest.mark.usefixtures("single_process_group")
def test_local_tensor() -> None:
    whole = torch.arange(6.0).view(3, 2)
    sharded = distribute_tensor(whole, init_device_mesh("cpu", (1,)), [Shard(0)])
    assert torch.equal(local_tensor(sharded), whole)
    assert local_tensor(sharded) is sharded._local_tensor
    assert local_tensor(whole) is whole
