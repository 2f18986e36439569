"""Compilers are asked for before training starts, in the order in which PyTorch and Triton look for them."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.helpers import mentions
from titanlite.runtime.compilers import missing_for_cpu, missing_for_gpu


def machine(*programs: str) -> Callable[[str], str | None]:
    """`shutil.which` of a machine with these programs."""
    return lambda name: f"/usr/bin/{name}" if name in programs else None


@pytest.fixture
def headers(tmp_path: Path) -> Path:
    (tmp_path / "Python.h").touch()
    return tmp_path


@pytest.mark.parametrize(
    ("environ", "programs", "words"),
    [
        ({}, ["gcc"], None),
        ({}, ["g++", "cc"], ["Triton", "gcc", "clang"]),
        ({"CC": "icx"}, ["gcc"], ["Triton", "CC", "icx"]),
    ],
)
def test_a_gpu_needs_a_c_compiler(
    environ: dict[str, str], programs: list[str], words: list[str] | None, headers: Path
) -> None:
    found = missing_for_gpu(environ, has_triton=True, headers=headers, which=machine(*programs))
    assert found is None if words is None else mentions(str(found), *words)


def test_a_gpu_needs_triton_and_the_headers_of_python(headers: Path, tmp_path: Path) -> None:
    which = machine("gcc")
    found = missing_for_gpu({}, has_triton=False, headers=headers, which=which)
    assert mentions(str(found), "pip install triton")
    found = missing_for_gpu({}, has_triton=True, headers=tmp_path / "none", which=which)
    assert mentions(str(found), tmp_path / "none", "Python.h")


@pytest.mark.parametrize(
    ("environ", "platform", "programs", "words"),
    [
        ({}, "linux", ["g++"], None),
        ({}, "linux", ["clang++"], ["g++", "CXX"]),
        ({"CXX": "icpx"}, "linux", ["g++"], ["icpx", "CXX"]),
    ],
)
def test_a_cpu_needs_a_cpp_compiler(
    environ: dict[str, str], platform: str, programs: list[str], words: list[str] | None
) -> None:
    found = missing_for_cpu(environ, platform=platform, which=machine(*programs))
    assert found is None if words is None else mentions(str(found), "CPU", *words)
