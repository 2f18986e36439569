"""Compilers are asked for before training starts, in the order in which PyTorch and Triton look for them."""

from collections.abc import Callable
from pathlib import Path

import pytest

from titanlite.runtime.compilers import missing_for_cpu, missing_for_gpu


def machine(*programs: str) -> Callable[[str], str | None]:
    """`shutil.which` of a machine with these programs."""
    return lambda name: f"/usr/bin/{name}" if name in programs else None


@pytest.fixture
def headers(tmp_path: Path) -> Path:
    (tmp_path / "Python.h").touch()
    return tmp_path


@pytest.mark.parametrize(
    ("environ", "programs", "problem"),
    [
        ({}, ["gcc"], None),
        ({}, ["g++", "cc"], "Triton needs a C compiler, and there is neither gcc nor clang: install one"),
        ({"CC": "icx"}, ["gcc"], "Triton needs a C compiler, and CC names icx, which is not there: set CC to"),
    ],
)
def test_a_gpu_needs_a_c_compiler(
    environ: dict[str, str], programs: list[str], problem: str | None, headers: Path
) -> None:
    found = missing_for_gpu(environ, has_triton=True, headers=headers, which=machine(*programs))
    assert (found is None) if problem is None else (found is not None and found.startswith(problem))


def test_a_gpu_needs_triton_and_the_headers_of_python(headers: Path, tmp_path: Path) -> None:
    which = machine("gcc")
    assert missing_for_gpu({}, has_triton=False, headers=headers, which=which) == (
        "compiling for a GPU needs triton, which is not installed: pip install triton"
    )
    found = missing_for_gpu({}, has_triton=True, headers=tmp_path / "none", which=which)
    assert found is not None
    assert found.startswith(f"Triton compiles with Python's headers, and {tmp_path / 'none'} has no Python.h")


@pytest.mark.parametrize(
    ("environ", "platform", "programs", "problem"),
    [
        ({}, "linux", ["g++"], None),
        ({}, "linux", ["clang++"], "there is no g++ (CXX in the environment selects another)"),
        ({"CXX": "icpx"}, "linux", ["g++"], "there is no icpx (named by CXX in the environment)"),
    ],
)
def test_a_cpu_needs_a_cpp_compiler(
    environ: dict[str, str], platform: str, programs: list[str], problem: str | None
) -> None:
    found = missing_for_cpu(environ, platform=platform, which=machine(*programs))
    assert found == (None if problem is None else f"compiling for the CPU needs a C++ compiler, and {problem}")
