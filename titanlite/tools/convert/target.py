"""Places that an export is written to: a folder, or a URL of an object store. Killed, an export resumes.

On a file system the folder is written beside its place and renamed at the end, so that there is a whole one or none. An
object store cannot rename. There config.json (adapter_config.json of adapters), without which no program takes the
folder for a model, is written last.
"""

import json
import os
import re
import shutil
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from titanlite.runtime.errors import UserError
from titanlite.runtime.files import FileLocked, lock_file
from titanlite.storage.storage import ObjectStorage, Storage, open_storage

RECORD = ".export.json"
LAST = "config.json", "adapter_config.json"
CHUNK = 1 << 24

Write = Callable[[BinaryIO], object]


class Target(ABC):
    """Place of an export. `begin` comes first, then files, then `commit`."""

    def __init__(self, storage: Storage, folder: str, place: str) -> None:
        self.storage = storage
        self.folder = folder
        self.place = place
        self._done: dict[str, dict[str, Any]] = {}
        self._identity = ""

    @abstractmethod
    def check(self) -> None:
        """Check that nothing would be overwritten.

        Raises:
            UserError: something is there that is no unfinished export.
        """

    def begin(self, identity: str) -> set[str]:
        """Start, or resume.

        Args:
            identity: of the source and the options. Another one starts anew.

        Returns:
            the files that an earlier start has written, and that are whole.
        """
        self.check()
        self._identity = identity
        earlier = self._prepare()
        if earlier.get("identity") != identity:
            self._clear()
            earlier = {}
        self._done = {name: done for name, done in earlier.get("files", {}).items() if self._is_whole(name, done)}
        self._write_record()
        return set(self._done)

    def write(self, name: str, write: Write) -> None:
        """Write a file. It is durable on return, and a later start keeps it."""

        def attempt() -> _Summed:
            with self._create(name) as file:
                summed = _Summed(file)
                write(summed)  # pyright: ignore[reportArgumentType]
            return summed

        written = self.storage.retry(attempt, f"{self.folder}/{name}")
        self._publish(name)
        self._done[name] = {"size": written.size, "crc32": f"{written.crc:08x}"}
        self._write_record()

    @abstractmethod
    def commit(self) -> None:
        """Make the export count."""

    @abstractmethod
    def _prepare(self) -> dict[str, Any]:
        """Return the record of an earlier start; nothing if there is none."""

    @abstractmethod
    def _clear(self) -> None: ...

    @abstractmethod
    def _create(self, name: str) -> Any: ...

    @abstractmethod
    def _publish(self, name: str) -> None:
        """Give a file that is written its name."""

    def _write_record(self) -> None:
        body = json.dumps({"identity": self._identity, "files": self._done}).encode()

        def attempt() -> None:
            with self._create(RECORD) as file:
                file.write(body)

        self.storage.retry(attempt, f"{self.folder}/{RECORD}")
        self._publish(RECORD)

    def _read_record(self) -> dict[str, Any]:
        try:
            found = json.loads(self.storage.read(f"{self.folder}/{RECORD}"))
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    def _is_whole(self, name: str, done: dict[str, Any]) -> bool:
        """Return whether a file has the bytes that were written."""
        if not re.fullmatch(r"[\w.-]+", name):
            return False
        crc, size = 0, int(done["size"])
        try:
            for start in range(0, size + 1, CHUNK):
                data = self.storage.read(f"{self.folder}/{name}", start, CHUNK)
                crc = zlib.crc32(data, crc)
                if len(data) != min(CHUNK, size - start):
                    return False
        except OSError:
            return False
        return f"{crc:08x}" == done["crc32"]


class LocalTarget(Target):
    """A folder on a file system."""

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self.staging = self.path.with_name(f".{path.name}.staging")
        super().__init__(open_storage(str(self.path.parent)), self.staging.name, str(path))

    def check(self) -> None:
        if os.path.lexists(self.path) and not (self.path.is_dir() and not any(self.path.iterdir())):
            raise UserError(f"{self.place} exists: name another --out, or delete it")

    def _prepare(self) -> dict[str, Any]:
        try:
            self.staging.mkdir(parents=True, exist_ok=True)
            self._lock = lock_file(self.staging / ".lock", timeout=0)
        except FileLocked as error:
            raise UserError(f"{self.place} is being written by {error.holder}") from None
        except OSError as error:
            raise UserError(f"--out: {self.place} cannot be written: {error.strerror or error}") from None
        return self._read_record()

    def _clear(self) -> None:
        for entry in self.staging.iterdir():
            if entry.name != ".lock":
                entry.unlink()

    def _create(self, name: str) -> Any:
        return self.storage.create(f"{self.folder}/{name}.part")

    def _publish(self, name: str) -> None:
        os.replace(self.staging / f"{name}.part", self.staging / name)

    def commit(self) -> None:
        for name in (RECORD, ".lock"):
            (self.staging / name).unlink()
        _sync(self.staging)
        self.check()
        os.rename(self.staging, self.path)
        _sync(self.path.parent)
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
        self.objects = storage
        self._held: dict[str, bytes] = {}
        super().__init__(storage, folder, url)

    def _names(self) -> set[str]:
        root = f"{self.objects.root}/{self.folder}"

        def find() -> list[str]:
            self.objects.fs.invalidate_cache()
            try:
                return self.objects.fs.find(root)
            except FileNotFoundError:
                return []

        return {path[len(root) + 1 :] for path in self.storage.retry(find, self.folder)}

    def check(self) -> None:
        names = self._names()
        if names and RECORD not in names:
            raise UserError(f"{self.place} exists: name another --out, or delete it")

    def _prepare(self) -> dict[str, Any]:
        return self._read_record() if RECORD in self._names() else {}

    def _clear(self) -> None:
        for name in self._names():
            self.storage.retry(lambda path=f"{self.objects.root}/{self.folder}/{name}": self.objects.fs.rm(path), name)

    def write(self, name: str, write: Write) -> None:
        if name not in LAST:
            return super().write(name, write)
        self._last = name, write
        return None

    def _create(self, name: str) -> Any:
        return self.storage.create(f"{self.folder}/{name}")

    def _publish(self, name: str) -> None: ...

    def commit(self) -> None:
        super().write(*self._last)
        path = f"{self.objects.root}/{self.folder}/{RECORD}"
        self.storage.retry(lambda: self.objects.fs.rm(path), RECORD)


def open_target(place: str) -> Target:
    """Return the target at a path or URL.

    Raises:
        UserError: the protocol of the URL is unknown.
    """
    return RemoteTarget(place) if "://" in place else LocalTarget(Path(place).expanduser())


class _Summed:
    """A file that counts and sums what is written to it."""

    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        self.size = 0
        self.crc = 0

    def write(self, data: Any) -> int:
        taken = self.file.write(data)
        view = memoryview(data)[:taken]
        self.crc = zlib.crc32(view, self.crc)
        self.size += taken
        return taken


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
