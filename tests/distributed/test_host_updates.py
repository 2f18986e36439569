"""Updates on the host beside the next step, on several processes: no bit differs. One process: tests/unit."""

from typing import Any

import pytest

from tests.support.helpers import THREE_BLOCKS, TinyRun, run_ranks, train_on_this_rank
from tests.support.layouts import degrees
from tests.support.slow_updates import SlowUpdates
from tests.support.whole_runs import assert_equal, values_of
from titanlite.schema import Config

OFFLOAD = (THREE_BLOCKS, "--training.enable_cpu_offload", "--training.steps=4")
MOE = (
    "--model={name='qwen3_moe', flavor='debug', args={dim=32, n_layers=2, n_heads=2, n_kv_heads=1, head_dim=16, "
    "hidden_dim=24, vocab_size=259}}",
)
EVEN = "--model.args={dim=32, n_layers=2, n_heads=2, n_kv_heads=2, hidden_dim=64, vocab_size=260}"
CASES: dict[str, list[str]] = {
    "shards, accumulation": [*degrees(1, 2), "--training.local_batch_size=2"],
    "replicas": degrees(2, 1),
    "in backward": [*degrees(1, 2), "--optimizer.in_backward=true", "--training.max_norm=0"],
    "experts": [*degrees(1, 2, expert=2), *MOE],
    "stages": [*degrees(1, 1, pipeline=2), "--training.local_batch_size=2"],
    "tensor": [*degrees(1, 1, tensor=2), EVEN],
}


def both(rank: int, world_size: int, pairs: list[tuple[Config, Config]]) -> list[tuple[Any, Any, set[str], int]]:
    """Train each pair: once as a CPU does, and once with the thread."""
    found = []
    for alone, beside in pairs:
        expected = values_of(train_on_this_rank(alone, rank, world_size))
        with pytest.MonkeyPatch.context() as patch:
            seen = SlowUpdates(patch)
            found.append((expected, values_of(train_on_this_rank(beside, rank, world_size)), seen.threads, seen.waits))
    return found


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(["shards, accumulation", "stages"], marks=pytest.mark.slow, id="some"),
        pytest.param([*CASES], marks=pytest.mark.nightly, id="all"),
    ],
)
def test_no_bit_differs_on_two_processes(tiny: TinyRun, names: list[str]) -> None:
    pairs = [
        tuple(
            tiny.config(f"--job.name={kind}-{number}", *OFFLOAD, *options, "--checkpoint.enable=false", world_size=2)
            for kind in ("alone", "beside")
        )
        for number, options in enumerate(CASES[name] for name in names)
    ]
    for of_rank in run_ranks(both, 2, pairs):
        for name, (expected, found, threads, waits) in zip(names, of_rank, strict=True):
            assert_equal(found, expected)
            assert (name, threads, waits > 0) == (name, {"update_0"}, True)
    for number in range(len(names)):
        assert tiny.losses(f"beside-{number}") == tiny.losses(f"alone-{number}")
