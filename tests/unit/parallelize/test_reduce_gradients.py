"""parallelism.fsdp_reduce_gradients: what is refused, and the plan of reductions once a step."""

import pytest

from tests.support.plans import profiled, shapes, traced
from titanlite.tools.plan.workload import traffic_of, workload_of

LAST = "--parallelism.fsdp_reduce_gradients=last"
ONE_BLOCK = "--model.args.n_layers=1"
FOUR = ("--training.global_batch_size=16", "--training.local_batch_size=1", ONE_BLOCK)
"""Four micro-batches on four ranks."""


@pytest.mark.long
def test_the_plan_reduces_once_and_keeps_whole_gradients() -> None:
    each, last = (traced(*FOUR, *options, world_size=4, gpu=True) for options in ((), (LAST,)))
    sent = [traffic_of(trace, accumulation=4) for trace in (each, last)]
    assert sent[0]["reduce_scatter", "shard"] == 4 * sent[1]["reduce_scatter", "shard"] > 0
    assert sent[0]["all_gather", "shard"] == sent[1]["all_gather", "shard"] > 0
    one, other = (workload_of(trace, fuse=False, gpus_per_node=8).units for trace in (each, last))
    for unit, once in zip(one, other, strict=True):
        assert (unit.all_reduce, once.reduce) == ((), ())
        assert once.all_reduce == unit.reduce
        assert len(unit.reduce) == 1
    whole = 4 * sum(shape.numel() for shape in shapes(ONE_BLOCK))
    without, found = (profiled(*FOUR, *options, world_size=4, gpu=True) for options in ((), (LAST,)))
    assert without.most("gradients") == found.most("gradients") == whole // 4
    assert without.most("reduce-scatter") < whole
    assert found.phases["forward head"]["reduce-scatter"] == whole  # from the first micro-batch
