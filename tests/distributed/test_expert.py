"""Expert parallelism: what ranks with different experts exchange and save. That they train as one: tests/matrix.py."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from tests.helpers import TinyRun, run_ranks, train_on_this_rank, world
from tests.layouts import CountOperators, built, degrees, one_step, optimizer_moments, whole
from titanlite.ops.kernels import Kernels
from titanlite.schema import Config
from titanlite.techniques.expert.exchange import AllToAllExchange

MOE = [
    "--model={name='qwen3_moe', flavor='debug', args={dim=32, n_layers=2, n_heads=2, n_kv_heads=1, head_dim=16, "
    "hidden_dim=24, vocab_size=259}}",
]
TWO = 1, 2, 1, 1, 2
"""With degree 2 of expert parallelism."""


def times_weight(x_SD: Tensor, ends_E: Tensor, weights: Any) -> Tensor:
    """Multiply the tokens of each expert by its weight [E, 1]."""
    sizes = ends_E.diff(prepend=ends_E.new_zeros(1))
    return x_SD * weights[0].repeat_interleave(sizes, dim=0)


def check_exchange(counts: list[list[int]]) -> None:
    """Compare the results and the gradients of this rank's tokens with those of a rank that has all four experts.

    Args:
        counts: for each rank, its tokens for each expert.
    """
    group = world()
    rank = group.rank()
    tokens = torch.arange(1.0, sum(counts[rank]) + 1)[:, None] + 100 * rank
    whole_weight = torch.tensor([[1.0], [10.0], [100.0], [1000.0]])
    ends_E = torch.tensor(counts[rank]).cumsum(0).int()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("expert",))
    weight = distribute_tensor(whole_weight, mesh, [Shard(0)], src_data_rank=None).requires_grad_()
    exchange = AllToAllExchange(group, Kernels()).compute
    found = []
    for compute, its_weight in (
        (lambda x: exchange(x, ends_E, [weight], times_weight), weight),
        (lambda x: times_weight(x, ends_E, [plain]), plain := whole_weight.clone().requires_grad_()),
    ):
        x_SD = tokens.clone().requires_grad_()
        out_SD = compute(x_SD)
        (out_SD * tokens).sum().backward()
        gradient = its_weight.grad
        assert gradient is not None
        if isinstance(gradient, DTensor):
            gradient = 2 * gradient.full_tensor()  # what FSDP averages over half of the ranks
        else:
            dist.all_reduce(gradient)
        found.append((out_SD, x_SD.grad, gradient))
    assert all(map(torch.equal, *found))


def two_ranks(rank: int, world_size: int, built_only: Config, config: Config) -> list[dict[str, Any]]:
    """Return initial weights, and the moments after training."""
    run = built(rank, world_size, built_only)
    weight = run.model.get_parameter("layers.0.feed_forward.w1")
    assert isinstance(weight, DTensor)
    assert weight.to_local().shape == (4, 32, 24), "four of eight experts"
    initial = {name: whole(parameter).numpy() for name, parameter in run.model.named_parameters()}
    with CountOperators("_c10d_functional.all_to_all_single") as operators:
        one_step(run)
    assert operators.count == 2 * (3 + 2 + 2), "counts, tokens and results; recomputed but for counts; gradients"
    # Rank 1 sends nothing. Expert 1 gets nothing. Rank 0 has experts without any token.
    check_exchange([[1, 0, 2, 3], [0, 0, 0, 0]])
    check_exchange([[0, 0, 2, 1], [0, 0, 3, 0]])
    run = train_on_this_rank(config, rank, world_size)
    moments = {
        f"{name}.{key}": whole(value).numpy()
        for name, parameter in run.model.named_parameters()
        for key, value in run.optimizer.state[parameter].items()
    }
    return [initial, moments]


@pytest.mark.usefixtures("single_process_group")
def test_two_ranks_with_different_experts_begin_and_save_as_one(tiny: TinyRun) -> None:
    """One process loads the moments that two ranks have saved."""
    options = [*MOE, "--training.steps=4", "--activation_checkpoint.mode=selective", "--data.document_mask"]
    two = [tiny.config(*options, *degrees(*TWO), f"--job.name={it}", world_size=2) for it in ("two-built", "two")]
    built_only, config, loaded = (tiny.config(*options, f"--job.name={it}") for it in ("one-built", "one", "two"))
    of_ranks = run_ranks(two_ranks, 2, *two)
    run = built(0, 1, built_only)
    run.batches.close()
    initial = {name: whole(parameter).numpy() for name, parameter in run.model.named_parameters()}
    train_on_this_rank(config, 0, 1)
    one = [initial, optimizer_moments(0, 1, loaded)]
    for found in of_ranks:
        for ours, theirs in zip(found, one, strict=True):
            assert ours.keys() == theirs.keys()
            for name, value in theirs.items():
                assert (ours[name] == value).all(), name
