"""The stand-in for a GPU, built for the PyTorch of this environment."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.null_gpu.build import build, environment, has_cuda_build

HERE = Path(__file__).parent
ROOT = HERE.parents[1]

RunPython = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="session")
def null_gpu(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Environment variables of a process that sees the stand-in as its GPU."""
    if not has_cuda_build() or not shutil.which("gcc"):
        pytest.skip("needs the CUDA build of PyTorch and gcc: ./run_tests.sh null_gpu")
    folder = tmp_path_factory.mktemp("null_gpu")
    build(folder)
    return {**os.environ, **environment(folder), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


@pytest.fixture
def run_python(null_gpu: dict[str, str], tmp_path: Path) -> RunPython:
    """Run Python on the stand-in, in an empty folder, and check that it succeeds."""

    def run(
        *words: str, timeout: float = 600, succeeds: bool = True, **environ: str
    ) -> subprocess.CompletedProcess[str]:
        result = subprocess.run(
            [sys.executable, *words], env={**null_gpu, **environ}, cwd=tmp_path, capture_output=True, text=True,
            timeout=timeout,
        )  # fmt: skip
        assert not succeeds or result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
        return result

    return run
