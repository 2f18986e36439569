"""First lines of a run."""

import pytest
import torch

from tests.support.models import SMALL, built
from titanlite.metrics.run_summary import types_of
from titanlite.ops.cpu import CpuKernels
from titanlite.ops.kernels import Kernels, set_kernels


@pytest.mark.parametrize(
    ("dtype", "kernels", "words"),
    [
        (torch.bfloat16, CpuKernels(hardware_bfloat16=False), "bfloat16 (multiplied in float32)"),
        (torch.float16, CpuKernels(hardware_bfloat16=True), "float16 (multiplied in float32)"),
        (torch.bfloat16, CpuKernels(hardware_bfloat16=True), "bfloat16"),
        (torch.float32, CpuKernels(hardware_bfloat16=False), "float32"),
        (torch.bfloat16, Kernels(), "bfloat16"),
    ],
)
def test_the_compute_type_says_what_is_multiplied(dtype: torch.dtype, kernels: Kernels, words: str) -> None:
    model = built(SMALL).to(dtype)
    set_kernels(model, kernels)
    assert types_of(model, torch.optim.SGD(model.parameters()))["compute"] == words
