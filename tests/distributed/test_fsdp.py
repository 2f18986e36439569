"""Collectives that FSDP gets for CPUs, and gathering in place for a shard degree of 1."""

from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from tests.support.helpers import THREE_BLOCKS, TinyRun, run_in_turn, run_ranks, train_on_this_rank, world
from tests.support.layouts import built, degrees, one_step
from titanlite.loss import token_loss
from titanlite.parallelize.reductions import AllToAllReduceScatter
from titanlite.runtime.private_torch.fsdp import _param_group
from titanlite.schema import Config


def exchanged(rank: int, world_size: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what this rank gets, and what it should get."""
    wholes = [torch.randn(5 * world_size, generator=torch.Generator().manual_seed(rank)) for rank in range(world_size)]
    wholes = [whole.to(dtype) for whole in wholes]
    group = world()
    comm = AllToAllReduceScatter(in_flight=None)
    out = comm.allocate([5], dtype=dtype, device=torch.device("cpu"))
    comm(out, wholes[rank], group, dist.ReduceOp.AVG)
    return out, torch.stack(wholes).mean(dim=0).chunk(world_size)[rank]


def test_reduce_scatter_by_all_to_all() -> None:
    """Sums are rounded to bfloat16 once."""
    for out, expected in run_ranks(exchanged, 3, torch.bfloat16):
        assert out.dtype == torch.bfloat16
        assert torch.equal(out, expected)


def starts_and_waits(rank: int, world_size: int, config: Config) -> list[str]:
    """Return the events of the exchanges of a step in their order: "start 0", "wait 0", ..."""
    exchange: Any = dist.all_to_all_single
    events: list[str] = []

    def noted(*args: Any, **kwargs: Any) -> Any:
        number = len([event for event in events if event.startswith("start")])
        events.append(f"start {number}")
        work = exchange(*args, **kwargs)
        return SimpleNamespace(wait=lambda: (events.append(f"wait {number}"), work.wait()))

    with patch("torch.distributed.all_to_all_single", noted):
        train_on_this_rank(config, rank, world_size)
    return events


def of_a_micro_batch(first: int, late: bool) -> list[str]:
    """Five units exchange: the head, three blocks, the embedding."""
    numbers = range(first, first + 5)
    if not late:
        return [f"{what} {number}" for number in numbers for what in ("start", "wait")]
    between = [event for number in numbers[1:] for event in (f"wait {number - 1}", f"start {number}")]
    return [f"start {first}", *between, f"wait {numbers[-1]}"]


EXCHANGES: dict[str, tuple[list[str], list[bool]]] = {
    "as it is": ([], [True]),
    "added to earlier gradients": (["--training.global_batch_size=8", "--training.local_batch_size=2"], [True, False]),
    "used in backward": (["--optimizer.in_backward=true", "--training.max_norm=0"], [False]),
    "converted": (["--training.mixed_precision_reduce=bfloat16"], [False]),
}


def test_backward_continues_during_an_exchange_unless_it_reads_the_result(tiny: TinyRun) -> None:
    common = [
        THREE_BLOCKS,
        *degrees(1, 2),
        "--training.steps=1",
        "--lr_scheduler.warmup_steps=1",
        "--checkpoint.enable=false",
    ]
    configs = [
        tiny.config(*common, *options, f"--job.name={number}", world_size=2)
        for number, (options, _) in enumerate(EXCHANGES.values())
    ]
    for (name, (_, late)), ranks in zip(EXCHANGES.items(), run_in_turn(starts_and_waits, 2, configs), strict=True):
        expected = [event for index, is_late in enumerate(late) for event in of_a_micro_batch(5 * index, is_late)]
        assert ranks == [expected] * 2, name


def gathered_in_place(rank: int, world_size: int, config: Config) -> list[bool]:
    """Return for each parameter whether compute used the memory of its shard, after a step."""
    run = built(rank, world_size, config)
    one_step(run)
    states = [module._get_fsdp_state() for module in run.model.modules() if isinstance(module, FSDPModule)]
    units = [state._fsdp_param_group for state in states]
    parameters = [parameter for unit in units if unit for parameter in unit.fsdp_params]
    assert len(parameters) == len(list(run.model.parameters()))
    return [
        parameter._unsharded_param.data_ptr() == parameter._sharded_param_data.data_ptr() for parameter in parameters
    ]


@pytest.mark.usefixtures("single_process_group")
def test_one_shard_is_gathered_in_place(tiny: TinyRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also for each of several replicas; where weights are converted or elsewhere, they are copied."""
    monkeypatch.setattr("titanlite.parallelize.fsdp.has_units", lambda *_, **__: True)  # as on a GPU
    alone = [["--parallelism.fsdp_reshard_after_forward=always"], ["--training.mixed_precision_param=bfloat16"]]
    configs = [tiny.config(*options, f"--job.name={number}") for number, options in enumerate(alone)]
    assert [{*gathered_in_place(0, 1, config)} for config in configs] == [{True}, {False}]
    layouts = [degrees(2, 1), degrees(1, 2)]
    of_two = [tiny.config(*options, f"--job.name=two-{number}", world_size=2) for number, options in enumerate(layouts)]
    found = run_in_turn(gathered_in_place, 2, of_two)
    assert [[set(rank) for rank in ranks] for ranks in found] == [[{True}] * 2, [{False}] * 2]


def gathered(rank: int, world_size: int, config: Config) -> list[str]:
    """Names of the units whose weights are gathered, or being gathered, after a pass without gradients."""
    run = built(rank, world_size, config)
    one_step(run)
    batch = next(iter(run.batches))
    with torch.no_grad():
        run.model(batch["tokens"], loss=partial(token_loss, labels_BL=batch["labels"]))
    units = [
        (name, _param_group(module)) for name, module in run.model.named_modules() if isinstance(module, FSDPModule)
    ]
    return [
        name
        for name, param_group in units
        if param_group and (param_group.is_unsharded or param_group._all_gather_result is not None)
    ]


@pytest.mark.slow
def test_passes_without_gradients_leave_no_weights_of_the_module(tiny: TinyRun) -> None:
    options = [
        "--model.name=smollm3",
        "--training.multi_token_weight=0.3",
        *degrees(1, 2),
        "--parallelism.fsdp_forward_prefetch=2",
    ]
    sizes = ["--parallelism.fsdp_min_unit_params=0", "--parallelism.fsdp_min_unit_params=1000000"]
    names = run_in_turn(gathered, 2, [tiny.config(*options, size, world_size=2) for size in sizes])
    assert [found for of_config in names for found in of_config] == [["tok_embeddings", "head"]] * 4
