"""The bytes of a file, unpacked where it is packed with gzip or zstd."""

import gzip
import io
import zlib
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

BLOCK = 2**13
"""Bytes that are unpacked at once: damage costs at most these."""
PACKINGS = {".gz": "gzip", ".zst": "zstd", ".zstd": "zstd"}


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
        self._file = open(path, "rb", buffering=2**17)  # noqa: SIM115 (open until the `with` block ends)
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
        """Fewer than `count` only at the end."""
        return self._collect(count, lambda left: self._bytes.read1(min(left, BLOCK)))

    def read_lines(self, count: int) -> bytes:
        """`count` bytes, and what is left of the line that they end in. A line that damage has cut is left out."""
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
            if isinstance(error, OSError) and error.errno:  # of the disk
                raise
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
