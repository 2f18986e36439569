"""Work that one process does for all, on file systems with and without locks."""

import errno
import fcntl
import multiprocessing
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest

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
    with pytest.raises(PermissionError, match="is not a folder of this user"):
        lock_work(tmp_path / "shared" / "work.lock", on_wait=print)
