"""GPU memory: settings of the allocator before torch is imported, and allocator retries. No GPU is needed."""

import logging
import os
import subprocess
import sys

import pytest
import torch

from titanlite.metrics.memory_watch import MemoryWatch
from titanlite.runtime.allocator import VARIABLES, allocator_settings, use_expandable_segments

AT_IMPORT_OF_TORCH = """
import os, sys

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            print("PYTORCH_ALLOC_CONF =", os.environ.get("PYTORCH_ALLOC_CONF"), flush=True)
            os._exit(0)

sys.meta_path.insert(0, Finder())
from titanlite.cli import run
run(["train", "debug"])
"""


def test_segments_are_expandable_by_default() -> None:
    environ: dict[str, str] = {}
    use_expandable_segments(environ)
    assert environ == {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    assert allocator_settings(environ) == "expandable_segments:True (PYTORCH_ALLOC_CONF)"


@pytest.mark.parametrize("name", VARIABLES)
@pytest.mark.parametrize("value", ["expandable_segments:False", "max_split_size_mb:512", ""])
def test_settings_of_the_user_stay(name: str, value: str) -> None:
    environ = {name: value}
    use_expandable_segments(environ)
    assert environ == {name: value}
    assert allocator_settings(environ) == f"{value} ({name})"


def test_the_first_variable_counts_as_in_pytorch() -> None:
    environ = {"PYTORCH_ALLOC_CONF": "expandable_segments:True", "PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:512"}
    assert allocator_settings(environ) == "max_split_size_mb:512 (PYTORCH_CUDA_ALLOC_CONF)"
    assert allocator_settings({}) == "PyTorch's defaults"


def test_train_sets_the_allocator_before_it_imports_torch() -> None:
    environ = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    result = subprocess.run(
        [sys.executable, "-c", AT_IMPORT_OF_TORCH], env=environ, capture_output=True, text=True, check=True
    )
    assert result.stdout == "PYTORCH_ALLOC_CONF = expandable_segments:True\n"


def test_a_warning_when_allocator_retries_grow(caplog: pytest.LogCaptureFixture) -> None:
    watch = MemoryWatch(torch.device("cpu"))
    assert watch.retries() == 0
    with caplog.at_level(logging.WARNING, "titanlite"), pytest.MonkeyPatch.context() as patch:
        patch.setattr(logging.getLogger("titanlite"), "propagate", True)
        for step, retries in [(1, 0), (10, 3), (20, 3), (30, 5)]:
            watch.warn(retries, step=step)
    assert [record.getMessage().partition(":")[2].partition(":")[0] for record in caplog.records] == [
        " 3 allocator retries up to step 10",
        " 2 allocator retries up to step 30",
    ]
    assert "training.local_batch_size" in caplog.text
