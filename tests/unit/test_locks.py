"""Work that one process does for all, on file systems with and without locks."""

import errno
import fcntl
import multiprocessing
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest

from titanlite.run.run_folder import _lock
from titanlite.runtime.errors import UserError
from titanlite.runtime.files import lock_work


def hold(path: Path, has_it: Any) -> None:
    """Take the lock, and keep it until this process is killed."""
    lock = lock_work(path, on_wait=print)
    has_it.set()
    while not lock.closed:
        has_it.wait()


@pytest.mark.long
def test_another_process_takes_over_when_the_first_is_killed(tmp_path: Path) -> None:
    context = multiprocessing.get_context("forkserver")
    has_it, waited = context.Event(), []
    process = context.Process(target=hold, args=(tmp_path / "work.lock", has_it), daemon=True)
    process.start()
    assert has_it.wait(60)

    def kill(holder: str) -> None:
        waited.append(holder)
        process.kill()

    with lock_work(tmp_path / "work.lock", on_wait=kill):
        assert [holder.startswith(f"process {process.pid} on ") for holder in waited] == [True]
    process.join()


@pytest.fixture
def _no_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system without locks in the folder `shared`, and a temporary folder of this test's own."""
    (tmp_path / "shared").mkdir()
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    flock = fcntl.flock

    def refuse(file: Any, operation: int) -> None:
        if "/shared/" in os.readlink(f"/proc/self/fd/{file.fileno()}"):
            raise OSError(errno.ENOLCK, "No locks available")
        flock(file, operation)

    monkeypatch.setattr(fcntl, "flock", refuse)


@pytest.mark.usefixtures("_no_locks")
def test_without_locks_one_process_of_a_machine_does_the_work(tmp_path: Path) -> None:
    path, waited = tmp_path / "shared" / "work.lock", []
    first = lock_work(path, on_wait=waited.append)
    assert not waited

    def release(holder: str) -> None:
        waited.append(holder)
        first.close()

    with lock_work(path, on_wait=release):
        assert [holder.startswith(f"process {os.getpid()} on ") for holder in waited] == [True]
    with lock_work(tmp_path / "shared" / "other.lock", on_wait=waited.append):
        assert len(waited) == 1


@pytest.mark.usefixtures("_no_locks")
def test_a_planted_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "tmp" / f"titanlite-locks-{os.getuid()}").symlink_to(tmp_path / "shared")
    with pytest.raises(PermissionError, match="titanlite-locks"):
        lock_work(tmp_path / "shared" / "work.lock", on_wait=print)


@pytest.mark.parametrize("kind", ["folder", "dangling link", "link to a file", "pipe", "device", "not readable"])
def test_a_run_folder_that_cannot_be_locked_is_refused(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock, precious = tmp_path / ".lock", tmp_path / "precious"
    precious.write_text("of somebody")
    if kind == "folder":
        lock.mkdir()
    elif kind == "pipe":
        os.mkfifo(lock)
    elif kind == "not readable":  # tests may run as root, which reads all
        lock.touch()
        monkeypatch.setattr(os, "open", lambda path, *_: (_ for _ in ()).throw(PermissionError(13, "denied", path)))
    else:
        lock.symlink_to({"dangling link": "missing/a", "link to a file": precious, "device": "/dev/zero"}[kind])
    with pytest.raises(UserError, match=r"job\.dump_folder.*/\.lock\b") as caught:
        _lock(tmp_path)
    assert caught.value.exit_code == 2
    assert "\n" not in str(caught.value)
    assert precious.read_text() == "of somebody"


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EIO, errno.EACCES])
def test_only_a_file_system_without_locks_may_pass(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)
    if number in (errno.EIO, errno.EACCES):
        with pytest.raises(UserError, match=r"/\.lock\b"):
            _lock(tmp_path)
    else:
        assert _lock(tmp_path) is None
        assert [str(tmp_path) in record.message for record in caplog.records] == [True]


def test_a_lock_on_a_full_disk_is_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        first = _lock(tmp_path)
    monkeypatch.setattr("titanlite.run.run_folder.LOCK_TIMEOUT", 0)
    with pytest.raises(UserError, match=r"job\.name"):
        _lock(tmp_path)
    assert first is not None
    first.close()
