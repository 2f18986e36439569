"""Prepared tokens at a URL: copied once a node, checked, resumed after a kill; and the errors of failures."""

import json
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.registry import _registry, known_implementations

from tests.support.object_stores import Flaky
from titanlite.data import remote
from titanlite.data.remote import localize
from titanlite.data.tokens import INDEX, TokenStore
from titanlite.runtime.console import install_hint
from titanlite.runtime.errors import RunError, UserError
from titanlite.storage.storage import ObjectStorage
from titanlite.tools.ingest.token_writer import TokenWriter

URL = "flaky://bucket/corpora/my.tokens"
FILES = [f"{shard:05d}.{kind}" for shard in range(4) for kind in ("documents", "tokens")]


def write(folder: Path, *, add: int = 0) -> Path:
    """Four shards of 100 tokens."""
    with TokenWriter(folder, vocab_size=1000, tokenizer="test", shard_tokens=100) as writer:
        for begin in range(0, 400, 50):
            writer.add(np.arange(begin, begin + 50) + add)
    return folder


def upload(folder: Path, url: str) -> None:
    place = ObjectStorage(url, owner="")
    for path in folder.iterdir():
        place.retry(lambda path=path: place.fs.pipe_file(f"{place.root}/{path.name}", path.read_bytes()), path.name)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("prepared") / "tokens")


@pytest.fixture
def tokens(prepared: Path) -> Iterator[Path]:
    """A folder of tokens; the same lies at URL, which never fails until a test makes it."""
    Flaky.register()
    Flaky.chance, Flaky._force = 0, False
    upload(prepared, URL)
    yield prepared
    Flaky.store.clear()


def change(name: str, data: bytes) -> None:
    MemoryFileSystem.pipe_file(Flaky(), f"/bucket/corpora/my.tokens/{name}", data)


def on_reading(monkeypatch: pytest.MonkeyPatch, act: Callable[[str, bytes], bytes]) -> None:
    """Replace the bytes that are read of a file by those that `act` returns."""
    cat_file = Flaky.cat_file

    def read(self: Flaky, path: str, *args: Any, **kwargs: Any) -> bytes:
        return act(path.rpartition("/")[2], cat_file(self, path, *args, **kwargs))

    monkeypatch.setattr(Flaky, "cat_file", read)


def count_fetches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Collect the names of files that are read from now on."""
    names: list[str] = []

    def note(name: str, data: bytes) -> bytes:
        names.append(name)
        return data

    on_reading(monkeypatch, note)
    return names


def test_a_copy_is_what_lies_there_though_reading_fails_now_and_then(
    tokens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "BLOCK_BYTES", 64)
    monkeypatch.setattr(Flaky, "_force", True)
    Flaky.chance = Flaky.CHANCE
    Flaky.failures = 0
    folder = localize(URL, tmp_path / "cache")
    assert Flaky.failures > 0
    assert contents(folder) == contents(tokens)
    assert TokenStore(folder).read(0, 400).tolist() == list(range(400))
    assert folder.name.startswith("my_tokens-")
    assert sorted(path.name for path in folder.parent.iterdir()) == [folder.name, f"{folder.name}.lock"]
    Flaky.chance = 0
    read = count_fetches(monkeypatch)
    assert localize(URL + "/", tmp_path / "cache") == folder
    assert read == [INDEX]


def test_other_tokens_at_the_same_place_become_another_copy(tokens: Path, tmp_path: Path) -> None:
    first = localize(URL, tmp_path / "cache")
    upload(write(tmp_path / "others", add=1), URL)
    second = localize(URL, tmp_path / "cache")
    assert [TokenStore(folder).read(0, 2).tolist() for folder in (first, second)] == [[0, 1], [1, 2]]


@pytest.mark.slow
def test_a_copy_from_an_s3_server(s3: str, prepared: Path, tmp_path: Path) -> None:
    url = f"{s3}/{tmp_path.name}/tokens"
    upload(prepared, url)
    assert contents(localize(url, tmp_path / "cache")) == contents(prepared)
    with pytest.raises(UserError, match=f"^data.path: {url}-none/index.json"):
        localize(f"{url}-none", tmp_path / "cache")
    ObjectStorage(url, owner="").fs.rm_file(f"{url}/00002.tokens")
    with pytest.raises(UserError, match=f"^data.path: {url}/00002.tokens"):
        localize(url, tmp_path / "cache2")


def test_a_local_url_is_a_path(tmp_path: Path) -> None:
    assert localize(f"file://{tmp_path}/tokens/", tmp_path / "cache") == tmp_path / "tokens"
    assert list(tmp_path.iterdir()) == []


# What can be wrong


@pytest.mark.parametrize(("kind", "extra"), [("gs", f" ({install_hint('gcs')})"), ("madeup", "")])
def test_a_missing_driver_is_named(kind: str, extra: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    missing = {"class": "no_such_package.FileSystem", "err": "install that package"}
    monkeypatch.setitem(known_implementations, kind, missing)
    monkeypatch.delitem(_registry, kind, raising=False)
    with pytest.raises(UserError) as error:
        localize(f"{kind}://bucket/tokens", tmp_path)
    assert str(error.value).startswith(f"data.path: {kind}://bucket/tokens: ")
    assert str(error.value).endswith(f"install that package{extra}")
    with pytest.raises(UserError, match=r"^data\.path: nonsense://bucket\b"):
        localize("nonsense://bucket", tmp_path)


@pytest.mark.long
def test_a_place_that_does_not_answer_is_given_up(
    tokens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(remote, "PATIENCE", 0.5)
    attempts: list[str] = []

    def refuse(name: str, data: bytes) -> bytes:
        if name == "00001.tokens":
            attempts.append(name)
            raise ConnectionError("connection reset")
        return data

    on_reading(monkeypatch, refuse)
    began = time.monotonic()
    with pytest.raises(RunError, match=rf"^{URL}/00001.tokens: .*ConnectionError.*\b\d s$"):
        localize(URL, tmp_path / "cache")
    assert time.monotonic() - began < 3
    assert len(attempts) >= 3


def test_a_damaged_file_is_fetched_once_more_and_then_named(
    tokens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "THREADS", 1)  # one file after the other
    whole = (tokens / "00002.tokens").read_bytes()
    change("00002.tokens", b"?" + whole[1:])
    read = count_fetches(monkeypatch)
    with pytest.raises(UserError, match=f"^data.path: {URL}/00002.tokens .*SHA-256"):
        localize(URL, tmp_path / "cache")
    assert read[:8] == [INDEX, *FILES[:5], "00002.tokens", "00002.tokens"]
    change("00002.tokens", whole[:-1])
    with pytest.raises(UserError, match=r"\b199\b.*index\.json.*\b200\b"):
        localize(URL, tmp_path / "cache")
    change("00002.tokens", whole)
    read.clear()
    folder = localize(URL, tmp_path / "cache")
    assert contents(folder) == contents(tokens)
    assert read[:2] == [INDEX, "00002.tokens"]
    assert not set(read) & set(FILES[:5]), "what was there and right is not fetched again"


@pytest.mark.parametrize(
    "shard",
    [
        {"name": "../../.bashrc"},
        {"name": "/etc/passwd"},
        {"name": ".hidden"},
        {"name": "a\n"},
        {"tokens": -1},
        {"sha256": {"../x": ""}},
        {"sha256": {"exe": ""}},
        {"sha256": []},
    ],
)
def test_an_index_can_name_nothing_but_files_of_its_folder(shard: dict[str, Any], tokens: Path, tmp_path: Path) -> None:
    index = json.loads((tokens / INDEX).read_text())
    index["shards"] = [{"name": "a", "tokens": 1, "documents": 1, "sha256": {"tokens": ""}} | shard]
    for content in (json.dumps(index).encode(), b"{", b"[]", b'{"format": 1}', b'{"format": 2, "dtype": "O"}'):
        change(INDEX, content)
        with pytest.raises(UserError, match=f"^data.path: {URL}/index.json "):
            localize(URL, tmp_path / "cache")
        assert not (tmp_path / "cache").exists()


def test_a_full_disk_is_not_taken_for_a_bad_connection(
    tokens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(RunError, match=r"cache/my_tokens-\w{16} .*\[Errno 28\]"):
        localize(URL, tmp_path / "cache")


# Several processes, and kills


def localize_counting(cache_folder: Path) -> int:
    """Return the number of reads that a copy took in this process."""
    before = Flaky.calls["cat_file"]
    localize(URL, cache_folder)
    return Flaky.calls["cat_file"] - before


@pytest.mark.long
def test_processes_that_come_together_copy_once(tokens: Path, tmp_path: Path) -> None:
    with multiprocessing.get_context("fork").Pool(1) as pool:  # the store in memory comes along
        other = pool.apply_async(localize_counting, [tmp_path / "cache"])
        own = localize_counting(tmp_path / "cache")
        reads = [own, other.get(timeout=120)]
    assert sorted(reads) == [1, 1 + len(FILES)]


def test_a_killed_copy_resumes(tokens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "THREADS", 1)

    def localize_and_die() -> None:
        def die(name: str, data: bytes) -> bytes:
            if name == FILES[4]:
                os.kill(os.getpid(), signal.SIGKILL)
            return data

        on_reading(monkeypatch, die)
        localize(URL, tmp_path / "cache")

    process = multiprocessing.get_context("fork").Process(target=localize_and_die)
    process.start()
    process.join(30)
    assert process.exitcode == -signal.SIGKILL
    [staging] = [path for path in (tmp_path / "cache").iterdir() if path.is_dir()]
    assert sorted(path.name for path in staging.iterdir()) == sorted([*FILES[:4], f"{FILES[4]}.part"])
    read = count_fetches(monkeypatch)
    folder = localize(URL, tmp_path / "cache")
    assert read == [INDEX, *FILES[4:]]
    assert contents(folder) == contents(tokens)
    assert not staging.exists()


def test_a_slow_answer_is_no_failure_and_slow_failures_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block over a slow link may take longer than the patience. Of calls that fail, all the time counts."""
    monkeypatch.setattr(remote, "PATIENCE", 0.1)
    calls: list[int] = []

    def act(*, fails: bool) -> int:
        calls.append(1)
        time.sleep(0.2)
        if fails:
            raise ConnectionError("reset")
        return 7

    assert remote.retrying(lambda: act(fails=False), "there") == 7
    with pytest.raises(RunError):
        remote.retrying(lambda: act(fails=True), "there")
    assert len(calls) == 2
