"""Compilers that torch.compile and Triton call on this machine."""

import os
import shutil
import sys
import sysconfig
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path

import torch

from titanlite.runtime.errors import UserError

Which = Callable[[str], str | None]
"""Finds a program: `shutil.which`."""


def check_compiler(device: torch.device) -> None:
    """Check that torch.compile will find the compilers that it needs.

    Raises:
        UserError: a compiler is not installed.
    """
    if device.type == "cuda":
        headers = Path(sysconfig.get_paths(scheme=_header_scheme())["include"])
        problem = missing_for_gpu(os.environ, has_triton=find_spec("triton") is not None, headers=headers)
    else:
        problem = missing_for_cpu(os.environ, platform=sys.platform)
    if problem:
        raise UserError(problem)


def missing_for_gpu(
    environ: Mapping[str, str], *, has_triton: bool, headers: Path, which: Which = shutil.which
) -> str | None:
    """Return what is missing to compile for a GPU; None if nothing is.

    Triton generates the GPU's code by itself, and a C compiler builds the function of each kernel that launches it.

    Args:
        headers: folder of Python.h.
    """
    if not has_triton:
        return "compiling for a GPU needs triton, which is not installed: pip install triton"
    # As triton/runtime/build.py: CC, or else gcc, or else clang.
    compiler = environ.get("CC")
    if compiler is not None and which(compiler) is None:
        return (
            f"Triton needs a C compiler, and CC names {compiler}, which is not there: set CC to a compiler, or unset it"
        )
    if compiler is None and which("gcc") is None and which("clang") is None:
        return (
            "Triton needs a C compiler, and there is neither gcc nor clang: install one (Debian and Ubuntu: apt "
            "install gcc), or set CC"
        )
    if not (headers / "Python.h").is_file():
        return (
            f"Triton compiles with Python's headers, and {headers} has no Python.h: install them (Debian and Ubuntu: "
            f"apt install python{sys.version_info.major}.{sys.version_info.minor}-dev)"
        )
    return None


def missing_for_cpu(environ: Mapping[str, str], *, platform: str, which: Which = shutil.which) -> str | None:
    """Return what is missing to compile for the CPU; None if nothing is."""
    # As torch._inductor.config.cpp.cxx: one name, and no other is tried.
    compiler = environ.get("CXX", "clang++" if platform == "darwin" else "g++")
    if which(compiler) is not None or environ.get("TORCH_INDUCTOR_INSTALL_GXX"):
        return None
    chosen = "named by CXX in the environment" if "CXX" in environ else "CXX in the environment selects another"
    return f"compiling for the CPU needs a C++ compiler, and there is no {compiler} ({chosen})"


def _header_scheme() -> str:
    """Return the installation scheme whose headers Triton includes."""
    scheme = sysconfig.get_default_scheme()
    return "posix_prefix" if scheme == "posix_local" else scheme  # Debian's own Python
