"""Checkpoints that count: commit protocol, manifest, damage and retention, on disk and in object stores."""

import errno
import json
import os
import resource
from collections.abc import Iterator
from dataclasses import replace as replace_fields
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.helpers import mentions
from tests.support.manifests import manifest_of
from tests.support.object_stores import Flaky
from titanlite.checkpoint import manifest as manifests
from titanlite.checkpoint.manifest import FileRecord, Manifest, folder_name
from titanlite.data.tokens import TokenStore
from titanlite.run.endings import report_errors
from titanlite.runtime.errors import DamagedCheckpoint, RunError
from titanlite.runtime.files import FileLocked, write_all, write_atomically
from titanlite.storage.storage import MANIFEST, ObjectStorage, Storage, open_storage, sync
from titanlite.tools import cli
from titanlite.tools.ingest.token_writer import TokenWriter


@pytest.fixture(params=["disk", "flaky memory", pytest.param("s3", marks=pytest.mark.slow)])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Storage]:
    """A place for checkpoints, of each kind."""
    if request.param == "disk":
        yield open_storage(str(tmp_path / "run"), owner="me")
    elif request.param == "flaky memory":
        Flaky.register()
        storage = open_storage("flaky://bucket/run", owner="me")
        yield storage
        assert Flaky.failures > 0
        Flaky.store.clear()
    else:
        yield open_storage(f"{request.getfixturevalue('s3')}/{tmp_path.name}/run", owner="me")


def stage(storage: Storage, step: int, contents: dict[str, bytes]) -> str:
    staging = storage.begin(folder_name(step))
    for name, content in contents.items():

        def write(name: str = name, content: bytes = content) -> None:
            with storage.create(f"{staging}/{name}") as file:
                write_all(file, content)

        storage.retry(write, name)
    return staging


def save(storage: Storage, step: int, contents: dict[str, bytes] | None = None) -> Manifest:
    contents = {"__0_0.distcp": b"12345", ".metadata": b"67"} if contents is None else contents
    stage(storage, step, contents)
    manifest = manifest_of(step, contents)
    storage.publish(folder_name(step), manifest.to_json())
    return manifest


def steps(storage: Storage) -> list[int]:
    return manifests.committed_steps(storage.list())


@pytest.mark.long
def test_only_what_is_published_counts(storage: Storage) -> None:
    assert steps(storage) == []
    for step in (20, 3, 123456789):
        manifest = save(storage, step)
        assert manifests.read_manifest(storage, folder_name(step)) == manifest
    stage(storage, 30, {"__0_0.distcp": b"1"})
    assert steps(storage) == [3, 20, 123456789]
    sizes = storage.list()[folder_name(20)]
    assert sizes["__0_0.distcp"] == 5
    assert manifests.verify(storage, folder_name(20), sizes).size == 7
    assert storage.read("step-00000020/__0_0.distcp", 1, 3) == b"234"


@pytest.mark.long
def test_a_sweep_takes_what_a_killed_process_of_this_run_left_and_nothing_else(storage: Storage) -> None:
    save(storage, 1)
    stage(storage, 2, {"__0_0.distcp": b"1"})
    other = open_storage(storage.url, owner="other")
    theirs = stage(other, 3, {"__0_0.distcp": b"2"})
    storage.sweep()
    assert steps(storage) == [1]
    left = storage.list()
    assert {name: size for name, size in left[theirs].items() if name.startswith("__")} == {"__0_0.distcp": 1}
    assert not [folder for folder in left if "step-00000002" in folder]
    other.sweep()
    assert [*storage.list()] == ["step-00000001"]


@pytest.mark.long
def test_nothing_of_another_run_is_replaced_or_deleted(storage: Storage) -> None:
    save(storage, 1)
    save(storage, 2)
    storage.quarantine(folder_name(2), "superseded")
    before, other = storage.list(), open_storage(storage.url, owner="other")
    for step in (1, 2):
        for act in (other.delete, other.begin):
            with pytest.raises(RunError, match=f"{folder_name(step)} .*another run .*me"):
                act(folder_name(step))
    assert storage.list() == before
    stage(other, 3, {"__0_0.distcp": b"1"})
    save(storage, 3) if not isinstance(storage, ObjectStorage) else storage.publish(
        folder_name(3), manifest_of(3, {}).to_json()
    )
    with pytest.raises(RunError, match=folder_name(3)):  # the other one was faster
        other.begin(folder_name(3))
    storage.delete(folder_name(1))
    assert steps(storage) == [3]


def test_a_place_belongs_to_the_run_that_claims_it(storage: Storage) -> None:
    other = open_storage(storage.url, owner="other")
    hold = storage.claim(0)
    for _ in range(2):
        with pytest.raises(FileLocked):
            other.claim(0)
    storage.check_claim()
    if isinstance(storage, ObjectStorage):
        assert storage.claim(0) is None, "the run itself, again"
        storage.check_claim()
        later = json.loads(storage.read("owner.json")) | {"process": 1}
        storage.fs.pipe_file(f"{storage.root}/owner.json", json.dumps(later).encode())
        with pytest.raises(RunError, match="process 1 "):  # a later start of the run
            storage.check_claim()
        with pytest.raises(RunError, match="me"):
            other.check_claim()
        assert storage.list() == {}, "the mark is no folder"
        storage.fs.rm_file(f"{storage.root}/owner.json")
    else:
        assert hold is not None
        hold.close()
    held = other.claim(0)
    if held is not None:
        held.close()


@pytest.mark.long
def test_saving_a_step_again_replaces_it(storage: Storage) -> None:
    save(storage, 1)
    storage.quarantine(folder_name(1), "damaged")
    assert steps(storage) == []
    storage.sweep()
    assert storage.list()[folder_name(1)]["__0_0.distcp"] == 5, "a quarantined checkpoint is not swept"
    manifest = save(storage, 1, {"__0_0.distcp": b"other"})
    assert manifests.read_manifest(storage, folder_name(1)) == manifest
    assert [name for name in storage.list()[folder_name(1)] if not name.startswith(".owner")] == [
        "__0_0.distcp",
        MANIFEST,
    ]


@pytest.mark.parametrize("kind", ["a link that leads to itself", "a link to a folder", "a file"])
def test_what_is_no_folder_in_the_place_of_a_checkpoint_is_put_aside(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    place, other = tmp_path / "run" / folder_name(1), tmp_path / "other"
    place.parent.mkdir()
    other.mkdir()
    if kind == "a file":
        place.touch()
    else:
        place.symlink_to(place if kind == "a link that leads to itself" else other)
    storage = open_storage(str(tmp_path / "run"), owner="me")
    save(storage, 1)
    assert steps(storage) == [1]
    assert sorted(os.listdir(tmp_path / "run")) == [folder_name(1), f"{folder_name(1)}.damaged-1"]
    assert other.is_dir()
    [record] = caplog.records
    assert mentions(record.message, place, f"{folder_name(1)}.damaged-1")


@pytest.mark.long
def test_deletion_killed_half_way_leaves_nothing_that_counts(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    save(storage, 1)
    save(storage, 2)

    def killed(*args: Any, **kwargs: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        if isinstance(storage, ObjectStorage):
            remove = storage._remove

            def remove_some(folder: str, names: list[str]) -> None:
                remove(folder, names[:1])
                if not names or not names[0].startswith(MANIFEST):
                    killed()

            patch.setattr(storage, "_remove", remove_some)
        else:
            patch.setattr("shutil.rmtree", lambda path, **_: killed() if Path(path).exists() else None)
        with pytest.raises(KeyboardInterrupt):
            storage.delete(folder_name(1))
    assert steps(storage) == [2]
    storage.sweep()
    assert [*storage.list()] == ["step-00000002"]


def without_checksum(text: bytes, **changes: Any) -> bytes:
    return json.dumps({**json.loads(text), "crc32": None, **changes}).encode()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text[:-20], "Unterminated string|delimiter"),
        (lambda text: text.replace(b'"samples": 8', b'"samples": 9'), "its own checksum"),
        (lambda text: text.replace(b'"size": 5', b'"size": 6'), "its own checksum"),
        (lambda text: b"", "Expecting value"),
        (lambda text: b"[]", "not a manifest"),
        (lambda text: b"[" * 100_000, "recursion"),
        (lambda text: without_checksum(text, settings=[1]), "settings"),
        (lambda text: without_checksum(text, files={"a": 7}), "files"),
        (lambda text: manifest_of(2, {}).to_json(), "step 2"),
    ],
)
def test_damage_of_a_manifest_is_named(tmp_path: Path, change: Any, message: str) -> None:
    storage = open_storage(str(tmp_path), owner="me")
    save(storage, 1)
    path = tmp_path / "step-00000001" / MANIFEST
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(DamagedCheckpoint, match=f"step-00000001/{MANIFEST}.*({message})"):
        manifests.read_manifest(storage, folder_name(1))


@pytest.mark.parametrize("name", [*manifests.TYPES])
def test_an_entry_that_is_missing_is_damage(name: str, tmp_path: Path) -> None:
    """Those that the first manifests of this format did not have are empty."""
    storage = open_storage(str(tmp_path), owner="me")
    whole = save(storage, 1)
    path = tmp_path / "step-00000001" / MANIFEST
    fields = {key: value for key, value in json.loads(path.read_bytes()).items() if key not in (name, "crc32")}
    path.write_text(json.dumps(fields))
    if name in ("data", "guard"):
        assert manifests.read_manifest(storage, folder_name(1)) == whole
    else:
        with pytest.raises(DamagedCheckpoint, match=rf"{MANIFEST}.*\b{name}\b"):
            manifests.read_manifest(storage, folder_name(1))


@pytest.mark.parametrize(
    ("written", "now", "is_read"),
    [(1, 2, False), (2, 2, True), (3, 2, False), (2, 3, True), (2, 4, False), (None, 2, False), ("2", 2, False)],
)
def test_the_present_format_and_the_one_before_are_read(
    written: Any, now: int, is_read: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    """Another one is refused with exit code 2, and stays a checkpoint. Before format 2 there were no checksums."""
    monkeypatch.setattr(manifests, "FORMAT", now)
    storage = open_storage(str(tmp_path), owner="me")
    save(storage, 1)
    path = tmp_path / "step-00000001" / MANIFEST
    path.write_bytes(without_checksum(path.read_bytes(), format=written))
    assert cli.run(["checkpoint", "verify", str(tmp_path)]) == (0 if is_read else 2)
    assert steps(storage) == [1]
    if not is_read:
        [line] = capfd.readouterr().err.splitlines()
        assert mentions(line, path, written, now)


def test_files_are_synced_before_a_checkpoint_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage, order = open_storage(str(tmp_path / "run"), owner="me"), []
    sync, rename = os.fsync, os.rename

    def record_sync(descriptor: int) -> None:
        order.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", record_sync)
    monkeypatch.setattr(os, "rename", lambda a, b: (order.append("rename"), rename(a, b)))
    save(storage, 1)
    staging = ".staging-step-00000001-me"
    assert order == ["__0_0.distcp", ".metadata", MANIFEST, staging, "rename", "run"]


class SmallDisk(FileIO):
    """File that takes three bytes at once, until the disk is full."""

    room = 0
    error: int | None = None
    """Error of a full disk; None: it takes no bytes, without an error."""

    def write(self, data: Any) -> int:
        taken = min(3, len(data), SmallDisk.room)
        if not taken and SmallDisk.error:
            raise OSError(SmallDisk.error, os.strerror(SmallDisk.error))
        SmallDisk.room -= taken
        return super().write(data[:taken])


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EDQUOT, errno.EIO, None])
def test_all_bytes_are_written_or_nothing_is_committed(
    error: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = open_storage(str(tmp_path / "run"), owner="me")
    first = save(storage, 1)
    needed = 7 + len(first.to_json())
    monkeypatch.setattr("titanlite.storage.storage.open", lambda path, mode, **_: SmallDisk(path, mode), raising=False)
    monkeypatch.setattr(SmallDisk, "error", error)
    for room in (*range(10), needed // 2):
        monkeypatch.setattr(SmallDisk, "room", room)
        with pytest.raises(OSError, match="staging") as caught:
            save(storage, 2)
        assert caught.value.errno == (error or errno.EIO)
        assert str(caught.value.filename).startswith(str(tmp_path / "run" / ".staging"))
        assert steps(storage) == [1]
        assert manifests.read_manifest(storage, folder_name(1)) == first
    monkeypatch.setattr(SmallDisk, "room", 2 * needed)
    second = save(storage, 2)
    assert manifests.verify(storage, folder_name(2), storage.list()[folder_name(2)]) == second


def test_a_limit_within_a_manifest_commits_nothing(tmp_path: Path) -> None:
    """The kernel takes the part of a write that fits."""
    storage = open_storage(str(tmp_path / "run"), owner="me")
    save(storage, 1)
    stage(storage, 2, {"a": b"5"})
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        with pytest.raises(OSError, match=MANIFEST) as caught:
            storage.publish(folder_name(2), manifest_of(2, {"a": b"5"}).to_json())
        with pytest.raises(OSError, match="run"):
            write_atomically(tmp_path / "run.json", "long" * 100)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert caught.value.errno == errno.EFBIG
    assert steps(storage) == [1]
    assert not (tmp_path / "run.json").exists()


def test_a_manifest_that_is_not_read_as_it_was_written_is_not_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = open_storage(str(tmp_path / "run"), owner="me")
    save(storage, 1)
    monkeypatch.setattr("titanlite.storage.storage.write_all", lambda file, data: file.write(data[:-1]))
    with pytest.raises(OSError, match=MANIFEST):
        save(storage, 2)
    assert steps(storage) == [1]


def test_what_counts_is_not_discarded(storage: Storage) -> None:
    """Another rank can be lost right after rank 0 has published."""
    save(storage, 1)
    storage.discard(folder_name(1))
    assert steps(storage) == [1]
    stage(storage, 2, {"__0_0.distcp": b"1"})
    storage.discard(folder_name(2))
    assert [*storage.list()] == ["step-00000001"]


@pytest.mark.parametrize("name", ["../../victim", "/etc", "a/b", ""])
def test_names_in_a_manifest_cannot_lead_elsewhere(tmp_path: Path, name: str) -> None:
    storage = open_storage(str(tmp_path), owner="me")
    good = manifest_of(1, {})
    bad = [replace_fields(good, run_id=name)] if name else []
    for manifest in [*bad, replace_fields(good, files={name or "..": FileRecord(0, "00000000")})]:
        stage(storage, 1, {})
        storage.publish(folder_name(1), manifest.to_json())
        with pytest.raises(DamagedCheckpoint, match=folder_name(1)):
            manifests.read_manifest(storage, folder_name(1))


def test_one_listing_call_of_an_object_store() -> None:
    Flaky.register()
    storage = open_storage("flaky://bucket/listed", owner="me")
    for step in (1, 2, 3):
        save(storage, step)
    Flaky.chance, Flaky.calls["find"] = 0.0, 0
    try:
        assert steps(storage) == [1, 2, 3]
    finally:
        Flaky.chance = Flaky.CHANCE
        Flaky.store.clear()
    assert Flaky.calls["find"] == 1
    assert Flaky.calls["ls"] <= 1


@pytest.mark.parametrize(
    ("keep_latest_k", "keep_every", "deleted"),
    [
        (0, 0, []),
        (1, 0, [10, 20, 30, 40]),
        (2, 0, [10, 20, 30]),
        (9, 0, []),
        (1, 20, [10, 30]),
        (2, 30, [10, 20]),
    ],
)
def test_retention(keep_latest_k: int, keep_every: int, deleted: list[int]) -> None:
    steps = [50, 10, 30, 20, 40]
    assert manifests.to_delete(steps, keep_latest_k=keep_latest_k, keep_every=keep_every) == deleted
    assert manifests.to_delete([], keep_latest_k=keep_latest_k, keep_every=keep_every) == []


def failing(*_: Any, **__: Any) -> Any:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


@pytest.mark.parametrize("call", ["scandir", "fsync", "read"])
def test_an_error_of_a_disk_names_the_path_and_the_rank(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "3")
    storage = open_storage(str(tmp_path / "run"), owner="me")
    with TokenWriter(tmp_path / "tokens", vocab_size=9, tokenizer="test") as writer:
        writer.add(np.arange(9))
    store = TokenStore(tmp_path / "tokens")
    path, act = {
        "scandir": (tmp_path / "run", storage.list),
        "fsync": (tmp_path / "run", lambda: sync(tmp_path / "run")),
        "read": (tmp_path / "tokens" / "00000.tokens", lambda: store.read(0, 9)),
    }[call]
    (tmp_path / "run").mkdir()
    monkeypatch.setattr(os, "pread" if call == "read" else call, failing)
    assert report_errors(act) == 1
    [line] = capfd.readouterr().err.splitlines()
    assert mentions(line, "error: rank 3", f"[Errno {errno.EIO}]", f"'{path}'")


def test_a_protocol_that_cannot_connect_is_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    """ftp connects when it is opened, and has errors of its own."""
    with pytest.raises(RunError, match=r"^ftp://localhost:1/x: [^\n]+$"):
        open_storage("ftp://localhost:1/x")
    for words in (["generate", "ftp://localhost:1/x", "--prompt", "a"], ["checkpoint", "list", "ftp://localhost:1/x"]):
        assert cli.run(words) == 1
        assert len(capfd.readouterr().err.splitlines()) == 1
