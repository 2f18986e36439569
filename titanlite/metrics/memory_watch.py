"""Watch over memory: the peak, and the times that a GPU's allocator ran out of memory and tried again."""

import logging
import os
import resource
import sys
from pathlib import Path

import torch

logger = logging.getLogger(__name__)


class MemoryWatch:
    """Peak memory of a device, and allocator retries. Host memory has no allocator retries."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.source = "allocator" if device.type == "cuda" else "process"
        """Source of `now`: PyTorch's allocator, or the memory of the whole process."""
        self._warned = 0
        self._reserved = 0

    def peak(self) -> float:
        """Return GiB: on a GPU, the most that PyTorch has reserved; on CPU, the most that the process had resident."""
        if self.device.type == "cuda":
            return max(self._reserved, torch.cuda.max_memory_reserved(self.device)) / 2**30
        unit = 1 if sys.platform == "darwin" else 2**10
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30

    def now(self) -> dict[str, int]:
        """Return bytes, without waiting for the device.

        On a GPU: `allocated` by tensors, their `peak` since `restart_peak`, and `reserved`. On CPU: `resident`, if the
        system reports it.
        """
        if self.device.type == "cuda":
            return {
                "allocated": torch.cuda.memory_allocated(self.device),
                "peak": torch.cuda.max_memory_allocated(self.device),
                "reserved": torch.cuda.memory_reserved(self.device),
            }
        try:
            pages = int(Path("/proc/self/statm").read_text().split()[1])
        except OSError:  # not Linux
            return {}
        return {"resident": pages * os.sysconf("SC_PAGE_SIZE")}

    def restart_peak(self) -> None:
        """Let the peak of `now` begin again. That of `peak` does not."""
        if self.device.type == "cuda":
            self._reserved = max(self._reserved, torch.cuda.max_memory_reserved(self.device))
            torch.cuda.reset_peak_memory_stats(self.device)

    def retries(self) -> int:
        """Return how often since the start an allocation failed, so that PyTorch freed its cache and tried again."""
        if self.device.type != "cuda":
            return 0
        return torch.cuda.memory_stats(self.device)["num_alloc_retries"]

    def warn(self, retries: int, *, step: int) -> None:
        """Log a warning if there are more allocator retries than at the last call.

        Args:
            retries: the largest number of any rank.
        """
        if retries > self._warned:
            logger.warning(
                f"memory: {retries - self._warned} allocator retries up to step {step}: GPU memory is nearly full, and "
                "each retry stops the GPU. Lower training.local_batch_size, or recompute more with "
                "activation_checkpoint.mode (docs/memory.md)"
            )
        self._warned = max(self._warned, retries)
