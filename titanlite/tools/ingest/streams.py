"""The bytes of a file, here or at a URL, unpacked where it is packed with gzip or zstd."""

import errno
import gzip
import io
import os
import zlib
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from titanlite.data.remote import open_place, retrying, version_of
from titanlite.runtime.errors import RunError, UserError

BLOCK = 2**13
"""Bytes that are unpacked at once: damage costs at most these."""
PACKINGS = {".gz": "gzip", ".zst": "zstd", ".zstd": "zstd"}
WIDE = (
    "it was packed with a window of more than 2^27 bytes (zstd --long=28 or more), which pyarrow does not read: pack "
    "it anew with zstd -dc --long=31 FILE | zstd -o NEW"
)
REMOTE_BLOCK = 2**22
"""Bytes that are read at once from a URL."""


class Stream:
    """Reads a file from its beginning. Damage ends the bytes as the end of the file does.

    Args:
        packing: gzip, zstd, or empty for a file that is not packed.

    Raises:
        OSError: the file cannot be opened or read.
    """

    def __init__(self, path: str | Path, packing: str) -> None:
        self.damage = ""
        """Reason why the bytes ended before all were unpacked; empty if all were."""
        self._file = open_binary(path)
        self._bytes: Any = _unpack(self._file, packing)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._file.close()

    @property
    def done(self) -> int:
        """Bytes of the file, as it is, that have been read."""
        return self._file.tell()

    def read(self, count: int) -> bytes:
        """Return `count` bytes, or fewer at the end."""
        return self._collect(count, lambda left: self._bytes.read1(min(left, BLOCK)))

    def read_lines(self, count: int) -> bytes:
        """Return `count` bytes, and the rest of the line in which they end. A line that damage has cut is left out."""
        data = self.read(count)
        if data and not self.damage and not data.endswith(b"\n"):
            data += self._collect(1, lambda left: self._bytes.readline())
        return data[: data.rfind(b"\n") + 1] if self.damage else data

    def _collect(self, count: int, read: Any) -> bytes:
        found: list[bytes] = []
        try:
            while count > 0 and (data := read(count)):
                found.append(data)
                count -= len(data)
        except (OSError, EOFError, zlib.error) as error:
            if isinstance(error, OSError) and error.errno:  # an error of the disk has a number
                raise
            if "too much memory" in str(error):
                raise OSError(errno.EFBIG, WIDE) from None
            self.damage = str(error)
        return b"".join(found)


def _unpack(file: IO[bytes], packing: str) -> Any:
    if packing == "gzip":
        return gzip.GzipFile(fileobj=file)
    if packing == "zstd":
        import pyarrow

        stream: Any = pyarrow.CompressedInputStream(file, "zstd")
        return io.BufferedReader(stream, BLOCK)
    return file


def open_binary(path: str | Path) -> IO[bytes]:
    """Open a file to read, here or at a URL, from which only the bytes that are read are fetched.

    Raises:
        OSError: a file of this machine cannot be opened.
        UserError, RunError: a file at a URL is not there, or its store does not answer.
    """
    if "://" in str(path):
        return io.BufferedReader(_RemoteFile(str(path)), REMOTE_BLOCK)
    return open(path, "rb", buffering=2**17)


def state_of(path: str) -> tuple[int, int | str]:
    """Return the size of a file, and the time of its last change, or the version at a URL.

    Raises:
        OSError: the file is not there.
        UserError, RunError: a file at a URL is not there, or its store does not answer.
    """
    if "://" in path:
        [state] = states_at(path).values()
        return state
    stats = os.stat(path)
    return stats.st_size, stats.st_mtime_ns


def states_at(url: str) -> dict[str, tuple[int, str]]:
    """Return the URLs of the files that a URL names, which can be a glob with `*`: each with its size and version.

    Raises:
        UserError: there is no such file.
        RunError: the store does not answer.
    """
    place = open_place(url)
    fs, states = place.fs, {}
    fs.invalidate_cache()
    for path in retrying(lambda: fs.glob(place.root), url) if "*" in url else [place.root]:
        name = fs.unstrip_protocol(path) if "*" in url else url
        about = retrying(partial(fs.info, path), name)
        if about["type"] != "file":
            continue
        if about["size"] is None:
            raise UserError(f"{name} cannot be read: its server does not tell the size")
        states[name] = about["size"], version_of(about)
    if not states:
        raise UserError(f"no file {url}")
    return states


class _RemoteFile(io.RawIOBase):
    """A file at a URL. Each range of bytes is a call of its own, which is retried: no error ends the file early."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._place = open_place(url)
        self._size, _ = state_of(url)
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + (0, self._at, self._size)[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        end = min(self._at + len(buffer), self._size)
        count = max(end - self._at, 0)
        if count:
            fetch = partial(self._place.fs.cat_file, self._place.root, start=self._at, end=end)
            data = retrying(fetch, self._url)
            if len(data) != count:
                why = "it has changed, or its server reads no ranges"
                raise RunError(f"{self._url}: {len(data):,} bytes came instead of {count:,}: {why}")
            buffer[:count] = data
            self._at = end
        return count
