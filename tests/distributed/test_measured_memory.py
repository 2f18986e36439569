"""`benchmarks/measured_memory.py` measures the memory that is really held."""

import pytest
import torch

from benchmarks.measured_memory import AllocationRecord, measure
from tests.helpers import TinyRun
from tests.layouts import degrees

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


@pytest.mark.nightly
def test_states_are_those_of_the_objects(tiny: TinyRun) -> None:
    sizes = ["--model.args.vocab_size=2000"]  # so that scalars do not count for much
    config = tiny.config(*sizes, *degrees(2, 2), world_size=4)
    for measured in measure(config, processes=4):
        parameters, optimizer, buffers = (measured.breakdown[name] for name in ("parameters", "optimizer", "buffers"))
        states = parameters + optimizer + buffers
        assert states <= measured.states <= 1.01 * states
        assert 2 * parameters < optimizer < 2.01 * parameters
        assert buffers == 2 * config.training.seq_len * 14 * 4  # cos and sin of 14 dims
        assert measured.batch == 2 * 8 * 8 // 4 * config.training.seq_len
        assert measured.peak == max(measured.phases.values()) <= measured.peak_with_gloo
        # Gradients are there with the states, which AdamW has from the beginning.
        assert measured.phases["update"] >= states + parameters
        assert states < measured.peak_first == measured.peak
