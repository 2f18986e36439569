"""Files of records of one type, for random access: tokens, starts of documents, and entries of a teacher.

Files are read, not mapped into memory: a read of a file that has become shorter is an error, and access to a map of it
ends the process with SIGBUS.
"""

import os
from pathlib import Path

import numpy as np

from titanlite.runtime.errors import UserError


class RecordFile:
    """Open file of records, which is closed when nothing refers to it.

    Args:
        count: number of records.
        key: option that names the folder, for errors.
        remedy: sentence that ends an error.

    Raises:
        UserError: the file is not there any more.
    """

    def __init__(self, path: Path, dtype: np.dtype, count: int, *, key: str, remedy: str) -> None:
        self.path = path
        self._dtype = dtype
        self._count = count
        self._key = key
        self._remedy = remedy
        self._descriptor = -1
        try:
            self._descriptor = os.open(path, os.O_RDONLY)
        except FileNotFoundError:
            raise self._changed("is missing") from None

    def __del__(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> int:
        size = self._dtype.itemsize
        data = os.pread(self._descriptor, size, index * size)
        if len(data) < size:
            raise self._changed("has become shorter")
        return int.from_bytes(data, "little")

    def read(self, begin: int, end: int) -> np.ndarray:
        """Return the records [begin, end).

        Raises:
            UserError: the file has become shorter.
        """
        size, offset = ((number * self._dtype.itemsize) for number in (end - begin, begin))
        data = os.pread(self._descriptor, size, offset)
        while len(data) < size:  # one read returns 2 GiB at most
            more = os.pread(self._descriptor, size - len(data), offset + len(data))
            if not more:
                raise self._changed("has become shorter")
            data += more
        return np.frombuffer(data, dtype=self._dtype)

    def _changed(self, how: str) -> UserError:
        return UserError(f"{self._key}: {self.path} {how} since this start opened the folder. {self._remedy}")
