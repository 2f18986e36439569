"""`benchmarks/measured_memory.py` measures the memory that is really held."""

import sys

import pytest
import torch

from benchmarks.measured_memory import AllocationRecord, Change, add_up, measure
from tests.helpers import TinyRun
from tests.layouts import degrees
from titanlite.runtime.errors import UserError

MB = 10**6


def megabytes(count: int) -> torch.Tensor:
    return torch.empty(count * MB, dtype=torch.uint8)


def test_a_known_sequence_has_exactly_its_peak() -> None:
    before = megabytes(7)
    with AllocationRecord() as record:
        with record.span("two at a time"):
            a = megabytes(10)
            b = megabytes(20)
            del a
            c = megabytes(5)
            del before  # was there before, and so is not counted
        with record.span("a storage that is freed and comes again"):
            view = b[MB:]
            b.untyped_storage().resize_(0)
            d = megabytes(18)
            b.untyped_storage().resize_(2 * MB)
        with record.span("nothing new"):
            del b, d
    two, freed, nothing = (record.find(name) for name in ("two", "a storage", "nothing"))
    assert record.peak(*two) == 30 * MB
    assert record.held(two[1]).tensors == 25 * MB
    assert record.peak(*freed) == (5 + 18 + 2) * MB
    assert record.peak(*nothing) == (5 + 18 + 2) * MB
    assert record.held(nothing[1]).tensors == c.nbytes + view.untyped_storage().nbytes() == 7 * MB


def test_buffers_of_a_collective_end_with_it() -> None:
    """The end of a buffer is noticed even if no operator sees it."""
    changes = [
        Change(0, 1, 100, False),
        Change(1, 2, 50, True),
        Change(2, 3, 10, False),
        Change(3, 1, 30, False),  # address 1 is given out again
        Change(4, 3, -10, False),
    ]
    assert [held[1:] for held in add_up(changes)] == [(100, 100), (100, 150), (110, 110), (40, 40), (30, 30)]


@pytest.mark.parametrize(
    ("processes", "options"),
    [
        (2, ["--training.dtype=bfloat16", "--optimizer.state_dtype=bfloat16"]),
        pytest.param(4, degrees(2, 2), marks=pytest.mark.nightly),
    ],
)
def test_states_are_those_of_the_objects(tiny: TinyRun, processes: int, options: list[str]) -> None:
    sizes = ["--model.args.vocab_size=2000"]  # so that scalars do not count for much
    config = tiny.config(*sizes, *options, world_size=processes)
    for measured in measure(config, processes=processes):
        parameters, optimizer, buffers = (measured.breakdown[name] for name in ("parameters", "optimizer", "buffers"))
        states = parameters + optimizer + buffers
        assert states <= measured.states <= 1.01 * states
        assert 2 * parameters < optimizer < 2.01 * parameters
        assert buffers == 2 * config.training.seq_len * 14 * 4  # cos and sin of 14 dims
        assert measured.batch == 2 * 8 * 8 // processes * config.training.seq_len
        assert measured.peak == max(measured.phases.values()) <= measured.peak_with_gloo
        # Gradients are there with the states, which AdamW has from the beginning.
        assert measured.phases["update"] >= states + parameters
        assert states < measured.peak_first == measured.peak


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")
def test_states_on_disk_are_not_in_memory(tiny: TinyRun) -> None:
    options = ["--model.args.vocab_size=2000", "--offload.optimizer=disk", "--offload.parameters=disk"]
    for measured in measure(tiny.config(*options, "--training.enable_cpu_offload", world_size=2), processes=2):
        # The last rank's uneven parts stay, and scalars.
        assert measured.states < 0.1 * (measured.breakdown["parameters"] + measured.breakdown["optimizer"])


def test_there_must_be_a_steady_state(tiny: TinyRun) -> None:
    with pytest.raises(UserError, match="2 steps"):
        measure(tiny.config(), processes=1, steps=1)
