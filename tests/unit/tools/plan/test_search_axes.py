"""`plan --search` with further axes: what it tries, and that it expects what the plan finds."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.plans import read
from titanlite.runtime.errors import UserError
from titanlite.schema import Config
from titanlite.tools.plan.estimate import Layout, plan, trace, with_options
from titanlite.tools.plan.hardware import find_hardware
from titanlite.tools.plan.layouts import SCHEDULES, can_have, further_axes, pipelines
from titanlite.tools.plan.pipeline import blocks_of_ends
from titanlite.tools.plan.search import Found, Layouts, best_axes, search

TENSOR = "--parallelism.tensor_parallel_degree=2"
EXPERT = "--parallelism.expert_parallel_degree=2"
HEADS = "--model.args={n_heads=8,n_kv_heads=8}"
MOE = (
    "--model={name='qwen3_moe', flavor='debug', args={dim=64, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=16, "
    "hidden_dim=32, n_experts=8, n_active_experts=2}}"
)


def axis_of(options: dict[str, Any]) -> str:
    return " ".join(f"{key.split('.')[1].partition('_')[0]} {value}" for key, value in options.items() if value > 1)


def test_axes_that_are_tried() -> None:
    def tried(*options: str, world_size: int, gpus_per_node: int) -> list[str]:
        layout = Layout(world_size, find_hardware("H100"), gpus_per_node)
        return [axis_of(further) for further in further_axes(read(*options, world_size=world_size), layout)]

    long, short = "--training.seq_len=32", "--training.seq_len=6"
    assert tried(MOE, long, "--model.args.n_kv_heads=4", world_size=8, gpus_per_node=8) == [
        "expert 8", "context 2", "context 4", "context 8", "tensor 2", "tensor 4",
    ]  # fmt: skip
    assert tried(HEADS, TENSOR, long, world_size=8, gpus_per_node=8) == []
    assert tried(HEADS, short, world_size=2, gpus_per_node=1) == []


def test_only_what_the_config_and_its_model_allow() -> None:
    dense, moe = read(HEADS), read(MOE)
    expert, tensor = ({f"parallelism.{axis}_parallel_degree": 2} for axis in ("expert", "tensor"))
    assert [can_have(config, expert, 4) for config in (dense, moe)] == [False, True]
    assert [can_have(config, tensor, 4) for config in (dense, moe, read(MOE, "--model.args.n_kv_heads=1"))] == [
        True,
        True,
        False,
    ]
    assert not can_have(read(HEADS, "--training.loss=own.py:loss"), tensor, 4)
    assert [can_have(moe, expert, 4, replicas) for replicas in (4, 2, 1)] == [False, True, True]
    assert not can_have(moe, expert, 3)


@pytest.mark.parametrize(
    ("options", "speeds", "tried", "best"),
    [
        ([MOE], {"": 10.0, "expert 8": 20.0}, ["", "expert 8"], "expert 8"),
        ([MOE], {"expert 8": 5.0}, ["", "expert 8"], "expert 8"),
        ([MOE], {"context 4": 5.0}, ["", "expert 8", "context 2", "context 4"], "context 4"),
        ([HEADS], {"tensor 4": 3.0}, ["", "context 2", "context 4", "context 8", "tensor 2", "tensor 4"], "tensor 4"),
    ],
)
def test_what_is_proposed(options: list[str], speeds: dict[str, float], tried: list[str], best: str) -> None:
    asked: list[str] = []

    def find(config: Config, layout: Layout) -> Found:
        degrees = config.parallelism.model_dump()
        found = {
            f"{axis}_parallel_degree": degrees[f"{axis}_parallel_degree"] for axis in ("context", "expert", "tensor")
        }
        asked.append(axis_of({f"parallelism.{key}": value for key, value in found.items()}))
        if asked[-1] not in speeds:
            raise UserError("nothing fits")
        pair: Any = (
            None,
            SimpleNamespace(tokens_per_second=speeds[asked[-1]], axis=asked[-1]),
        )
        return Found([pair], tried=1)

    config = read(*options, "--training.seq_len=32")
    result: Any = best_axes(config, Layout(8, find_hardware("H100"), 8), find)
    assert result.best[0][1].axis == best
    assert asked == tried
    assert result.tried == len([axis for axis in asked if axis in speeds])


DEEP = "--model.args={dim=64, n_layers=8, n_heads=8, n_kv_heads=8, hidden_dim=128}"


def test_pipelines_that_are_tried() -> None:
    config = read(DEEP, "--training.global_batch_size=8")
    found = [*pipelines(config, Layout(8, find_hardware("H100"), 2), {})]
    tried = [
        (options["parallelism.pipeline_parallel_degree"], options["parallelism.tensor_parallel_degree"], schedule)
        for options in found
        if (schedule := options["parallelism.pipeline_parallel_schedule"])
    ]
    one, two = SCHEDULES
    assert tried == [
        (2, 1, one), (2, 1, two), (2, 2, one), (2, 2, two), (4, 1, one), (4, 1, two), (4, 2, one), (4, 2, two),
        (8, 1, one),  # 16 stages have too few blocks
    ]  # fmt: skip
    assert found[0]["parallelism.data_parallel_shard_degree"] == -1
    assert not [*pipelines(read(DEEP, "--model.args.tied_head=true"), Layout(8, find_hardware("H100"), 2), {})]


@pytest.mark.nightly
def test_a_pipeline_is_proposed_where_collectives_take_long() -> None:
    slow = replace(find_hardware("H100"), link_bandwidth=1e7, network_bandwidth=1e6)
    layout = Layout(8, slow, 2)
    config = read(DEEP, "--training.global_batch_size=64", "--training.seq_len=32")
    found = search(config, layout)
    [(candidate, planned), *others] = found.best
    assert candidate.options["parallelism.pipeline_parallel_degree"] > 1
    again = plan(with_options(config, candidate.options), layout)
    assert (planned.reserved, planned.time.total) == (again.reserved, pytest.approx(again.time.total))
    assert all(layout.tokens_per_second <= planned.tokens_per_second for _, layout in others)
    fast = search(config, Layout(8, replace(slow, link_bandwidth=1e15, network_bandwidth=1e15), 8))
    assert not any("parallelism.pipeline_parallel_degree" in layout.options for layout, _ in fast.best)


def test_blocks_that_embedding_and_head_are_worth() -> None:
    assert blocks_of_ends([4.1, 8.0, 6.2], [4, 8, 4]) == (0, 2)
    assert blocks_of_ends([3.0, 3.9], [2, 3]) == (0, 0) == blocks_of_ends([2.0, 4.4], [2, 4])
    assert blocks_of_ends([2.0, 3.9], [2, 2]) == (0, 2)


@pytest.mark.parametrize(
    ("options", "world_size"),
    [
        pytest.param((TENSOR, HEADS), 8, marks=pytest.mark.nightly, id="layers"),
        pytest.param((EXPERT, TENSOR, MOE), 8, marks=pytest.mark.nightly, id="experts and layers"),
    ],
)
def test_it_expects_what_the_plan_finds(options: tuple[str, ...], world_size: int) -> None:
    config = read(*options, "--training.global_batch_size=16", world_size=world_size)
    layout = Layout(world_size, replace(find_hardware("H100"), link_bandwidth=1e8), 8)  # so slow that collectives count
    readers = world_size // config.parallelism.tensor_parallel_degree
    searching = Layouts(config, layout, share=16 // readers)
    work = "full", "", 4
    candidates = [*searching.expect(work, trace(searching.traced_config(work), layout))]
    assert len({candidate.expected.degrees for candidate in candidates}) == len(searching.degrees) > 1
    for candidate in [candidate for candidate in candidates if candidate.expected.degrees.sharded > 1]:
        found = plan(with_options(config, candidate.options), layout)
        assert candidate.expected.tokens_per_second == pytest.approx(found.tokens_per_second, rel=0.03), candidate.title
        assert candidate.expected.reserved == pytest.approx(found.reserved, rel=0.12), candidate.title
