"""Copy of a state in host memory, made beside the next forward and backward."""

import contextlib
import threading
from collections import deque
from collections.abc import Mapping
from itertools import accumulate
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from titanlite.runtime.private_torch.tensors import local_tensor

ALIGNMENT = 64
"""Bytes to whose multiple each buffer is aligned."""


class Staging:
    """Host memory for a copy of the state. The first save allocates it as a whole, and later ones reuse it.

    Two threads copy: the one that writes, and training where it must not wait longer.

    Args:
        pin: pinned memory, to which a GPU copies faster and without the host waiting.
    """

    def __init__(self, device: torch.device, *, pin: bool) -> None:
        self.pin = pin
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._buffers: dict[str, Tensor] = {}
        """Tensors in `_memory`, by name."""
        self._to_copy: deque[tuple[Tensor, Tensor]] = deque()
        self._lock = threading.Lock()
        self._is_due = False
        self._error: Exception | None = None

    @property
    def allocated_bytes(self) -> int:
        return self._memory.nbytes

    def begin(self, tensors: dict[str, Tensor]) -> None:
        """Announce a copy of tensors as they are now; on a GPU, as they are after the work that is queued."""
        self._is_due, self._error = True, None
        sources = {name: local_tensor(tensor) for name, tensor in tensors.items()}
        try:
            self._allocate(sources)
        except Exception as error:  # out of memory: `copy` raises it, where all ranks learn of it
            self._error = error
            return
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream())
        self._to_copy.extend((self._buffers[name], source) for name, source in sources.items())

    def copy(self) -> dict[str, Tensor]:
        """Return the complete copy. Call it in the thread that writes."""
        self._copy_all()
        if self._error is not None:
            raise self._error
        if self.stream is not None:
            self.stream.synchronize()
        return self._buffers

    def wait(self) -> None:
        """Make what is left of the copy. Training calls it before the state changes."""
        if not self._is_due:
            return
        self._is_due = False
        self._copy_all()
        if self.stream is not None:  # the copies are queued: the next change of the state queues behind them
            torch.cuda.current_stream().wait_stream(self.stream)

    def _copy_all(self) -> None:
        with torch.cuda.stream(self.stream) if self.stream else contextlib.nullcontext():
            while True:
                with self._lock:  # no copy is under way when the other thread finds the queue empty
                    if not self._to_copy:
                        return
                    try:
                        _copy(*self._to_copy.popleft())
                    except Exception as error:  # fails the save, not training, whichever thread meets it
                        self._error = error
                        self._to_copy.clear()

    def _allocate(self, tensors: Mapping[str, Tensor]) -> None:
        """Make a buffer for each tensor, one after the other in memory, unless those of the last save fit."""
        layout = [(name, tensor.shape, tensor.dtype) for name, tensor in tensors.items()]
        if layout == [(name, buffer.shape, buffer.dtype) for name, buffer in self._buffers.items()]:
            return
        ends = [*accumulate(-(-tensor.nbytes // ALIGNMENT) * ALIGNMENT for tensor in tensors.values())]
        self._buffers = {}
        if self.pin and len(self._memory):
            unpin(self._memory)
        self._memory = torch.empty(0, dtype=torch.uint8)  # freed before more is allocated
        self._memory = torch.empty(ends[-1] if ends else 0, dtype=torch.uint8)
        if self.pin and len(self._memory):
            pin(self._memory)
        starts = [0, *ends[:-1]]
        self._buffers = {
            name: _buffer(self._memory, start, tensor)
            for (name, tensor), start in zip(tensors.items(), starts, strict=True)
        }


def _buffer(memory: Tensor, start: int, like: Tensor) -> Tensor:
    """Return the part of a memory from a byte on as a tensor with a storage of its own, which `torch.save` needs."""
    if not like.numel():
        return torch.empty(like.shape, dtype=like.dtype)
    part = torch.frombuffer(memory.numpy().data, dtype=like.dtype, count=like.numel(), offset=start)
    return part.view(like.shape)


def pin(memory: Tensor) -> None:
    """Pin memory of the host, so that GPUs copy to it directly.

    PyTorch rounds the memory that it pins itself up to a power of two, which is up to twice the size.

    Raises:
        torch.cuda.CudaError: the system does not lock so much memory.
    """
    _call_cuda("cudaHostRegister", memory.data_ptr(), memory.nbytes, 0)


def unpin(memory: Tensor) -> None:
    """Undo `pin`, before the memory is freed."""
    _call_cuda("cudaHostUnregister", memory.data_ptr())


def _call_cuda(function: str, *arguments: int) -> None:
    runtime = cast(Any, torch.cuda.cudart())
    torch.cuda.check_error(int(getattr(runtime, function)(*arguments)))


def _copy(target: Tensor, source: Tensor) -> None:
    if source.device.type != "cpu" or not source.is_contiguous():
        target.copy_(source, non_blocking=True)
    elif source.numel():  # NumPy copies in this thread; PyTorch would start more, with training's priority
        np.copyto(target.view(-1).view(torch.uint8).numpy(), source.reshape(-1).view(torch.uint8).numpy())
