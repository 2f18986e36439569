"""Memory of a run at each log step: the peak, and how often a GPU's allocator ran out of memory and tried again.

Every value is read by the host: nothing waits for the device.
"""

import logging
import resource
import sys

import torch

logger = logging.getLogger(__name__)


class Memory:
    """Memory of this rank since the start."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._warned = 0

    def peak(self) -> float:
        """Return GiB: on a GPU, the most that PyTorch has reserved; on CPU, the most that the process had resident."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_reserved(self.device) / 2**30
        unit = 1 if sys.platform == "darwin" else 2**10
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30

    def retries(self) -> int:
        """Return how often since the start an allocation failed, so that PyTorch freed its cache and tried again."""
        return torch.cuda.memory_stats(self.device)["num_alloc_retries"] if self.device.type == "cuda" else 0

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
            self._warned = retries
