"""Documents become sequences: cut from the stream, or packed whole; compared with slow, plain code."""

import os
import pickle
import re
import shutil
import tempfile
from bisect import bisect_left, insort
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from titanlite.batch import IGNORE
from titanlite.data import packing
from titanlite.data.packing import PADDING, BestFit, Stream, TokenSequence, best_fit_decreasing
from titanlite.data.samples import Samples, Source
from titanlite.data.tokens import TokenStore
from titanlite.runtime.errors import RunError, UserError
from titanlite.tools.ingest.token_writer import TokenWriter

LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=12)
FEW = settings(max_examples=12, deadline=None, derandomize=True, database=None)
MANY = settings(max_examples=100, deadline=None, derandomize=True, database=None)


def write(folder: Path, lengths: list[int], *, masked: set[int] | None = None, shard_tokens: int = 61) -> TokenStore:
    """Documents of tokens 1, 2, 3, ...: each has its own. Documents continue over shard borders."""
    shutil.rmtree(folder, ignore_errors=True)
    total = sum(lengths)
    tokens, mask = np.arange(1, total + 1), np.ones(total, dtype=bool)
    mask[list(masked or ())] = False
    starts = np.cumsum([0, *lengths])[:-1]
    with TokenWriter(folder, vocab_size=2**17, tokenizer="test", shard_tokens=shard_tokens) as writer:
        for at in range(0, total, shard_tokens):
            here = slice(at, at + shard_tokens)
            writer.add(tokens[here], starts[(starts >= at) & (starts < at + shard_tokens)] - at, mask[here])
    return TokenStore(folder)


def as_lists(sequence: TokenSequence) -> tuple[list[int], list[int], list[int]]:
    assert sequence.tokens.dtype == sequence.labels.dtype == sequence.starts.dtype == np.int64
    return sequence.tokens.tolist(), sequence.labels.tolist(), sequence.starts.tolist()


# Stream


def test_batches_know_their_padding(tmp_path: Path) -> None:
    """Also without a document mask, and where a document of token 0 without labels ends a sequence."""
    store = write(tmp_path / "a", [3, 2, 5, 4], masked={*range(10, 14)})
    source = Source("a", BestFit(store, seq_len=5, plan_folder=tmp_path / "plans"), "f")
    samples = Samples([source], seed=0, shuffle=False, marks_padding=True)
    batch = samples.__getitems__([0, 1, 2])
    assert batch["tokens"].tolist() == [[1, 2, 3, 4, 5], [6, 7, 8, 9, 10], [11, 12, 13, 14, PADDING]]
    assert batch["padding"].int().tolist() == [[0] * 5, [0] * 5, [0, 0, 0, 0, 1]]
    assert "padding" not in Samples([source], seed=0).__getitems__([0])
    last = Stream(store, seq_len=5, document_mask=False, to_end=True).read(2)
    assert (last.tokens.tolist(), last.padding) == ([11, 12, 13, PADDING, PADDING], 2)


def test_documents_without_a_token_do_not_show(tmp_path: Path) -> None:
    with TokenWriter(tmp_path / "a", vocab_size=10, tokenizer="test") as writer:
        for document in ([], [1, 2], [], [3], []):
            writer.add(np.array(document, dtype=np.int64))
        writer.add(np.array([4, 5]), starts=np.array([], dtype=np.int64))
    sequence = Stream(TokenStore(tmp_path / "a"), seq_len=4, document_mask=True).read(0)
    assert as_lists(sequence) == ([1, 2, 3, 4], [2, IGNORE, IGNORE, 5], [0, 2, 3])


@pytest.mark.long
@FEW
@given(lengths=LENGTHS, seq_len=st.integers(1, 12), masked=st.sets(st.integers(0, 30), max_size=9), apart=st.booleans())
def test_stream_is_what_plain_code_gives(lengths: list[int], seq_len: int, masked: set[int], apart: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        masked = {place for place in masked if place < sum(lengths)}
        sequences = Stream(write(Path(folder) / "a", lengths, masked=masked), seq_len=seq_len, document_mask=apart)
        assert len(sequences) == (sum(lengths) - 1) // seq_len
        document = documents_of(lengths) if apart else [0] * sum(lengths)
        for i in range(len(sequences)):
            tokens = list(range(i * seq_len + 1, (i + 1) * seq_len + 1))
            assert as_lists(sequences.read(i)) == (tokens, *expected(tokens, document, masked))
        whole = Stream(sequences.store, seq_len=seq_len, document_mask=apart, to_end=True)
        read = [whole.read(i) for i in range(len(whole))]
        for short, long in zip(map(sequences.read, range(len(sequences))), read, strict=False):
            assert as_lists(short) == as_lists(long)
        rest = [t + 1 for t in range(1, sum(lengths)) if document[t] == document[t - 1] and t not in masked]
        assert [label for sequence in read for label in sequence.labels.tolist() if label != IGNORE] == rest
        for sequence in read[len(sequences) :]:
            length = (sum(lengths) - 1) % seq_len
            assert sequence.tokens.tolist()[length:] == [PADDING] * (seq_len - length)
            assert (len(sequence.labels), sequence.starts[-1]) == (seq_len, length)


def documents_of(lengths: list[int]) -> list[int]:
    """The document of each token."""
    return [number for number, length in enumerate(lengths) for _ in range(length)]


def expected(tokens: list[int], document: list[int], masked: set[int]) -> tuple[list[int], list[int]]:
    """(labels, starts) of a sequence, token by token; token t is at place t - 1 of the stream."""
    labels = []
    for t in tokens:
        continues = t != PADDING and t < len(document) and document[t] == document[t - 1]
        labels.append(t + 1 if continues and t not in masked else IGNORE)
    owners = [-1 if t == PADDING else document[t - 1] for t in tokens]
    return labels, [i for i in range(len(tokens)) if i == 0 or owners[i] != owners[i - 1]]


# Best fit


def test_empty_room_is_padding_and_counts_as_a_document_of_its_own(tmp_path: Path) -> None:
    sequences = BestFit(write(tmp_path / "a", [3, 2, 5]), seq_len=5, plan_folder=tmp_path / "plans")
    assert (len(sequences), sequences.cut_documents, sequences.fill) == (2, 0, 1.0)
    sequences = BestFit(write(tmp_path / "b", [4, 2, 5]), seq_len=5, plan_folder=tmp_path / "plans")
    assert (len(sequences), sequences.cut_documents, sequences.fill) == (3, 0, 11 / 15)
    assert as_lists(sequences.read(0)) == ([1, 2, 3, 4, PADDING], [2, 3, 4, IGNORE, IGNORE], [0, 4])
    assert as_lists(sequences.read(1)) == ([5, 6, PADDING, PADDING, PADDING], [6, *[IGNORE] * 4], [0, 2])
    assert as_lists(sequences.read(2)) == ([7, 8, 9, 10, 11], [8, 9, 10, 11, IGNORE], [0])


@pytest.mark.long
@FEW
@given(lengths=LENGTHS, seq_len=st.integers(1, 12), masked=st.sets(st.integers(0, 30), max_size=9))
def test_every_token_is_in_one_sequence_and_only_long_documents_are_cut(
    lengths: list[int], seq_len: int, masked: set[int]
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        masked = {place for place in masked if place < sum(lengths)}
        store = write(Path(folder) / "a", lengths, masked=masked)
        sequences = BestFit(store, seq_len=seq_len, plan_folder=Path(folder) / "plans")
        document = documents_of(lengths)
        seen: Counter[int] = Counter()
        in_rows: dict[int, set[int]] = {}
        for i in range(len(sequences)):
            sequence = sequences.read(i)
            assert as_lists(sequence)[1:] == expected(sequence.tokens.tolist(), document, masked)
            held = [t for t in sequence.tokens.tolist() if t != PADDING]
            seen.update(held)
            for t in held:
                in_rows.setdefault(document[t - 1], set()).add(i)
        assert seen == Counter(range(1, len(store) + 1))
        assert [len(in_rows[n]) for n in range(len(lengths))] == [-(-length // seq_len) for length in lengths]
        assert sequences.cut_documents == sum(length > seq_len for length in lengths)
        assert sequences.fill == len(store) / (len(sequences) * seq_len)
        assert len(sequences) >= -(-len(store) // seq_len)


def naive_best_fit_decreasing(lengths: list[int], capacity: int) -> list[int]:
    """The room that each bin has left, sorted."""
    rooms: list[int] = []
    for length in sorted(lengths, reverse=True):
        at = bisect_left(rooms, length)
        insort(rooms, (rooms.pop(at) if at < len(rooms) else capacity) - length)
    return rooms


@pytest.mark.long
@MANY
@given(st.integers(1, 100).flatmap(lambda n: st.tuples(st.just(n), st.lists(st.integers(1, n), max_size=150))))
def test_bins_are_those_of_best_fit_decreasing(case: tuple[int, list[int]]) -> None:
    capacity, lengths = case
    bins = best_fit_decreasing(np.array(lengths, dtype=np.int32), capacity)
    used: Counter[int] = Counter()
    for bin_, length in zip(bins.tolist(), lengths, strict=True):
        used[bin_] += length
    assert sorted(capacity - count for count in used.values()) == naive_best_fit_decreasing(lengths, capacity)
    assert all(bins[bin_] == bin_ for bin_ in used), "a bin is called by the piece that opened it"
    assert all(lengths[bin_] == max(np.array(lengths)[bins == bin_]) for bin_ in used)


@pytest.mark.long
def test_a_large_case_takes_few_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    turns = Counter[str]()
    take = packing._Rooms.take

    def counted(self: packing._Rooms, least: int) -> tuple[int, np.ndarray | None]:
        turns["take"] += 1
        return take(self, least)

    monkeypatch.setattr(packing._Rooms, "take", counted)
    lengths = np.random.default_rng(0).lognormal(5, 1.2, 100_000).astype(np.int64).clip(1, 1024)
    bins = best_fit_decreasing(lengths, 1024)
    assert len(np.unique(bins)) == len(naive_best_fit_decreasing(lengths.tolist(), 1024))
    assert turns["take"] < 5 * 1024


# Plans


@pytest.mark.long
def test_a_plan_is_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = write(tmp_path / "a", [3, 10, 1, 2])
    made: list[int] = []
    plan = packing.plan_best_fit

    def counted(store: TokenStore, seq_len: int) -> tuple[np.ndarray, np.ndarray, int]:
        made.append(seq_len)
        return plan(store, seq_len)

    monkeypatch.setattr(packing, "plan_best_fit", counted)
    with ThreadPoolExecutor(4) as pool:
        plans = [pool.submit(BestFit, store, seq_len=4, plan_folder=tmp_path / "plans") for _ in range(4)]
        sequences = [as_lists(future.result().read(3)) for future in plans]
    assert sequences == [([12, 13, 15, 16], [13, IGNORE, 16, IGNORE], [0, 2])] * 4
    assert made == [4]
    BestFit(store, seq_len=5, plan_folder=tmp_path / "plans")
    BestFit(write(tmp_path / "b", [3, 9, 2, 2]), seq_len=4, plan_folder=tmp_path / "plans")
    assert made == [4, 5, 4]
    kept = sorted(path.name.rpartition("-")[2] for path in (tmp_path / "plans").iterdir() if path.is_dir())
    assert kept == ["4", "4", "5"], "nothing half-made is left"


def test_remains_of_a_killed_process_are_no_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = write(tmp_path / "a", [3, 10, 1, 2])
    with monkeypatch.context() as patched:
        patched.setattr(os, "rename", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            BestFit(store, seq_len=4, plan_folder=tmp_path / "plans")
    assert len(BestFit(store, seq_len=4, plan_folder=tmp_path / "plans")) == 4


@pytest.mark.parametrize("kind", ["cut", "longer", "empty", "missing", "folder", "no JSON", "no count", "a file"])
def test_a_damaged_plan_is_made_again(tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    store = write(tmp_path / "a", [3, 10, 1, 2])
    sequences = BestFit(store, seq_len=4, plan_folder=tmp_path / "plans")
    expected = [as_lists(sequences.read(index)) for index in range(len(sequences))]
    [plan] = (path for path in (tmp_path / "plans").iterdir() if path.is_dir())
    for name in ("plan.json",) if kind.startswith("no ") else ("pieces", "first_pieces", "plan.json"):
        path = plan / name
        before = path.read_bytes()
        path.unlink()
        if kind == "folder":
            path.mkdir()
        elif kind == "a file":
            shutil.rmtree(plan)
            plan.write_text("x")
        elif kind != "missing":
            changed = {"cut": before[:-1], "longer": before + b"0", "empty": b"", "no JSON": b"{", "no count": b"{}"}
            path.write_bytes(changed[kind])
        again = BestFit(store, seq_len=4, plan_folder=tmp_path / "plans")
        assert [as_lists(again.read(index)) for index in range(len(again))] == expected
        assert str(plan) in caplog.records[-1].message
        assert [path.name for path in plan.iterdir() if path.is_dir()] == []


def test_a_plan_that_is_cut_under_a_reader_is_an_error(tmp_path: Path) -> None:
    sequences = BestFit(write(tmp_path / "a", [3, 10, 1, 2]), seq_len=4, plan_folder=tmp_path / "plans")
    [pieces] = tmp_path.glob("plans/*/pieces")
    os.truncate(pieces, 8)
    with pytest.raises(UserError, match=rf"data\.packing: {re.escape(str(pieces))} "):
        sequences.read(2)


def test_a_plan_that_cannot_be_kept_is_logged(tmp_path: Path) -> None:
    (tmp_path / "plans").touch()
    with pytest.raises(RunError, match=r"plans.*\[Errno 17\]"):
        BestFit(write(tmp_path / "a", [3]), seq_len=4, plan_folder=tmp_path / "plans")


def test_worker_processes_get_paths_and_no_arrays(tmp_path: Path) -> None:
    sequences = BestFit(
        write(tmp_path / "a", [7] * 3000, shard_tokens=2**20), seq_len=16, plan_folder=tmp_path / "plans"
    )
    data = pickle.dumps(sequences)
    assert len(data) < 1000
    copy = pickle.loads(data)
    assert (len(copy), copy.cut_documents, copy.fill) == (1500, 0, 14 / 16)
    assert as_lists(copy.read(1499)) == as_lists(sequences.read(1499))


def test_a_store_without_a_token_has_no_sequences(tmp_path: Path) -> None:
    store = write(tmp_path / "a", [])
    assert len(BestFit(store, seq_len=4, plan_folder=tmp_path / "plans")) == 0
    assert len(Stream(store, seq_len=4, document_mask=True)) == 0
