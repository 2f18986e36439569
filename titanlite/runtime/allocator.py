"""How this process gets and frees memory: imports without the garbage collector, the C library's allocator, and that of
CUDA, whose settings PyTorch reads from the environment when a process first uses its GPU."""

import ctypes
import gc
import os
import platform
import sys
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager


@contextmanager
def importing() -> Iterator[None]:
    """Import modules without garbage collections, and exempt what they made from later ones, until `gc.unfreeze`.

    Six collections would walk through all of PyTorch: 0.6 of the 4 seconds of CPU time to the end of a first step.
    """
    known, was_enabled = len(sys.modules), gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
        if len(sys.modules) > known:
            gc.freeze()


# Settings of this process on CPUs: cores and the C library's allocator.


def cores() -> int:
    """Return the number of cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def keep_freed_memory() -> None:
    """Configure glibc to keep freed memory, in one heap for all threads. Does nothing elsewhere.

    Every step frees and allocates the same tens of megabytes, and each new page from the kernel costs a page fault.
    Memory in one thread's heap is of no use to another thread. But operators whose threads allocate, as flash attention
    to short sequences, take up to twice as long.
    """
    if sys.platform == "linux" and platform.libc_ver()[0] == "glibc":
        m_trim_threshold, m_mmap_max, m_arena_max = -1, -4, -8  # malloc.h
        libc = ctypes.CDLL(None)
        libc.mallopt(m_trim_threshold, -1)
        libc.mallopt(m_mmap_max, 0)
        libc.mallopt(m_arena_max, 1)


VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""Environment variables with allocator settings. PyTorch takes the first that is set and ignores the others."""

EXPANDABLE = "expandable_segments:True"
"""Segments that grow in place. Blocks of different sizes then share one address range for each stream, so that memory
is not lost to fragmentation (PyTorch's notes on CUDA, "Optimizing memory usage")."""


def use_expandable_segments(environ: MutableMapping[str, str]) -> None:
    """Choose expandable segments, unless the user has set allocator settings of any kind.

    Call it before torch is imported. The settings have no effect without a GPU.
    """
    if not any(name in environ for name in VARIABLES):
        environ["PYTORCH_ALLOC_CONF"] = EXPANDABLE


def allocator_settings(environ: Mapping[str, str]) -> str:
    """Return the settings in effect, for the first lines of a run."""
    return next((f"{environ[name]} ({name})" for name in VARIABLES if name in environ), "PyTorch's defaults")
