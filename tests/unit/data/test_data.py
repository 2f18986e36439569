"""Data: shards of tokens, a permutation each epoch, and batches that depend on the config alone."""

import errno
import json
import multiprocessing
import os
import pickle
import re
import signal
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from tests.support.helpers import mentions
from titanlite.data.loader import MicroBatches, build_loader
from titanlite.data.packing import Stream
from titanlite.data.prepared import prepared_tokens
from titanlite.data.samples import Samples, Source, permute
from titanlite.data.sources import check_path, open_sources
from titanlite.data.tokenizer import ByteTokenizer
from titanlite.data.tokens import INDEX, JoinedTokens, TokenStore
from titanlite.runtime.errors import RunError, UserError
from titanlite.schedule import BatchSizes
from titanlite.schema import Data, DataSource, Validation, ValidationSource
from titanlite.tools.ingest.encoding import Options
from titanlite.tools.ingest.inputs import find_files
from titanlite.tools.ingest.prepare import prepare, prepare_text
from titanlite.tools.ingest.token_writer import TokenWriter


def write_tokens(folder: Path, documents: list[list[int]], **options: Any) -> TokenStore:
    with TokenWriter(folder, **{"vocab_size": 1000, "tokenizer": "test", **options}) as writer:
        for document in documents:
            writer.add(np.array(document))
    return TokenStore(folder)


# Shards


def test_store_reads_across_shards(tmp_path: Path) -> None:
    documents = [list(range(start, start + 7)) for start in range(0, 70, 7)]
    store = write_tokens(tmp_path / "tokens", documents, shard_tokens=16)
    assert len(store.index["shards"]) == 4
    assert len(store) == 70
    for start in range(70):
        for count in (0, 1, 5, 70 - start):
            if start + count <= 70:
                assert store.read(start, count).tolist() == list(range(start, start + count))
    assert pickle.loads(pickle.dumps(store)).read(20, 30).tolist() == list(range(20, 50))


@pytest.mark.parametrize("packing", ["stream", "best_fit"])
def test_several_folders_are_one_source(packing: Literal["stream", "best_fit"], tmp_path: Path) -> None:
    """They are read as one folder with the same documents, and each is verified."""
    tokenizer = ByteTokenizer()
    texts = [[f"{name} {'x' * (7 * number % 50)}" for number in range(30)] for name in ("a", "b")]
    stores = {}
    for name, lines in {"a": texts[0], "b": texts[1], "whole": [*texts[0], *texts[1]]}.items():
        file = tmp_path / f"{name}.jsonl"
        file.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
        options = Options(shard_tokens=300)
        stores[name] = prepare([str(file)], tmp_path / name, tokenizer=tokenizer, options=options)
    found = []
    for path in ([str(tmp_path / "a"), str(tmp_path / "b")], str(tmp_path / "whole")):
        data = Data(path=path, packing=packing)
        [source] = open_sources(data, data, tokenizer=tokenizer, seq_len=32, cache_folder=tmp_path / "cache")
        again = pickle.loads(pickle.dumps(source.sequences))
        found.append([tuple(part.tobytes() for part in again.read(index)[:3]) for index in range(len(again))])
        assert len(again) == len(source.sequences) > 10
    assert found[0] == found[1]
    joined = JoinedTokens([stores["a"], stores["b"]])
    assert joined.fingerprint != stores["a"].fingerprint
    assert [*joined.files()] == [*stores["a"].files(), *stores["b"].files()]
    assert [*joined.damaged()] == []


def test_tokens_and_text_are_two_sources(tmp_path: Path) -> None:
    write_tokens(tmp_path / "a", [[1, 2]])
    (tmp_path / "text.txt").write_text("a")
    for second in ("text.txt", "a", "./a"):
        with pytest.raises(UserError) as error:
            check_path([str(tmp_path / "a"), f"{tmp_path}/{second}"], find_files)
        assert mentions(str(error.value), tmp_path / "a")
    assert prepared_tokens([str(tmp_path / "text.txt"), str(tmp_path)]) == []
    write_tokens(tmp_path / "b", [[1, 2]])
    (tmp_path / "text.txt").unlink()
    assert prepared_tokens([f"{tmp_path}/*"]) == [str(tmp_path / "a"), str(tmp_path / "b")]


def test_each_source_may_have_its_own_field(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "no", "body": "a" * 99}) + "\n")
    (tmp_path / "b.jsonl").write_text(json.dumps({"content": "b" * 99, "body": "no"}) + "\n")
    paths = str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")
    data = Data(sources=[DataSource(path=paths[0]), DataSource(path=paths[1], text_field="content")], text_field="body")
    validation = Validation(
        enable=True, sources=[ValidationSource(path=paths[0]), ValidationSource(path=paths[1], text_field="content")]
    )
    for section in (data, validation):
        sources = open_sources(
            section, data, tokenizer=ByteTokenizer(), seq_len=32, cache_folder=tmp_path, prepare_text=prepare_text
        )
        assert [source.sequences.read(1).tokens.tolist() for source in sources] == [[ord("a")] * 32, [ord("b")] * 32]


@pytest.mark.parametrize(("vocab_size", "size"), [(65536, 2), (65537, 4)])
def test_token_size_follows_the_vocabulary(vocab_size: int, size: int, tmp_path: Path) -> None:
    store = write_tokens(tmp_path / "tokens", [[0, vocab_size - 1]], vocab_size=vocab_size)
    assert store.read(0, 2).tolist() == [0, vocab_size - 1]
    assert (tmp_path / "tokens" / "00000.tokens").stat().st_size == 2 * size


def test_a_folder_is_there_whole_or_not_at_all(tmp_path: Path) -> None:
    folder = tmp_path / "tokens"
    broken = TokenWriter(folder, vocab_size=10, tokenizer="test").__enter__()
    broken.add(np.array([1, 2]))
    assert [path.name.partition("-")[0] for path in tmp_path.iterdir()] == [".tokens.partial"]
    broken.__exit__(RuntimeError, RuntimeError("a document that cannot be read"), None)
    assert list(tmp_path.iterdir()) == []
    write_tokens(folder, [[1, 2, 3]])
    (folder / "00000.tokens").write_bytes(b"123")
    with pytest.raises(UserError, match=r"00000\.tokens "):
        TokenStore(folder)


def test_a_document_can_continue_in_the_next_shard_and_masks_begin_anywhere(tmp_path: Path) -> None:
    with TokenWriter(tmp_path / "a", vocab_size=10, tokenizer="test", shard_tokens=4) as writer:
        writer.add(np.array([1, 2, 3, 4, 5]))
        writer.add(np.array([6, 7, 8, 9]), starts=np.array([2]))
        writer.add(np.array([1, 2]))
        writer.add(np.array([3, 4]), mask=np.array([True, False]))
        writer.add(np.array([5]))
    store = TokenStore(tmp_path / "a")
    assert store.document_starts(0, 14).tolist() == [0, 7, 9, 11, 13]
    assert store.index["documents"] == 5
    assert store.has_mask
    assert [sorted(shard["sha256"]) for shard in store.index["shards"]] == [
        ["documents", "tokens"], ["documents", "tokens"], ["documents", "mask", "tokens"], ["documents", "tokens"]
    ]  # fmt: skip
    assert store.read_mask(0, 14).tolist() == [True] * 12 + [False, True]
    assert store.read_mask(12, 1).tolist() == [False]


def test_what_other_input_has_left_is_not_resumed(tmp_path: Path) -> None:
    options: dict[str, Any] = {"vocab_size": 20, "tokenizer": "test", "shard_tokens": 2}
    killed = TokenWriter(tmp_path / "a", key="one", **options).__enter__()
    killed.add(np.array([1, 2]), position=1)
    killed.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)
    with TokenWriter(tmp_path / "a", key="another", **options) as writer:
        assert (writer.position, writer.tokens) == (None, 0)
        writer.add(np.array([3]))
    assert len(TokenStore(tmp_path / "a")) == 1


# Order


@pytest.mark.long
def test_permutations_are_even() -> None:
    """Over many keys, each index goes everywhere equally often, and neighbours go their own ways."""
    size, keys = 10, 2_000
    landed = np.zeros((size, size))
    adjacent = 0
    for key in range(keys):
        images = [permute(index, size, key=key) for index in range(size)]
        landed[range(size), images] += 1
        adjacent += images[1] == images[0] + 1
    expected = keys / size
    assert (abs(landed - expected) < 6 * expected**0.5).all()
    assert abs(adjacent / keys - (size - 1) / (size * (size - 1))) < 0.02


# Batches


@pytest.mark.parametrize("name", ["/etc/00000", "../other/00000", "..", "sub/00000", ".hidden", ""])
def test_names_of_shards_are_plain(name: str, tmp_path: Path) -> None:
    write_tokens(tmp_path / "tokens", [[1] * 8], tokenizer="bytes", vocab_size=258)
    index = json.loads((tmp_path / "tokens" / INDEX).read_text())
    index["shards"][0]["name"] = name
    (tmp_path / "tokens" / INDEX).write_text(json.dumps(index))
    with pytest.raises(UserError, match=re.escape(f"'{name}.")):
        TokenStore(tmp_path / "tokens")


def test_too_little_data_is_an_error(tmp_path: Path) -> None:
    write_tokens(tmp_path / "tokens", [[1] * 8], tokenizer="bytes", vocab_size=258)
    options: dict[str, Any] = {"tokenizer": ByteTokenizer(), "cache_folder": tmp_path}
    data = Data(path=str(tmp_path / "tokens"))
    with pytest.raises(UserError, match=r" 8 tokens.* 8\b"):
        open_sources(data, data, seq_len=8, **options)
    [source] = open_sources(data, data, seq_len=7, **options)
    assert len(source.sequences) == 1


@pytest.mark.long
def test_ids_beyond_the_vocabulary_are_one_line(tmp_path: Path) -> None:
    write_tokens(tmp_path / "tokens", [[1] * 64], tokenizer="bytes", vocab_size=258)
    shard = np.memmap(next((tmp_path / "tokens").glob("*.tokens")), dtype="<u2", mode="r+")
    shard[9] = 300
    shard.flush()
    source = Source("a", Stream(TokenStore(tmp_path / "tokens"), seq_len=8, document_mask=False), "f")
    samples = Samples([source], seed=0, shuffle=False)
    batches = MicroBatches(start=0, sizes=BatchSizes((), 2), micro_batch_size=2, rank=0, ranks=1)
    loader = build_loader(samples, batches, num_workers=1, device=torch.device("cpu"))
    with pytest.raises(UserError) as error:  # without the traceback of the worker
        next(loader)
    assert mentions(str(error.value), "data.path", tmp_path / "tokens", 300, 9, 258)
    assert len(str(error.value).splitlines()) == 1
    assert not multiprocessing.active_children(), "a loader that fails ends its workers"


class BrokenDisk(Dataset[Any]):
    def __getitem__(self, index: int) -> Any:
        raise OSError(errno.EIO, os.strerror(errno.EIO), "/data/00000.tokens")


@pytest.mark.long
@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_of_a_disk_is_one_line(workers: int) -> None:
    batches = MicroBatches(start=0, sizes=BatchSizes((), 2), micro_batch_size=2, rank=0, ranks=1)
    loader = build_loader(BrokenDisk(), batches, num_workers=workers, device=torch.device("cpu"))
    with pytest.raises(OSError, match=r"Errno 5.*'/data/00000\.tokens'") as error:
        next(loader)
    assert len(str(error.value).splitlines()) == 1
    assert not multiprocessing.active_children(), "a loader that fails ends its workers"


class OwnProcess(Dataset[Any]):
    def __getitems__(self, indices: list[int]) -> Any:
        return {"process": torch.tensor([os.getpid()] * len(indices))}


@pytest.mark.long
def test_a_worker_that_is_killed_is_named(recwarn: pytest.WarningsRecorder) -> None:
    """As the system does when memory runs out. The loader meets a pipe or a socket that breaks."""
    batches = MicroBatches(start=0, sizes=BatchSizes((), 2), micro_batch_size=2, rank=0, ranks=1)
    loader = build_loader(OwnProcess(), batches, num_workers=1, device=torch.device("cpu"))
    worker = int(next(loader)["process"][0])
    os.kill(worker, signal.SIGKILL)
    with pytest.raises(RunError) as error:
        list(islice(loader, 10))  # some were read ahead
    assert mentions(str(error.value), "data.num_workers", "worker 0", worker, "SIGKILL")
    assert not multiprocessing.active_children()
