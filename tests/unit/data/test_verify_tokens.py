"""Token files that change under a run: found by checksum beside training, or where a file became shorter by reading."""

import json
import os
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.helpers import TinyRun, mentions
from tests.support.whole_runs import trained
from titanlite.data import verify
from titanlite.data.loader import MicroBatches, build_loader
from titanlite.data.packing import BestFit, Stream
from titanlite.data.samples import Samples, Source
from titanlite.data.tokens import TokenStore
from titanlite.data.verify import VALID_SECONDS, TokenCheck, while_checking
from titanlite.runtime.errors import UserError
from titanlite.runtime.files import lock_file
from titanlite.runtime.process_group import Ranks
from titanlite.schedule import BatchSizes
from titanlite.tools.ingest.token_writer import TokenWriter


def write(folder: Path) -> TokenStore:
    """Write 4,000 tokens of 100 documents, some of them masked, in several shards."""
    random = np.random.default_rng(0)
    with TokenWriter(folder, vocab_size=258, tokenizer="bytes", shard_tokens=1500) as writer:
        for _ in range(100):
            writer.add(random.integers(0, 256, size=40), mask=random.random(40) < 0.9)
    return TokenStore(folder)


def change(path: Path, *, at: int = 10, keep_time: bool = False) -> None:
    """Flip a bit, and leave the size as it is."""
    about = path.stat()
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)
    if keep_time:
        os.utime(path, ns=(about.st_atime_ns, about.st_mtime_ns))


def check(store: TokenStore, cache: Path) -> None:
    token_check = TokenCheck([store, store], cache)
    token_check.start()
    token_check.wait()
    token_check.raise_if_damaged()


@pytest.fixture
def all_are_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "LARGE", 0)


@pytest.mark.parametrize("kind", ["tokens", "documents", "mask"])
def test_a_changed_file_of_prepared_tokens_is_named(kind: str, tmp_path: Path) -> None:
    store = write(tmp_path / "tokens")
    check(store, tmp_path / "cache")
    path = tmp_path / "tokens" / f"00001.{kind}"
    change(path)
    with pytest.raises(UserError) as error:
        check(store, tmp_path / "cache")
    message = str(error.value)
    assert message.startswith(f"data.path: {path} ")
    assert mentions(message, "checksum", "titanlite data prepare", f"--out {tmp_path / 'tokens'}")
    assert len(message.splitlines()) == 1
    assert path.exists()


def test_a_damaged_cache_is_made_again_at_the_next_start(tmp_path: Path) -> None:
    store = write(tmp_path / "cache" / "key")
    change(tmp_path / "cache" / "key" / "00000.tokens")
    with pytest.raises(UserError, match=r"key\.damaged-1"):
        check(store, tmp_path / "cache")
    assert os.listdir(tmp_path / "cache") == ["key.damaged-1"]


def test_a_packing_plan_of_other_bytes_ends_the_run_and_is_made_again(tmp_path: Path) -> None:
    """With zeros for a piece, sequences of padding would be trained."""
    store, folder = write(tmp_path / "tokens"), tmp_path / "cache" / "packing"
    sequences = BestFit(store, seq_len=4, plan_folder=folder)
    expected = [sequences.read(index).tokens.tolist() for index in range(len(sequences))]
    pieces = sequences.plan.folder / "pieces"
    pieces.write_bytes(bytes(16) + pieces.read_bytes()[16:])
    source = Source("a", sequences, "f")
    batches = while_checking((wait_a_little() for _ in range(1000)), [source], tmp_path / "cache", Ranks(0, 1, 0, 1))
    with pytest.raises(UserError) as error:
        list(batches)
    assert str(error.value).startswith(f"data.packing: {pieces} ")
    assert mentions(str(error.value), "checksum", "plan.json", f"{sequences.plan.folder.name}.damaged-1")
    again = BestFit(store, seq_len=4, plan_folder=folder)
    assert [again.read(index).tokens.tolist() for index in range(len(again))] == expected
    check = TokenCheck([again.plan, store], tmp_path / "cache")
    check.start()
    check.wait()
    check.raise_if_damaged()


def wait_a_little() -> Any:
    time.sleep(0.01)
    return {}


@pytest.mark.usefixtures("all_are_large")
def test_a_large_folder_is_read_once_a_week(tmp_path: Path, log: Callable[[], list[str]]) -> None:
    store = write(tmp_path / "tokens")
    check(store, tmp_path / "cache")
    assert len(log()) == 2
    change(tmp_path / "tokens" / "00000.tokens", keep_time=True)
    check(store, tmp_path / "cache")  # verified just now
    assert len(log()) == 2
    [note] = tmp_path.glob(".tokens-*.verified")
    found = json.loads(note.read_text())
    note.write_text(json.dumps(found | {"verified_at": time.time() - VALID_SECONDS}))
    with pytest.raises(UserError, match=r"00000\.tokens "):
        check(store, tmp_path / "cache")


@pytest.mark.usefixtures("all_are_large")
@pytest.mark.parametrize("text", ["", "[" * 100_000, "[]", '{"files": {}, "verified_at": 1}', '{"verified_at": "x"}'])
def test_other_times_or_a_damaged_note_count_as_not_verified(text: str, tmp_path: Path) -> None:
    store = write(tmp_path / "tokens")
    check(store, tmp_path / "cache")
    [note] = tmp_path.glob(".tokens-*.verified")
    note.write_text(text)
    change(tmp_path / "tokens" / "00000.tokens", keep_time=True)
    with pytest.raises(UserError, match=r"00000\.tokens "):
        check(store, tmp_path / "cache")


@pytest.mark.usefixtures("all_are_large")
def test_one_process_reads_for_all(tmp_path: Path, log: Callable[[], list[str]]) -> None:
    store = write(tmp_path / "tokens")
    with lock_file(tmp_path / f".tokens-{store.fingerprint}.verified.lock"):
        check(store, tmp_path / "cache")
    assert log() == []


@pytest.mark.long
def test_the_speed_is_bounded_and_the_end_of_a_run_does_not_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verify, "BYTES_PER_SECOND", 1)
    token_check = TokenCheck([write(tmp_path / "tokens")], tmp_path / "cache")
    started = time.monotonic()
    token_check.start()
    time.sleep(0.2)
    token_check.raise_if_damaged()
    token_check.stop()
    assert time.monotonic() - started < 60


@pytest.mark.long
@pytest.mark.usefixtures("single_process_group")
def test_a_run_whose_tokens_have_changed_ends(tiny: TinyRun) -> None:
    """The start checks checksums of small caches. Here they change after that."""
    config = tiny.config("--training.steps=2")
    trained(config)
    [folder] = [path.parent for path in (tiny.folder / "outputs" / "data_cache").glob("*/index.json")]
    prepared = tiny.folder / "prepared"
    folder.rename(prepared)
    change(prepared / "00000.tokens", at=2)
    config = tiny.config(f"--data.path={prepared}", "--job.name=prepared", "--training.steps=100000")
    with pytest.raises(UserError, match=r"prepared/00000\.tokens\b"):
        trained(config)


# A file that became shorter


def loader_of(folder: Path, *, workers: int, packing: str = "stream") -> Any:
    store = TokenStore(folder)
    plans = folder.parent / "plans"
    reader = (
        Stream(store, seq_len=8, document_mask=True)
        if packing == "stream"
        else BestFit(store, seq_len=8, plan_folder=plans)
    )
    samples = Samples([Source("a", reader, "f", marks_documents=True)], seed=0)
    batches = MicroBatches(start=0, sizes=BatchSizes((), 2), micro_batch_size=2, rank=0, ranks=1)
    return build_loader(samples, batches, num_workers=workers, device=torch.device("cpu"))


def error_of(loader: Any) -> str:
    """Read until an error, and return its message. No error is kept, which would hold the workers."""
    try:
        list(islice(loader, 500))
    except UserError as error:
        return str(error)
    raise AssertionError("all was read")


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "workers"),
    [("tokens", 0), ("documents", 0), ("mask", 0), pytest.param("tokens", 1, marks=pytest.mark.slow)],
)
def test_a_file_that_became_shorter_is_one_line(kind: str, workers: int, tmp_path: Path) -> None:
    write(tmp_path / "tokens")
    loader = loader_of(tmp_path / "tokens", workers=workers)
    next(loader)
    for path in (tmp_path / "tokens").glob(f"*.{kind}"):
        os.truncate(path, 0)
    message = error_of(loader)
    assert f".{kind} " in message
    assert len(message.splitlines()) == 1


@pytest.mark.long
def test_a_file_that_is_gone_is_one_line(tmp_path: Path) -> None:
    write(tmp_path / "tokens")
    loader = loader_of(tmp_path / "tokens", workers=0, packing="best_fit")
    (tmp_path / "tokens" / "00001.tokens").unlink()
    assert "00001.tokens " in error_of(loader)
