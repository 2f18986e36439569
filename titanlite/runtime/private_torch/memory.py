"""History of the CUDA caching allocator, for memory snapshots."""

from pathlib import Path

import torch


def record_memory_history(*, max_entries: int) -> None:
    """Record each allocation and free from here on, with its Python stack. The newest `max_entries` are kept."""
    torch.cuda.memory._record_memory_history(max_entries=max_entries, stacks="python")


def dump_memory_snapshot(path: Path) -> None:
    """Write the allocator's segments and the recorded history to a file that pytorch.org/memory_viz opens."""
    torch.cuda.memory._dump_snapshot(str(path))
