"""Tensors in files on a local disk, for states that are larger than memory.

A file is mapped into memory: its pages come when they are touched, and go when the system wants memory. They are not
left to the system alone, which would keep as many as it can: what a step has changed is written back in a thread, and
leaves memory at once. Files have no name: they vanish with the process, however it ends.
"""

import errno
import logging
import mmap
import os
import shutil
import tempfile
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from titanlite.runtime.dtensor import from_local_like
from titanlite.runtime.errors import RunError, UserError
from titanlite.runtime.private_torch.tensors import local_tensor

logger = logging.getLogger(__name__)

WINDOW = 2**24
"""Bytes that are written back at a time: few of them are in memory."""
AHEAD = 2
"""Number of windows that wait for the disk before the step does."""
ALIGNMENT = 64
"""Bytes: a line of the cache, as in PyTorch's own memory."""
GIB = 2**30


def check_room(folder: Path, needed: float) -> None:
    """Check the free space of a disk.

    Args:
        needed: bytes, of all processes of this machine.

    Raises:
        UserError: the disk has less free space.
    """
    there = next(place for place in (folder, *folder.absolute().parents) if os.path.exists(place))
    free = shutil.disk_usage(there).free
    if needed > free:
        raise _no_room(folder, needed, free)


def _no_room(folder: Path, needed: float, free: float) -> UserError:
    sizes = f"needs {needed / GIB:,.2f} GiB, and {free / GIB:,.2f} GiB are free"
    return UserError(f"offload.path: there is no room in {folder}: it {sizes}. Name a folder on a larger disk")


@dataclass(frozen=True)
class _File:
    file: IO[bytes]
    map: mmap.mmap
    address: int
    """Address of its first byte in memory."""


Range = tuple[_File, int, int]
"""Bytes [from, to) of a file, in whole pages."""


class DiskMemory:
    """Memory of files: gives tensors that are mapped, and takes them out of memory when they are not needed.

    Args:
        folder: is made if it is not there.
        categories: of states that are to be in files; see `StateMemory.zeros`.
    """

    def __init__(self, folder: Path, categories: Collection[str] = ("parameters", "optimizer")) -> None:
        self.folder = folder
        self.slices_updates = "parameters" in categories or "optimizer" in categories
        self._categories = categories
        self._files: list[_File] = []
        self._thread = ThreadPoolExecutor(1, "offload")
        self._changed: list[Range] = []
        self._writing: deque[Future[None]] = deque()

    def allocate(self, shapes: Sequence[tuple[torch.Size, torch.dtype]]) -> list[Tensor]:
        """Tensors of zeros, in one file, one after the other. All of their disk space is taken now.

        Raises:
            UserError: there is not enough, or no file can be made.
        """
        offsets, size = [], 0
        for shape, dtype in shapes:
            offsets.append(size)
            size += -(-shape.numel() * dtype.itemsize // ALIGNMENT) * ALIGNMENT
        if size == 0:
            return [torch.empty(shape, dtype=dtype) for shape, dtype in shapes]
        map = self._new_file(size).map
        return [
            torch.frombuffer(map, dtype=dtype, count=shape.numel(), offset=offset).view(shape)
            if shape.numel()
            else torch.empty(shape, dtype=dtype)
            for (shape, dtype), offset in zip(shapes, offsets, strict=True)
        ]

    def zeros(
        self, category: str, like: Iterable[Tensor], dtype: torch.dtype | None = None, *, copies: int = 1
    ) -> dict[Tensor, list[Tensor]]:
        """Return tensors on disk. Where rows of a parameter do not divide evenly, FSDP copies the last rank's part to
        pad it, and that copy is in memory."""
        tensors = [*like] if category in self._categories else []
        shapes = [(local_tensor(tensor).shape, dtype or tensor.dtype) for tensor in tensors for _ in range(copies)]
        parts = iter(self.allocate(shapes))
        return {tensor: [from_local_like(part, tensor) for part in islice(parts, copies)] for tensor in tensors}

    def drop_after_use(self, model: nn.Module) -> None:
        """Drop parameters from memory after their FSDP unit's forward (compiled units excepted) and after their
        gradients are reduced."""
        if "parameters" not in self._categories:
            return
        units = [unit for unit in model.modules() if isinstance(unit, FSDPModule) and unit is not model]
        parts: dict[nn.Module, list[Tensor]] = {
            unit: [local_tensor(parameter) for parameter in unit.parameters()] for unit in units
        }

        def after_forward(unit: nn.Module, *_: Any) -> None:
            if not torch.compiler.is_compiling():
                self.drop(*parts[unit])

        for unit in units:
            unit.register_forward_hook(after_forward)
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(lambda parameter: self.drop(local_tensor(parameter)))

    def changed(self, *tensors: Tensor) -> None:
        """Write contiguous tensors back; they leave memory. Those that are in no file stay. Waits if the disk is slower
        than what changes them."""
        self._changed += self._ranges(tensors)
        if sum(end - start for _, start, end in self._changed) >= WINDOW:
            self._start_writing()
        while self._writing and (self._writing[0].done() or len(self._writing) > AHEAD):
            self._finish_writing()

    def drop(self, *tensors: Tensor) -> None:
        """Contiguous tensors were read, and are not needed soon: they leave memory."""
        for part in self._ranges(tensors):
            _drop(part)

    def flush(self) -> None:
        self._start_writing()
        while self._writing:
            self._finish_writing()

    def _start_writing(self) -> None:
        if self._changed:
            self._writing.append(self._thread.submit(_write_back, self._changed))
            self._changed = []

    def _finish_writing(self) -> None:
        try:
            self._writing.popleft().result()
        except OSError as error:
            raise RunError(f"offload.path: {self.folder} can no longer be written: {error.strerror}") from error

    def _ranges(self, tensors: Sequence[Tensor]) -> list[Range]:
        ranges = []
        for tensor in tensors:
            for file in self._files:
                start = tensor.data_ptr() - file.address
                if 0 <= start < len(file.map) and tensor.numel():
                    end = min(len(file.map), -(-(start + tensor.nbytes) // mmap.PAGESIZE) * mmap.PAGESIZE)
                    ranges.append((file, start // mmap.PAGESIZE * mmap.PAGESIZE, end))
        return ranges

    def _new_file(self, size: int) -> _File:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            file = tempfile.TemporaryFile(dir=self.folder)  # noqa: SIM115 (open as long as the tensors)
        except OSError as error:
            raise UserError(f"offload.path: no file can be made in {self.folder}: {error.strerror}") from error
        try:
            # Without it, a full disk would be found when a page is written to, and end the process by a signal.
            os.posix_fallocate(file.fileno(), 0, size)
        except OSError as error:
            file.close()
            if error.errno == errno.ENOSPC:
                raise _no_room(self.folder, size, shutil.disk_usage(self.folder).free) from error
            raise UserError(f"offload.path: {size:,} bytes in {self.folder}: {error.strerror}") from error
        map = mmap.mmap(file.fileno(), size)
        logger.info(f"{size / GIB:,.2f} GiB of states are in a file in {self.folder}")
        self._files.append(_File(file, map, torch.frombuffer(map, dtype=torch.uint8, count=1).data_ptr()))
        return self._files[-1]


def _write_back(ranges: Sequence[Range]) -> None:
    """Raises:
    OSError: the disk failed.
    """
    for descriptor in {file.file.fileno() for file, _, _ in ranges}:
        os.fdatasync(descriptor)
    for part in ranges:
        _drop(part)


def _drop(part: Range) -> None:
    """Drop pages from this process's memory, then from the system's, which keeps what is mapped or not written yet.

    Nothing is lost: a page that is touched again is read again.
    """
    file, start, end = part
    file.map.madvise(mmap.MADV_DONTNEED, start, end - start)
    os.posix_fadvise(file.file.fileno(), start, end - start, os.POSIX_FADV_DONTNEED)
