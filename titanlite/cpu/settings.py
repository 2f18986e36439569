"""Settings of this process on CPUs: cores and the C library's allocator."""

import ctypes
import os
import platform
import sys


def cores() -> int:
    """That this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def keep_freed_memory() -> None:
    """Tell glibc to keep freed memory instead of giving it back: every step frees and allocates the same tens of
    megabytes, and each page that comes anew from the kernel costs a fault. And to keep one heap for all threads: what
    one thread's heap keeps is of no use to another. Elsewhere than on Linux, do nothing."""
    if sys.platform == "linux" and platform.libc_ver()[0] == "glibc":
        m_trim_threshold, m_mmap_max, m_arena_max = -1, -4, -8  # malloc.h
        libc = ctypes.CDLL(None)
        libc.mallopt(m_trim_threshold, -1)
        libc.mallopt(m_mmap_max, 0)
        libc.mallopt(m_arena_max, 1)
