"""Places that an export is written to: a folder, or a URL of an object store.

On a file system the folder is written beside its place and renamed at the end, so that there is a whole one or none. An
object store cannot rename. There config.json (adapter_config.json of adapters), without which no program takes the
folder for a model, is written last.
"""

import os
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from titanlite.runtime.errors import UserError
from titanlite.runtime.files import FileLocked, lock_file
from titanlite.storage.storage import ObjectStorage, Storage, open_storage, sync_folder

UNFINISHED = ".export"
"""File that an object store has until an export to it is complete."""
Write = Callable[[BinaryIO], object]


class Target(ABC):
    """Place of an export. `begin` comes first, then files, the description last, then `commit`."""

    def __init__(self, storage: Storage, folder: str, place: str) -> None:
        self.storage = storage
        self.folder = folder
        self.place = place

    @abstractmethod
    def check(self) -> None:
        """Check that nothing would be overwritten.

        Raises:
            UserError: something is there that is no unfinished export.
        """

    @abstractmethod
    def begin(self) -> None:
        """Start with an empty folder."""

    def write(self, name: str, write: Write) -> None:
        """Write a file. It is durable on return."""

        def attempt() -> None:
            with self.storage.create(f"{self.folder}/{name}") as file:
                write(file)

        self.storage.retry(attempt, f"{self.folder}/{name}")

    @abstractmethod
    def commit(self) -> None:
        """Make the export count."""


class LocalTarget(Target):
    """A folder on a file system."""

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self.staging = self.path.with_name(f".{path.name}.staging")
        super().__init__(open_storage(str(self.path.parent)), self.staging.name, str(path))

    def check(self) -> None:
        if os.path.lexists(self.path) and not (self.path.is_dir() and not any(self.path.iterdir())):
            raise UserError(f"{self.place} exists: name another --out, or delete it")

    def begin(self) -> None:
        try:
            self.staging.mkdir(parents=True, exist_ok=True)
            self._lock = lock_file(self.staging / ".lock", timeout=0)
        except FileLocked as error:
            raise UserError(f"{self.place} is being written by {error.holder}") from None
        except OSError as error:
            raise UserError(f"--out: {self.place} cannot be written: {error.strerror or error}") from None
        for left in self.staging.iterdir():
            if left.name != ".lock":
                left.unlink()

    def commit(self) -> None:
        (self.staging / ".lock").unlink()
        sync_folder(self.staging)
        self.check()
        os.rename(self.staging, self.path)
        sync_folder(self.path.parent)
        self._lock.close()

    def discard(self) -> None:
        """Delete what was written and is not committed."""
        shutil.rmtree(self.staging, ignore_errors=True)


class RemoteTarget(Target):
    """A folder of an object store."""

    def __init__(self, url: str) -> None:
        protocol, _, path = url.rstrip("/").partition("://")
        above, _, folder = path.rpartition("/")
        try:
            storage = open_storage(f"{protocol}://{above}")
        except (ValueError, ImportError) as error:  # of fsspec
            raise UserError(f"--out: {url}: {error}") from None
        if not above:
            raise UserError(f"--out: {url} is a whole bucket: name a folder in it")
        assert isinstance(storage, ObjectStorage)
        self.fs, self.root = storage.fs, f"{storage.root}/{folder}"
        super().__init__(storage, folder, url)

    def _names(self) -> set[str]:
        def find() -> list[str]:
            self.fs.invalidate_cache()
            try:
                return self.fs.find(self.root)
            except FileNotFoundError:
                return []

        return {path[len(self.root) + 1 :] for path in self.storage.retry(find, self.folder)}

    def check(self) -> None:
        names = self._names()
        if names and UNFINISHED not in names:
            raise UserError(f"{self.place} exists: name another --out, or delete it")

    def begin(self) -> None:
        for name in self._names() - {UNFINISHED}:
            self._remove(name)
        self.write(UNFINISHED, lambda file: None)

    def commit(self) -> None:
        self._remove(UNFINISHED)

    def _remove(self, name: str) -> None:
        self.storage.retry(lambda: self.fs.rm(f"{self.root}/{name}"), name)


def open_target(place: str) -> Target:
    """Return the target at a path or URL.

    Raises:
        UserError: the protocol of the URL is unknown.
    """
    return RemoteTarget(place) if "://" in place else LocalTarget(Path(place).expanduser())
