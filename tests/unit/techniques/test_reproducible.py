"""Parts of `debug.reproducible_layouts`; whole runs: tests/distributed/test_reproducible.py."""

from itertools import islice

import pytest
import torch

from tests.support.models import plain_step
from tests.support.plans import layout_of, read
from titanlite.data.loader import MicroBatches
from titanlite.optim.rounding import SlicedAdamW
from titanlite.schedule import BatchSizes
from titanlite.techniques.reproducible.step import ReproducibleStep, squares
from titanlite.tools.plan.estimate import model_of
from titanlite.tools.plan.memory import profile
from titanlite.tools.plan.search import Layouts
from titanlite.tools.plan.trace import trace_step

ON = ["--debug.reproducible_layouts", "--training.local_batch_size=1", "--training.global_batch_size=16"]


def test_neighbours_in_the_tree_are_neighbours_in_the_batch() -> None:
    """Two replicas of two shards, with two micro-batches in a step."""
    sizes = BatchSizes((), 8)
    ranks = [MicroBatches(40, sizes=sizes, micro_batch_size=1, rank=rank, ranks=4, together=2) for rank in range(4)]
    found = [[sample for [sample] in islice(batches, 4)] for batches in ranks]
    assert found == [[40, 42, 48, 50], [41, 43, 49, 51], [44, 46, 52, 54], [45, 47, 53, 55]]
    wanted = [[False, True], [False, False], [True, False], [False, False]]
    assert ranks[0].of_step(1, wanted) == [42, 44]
    assert ranks[0].of_step(2, wanted) == [50, 52]


def peak() -> int:
    config = read(*ON, "--training.global_batch_size=8", "--model.args.n_layers=1", world_size=2)
    found = trace_step(config, *model_of(config), world_size=2, gpu=True)
    return profile(found).peak


@pytest.mark.long
def test_a_plan_counts_the_sums_that_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trace of two of four micro-batches has the peak of one of all four, but for the tokens."""
    few = peak()
    monkeypatch.setattr("titanlite.tools.plan.trace.MICRO_BATCHES", 4)
    assert peak() == pytest.approx(few, rel=0.005)


def test_a_search_tries_no_local_batch_that_training_refuses() -> None:
    plain, on = (Layouts(read(*options, world_size=2), layout_of(2), 12).batches for options in ((), ON))
    assert (plain, on) == ([1, 2, 3, 4, 6, 12], [1, 2, 4])


@pytest.mark.usefixtures("single_process_group")
def test_a_step_after_one_that_raised_adds_its_own_gradients_only() -> None:
    parameter = torch.nn.Parameter(torch.zeros(1))
    model = torch.nn.ParameterList([parameter])
    sums = plain_step(model, torch.optim.SGD([parameter]), ReproducibleStep)
    for step in ([1.0], [2.0, 4.0, 8.0, 16.0]):
        for number, value in enumerate(step):
            parameter.grad = torch.tensor([value])
            sums.after_backward(number, is_last=number == 3)
    assert parameter.grad is not None
    assert parameter.grad.tolist() == [30.0]


def updated(gradients: list[torch.Tensor]) -> torch.Tensor:
    """The second moments, in float32, of bfloat16 parameters with these gradients after three steps."""
    parameters = {
        str(i): torch.nn.Parameter(torch.ones(len(gradient), dtype=torch.bfloat16))
        for i, gradient in enumerate(gradients)
    }
    groups = [{"params": [*parameters.values()], "lr": 1e-3}]
    optimizer = SlicedAdamW(
        groups, parameters, state_dtype=torch.float32, seed=0, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1
    )
    for parameter, gradient in zip(parameters.values(), gradients, strict=True):
        parameter.grad = gradient.bfloat16()
    for _ in range(3):
        optimizer.step()
    return torch.cat([optimizer.state[parameter]["exp_avg_sq"] for parameter in parameters.values()])


def test_rounded_updates_do_not_depend_on_how_a_tensor_is_cut() -> None:
    gradient = torch.randn(8191, generator=torch.Generator().manual_seed(0))
    assert torch.equal(updated([gradient[:37], gradient[37:]]), updated([gradient]))


@pytest.mark.gpu
def test_row_norms_and_fused_updates_on_a_gpu_do_not_depend_on_how_a_tensor_is_cut() -> None:
    gradient = torch.randn(2048, 4096, device="cuda")
    whole, parts = squares([gradient]), squares([gradient[:700], gradient[700:]])
    assert torch.equal(whole, parts)
    found = []
    for cuts in ([2048], [700, 1348]):
        parameters = [torch.nn.Parameter(torch.ones(rows, 4096, device="cuda")) for rows in cuts]
        optimizer = torch.optim.AdamW(parameters, lr=1e-3, fused=True)
        for parameter, part in zip(parameters, gradient.split(cuts), strict=True):
            parameter.grad = part.clone()
        optimizer.step()
        found.append(
            [
                torch.cat([optimizer.state[parameter]["exp_avg_sq"] for parameter in parameters]),
                torch.cat([*parameters]),
            ]
        )
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
