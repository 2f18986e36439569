"""Global sample index -> sequence: exact shares, permutations, nothing that depends on ranks, workers or resumes."""

import json
import multiprocessing
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from titanlite.data.loader import MicroBatches, build_loader
from titanlite.data.packing import Stream, TokenSequence
from titanlite.data.samples import MOST_PERIOD, Mixture, Samples, Source, Stage, as_batch
from titanlite.data.shorter import cut_sequences
from titanlite.data.tokens import TokenStore
from titanlite.runtime.errors import UserError
from titanlite.schedule import BatchSizes, count_steps
from titanlite.schema import DataSource, Training
from titanlite.tools.ingest.token_writer import TokenWriter

CPU = torch.device("cpu")


class Numbered:
    """Sequences whose tokens encode their source and their sequence."""

    def __init__(self, source: int, sequences: int, seq_len: int = 2) -> None:
        self.source, self.sequences, self.seq_len = source, sequences, seq_len

    def __len__(self) -> int:
        return self.sequences

    def read(self, index: int) -> TokenSequence:
        assert 0 <= index < self.sequences
        tokens = np.full(self.seq_len, self.source * 10**6 + index)
        return TokenSequence(tokens, tokens + 1, np.array([0]))


def mixed(*sources: tuple[int, float], seed: int = 0, **options: Any) -> Samples:
    """Samples of sources given as (sequences, weight)."""
    parts = [
        Source(f"s{i}", Numbered(i, sequences), f"fingerprint{i}", weight)
        for i, (sequences, weight) in enumerate(sources)
    ]
    return Samples(parts, seed=seed, **options)


def read(samples: Samples, start: int, stop: int) -> list[int]:
    return samples.__getitems__(list(range(start, stop)))["tokens"][:, 0].tolist()


FEW = settings(max_examples=25, deadline=None, derandomize=True, database=None)
weights = st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=6)


# Shares


@pytest.mark.long
@FEW
@given(weights=weights)
def test_shares_are_exact_at_every_prefix(weights: list[float]) -> None:
    mixture = Mixture(weights)
    exact = np.array(weights) / sum(weights)
    total = 3000
    owners = np.array([mixture.locate(sample)[0] for sample in range(total)])
    so_far = np.cumsum(owners[:, None] == np.arange(len(weights)), axis=0)
    drift = np.abs(so_far - np.arange(1, total + 1)[:, None] * exact)
    assert drift.max() <= (len(weights) + 1) / 2 + total * 2 / MOST_PERIOD, "never more than a sample or two off"
    assert (np.abs(so_far[-1] / total - exact) < 1e-3 + 1 / total).all()
    for samples in (0, 1, 7, total):
        assert mixture.counts(samples) == [int((owners[:samples] == i).sum()) for i in range(len(weights))]
    assert np.abs(np.array(mixture.counts(10**12)) / 10**12 - exact).max() < 2e-5, "far away as near"


@FEW
@given(weights=weights, sample=st.integers(0, 10**15))
def test_places_in_the_mixture_can_be_found_back(weights: list[float], sample: int) -> None:
    mixture = Mixture(weights)
    source, number = mixture.locate(sample)
    assert mixture.index(source, number) == sample
    assert mixture.counts(sample)[source] == number


# Samples


@FEW
@given(
    sources=st.lists(st.tuples(st.integers(1, 40), st.sampled_from([0.1, 0.25, 1, 3])), min_size=1, max_size=4),
    seed=st.integers(0, 5),
    start=st.integers(0, 300),
)
def test_each_source_is_read_once_an_epoch(sources: list[tuple[int, float]], seed: int, start: int) -> None:
    samples = mixed(*sources, seed=seed)
    located = [samples.locate(sample) for sample in range(400)]
    assert read(samples, start, start + 20) == [s * 10**6 + sequence for s, _, sequence in located[start : start + 20]]
    for i, (sequences, _) in enumerate(sources):
        mine = [(epoch, sequence) for source, epoch, sequence in located if source == i]
        assert [epoch for epoch, _ in mine] == [k // sequences for k in range(len(mine))]
        for epoch in range(len(mine) // sequences):
            assert sorted(sequence for e, sequence in mine if e == epoch) == list(range(sequences)), "a permutation"
        assert samples.consumed(400)[i] == len(mine)


def test_epochs_have_orders_of_their_own() -> None:
    samples = mixed((50, 1.0))
    epochs = [read(samples, 50 * epoch, 50 * (epoch + 1)) for epoch in range(20)]
    assert len({tuple(epoch) for epoch in epochs}) == 20
    assert read(mixed((50, 1.0), seed=1), 0, 50) != epochs[0]
    follows = Counter((epoch[i], epoch[i + 1]) for epoch in epochs for i in range(49))
    assert max(follows.values()) <= 5, "which sequence follows which is not handed on from epoch to epoch"


def test_without_shuffling_sequences_come_in_their_order() -> None:
    assert read(mixed((5, 1.0), shuffle=False), 0, 12) == [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0, 1]


@FEW
@given(data=st.data(), ranks=st.sampled_from([1, 2, 3, 4, 6, 12]), start=st.integers(0, 40))
def test_the_stream_does_not_depend_on_ranks_or_micro_batches(data: Any, ranks: int, start: int) -> None:
    micro = data.draw(st.sampled_from([m for m in (1, 2, 3, 4, 6, 12) if (12 // ranks) % m == 0]))
    check_stream(ranks, micro, 12 * start, workers=0)


@pytest.mark.long
def test_the_stream_does_not_depend_on_workers() -> None:
    before = torch.get_rng_state()
    check_stream(2, 2, 36, workers=2)
    assert torch.equal(torch.get_rng_state(), before), "nothing is drawn from the global random state"


def check_stream(ranks: int, micro: int, start: int, workers: int) -> None:
    samples = mixed((37, 0.6), (11, 0.4))
    steps: list[list[int]] = [[] for _ in range(3)]
    for rank in range(ranks):
        batches = MicroBatches(start=start, sizes=BatchSizes((), 12), micro_batch_size=micro, rank=rank, ranks=ranks)
        loader = build_loader(samples, batches, num_workers=workers, device=CPU)
        for step in steps:
            for batch in islice(loader, 12 // ranks // micro):
                step += batch["tokens"][:, 0].tolist()
        assert len(multiprocessing.active_children()) == workers
        loader.close()
        assert not multiprocessing.active_children()
    assert [token for step in steps for token in step] == read(samples, start, start + 36)


def test_sources_may_be_named_in_any_order_but_not_twice() -> None:
    one = Source("a", Numbered(0, 9), "A", 0.7)
    two = Source("b", Numbered(1, 9), "B", 0.3)
    assert read(Samples([one, two], seed=0), 0, 50) == read(Samples([two, one], seed=0), 0, 50)
    with pytest.raises(UserError, match=r"\ba\b.*\bc\b"):
        Samples([one, Source("c", Numbered(0, 9), "A", 0.3)], seed=0)


def test_sources_are_called_by_the_last_part_of_their_path() -> None:
    names = {"corpus/*.txt": "corpus", "s3://bucket/tok/": "tok", "stdlib://": "stdlib", "a/b.jsonl": "b.jsonl"}
    names |= {"*.txt": "data", "../": "data", "~/books": "books"}
    assert {path: DataSource(path=path).title for path in names} == names
    assert DataSource(path=["x/one", "y/two"]).title == "one"
    assert DataSource(path="x", name="mine").title == "mine"


# Limits


@FEW
@given(
    sources=st.lists(st.tuples(st.integers(1, 40), st.sampled_from([0.1, 0.25, 1, 3])), min_size=1, max_size=4),
    epochs=st.integers(1, 3),
)
def test_the_limit_is_where_a_source_would_be_read_once_more(sources: list[tuple[int, float]], epochs: int) -> None:
    samples = mixed(*sources)
    limit = samples.limit(epochs)
    assert all(epoch < epochs for _, epoch, _ in map(samples.locate, range(limit)))
    assert samples.locate(limit)[1:2] == (epochs,)


def test_steps_of_finite_data() -> None:
    once = Training(epochs=1, global_batch_size=8)
    assert count_steps(once, step=0, samples=0, limit=1003) == 125
    assert count_steps(once, step=100, samples=800, limit=1003) == 125
    assert count_steps(once, step=125, samples=1000, limit=1003) == 125
    assert count_steps(once, step=130, samples=1040, limit=1003) == 130, "what is done is done"
    with pytest.raises(UserError, match=r"training\.epochs: 7 .* 8$"):
        count_steps(once, step=0, samples=0, limit=7)
    steps = Training(steps=126, global_batch_size=8)
    assert count_steps(steps, step=0, samples=0, limit=None) == 126


# Resuming


def saved(samples: Samples, count: int) -> dict[str, Any]:
    return json.loads(json.dumps(samples.state(count)))


def test_a_changed_mixture_resumes_in_each_source_that_is_still_the_same() -> None:
    first = mixed((40, 0.5), (40, 0.5))
    second = mixed((40, 0.2), (40, 0.7), (40, 0.1)).resume(saved(first, 60), 60, "continue")
    seen = read(first, 0, 60) + read(second, 60, 73)
    for source in (0, 1):
        sequences = [token for token in seen if token // 10**6 == source]
        assert len(set(sequences)) == len(sequences), "nothing is read again before the epoch is over"
    assert second.consumed(60) == [30, 30, 0]
    assert np.diff([second.consumed(60), second.consumed(160)], axis=0).tolist() == [[20, 70, 10]]
    third = mixed((40, 0.2), (40, 0.7), (40, 0.1)).resume(saved(second, 100), 100, "error")
    assert read(third, 100, 200) == read(second, 100, 200), "and the next start knows it too"
    without = mixed((40, 1.0)).resume(saved(second, 100), 100, "continue")
    back = mixed((40, 0.5), (40, 0.5)).resume(saved(without, 110), 110, "continue")
    assert back.consumed(110) == [48, 58], "a source that was left out for a while is not forgotten"


def of_length(store: TokenStore, seq_len: int, **options: Any) -> Samples:
    """Samples of a stream of tokens 0, 1, 2, ..., in the order of the files."""
    reader = Stream(store, seq_len=seq_len, document_mask=False)
    fingerprint = f"{store.fingerprint}-stream-{seq_len}"
    return Samples([Source("a", reader, fingerprint)], seed=0, shuffle=False, seq_len=seq_len, **options)


@pytest.mark.parametrize("knows_length", [True, False])
def test_another_length_resumes_at_the_same_tokens(tmp_path: Path, knows_length: bool) -> None:
    """In an epoch without what it has read, and in a later one in as many; also twice, and beside another change."""
    with TokenWriter(tmp_path / "a", vocab_size=1000, tokenizer="test") as writer:
        writer.add(np.arange(97))
    store = TokenStore(tmp_path / "a")
    first = of_length(store, 8)

    def resumed(before: Samples, seen: int, seq_len: int, **options: Any) -> tuple[Samples, int]:
        state, now = saved(before, seen), of_length(store, seq_len, **options)
        if not knows_length:  # as checkpoints of before
            del state["seq_len"]
        seen = now.convert(seen, state)
        return now.resume(state, seen, "continue"), seen

    longer, seen = resumed(first, 4, 16)
    assert seen == 2
    assert longer.__getitems__([seen])["tokens"][0].tolist() == [*range(32, 48)]
    assert longer.consumed(seen) == [2]
    odd, seen = resumed(first, 5, 16)
    assert (seen, odd.__getitems__([seen])["tokens"][0, 0].item()) == (3, 48)
    shorter, seen = resumed(longer, 3, 4)
    assert seen == 12
    assert shorter.__getitems__([seen])["tokens"][0].tolist() == [48, 49, 50, 51]
    back, seen = resumed(shorter, 14, 8)
    assert back.__getitems__([seen])["tokens"][0, 0].item() == 56
    second, seen = resumed(first, 12 + 3, 24)  # of 12 sequences in an epoch
    assert second.passes(seen) == {"a": 1 + 1 / 4}
    assert second.__getitems__([seen])["tokens"][0, 0].item() == 24
    same, seen = resumed(first, 5, 8)
    assert (seen, same.origin) == (5, first.origin)


def test_the_smallest_change_of_a_weight_is_a_change() -> None:
    assert mixed((9, 0.1234567), (9, 1.0)).settings() != mixed((9, 0.1234568), (9, 1.0)).settings()


def test_a_changed_mixture_can_start_over() -> None:
    first = mixed((40, 1.0))
    second = mixed((40, 0.5), (40, 0.5)).resume(saved(first, 60), 60, "restart")
    assert read(second, 60, 90) == read(mixed((40, 0.5), (40, 0.5)), 0, 30)
    assert second.limit(1) == 60 + 80
    assert mixed((40, 1.0)).resume({}, 60, "continue").consumed(60) == [0], "a checkpoint without a state of the data"


# Batches


def test_batches_know_their_documents() -> None:
    one = TokenSequence(np.arange(6), np.arange(6) + 1, np.array([0, 2, 5]))
    two = TokenSequence(np.arange(6), np.arange(6) + 1, np.array([0]))
    batch = as_batch([one, two], mark_documents=True)
    assert batch["positions"].tolist() == [[0, 1, 0, 1, 2, 0], [0, 1, 2, 3, 4, 5]]
    assert batch["documents"].tolist() == [[0, 0, 1, 1, 1, 2], [0] * 6]
    assert batch["boundaries"].tolist() == [0, 2, 5, 6, 12]
    assert (batch["positions"].dtype, batch["documents"].dtype) == (torch.int64, torch.int32)
    assert set(as_batch([one], mark_documents=False)) == {"tokens", "labels"}


# Stages


STAGES = [Stage(50, {"s0": 1.0}), Stage(130, {"s0": 0.25, "s1": 0.75, "s2": 0.0})]


def test_weights_of_stages_are_exact_and_each_source_goes_on_where_it_was() -> None:
    samples = mixed((37, 1.0), (11, 0.0), (20, 3.0), stages=STAGES)
    located = [samples.locate(sample) for sample in range(400)]
    owners = [source for source, _, _ in located]
    assert [owners[:50].count(i) for i in range(3)] == [50, 0, 0]
    assert [owners[50:130].count(i) for i in range(3)] == [20, 60, 0]
    assert [owners[130:].count(i) for i in range(3)] == [68, 0, 202]
    for i, sequences in enumerate((37, 11, 20)):
        mine = [(epoch, sequence) for source, epoch, sequence in located if source == i]
        assert mine == [samples.orders[i].locate(number) for number in range(len(mine))]
        assert {epoch for epoch, _ in mine} == set(range(-(-len(mine) // sequences)))
    for seen in (0, 49, 50, 51, 130, 131, 400):
        assert samples.consumed(seen) == [owners[:seen].count(i) for i in range(3)]


@pytest.mark.parametrize("epochs", [1, 2, 9])
def test_the_limit_counts_stages(epochs: int) -> None:
    samples = mixed((37, 1.0), (11, 0.0), (20, 3.0), stages=STAGES)
    limit = samples.limit(epochs)
    assert all(epoch < epochs for _, epoch, _ in map(samples.locate, range(limit)))
    assert samples.locate(limit)[1] == epochs


@pytest.mark.parametrize("at", [0, 50, 51, 130, 200])
def test_samples_resume_in_any_stage_and_later_stages_may_change(at: int) -> None:
    first = mixed((37, 1.0), (11, 0.0), (20, 3.0), stages=STAGES)
    state = saved(first, at)
    again = mixed((37, 1.0), (11, 0.0), (20, 3.0), stages=STAGES).resume(state, at, "error")
    assert read(again, at, 300) == read(first, at, 300)
    for changed in (
        mixed((37, 5.0), (11, 1.0), (20, 3.0), (9, 1.0), stages=STAGES),  # from sample 130 on
        mixed((37, 1.0), (11, 0.0), (20, 3.0), stages=[STAGES[0], Stage(140, STAGES[1].weights)]),  # the same
        mixed((37, 1.0), (11, 0.0), (20, 3.0), stages=[STAGES[0]]),  # from sample 50 on
    ):
        begins = 50 if len(changed.stages) == 1 else 130
        assert (changed.settings(at) == first.settings(at)) == (at <= begins)
        found = changed.resume(state, at, "continue")
        if at <= begins:
            assert read(found, 0, 300) == read(changed, 0, 300), "as if it had been so from the beginning"
        assert found.consumed(at)[:3] == first.consumed(at)


# Sequences cut for a shorter length


@pytest.mark.parametrize("mark", [False, True])
def test_cut_sequences_have_the_same_tokens(mark: bool) -> None:
    tokens = np.arange(24)
    one = TokenSequence(tokens[:12], tokens[:12] + 1, np.array([0, 3, 10]))
    other = TokenSequence(tokens[12:], tokens[12:] + 1, np.array([0, 4]))
    batch = as_batch([one, other], mark_documents=mark)
    cut = cut_sequences(batch, 4)
    assert cut["tokens"].shape == cut["labels"].shape == (6, 4)
    for name in set(batch) - {"boundaries"}:
        assert torch.equal(cut[name].flatten(), batch[name].flatten())
    if mark:
        assert batch["boundaries"].tolist() == [0, 3, 10, 12, 16, 24]
        assert cut["boundaries"].tolist() == [0, 3, 4, 8, 10, 12, 16, 20, 24]
    assert cut_sequences(batch, 12)["tokens"].equal(batch["tokens"])


# Windows


@pytest.mark.parametrize(("sequences", "window"), [(50, 8), (48, 8), (5, 8), (37, 1)])
def test_windows_are_shuffled_each_in_its_place(sequences: int, window: int) -> None:
    samples = mixed((sequences, 1.0), window=window)
    located = [samples.locate(sample)[1:] for sample in range(3 * sequences)]
    epochs = [[sequence for epoch, sequence in located if epoch == number] for number in range(3)]
    for epoch in epochs:
        for first in range(0, sequences, window):
            part = epoch[first : first + window]
            assert sorted(part) == list(range(first, min(first + window, sequences)))
    if window == 8 < sequences:
        offsets = {
            tuple(sequence - first for sequence in epoch[first : first + 8]) for epoch in epochs for first in (0, 8)
        }
        assert len(offsets) == 6, "each window has an order of its own in each epoch"
