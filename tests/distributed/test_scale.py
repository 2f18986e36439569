"""Nothing may depend on the size of the model or of the cluster on the host: 405B on 512 ranks, without memory."""

import time
from dataclasses import replace

import pytest
import torch
from torch.distributed.tensor import DTensor

from tests.support.helpers import run_ranks
from titanlite.models.llama3 import Llama3
from titanlite.ops.cpu import CpuKernels
from titanlite.optim import build_optimizer
from titanlite.parallelize import build_mesh, parallelize
from titanlite.schema import ActivationCheckpoint, Compile, Config, Optimizer, Parallelism


def build_405b(rank: int, world_size: int, n_layers: int) -> tuple[float, int, int]:
    started = time.perf_counter()
    with torch.device("meta"):
        model = Llama3(replace(Llama3.flavors["405B"], n_layers=n_layers))  # pyright: ignore[reportArgumentType]
    config = Config(
        parallelism=Parallelism(data_parallel_replicate_degree=4, fsdp_forward_prefetch=1, fsdp_backward_prefetch=1),
        activation_checkpoint=ActivationCheckpoint(mode="full"),
        compile=Compile(enable=True),
    )
    mesh = build_mesh(config.parallelism, world_size=world_size, device_type="cpu")
    parallelize(model, config, mesh=mesh, kernels=CpuKernels())
    build_optimizer(model, Optimizer(), seed=0)
    seconds = time.perf_counter() - started
    parameters = list(model.parameters())
    assert all(isinstance(parameter, DTensor) and parameter.is_meta for parameter in parameters)
    whole = sum(parameter.numel() for parameter in parameters)
    local = sum(parameter.to_local().numel() for parameter in parameters if isinstance(parameter, DTensor))
    return seconds, whole, local


@pytest.mark.parametrize(
    ("n_layers", "expected"), [(8, 29_704_339_456), pytest.param(126, 405_853_388_800, marks=pytest.mark.nightly)]
)
def test_405b_on_512_ranks_is_built_in_seconds(n_layers: int, expected: int) -> None:
    [(seconds, whole, local)] = run_ranks(build_405b, 512, n_layers, backend="fake")
    assert whole == expected
    assert local == whole // 128
    assert seconds < 30
