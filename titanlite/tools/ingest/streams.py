"""The bytes of a file, unpacked where it is packed with gzip or zstd."""

import io
import zlib
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

BLOCK = 2**17
PACKINGS = {".gz": "gzip", ".zst": "zstd", ".zstd": "zstd"}


class Stream:
    """Reads a file from its beginning.

    Args:
        packing: gzip, zstd, or empty for a file that is not packed.

    Raises:
        OSError: the file cannot be opened or read.
    """

    def __init__(self, path: str | Path, packing: str) -> None:
        self._file = open(path, "rb")  # noqa: SIM115 (open until the `with` block ends)
        self._unpacked = _Unpacked(self._file, packing) if packing else None
        self._bytes: IO[bytes] = io.BufferedReader(self._unpacked, BLOCK) if self._unpacked else self._file

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._file.close()

    @property
    def damage(self) -> str:
        """Reason why the bytes ended before all were unpacked; empty if all were."""
        return self._unpacked.damage if self._unpacked else ""

    @property
    def done(self) -> int:
        """Bytes of the file, as it is, that have been read."""
        return self._file.tell()

    def read(self, count: int) -> bytes:
        """Fewer than `count` only at the end."""
        return self._bytes.read(count)

    def read_lines(self, count: int) -> bytes:
        """`count` bytes, and what is left of the line that they end in."""
        data = self._bytes.read(count)
        return data if data.endswith(b"\n") or not data else data + self._bytes.readline()


class _Unpacked(io.RawIOBase):
    """Unpacked bytes of a file of one or more frames. Damage ends the bytes like the end of the file, so that
    nothing before it is lost; `damage` describes it."""

    def __init__(self, file: IO[bytes], packing: str) -> None:
        self.damage = ""
        self._file = file
        self._packing = packing
        self._frame: Any = None
        self._packed = b""
        self._ready = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready and not self.damage:
            self._packed = self._packed or self._file.read(BLOCK)
            if self._frame is None and self._packing == "gzip":
                self._packed = self._packed.lstrip(b"\0")  # padding may follow a frame, as tapes have it
            if not self._packed:
                self.damage = "it ends too early" if self._frame else ""
                break
            self._unpack()
        count = min(len(buffer), len(self._ready))
        buffer[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count

    def _unpack(self) -> None:
        try:
            self._frame = self._frame or _new_frame(self._packing)
            self._ready = memoryview(self._frame.decompress(self._packed))
        except Exception as error:  # zlib.error or ZstdError: the latter is of a package that may not be there
            self.damage = str(error)
            return
        self._packed = b""
        if self._frame.eof:
            self._packed = self._frame.unused_data
            self._frame = None


def _new_frame(packing: str) -> Any:
    if packing == "gzip":
        return zlib.decompressobj(wbits=31)
    import zstandard

    return zstandard.ZstdDecompressor(max_window_size=2**31).decompressobj()
