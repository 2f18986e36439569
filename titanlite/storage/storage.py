"""Storage of checkpoints: a folder on a file system, or a URL of an object store (by fsspec). Imports no torch.

Names are relative to the storage, with slashes: step-00000100/manifest.json. A checkpoint is a folder of files. Its
manifest, published last, makes it count: on a file system by renaming the folder, in an object store, which cannot
rename, by writing the manifest. A storage belongs to one run: what another run has saved is never replaced or deleted.
"""

import contextlib
import copy
import errno
import json
import logging
import os
import platform
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, BinaryIO, TypeVar

from titanlite.runtime.errors import DamagedCheckpoint, RunError, UserError, printable
from titanlite.runtime.files import SMALL, FileLocked, checked_name, lock_file, naming_path, quarantine_path, write_all
from titanlite.storage import retry

logger = logging.getLogger(__name__)

T = TypeVar("T")
MANIFEST = "manifest.json"
Listing = dict[str, dict[str, int]]
"""Bytes of each file, by folder and name."""
S3_SETTINGS = {"retries": {"mode": "standard", "total_max_attempts": 3}, "connect_timeout": 5, "read_timeout": 10}
"""Settings of botocore: a request is repeated twice, so that a call fails within 3 s if the store answers with errors,
and within half a minute if it does not answer."""
UNCHECKED = {"response_checksum_validation": "when_required"}
"""Setting of botocore from 1.36 on. Its check fails where a server answers a request for a part of an object with the
checksum of the whole (rclone, older Ceph). Checkpoints and token shards have checksums of their own."""
SLOWEST = 2**20
"""Bytes in a second that an object store reads at least."""
DISCARD_SECONDS = 2.0
"""Time for which the deletion of a failed save is repeated: the store that failed may be down."""
OWNER = "owner.json"
"""Object that names the run to which a place in an object store belongs: there are no locks."""


class Storage(ABC):
    """Storage of a run's checkpoints.

    Args:
        owner: id of the run. Only what this run has written is deleted or replaced.
    """

    PATIENCE = retry.PATIENCE
    """Seconds after which a call that fails is no longer repeated."""

    def __init__(self, url: str, owner: str) -> None:
        self.url = url
        self.owner = owner

    def url_of(self, name: str) -> str:
        """Return the path or URL of a file, for error messages."""
        return f"{self.url}/{name}"

    @abstractmethod
    def claim(self, timeout: float) -> IO[str] | None:
        """Let no other run save here, until the result is closed or the process ends.

        Args:
            timeout: seconds to wait for another run that is ending.

        Raises:
            FileLocked: another run saves here.
            OSError: the place cannot be written, or has no locks.
        """

    def check_claim(self) -> None:  # noqa: B027 (where there are locks, a claim lasts)
        """Check that no other process has claimed the place since.

        Raises:
            RunError: one has.
        """

    def run_of(self, folder: str, sizes: dict[str, int]) -> str | None:
        """Return the id of the run that has saved a folder, by its manifest, a quarantined one as well; None if none
        can be read.

        Args:
            sizes: bytes of the folder's files, as `list` returns them.
        """
        for name, size in sizes.items():
            if name.startswith(MANIFEST) and size <= SMALL:
                with contextlib.suppress(ValueError, RecursionError, FileNotFoundError):
                    found = json.loads(self.read(f"{folder}/{name}"))
                    if isinstance(found, dict):
                        return checked_name(found.get("run_id"))
        return None

    def _check_own(self, folder: str, sizes: dict[str, int]) -> None:
        """Check that a folder may be replaced or deleted; arguments as of `run_of`.

        Raises:
            RunError: another run has saved it.
        """
        if (run := self.run_of(folder, sizes)) not in (None, self.owner):
            raise RunError(f"{self.url_of(folder)} was saved by another run (id {run}), and stays as it is")

    @abstractmethod
    def list(self) -> Listing:
        """Return the files of all folders, with unfinished and hidden folders; links to folders are none of them.

        An object store is listed once.
        """

    @abstractmethod
    def read(self, name: str, start: int = 0, size: int | None = None) -> bytes:
        """Return `size` bytes of a file from `start` on; all of them by default."""

    def read_exactly(self, name: str, start: int, size: int, is_right: Callable[[bytes], bool], damage: str) -> bytes:
        """Return `size` bytes of a file from `start` on. They are read again if they are not right.

        Args:
            is_right: returns whether they are right.
            damage: text of the error if they are not.

        Raises:
            RunError: another number of bytes arrived, twice: the store is at fault, and the file perhaps whole.
            DamagedCheckpoint: they are not right, twice.
        """
        data = self.read(name, start, size)
        if len(data) != size or not is_right(data):
            data = self.read(name, start, size)
        if len(data) != size:
            raise RunError(f"{self.url_of(name)}: {len(data)} of {size} bytes arrived, twice")
        if not is_right(data):
            raise DamagedCheckpoint(damage)
        return data

    @abstractmethod
    def create(self, name: str, size: int = 0) -> contextlib.AbstractContextManager[BinaryIO]:
        """Open a new file for `write_all`. The file is durable when the context ends without an error.

        Args:
            size: bytes to reserve on a file system before any is written; as many must be written.
        """

    @abstractmethod
    def begin(self, folder: str) -> str:
        """Return the name of the empty folder in which `folder` is written until it is published."""

    @abstractmethod
    def publish(self, folder: str, manifest: bytes) -> None:
        """Commit a folder whose other files are complete and durable.

        Raises:
            RunError: another run has saved this folder.
        """

    @abstractmethod
    def discard(self, folder: str) -> None:
        """Delete a folder that was begun and cannot be published."""

    @abstractmethod
    def rename(self, folder: str, name: str, new: str) -> None:
        """Rename a file of a folder."""

    def quarantine(self, folder: str, reason: str) -> None:
        """Make a folder no longer count. Its manifest is renamed to manifest.json.<reason>."""
        self.rename(folder, MANIFEST, f"{MANIFEST}.{reason}")

    @abstractmethod
    def delete(self, folder: str) -> None:
        """Delete a folder. If the process is killed halfway, the rest does not count, and `sweep` deletes it.

        Raises:
            RunError: another run has saved it.
        """

    @abstractmethod
    def sweep(self) -> None:
        """Delete the remains of killed processes of this run. No process of the run may be saving."""

    def retry(self, call: Callable[[], T], name: str) -> T:
        """Return `call()`. Object stores repeat it while it fails; file systems do not."""
        return call()


class LocalStorage(Storage):
    """A folder on a file system that all nodes share."""

    def __init__(self, url: str, owner: str) -> None:
        self.root = Path(url).expanduser()
        super().__init__(str(self.root), owner)

    def claim(self, timeout: float) -> IO[str] | None:
        self.root.mkdir(parents=True, exist_ok=True)
        return lock_file(self.root / ".lock", timeout=timeout)

    def list(self) -> Listing:
        found: Listing = {}
        with contextlib.suppress(FileNotFoundError, NotADirectoryError), naming_path(self.root):
            for folder in os.scandir(self.root):
                with contextlib.suppress(FileNotFoundError, NotADirectoryError):  # deleted meanwhile
                    if folder.is_dir(follow_symlinks=False):  # a link's manifest is that of another folder
                        found[folder.name] = _sizes(folder)
        return found

    def read(self, name: str, start: int = 0, size: int | None = None) -> bytes:
        with naming_path(self.root / name), open(self.root / name, "rb", buffering=0) as file:
            file.seek(start)
            return file.read() if size is None else _read_all(file, size)

    @contextlib.contextmanager
    def create(self, name: str, size: int = 0) -> Iterator[BinaryIO]:
        with naming_path(self.root / name), open(self.root / name, "wb", buffering=0) as file:
            if size:
                os.posix_fallocate(file.fileno(), 0, size)
            yield file
            os.fsync(file.fileno())

    def begin(self, folder: str) -> str:
        if (self.root / folder).is_dir():
            self._check_own(folder, _sizes(self.root / folder))
        staging = self._staging(folder)
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir(parents=True)
        return staging.name

    def publish(self, folder: str, manifest: bytes) -> None:
        staging, final = self._staging(folder), self.root / folder
        with self.create(f"{staging.name}/{MANIFEST}") as file:
            write_all(file, manifest)
        if self.read(f"{staging.name}/{MANIFEST}") != manifest:
            raise OSError(errno.EIO, "it was written, and something else is read", str(staging / MANIFEST))
        sync(staging)
        if final.is_dir() and not final.is_symlink():  # quarantined, or saved again
            self.delete(folder)
        elif os.path.lexists(final):
            damaged = quarantine_path(final)
            os.rename(final, damaged)
            logger.warning(f"{final} is no folder of a checkpoint: it is now {damaged.name}, and {folder} is saved")
        os.rename(staging, final)
        sync(self.root)

    def discard(self, folder: str) -> None:
        shutil.rmtree(self._staging(folder), ignore_errors=True)

    def rename(self, folder: str, name: str, new: str) -> None:
        os.rename(self.root / folder / name, self.root / folder / new)
        sync(self.root / folder)

    def delete(self, folder: str) -> None:
        self._check_own(folder, _sizes(self.root / folder))
        hidden = self.root / f".deleted-{folder}-{self.owner}"
        shutil.rmtree(hidden, ignore_errors=True)
        os.rename(self.root / folder, hidden)
        shutil.rmtree(hidden, ignore_errors=True)

    def sweep(self) -> None:
        for folder in self.list():
            if folder.startswith((".staging-", ".deleted-")) and folder.endswith(f"-{self.owner}"):
                shutil.rmtree(self.root / folder, ignore_errors=True)

    def _staging(self, folder: str) -> Path:
        return self.root / f".staging-{folder}-{self.owner}"


class ObjectStorage(Storage):
    """An object store. Calls that fail are repeated for half a minute; then the error names the file.

    Its library has retries of its own, which would take minutes.
    """

    def __init__(self, url: str, owner: str) -> None:
        import fsspec
        from fsspec.config import conf

        super().__init__(url.rstrip("/"), owner)
        settings = {}
        self._is_s3 = url.partition("://")[0] in ("s3", "s3a")
        if self._is_s3:
            settings = {"config_kwargs": s3_settings() | conf.get("s3", {}).get("config_kwargs", {})}
        try:
            self.fs, root = fsspec.url_to_fs(url, **settings)
        except (ValueError, ImportError):
            raise
        except Exception as error:  # a protocol that connects at once (ftp, sftp) has errors of its own
            raise RunError(f"{url}: no connection: {error}") from error
        if self._is_s3:
            self.fs.retries = 1
        self.root = root.rstrip("/")

    def claim(self, timeout: float) -> IO[str] | None:
        found = self._claimed_by()
        if found is None or found.get("run_id") == self.owner:  # an earlier start of this run has ended, or soon will
            self._put(OWNER, json.dumps(self._claim).encode())
            found = self._claimed_by()
        if found is not None and found != self._claim:  # of two that begin together, both find the later one's
            raise FileLocked(self._named(found))
        return None

    def check_claim(self) -> None:
        if (found := self._claimed_by()) is not None and found != self._claim:
            raise RunError(f"{self.url} belongs to {self._named(found)} now, and no more to this process")

    @property
    def _claim(self) -> dict[str, Any]:
        return {"run_id": self.owner, "host": platform.node(), "process": os.getpid()}

    def _claimed_by(self) -> dict[str, Any] | None:
        try:
            found = json.loads(self.read(OWNER))
        except FileNotFoundError:
            return None
        except (ValueError, RecursionError):
            found = None
        return found if isinstance(found, dict) else None

    def _named(self, about: dict[str, Any]) -> str:
        return printable(
            f"the run with the id {about.get('run_id')} (process {about.get('process')} on {about.get('host')}, by "
            f"{self.url_of(OWNER)})"
        )

    def list(self) -> Listing:
        def find() -> dict[str, Any]:
            self.fs.invalidate_cache()
            return self.fs.find(self.root, detail=True)

        found: Listing = {}
        try:
            files = self._in_time(find, "")
        except FileNotFoundError as error:
            if self._is_s3:  # where a folder that is not there is an empty listing
                bucket = self.root.partition("/")[0]
                raise UserError(f"{self.url}: there is no bucket {bucket}: correct its name, or create it") from error
            files = {}
        for path, info in files.items():
            folder, _, name = path[len(self.root) + 1 :].partition("/")
            if name:
                found.setdefault(folder, {})[name] = info["size"]
        return found

    def read(self, name: str, start: int = 0, size: int | None = None) -> bytes:
        end = None if size is None else start + size
        return self._in_time(
            lambda: self.fs.cat_file(f"{self.root}/{name}", start=start, end=end), name, (size or 0) / SLOWEST
        )

    def create(self, name: str, size: int = 0) -> contextlib.AbstractContextManager[BinaryIO]:
        return self.fs.open(f"{self.root}/{name}", "wb")

    def begin(self, folder: str) -> str:
        if self.list().get(folder):
            self.delete(folder)
        self._put(f"{folder}/{self._mark}", b"")
        return folder

    def publish(self, folder: str, manifest: bytes) -> None:
        self._put(f"{folder}/{MANIFEST}", manifest)

    def discard(self, folder: str) -> None:
        hasty = copy.copy(self)
        hasty.PATIENCE = min(self.PATIENCE, DISCARD_SECONDS)
        if not any(name.startswith(MANIFEST) for name in hasty.list().get(folder, {})):  # perhaps published already
            hasty.delete(folder)

    def rename(self, folder: str, name: str, new: str) -> None:
        # The store copies it: what a read returns may not be the whole of it.
        path = f"{self.root}/{folder}"
        self._in_time(lambda: self.fs.cp_file(f"{path}/{name}", f"{path}/{new}"), f"{folder}/{new}")
        self._remove(folder, [name])

    def delete(self, folder: str) -> None:
        names = self.list().get(folder, {})
        self._check_own(folder, names)
        first = [name for name in names if name.startswith(MANIFEST)]
        self._remove(folder, first)
        self._remove(folder, [name for name in names if name not in (*first, self._mark)])
        self._remove(folder, [self._mark])  # last: half deleted, the folder still belongs to this run

    def sweep(self) -> None:
        for folder, files in self.list().items():
            if self._mark in files and not any(name.startswith(MANIFEST) for name in files):
                self.delete(folder)

    def retry(self, call: Callable[[], T], name: str) -> T:
        return retry.retry(call, name=self.url_of(name), patience=self.PATIENCE)

    def _in_time(self, call: Callable[[], T], name: str, seconds: float = 0) -> T:
        """Return `call()` as `retry`, within half a minute and some seconds, whatever the library does."""
        name, patience = self.url_of(name), self.PATIENCE + seconds
        return retry.retry(call, name=name, patience=patience, longest=patience)

    @property
    def _mark(self) -> str:
        return f".owner-{self.owner}"

    def _put(self, name: str, data: bytes) -> None:
        self._in_time(lambda: self.fs.pipe_file(f"{self.root}/{name}", data), name)

    def _remove(self, folder: str, names: "list[str]") -> None:
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                self._in_time(lambda path=f"{self.root}/{folder}/{name}": self.fs.rm_file(path), f"{folder}/{name}")


def s3_settings() -> dict[str, Any]:
    """Return the settings of botocore for object stores of S3's protocol."""
    try:
        from botocore.config import Config
    except ImportError:  # fsspec says what to install
        return S3_SETTINGS
    known = Config.OPTION_DEFAULTS  # pyright: ignore[reportAttributeAccessIssue]
    return S3_SETTINGS | {name: value for name, value in UNCHECKED.items() if name in known}


def open_storage(url: str, *, owner: str = "") -> Storage:
    """Return the storage at a path or URL.

    Raises:
        ValueError: the protocol of the URL is unknown.
        ImportError: the package for the protocol is not installed.
    """
    return ObjectStorage(url, owner) if "://" in url else LocalStorage(url, owner)


def _sizes(folder: "os.DirEntry[str] | Path") -> dict[str, int]:
    """Return the bytes of each file of a folder, by name."""
    return {entry.name: entry.stat().st_size for entry in os.scandir(folder) if _is_file(entry)}


def _is_file(entry: "os.DirEntry[str]") -> bool:
    """Return whether an entry is a file; a symbolic link that leads to itself is none."""
    try:
        return entry.is_file()
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        return False


def _read_all(file: Any, size: int) -> bytes:
    data = file.read(size)
    while len(data) < size and (more := file.read(size - len(data))):  # one read returns 2 GiB at most
        data += more
    return data


def sync(path: Path) -> None:
    """Make a file durable, or the names of a folder's files."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with naming_path(path):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
