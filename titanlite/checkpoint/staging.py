"""Copy of a state in host memory, made beside the next forward and backward."""

import contextlib
import threading
from collections import deque

import numpy as np
import torch
from torch import Tensor

from titanlite.runtime.private_torch import local_tensor


class Staging:
    """Host memory for a copy of the state. The first save allocates it, and later ones reuse it.

    Two threads copy: the one that writes, and training where it must not wait longer.

    Args:
        pin: pinned memory, to which a GPU copies faster and without the host waiting.
    """

    def __init__(self, device: torch.device, *, pin: bool) -> None:
        self.pin = pin
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._buffers: dict[str, Tensor] = {}
        self._to_copy: deque[tuple[Tensor, Tensor]] = deque()
        self._lock = threading.Lock()
        self._is_due = False
        self._error: Exception | None = None

    def begin(self, tensors: dict[str, Tensor]) -> None:
        """Announce a copy of tensors as they are now; on a GPU, as they are after the work that is queued."""
        self._is_due, self._error = True, None
        sources = {name: local_tensor(tensor) for name, tensor in tensors.items()}
        try:
            self._buffers = {name: self._buffer(name, source) for name, source in sources.items()}
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

    def _buffer(self, name: str, tensor: Tensor) -> Tensor:
        buffer = self._buffers.get(name)
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=self.pin)
        return buffer


def _copy(target: Tensor, source: Tensor) -> None:
    if source.device.type != "cpu" or not source.is_contiguous():
        target.copy_(source, non_blocking=True)
    elif source.numel():  # NumPy copies in this thread; PyTorch would start more, with training's priority
        np.copyto(target.view(-1).view(torch.uint8).numpy(), source.reshape(-1).view(torch.uint8).numpy())
