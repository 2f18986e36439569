"""Preparation in the background: the same sequences as if all had been prepared before, also after kills."""

import gc
import multiprocessing
import os
import pickle
import random
import signal
import threading
import time
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path

import numpy as np
import pytest

from tests.support.helpers import TinyRun, mentions, train_on_this_rank
from tests.support.processes import kill_all, started, unhurried
from titanlite.data.packing import Stream
from titanlite.data.samples import Samples, Source
from titanlite.data.sources import store_of
from titanlite.data.tokenizer import load_tokenizer
from titanlite.data.tokens import TokenStore
from titanlite.runtime.errors import RunError
from titanlite.schema import Data
from titanlite.tools.ingest import background, token_writer
from titanlite.tools.ingest.background import GrowingStore, failure_of
from titanlite.tools.ingest.prepare import prepare_text
from titanlite.tools.ingest.token_writer import TokenWriter

KEY = "0123456789abcdef"


def writer_of(folder: Path) -> TokenWriter:
    return TokenWriter(folder, vocab_size=300, tokenizer="t", shard_tokens=1000, key=KEY)


def chunks(first: int, end: int) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Chunks of 100 tokens in two documents; in some, tokens do not count in the loss."""
    for number in range(first, end):
        tokens = np.random.default_rng(number).integers(0, 300, 100)
        yield tokens, np.array([0, 37]), np.arange(100) % 5 > (number % 3 == 1)


def samples_of(store: TokenStore) -> Samples:
    stream = Stream(store, seq_len=16, document_mask=True)
    return Samples([Source("s", stream, store.fingerprint, 1.0, marks_documents=True)], seed=3, window=20)


def read(samples: Samples, first: int, end: int) -> list[list[int]]:
    batch = samples.__getitems__([*range(first, end)])
    return [values.flatten().tolist() for _, values in sorted(batch.items())]


@pytest.fixture
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_writer, "GROWING_TOKENS", 200)
    monkeypatch.setattr(background, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(background, "REPORT_SECONDS", 0.05)


@pytest.mark.usefixtures("small_steps")
def test_readers_get_the_same_sequences_while_a_killed_writer_is_followed_by_another(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with writer_of(tmp_path / "whole") as writer:
        for chunk in chunks(0, 33):
            writer.add(*chunk)
    whole = samples_of(TokenStore(tmp_path / "whole"))
    expected = read(whole, 0, 600)  # 206 sequences: nearly three passes

    place = tmp_path / "tokens"
    first = writer_of(place)
    first.__enter__()
    for number, chunk in enumerate(chunks(0, 15)):
        first.add(*chunk, position=number + 1)
    store = GrowingStore(place, key=KEY, may_mask=True)
    assert not store.is_complete
    assert len(store) == 1400, "to the last state of one that was killed"
    samples = samples_of(store)
    found = read(samples, 0, 80)
    assert samples.passes(80) == {}

    results: list[list[list[int]]] = []
    reader = threading.Thread(target=lambda: results.append(read(samples, 80, 600)))
    reader.start()  # sequences 80 to 100 are needed, tokens up to 1601
    deadline = time.monotonic() + 30
    while not any(mentions(record.getMessage(), str(place), "1,400", "1,601") for record in caplog.records):
        assert time.monotonic() < deadline, "names what it waits for"
        time.sleep(0.02)
    assert pickle.loads(pickle.dumps(store)).read(0, 1400).tolist() == store.read(0, 1400).tolist()
    with writer_of(place) as second:
        assert second.position == 10, "after the last whole shard"
        for number, chunk in enumerate(chunks(10, 33), start=10):
            second.add(*chunk, position=number + 1)
            assert store.read(0, 1400).tolist() == TokenStore(tmp_path / "whole").read(0, 1400).tolist()
            if number == 20:
                time.sleep(0.1)
    reader.join(timeout=60)
    joined = [a + b for a, b in zip(found, results[0], strict=True)]
    names = sorted(whole.__getitems__([0]))
    for name, values, all_values in zip(names, joined, expected, strict=True):
        assert name == "boundaries" or values == all_values, name
    assert samples.passes(600) == whole.passes(600)
    assert TokenStore(place).fingerprint == TokenStore(tmp_path / "whole").fingerprint
    assert not list(place.glob("*.json.*")) + list(place.glob("growing.json")) + list(place.glob("resume.json"))
    assert store.fingerprint == GrowingStore(place, key=KEY, may_mask=True).fingerprint


@pytest.mark.usefixtures("small_steps")
def test_readers_fail_with_the_preparation(tmp_path: Path) -> None:
    failure_of(tmp_path / "tokens").write_text("a.jsonl:1: not JSON")
    with pytest.raises(RunError, match=r"a\.jsonl:1"):
        GrowingStore(tmp_path / "tokens", key=KEY, may_mask=False)


def large_text(path: Path, size: int) -> Path:
    words = [bytes(random.Random(n).choices(b"abcdefgh \n", k=997)) for n in range(64)]
    order = random.Random(0)
    path.write_bytes(b"".join(order.choice(words) for _ in range(size // 997)))
    return path


def preparing(timeout: float = 60) -> BaseProcess:
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        for process in multiprocessing.active_children():
            if process.name.startswith("SpawnProcess"):
                return process
        time.sleep(0.01)
    raise AssertionError("no process prepares")


@pytest.mark.slow
def test_a_killed_preparation_is_resumed_and_gives_the_tokens_of_one_before(tmp_path: Path) -> None:
    text = large_text(tmp_path / "a.txt", 12_000_000)
    tokenizer, data = load_tokenizer("bytes"), Data(prepare="background", shuffle_window=1000)
    others = set(multiprocessing.active_children())
    results: list[TokenStore] = []
    opens = threading.Thread(
        target=lambda: results.append(
            prepare_text([str(text)], data=data, tokenizer=tokenizer, cache_folder=tmp_path / "cache")
        )
    )
    opens.start()
    first = preparing()
    assert first not in others
    assert first.pid
    os.kill(first.pid, signal.SIGKILL)
    opens.join(timeout=120)
    (store,) = results
    found = store.read(0, 1_000_000)
    store.wait_for(1 << 40)
    before = prepare_text([str(text)], data=Data(), tokenizer=tokenizer, cache_folder=tmp_path / "other")
    assert store.is_complete
    assert len(store) == len(before) > 11_000_000
    assert np.array_equal(store.read(0, len(store)), before.read(0, len(before)))
    assert np.array_equal(found, before.read(0, 1_000_000))
    assert TokenStore(store.folder).index["shards"] == before.index["shards"]


@pytest.mark.slow
@pytest.mark.usefixtures("single_process_group")
def test_a_run_begins_with_the_first_tokens_and_trains_as_with_all(tiny: TinyRun) -> None:
    text = large_text(tiny.text / "large.txt", 9_000_000)
    options = [f"--data.path={text}", "--data.shuffle_window=64", "--training.steps=4"]
    train_on_this_rank(tiny.config(*options, "--job.name=before"), 0, 1)
    background = [*options, "--data.prepare=background", f"--data.cache_folder={tiny.folder / 'other'}"]
    run = train_on_this_rank(tiny.config(*background), 0, 1)
    assert tiny.losses() == tiny.losses("before")
    store = store_of(run.position.samples.sources[0])
    assert isinstance(store, GrowingStore)
    store.wait_for(1 << 40)
    del run
    gc.collect()  # its lock of the folder
    again = tiny.config(*background, "--training.steps=6")
    train_on_this_rank(again, 0, 1)
    train_on_this_rank(tiny.config(*options, "--job.name=before", "--training.steps=6"), 0, 1)
    assert tiny.losses() == tiny.losses("before")


@pytest.mark.slow
@pytest.mark.usefixtures("single_process_group")
def test_a_run_that_is_killed_while_its_text_is_prepared_reads_the_same_again(tiny: TinyRun) -> None:
    text = large_text(tiny.text / "large.txt", 6_000_000)
    cache = tiny.folder / "cache"
    options = [str(tiny.toml), f"--data.path={text}", "--data.shuffle_window=4096", f"--data.cache_folder={cache}"]
    background = [*options, "--data.prepare=background", "--training.steps=12", "--checkpoint.interval=2"]
    with started(tiny.folder, *background, unhurried(tiny), NPROC="2") as job:
        job.wait_until(lambda: any(cache.glob(".*.partial-*/growing.json")))
        makers = [pid for pid, command in job.pids().items() if "spawn_main" in command]
        for pid in makers:
            os.kill(pid, signal.SIGSTOP)
        job.wait_for_step(3)
        complete = {path.name for path in cache.iterdir() if not path.name.startswith(".")}
        kill_all([pid for pid in job.pids() if pid not in makers])
        for pid in makers:
            os.kill(pid, signal.SIGCONT)
        assert not job.left()
    assert makers
    assert not complete, "training began before its end"
    train_on_this_rank(tiny.config(*background[1:]), 0, 1)
    train_on_this_rank(tiny.config(*options[1:], "--training.steps=12", "--job.name=before"), 0, 1)
    assert tiny.losses() == pytest.approx(tiny.losses("before"), rel=1e-6)
