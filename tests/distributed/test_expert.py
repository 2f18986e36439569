"""Expert parallelism: what ranks with different experts exchange and save. That they train as one: tests/matrix.py."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.helpers import TinyRun, run_ranks, train_on_this_rank, world
from tests.support.layouts import CountOperators, built, degrees, one_step, optimizer_moments, whole
from titanlite.models.base import NOT_CHOSEN
from titanlite.ops.kernels import Kernels
from titanlite.schema import Config
from titanlite.techniques.expert.exchange import AllToAllExchange
from titanlite.techniques.reproducible.experts import ExchangeOfMicroBatches

MOE = [
    "--model={name='qwen3_moe', flavor='debug', args={dim=32, n_layers=2, n_heads=2, n_kv_heads=1, head_dim=16, "
    "hidden_dim=24, vocab_size=259}}",
]
TWO = 1, 2, 1, 1, 2
"""With degree 2 of expert parallelism."""


def times_stack(x_SD: Tensor, weights_S: Tensor, ends_E: Tensor, stacks: Any) -> Tensor:
    """Multiply the tokens of each expert by its number [E, 1], and by their weights."""
    sizes = ends_E.diff(prepend=ends_E.new_zeros(1))
    return x_SD * stacks[0].repeat_interleave(sizes, dim=0) * weights_S[:, None]


class RowsSent(TorchDispatchMode):
    """Rows that each all-to-all sends."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "all_to_all_single" in str(func):
            self.rows.append(len(args[0]))
        return func(*args, **(kwargs or {}))


def check_exchange(chosen: list[list[list[int]]], make: Any, moved: list[tuple[int, int]], factor: int = 2) -> None:
    """Compare the results and the gradients of this rank's tokens with those of a rank that has all four experts. All
    sums of the numbers here are exact.

    Args:
        chosen: for each rank, the experts of each of its tokens.
        moved: tokens that each rank sends and receives.
        factor: of a stack's gradient. FSDP averages it over half of the ranks, or adds it up where runs are
            reproducible.
    """
    group = world()
    rank = group.rank()
    experts = torch.tensor(chosen[rank])
    tokens = torch.arange(1.0, len(experts) + 1)[:, None] + 100 * rank
    whole_stack = torch.tensor([[1.0], [10.0], [100.0], [1000.0]])
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("expert",))
    stack = distribute_tensor(whole_stack, mesh, [Shard(0)], src_data_rank=None).requires_grad_()
    plain = whole_stack.clone().requires_grad_()
    is_chosen_TE = torch.zeros(len(tokens), 4, dtype=torch.bool).scatter(1, experts, value=True)
    found, exchange = [], make(group, Kernels())
    for passed, its_stack in (
        (lambda x, w: exchange.compute(exchange.send(x, w, experts.shape[1]), [stack], times_stack), stack),
        (lambda x, w: (x @ plain.t() * w.masked_fill(w == NOT_CHOSEN, 0)).sum(dim=1, keepdim=True), plain),
    ):
        x_TD = tokens.clone().requires_grad_()
        weights_TE = (tokens + torch.arange(4)).masked_fill(~is_chosen_TE, NOT_CHOSEN).requires_grad_()
        with RowsSent() as rows:
            out_TD = passed(x_TD, weights_TE)
        if its_stack is stack:
            assert rows.rows == [2, *moved[rank]], "weights for the experts of two ranks, tokens, results"
        (out_TD * tokens).sum().backward()
        gradient = its_stack.grad
        assert gradient is not None
        assert weights_TE.grad is not None
        if isinstance(gradient, DTensor):
            gradient = factor * gradient.full_tensor()
        else:
            dist.all_reduce(gradient)
        found.append((out_TD, x_TD.grad, weights_TE.grad * is_chosen_TE, gradient))
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
    assert operators.count == 2 * (3 + 2 + 3), "weights, tokens and results; recomputed, but for results; gradients"
    # A token with two experts on a rank is sent there once.
    both = [[[0, 1], [0, 2], [3, 1]], [[2, 3], [0, 1], [3, 2]]]
    check_exchange(both, AllToAllExchange, moved=[(5, 4), (3, 4)])
    # Expert 1 gets nothing. Rank 0 has experts without any token.
    check_exchange([[[0], [2], [2], [3]], [[0], [3], [3], [3]]], AllToAllExchange, moved=[(4, 2), (4, 6)])
    check_exchange([[[2], [2], [3]], [[2], [2], [2]]], AllToAllExchange, moved=[(3, 0), (3, 6)])
    one_by_one = partial(ExchangeOfMicroBatches, dtype=torch.float32)
    check_exchange(both, one_by_one, moved=[(6, 6), (6, 6)], factor=1)
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
    two = [tiny.config(*options, *degrees(*TWO), f"--job.name={name}", world_size=2) for name in ("two-built", "two")]
    built_only, config, loaded = (tiny.config(*options, f"--job.name={name}") for name in ("one-built", "one", "two"))
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
