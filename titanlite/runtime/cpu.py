"""Settings of this process on CPUs: cores and the C library's allocator."""

import ctypes
import os
import platform
import sys


def cores() -> int:
    """Return the number of cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def keep_freed_memory() -> None:
    """Configure glibc to keep freed memory, in one heap for all threads. Does nothing elsewhere.

    Every step frees and allocates the same tens of megabytes, and each new page from the kernel costs a page fault.
    Memory in one thread's heap is of no use to another thread.
    """
    if sys.platform == "linux" and platform.libc_ver()[0] == "glibc":
        m_trim_threshold, m_mmap_max, m_arena_max = -1, -4, -8  # malloc.h
        libc = ctypes.CDLL(None)
        libc.mallopt(m_trim_threshold, -1)
        libc.mallopt(m_mmap_max, 0)
        libc.mallopt(m_arena_max, 1)
