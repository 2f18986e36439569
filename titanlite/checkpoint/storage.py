"""Where checkpoints lie: a folder on disk, or a place in an object store behind fsspec. No torch here.

Names are below that place, with slashes: step-00000100/manifest.json. A checkpoint is a folder of files; what makes it
count is its manifest, published last: on disk by renaming the folder; in an object store, which cannot, by writing the
manifest.
"""

import contextlib
import logging
import os
import random
import shutil
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

logger = logging.getLogger(__name__)

T = TypeVar("T")
MANIFEST = "manifest.json"
PERMANENT = (FileNotFoundError, FileExistsError, PermissionError, NotADirectoryError, IsADirectoryError)


class Files(ABC):
    """The place of a run's checkpoints.

    Args:
        owner: id of the run: only its own unfinished folders are ever swept.
    """

    def __init__(self, url: str, owner: str) -> None:
        self.url = url
        self.owner = owner

    def where(self, name: str) -> str:
        """What messages call a file."""
        return f"{self.url}/{name}"

    @abstractmethod
    def list(self) -> dict[str, dict[str, int]]:
        """{folder: {file: size in bytes}}, unfinished and hidden folders too; one listing of an object store."""

    @abstractmethod
    def read(self, name: str, start: int = 0, size: int | None = None) -> bytes: ...

    @abstractmethod
    def create(self, name: str) -> contextlib.AbstractContextManager[BinaryIO]:
        """A new file to write. It is durable when the context ends without an error."""

    @abstractmethod
    def begin(self, folder: str) -> str:
        """The empty folder in which `folder` is written until it is published."""

    @abstractmethod
    def publish(self, folder: str, manifest: bytes) -> None:
        """Make a folder count whose other files are all there, and durable."""

    @abstractmethod
    def discard(self, folder: str) -> None:
        """Delete what was begun and cannot be published."""

    @abstractmethod
    def withdraw(self, folder: str, why: str) -> None:
        """Make a folder not count any longer; its manifest stays as manifest.json.<why>."""

    @abstractmethod
    def delete(self, folder: str) -> None:
        """A process killed in the middle leaves nothing that counts; `sweep` deletes the rest."""

    @abstractmethod
    def sweep(self) -> None:
        """Delete what killed processes of this run have left. No process of the run may be saving."""

    def retrying(self, act: Callable[[], T], what: str) -> T:
        """Disks are not asked twice; see Remote."""
        return act()


class Local(Files):
    """A folder on a file system that all nodes share."""

    def __init__(self, url: str, owner: str) -> None:
        self.root = Path(url).expanduser()
        super().__init__(str(self.root), owner)

    def list(self) -> dict[str, dict[str, int]]:
        found: dict[str, dict[str, int]] = {}
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            for folder in os.scandir(self.root):
                with contextlib.suppress(FileNotFoundError, NotADirectoryError):  # deleted meanwhile
                    if folder.is_dir():
                        entries = [entry for entry in os.scandir(folder) if entry.is_file()]
                        found[folder.name] = {entry.name: entry.stat().st_size for entry in entries}
        return found

    def read(self, name: str, start: int = 0, size: int | None = None) -> bytes:
        with _naming(self.root / name), open(self.root / name, "rb", buffering=0) as file:
            file.seek(start)
            return file.read() if size is None else _read_all(file, size)

    @contextlib.contextmanager
    def create(self, name: str) -> Iterator[BinaryIO]:
        with _naming(self.root / name), open(self.root / name, "wb", buffering=0) as file:
            yield file
            os.fsync(file.fileno())

    def begin(self, folder: str) -> str:
        staging = f".staging-{folder}-{self.owner}"
        shutil.rmtree(self.root / staging, ignore_errors=True)
        (self.root / staging).mkdir(parents=True)
        return staging

    def publish(self, folder: str, manifest: bytes) -> None:
        staging, final = self.root / f".staging-{folder}-{self.owner}", self.root / folder
        with self.create(f"{staging.name}/{MANIFEST}") as file:
            file.write(manifest)
        _sync_folder(staging)
        if final.exists():  # withdrawn, or about to be
            self.delete(folder)
        os.rename(staging, final)
        _sync_folder(self.root)

    def discard(self, folder: str) -> None:
        shutil.rmtree(self.root / f".staging-{folder}-{self.owner}", ignore_errors=True)

    def withdraw(self, folder: str, why: str) -> None:
        os.rename(self.root / folder / MANIFEST, self.root / folder / f"{MANIFEST}.{why}")

    def delete(self, folder: str) -> None:
        hidden = self.root / f".deleted-{folder}-{self.owner}"
        shutil.rmtree(hidden, ignore_errors=True)
        os.rename(self.root / folder, hidden)
        shutil.rmtree(hidden, ignore_errors=True)

    def sweep(self) -> None:
        for folder in self.list():
            if folder.startswith((".staging-", ".deleted-")) and folder.endswith(f"-{self.owner}"):
                shutil.rmtree(self.root / folder, ignore_errors=True)


class Remote(Files):
    """An object store. What fails is tried again, for half a minute; then the error names the file."""

    PATIENCE = 30.0

    def __init__(self, url: str, owner: str) -> None:
        import fsspec

        super().__init__(url.rstrip("/"), owner)
        self.fs, root = fsspec.url_to_fs(url)
        self.root = root.rstrip("/")

    def list(self) -> dict[str, dict[str, int]]:
        def find() -> dict[str, Any]:
            self.fs.invalidate_cache()
            try:
                return self.fs.find(self.root, detail=True)
            except FileNotFoundError:
                return {}

        found: dict[str, dict[str, int]] = {}
        for path, info in self.retrying(find, "").items():
            folder, _, name = path[len(self.root) + 1 :].partition("/")
            if name:
                found.setdefault(folder, {})[name] = info["size"]
        return found

    def read(self, name: str, start: int = 0, size: int | None = None) -> bytes:
        end = None if size is None else start + size
        return self.retrying(lambda: self.fs.cat_file(f"{self.root}/{name}", start=start, end=end), name)

    def create(self, name: str) -> contextlib.AbstractContextManager[BinaryIO]:
        return self.fs.open(f"{self.root}/{name}", "wb")

    def begin(self, folder: str) -> str:
        if self.list().get(folder):
            self.delete(folder)
        self._put(f"{folder}/{self._mark}", b"")
        return folder

    def publish(self, folder: str, manifest: bytes) -> None:
        self._put(f"{folder}/{MANIFEST}", manifest)

    def discard(self, folder: str) -> None:
        if not any(name.startswith(MANIFEST) for name in self.list().get(folder, {})):  # it may have been published
            self.delete(folder)

    def withdraw(self, folder: str, why: str) -> None:
        self._put(f"{folder}/{MANIFEST}.{why}", self.read(f"{folder}/{MANIFEST}"))
        self._remove(folder, [MANIFEST])

    def delete(self, folder: str) -> None:
        names = [*self.list().get(folder, {})]
        first = [name for name in names if name.startswith(MANIFEST)]
        self._remove(folder, first)
        self._remove(folder, [name for name in names if name not in (*first, self._mark)])
        self._remove(folder, [self._mark])  # last: half deleted, it is still known as this run's

    def sweep(self) -> None:
        for folder, files in self.list().items():
            if self._mark in files and not any(name.startswith(MANIFEST) for name in files):
                self.delete(folder)

    def retrying(self, act: Callable[[], T], what: str) -> T:
        """Do it until it succeeds; waits are doubled, with some chance in them so that ranks do not come together."""
        waited, wait = 0.0, 0.05
        while True:
            try:
                return act()
            except PERMANENT as error:
                raise type(error)(f"{self.where(what)}: {error}") from error
            except Exception as error:  # each kind of store has errors of its own
                if waited + wait > self.PATIENCE:  # whatever the attempts took: a large file takes long
                    raise OSError(f"{self.where(what)}: {error!r} for {self.PATIENCE:.0f} s") from error
                if wait > 0.3:  # not a hiccup
                    logger.warning(f"{self.where(what)}: {error!r}; trying again")
            time.sleep(wait * random.Random().uniform(0.5, 1.5))
            waited, wait = waited + wait, 2 * wait

    @property
    def _mark(self) -> str:
        return f".owner-{self.owner}"

    def _put(self, name: str, data: bytes) -> None:
        self.retrying(lambda: self.fs.pipe_file(f"{self.root}/{name}", data), name)

    def _remove(self, folder: str, names: "list[str]") -> None:
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                self.retrying(lambda path=f"{self.root}/{folder}/{name}": self.fs.rm_file(path), f"{folder}/{name}")


def open_storage(url: str, *, owner: str = "") -> Files:
    """Raises:
    ValueError, ImportError: the kind of URL is unknown, or the package for it is not installed.
    """
    return Remote(url, owner) if "://" in url else Local(url, owner)


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Errors of reading and writing do not say of which file."""
    try:
        yield
    except OSError as error:
        if error.errno is None or error.filename is not None:
            raise
        raise type(error)(error.errno, error.strerror, str(path)) from error


def _read_all(file: Any, size: int) -> bytes:
    data = file.read(size)
    while len(data) < size and (more := file.read(size - len(data))):  # one read gives 2 GiB at most
        data += more
    return data


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
