"""Optimizers on tensors that are sharded in ways FSDP alone does not: the weights are those of one process."""

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from tests.support.helpers import run_ranks
from titanlite.optim import update
from titanlite.optim.muon import Muon
from titanlite.optim.rounding import SlicedAdamW
from titanlite.runtime.dtensor import GlobalIndices, count_replicas, from_local_like, slice_like
from titanlite.runtime.private_torch.tensors import local_tensor

SHAPES = [(16, 32), (32, 16), (8, 16, 32), (7, 10), (3, 8, 5)]
EVEN = 3
"""Parts of the first ones have whole vectors of the CPU's AdamW kernel, which rounds the rest of a tensor in another
way. Those of the others are uneven, or empty on some ranks."""
STEPS = 4
LAYOUTS: list[tuple[tuple[int, ...], list[Placement]]] = [
    ((4,), [Shard(1)]),
    ((2, 2), [Shard(0), Shard(0)]),
    ((2, 2), [Replicate(), Shard(1)]),
    ((1, 4), [Shard(1), Shard(0)]),
]
OPTIMIZERS: dict[str, Callable[[dict[str, nn.Parameter]], torch.optim.Optimizer]] = {
    "Muon": lambda parameters: Muon(parameters.values(), lr=0.05, ns_dtype="float32"),
    "SlicedAdamW": lambda parameters: SlicedAdamW(
        [{"params": [*parameters.values()]}], parameters, state_dtype=torch.bfloat16, seed=1,
        lr=0.01, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1,
    ),
}  # fmt: skip


def draw(step: int) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(step)
    return (torch.randn(shape, generator=generator) for shape in SHAPES)


def trained(name: str, parameters: list[nn.Parameter]) -> list[np.ndarray]:
    """Weights after some steps with given gradients, whole."""
    if name == "SlicedAdamW":
        parameters = [nn.Parameter(parameter.detach().bfloat16()) for parameter in parameters[:EVEN]]
    optimizer = OPTIMIZERS[name]({f"weight{number}": parameter for number, parameter in enumerate(parameters)})
    for step in range(1, STEPS):
        for parameter, gradient in zip(parameters, draw(step), strict=False):
            part = slice_like(gradient, parameter).to(parameter.dtype)
            parameter.grad = from_local_like(part.contiguous(), parameter)
        update(optimizer, skip=torch.tensor(step == 2))
    wholes = [parameter.full_tensor() if isinstance(parameter, DTensor) else parameter for parameter in parameters]
    return [whole.detach().float().numpy() for whole in wholes]


def placed(degrees: tuple[int, ...], placements: list[Placement]) -> list[nn.Parameter]:
    mesh = init_device_mesh("cpu", degrees)
    return [nn.Parameter(distribute_tensor(whole, mesh, placements, src_data_rank=None)) for whole in draw(0)]


def tensor_parallel(dim: int) -> list[nn.Parameter]:
    """Parameters that tensor parallelism shards by one dimension, and FSDP shards the parts by rows."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tensor"))
    model, tensor_mesh = nn.Module(), mesh["tensor"]
    for number, whole in enumerate([*draw(0)][:EVEN]):
        sharded = distribute_tensor(whole, tensor_mesh, [Shard(dim)], src_data_rank=None)
        model.register_parameter(f"weight{number}", nn.Parameter(sharded))
    fully_shard(model, mesh=mesh["shard"])
    return [*model.parameters()]


def on_four(rank: int, world_size: int) -> list[dict[str, list[np.ndarray]]]:
    found = []
    ways = [partial(placed, *layout) for layout in LAYOUTS] + [partial(tensor_parallel, dim) for dim in (0, 1)]
    for parameters in ways:
        for parameter, whole in zip(parameters(), draw(0), strict=False):
            part = local_tensor(parameter).flatten()
            indices = GlobalIndices(parameter)(0, len(part), torch.device("cpu"))
            assert torch.equal(part, whole.flatten()[indices])
        found.append({name: trained(name, parameters()) for name in OPTIMIZERS})
    for parameter in tensor_parallel(0):
        assert torch.distributed.group.WORLD is not None
        assert count_replicas(parameter, torch.distributed.get_world_size()) == 1
    return found


@pytest.mark.slow
def test_weights_are_those_of_one_process_however_they_are_sharded() -> None:
    expected = {name: trained(name, [nn.Parameter(whole) for whole in draw(0)]) for name in OPTIMIZERS}
    for number, rank in enumerate(run_ranks(on_four, 4)):
        assert len(rank) == len(LAYOUTS) + 2
        for layout, found in enumerate(rank):
            for name, weights in found.items():
                assert len(weights) >= EVEN
                for mine, alone, first in zip(weights, expected[name], draw(0), strict=False):
                    case = f"rank {number}, layout {layout}, {name} {mine.shape}"
                    assert abs(alone - first.numpy()).max() > 0.01, case
                    assert mine == pytest.approx(alone, abs=0 if name == "SlicedAdamW" else 1e-5), case
