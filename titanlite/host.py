"""This process on its host: heap, Python's garbage collector, and the CPU's products, set as training needs them."""

import ctypes
import gc
import os
import platform
import sys
import warnings
from functools import cache
from pathlib import Path

import torch
from torch import Tensor


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


def set_objects_apart() -> None:
    """To be called when all is there that lives as long as the run, until `gc.unfreeze`. Python's garbage collector
    looks at everything now and then, of which there are 300,000 objects: 0.2 s in the middle of a step, and in another
    one on each rank. From here on, it looks at what is younger."""
    if not gc.get_freeze_count():
        gc.collect()
        gc.freeze()


def multiply_by_onednn() -> None:
    """Where MKL holds back, give float32 products of rows that lie one after the other, which are those of forward and
    of the inputs' gradients, to oneDNN: both libraries are part of PyTorch. Products of bfloat16 go there anyway. For
    the whole process, which autograd and the compiler's tracing do not notice."""
    if mkl_holds_back():
        _multiply_by_onednn()


def mkl_holds_back() -> bool:
    """MKL knows the vectors of 512 bits of Intel's CPUs, and takes AMD's for CPUs without."""
    about = Path("/proc/cpuinfo")
    is_amd = about.exists() and "AuthenticAMD" in about.read_text()
    return is_amd and torch.backends.cpu.get_cpu_capability() == "AVX512" and torch.backends.mkldnn.is_available()


@cache
def _multiply_by_onednn() -> torch.library.Library:
    linear, product_into = torch.ops.mkldnn._linear_pointwise.default, torch.ops.aten.mm.out

    def mm(a: Tensor, b: Tensor) -> Tensor:
        suits = a.dtype == b.dtype == torch.float32 and a.is_contiguous() and a.shape[1:] == b.shape[:1]
        if suits and a.numel() and b.numel():
            return linear(a, b.t(), None, "none", [], "")
        return product_into(a, b, out=a.new_empty(a.shape[0], b.shape[1]))  # PyTorch's own way

    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Warning only once for all operators")
        library.impl("mm", mm, "CPU")
    return library
