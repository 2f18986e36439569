"""AdamW's Triton kernel: the bits of its formula in Triton's interpreter, and one launch a tensor on the device."""

import json
from pathlib import Path

import pytest

from tests.null_gpu.conftest import RunPython

pytestmark = pytest.mark.null_gpu

FORMULA = str(Path(__file__).parent / "rounding_by_formula.py")

STEP = """
import ctypes, json, os, tempfile, torch
from torch import nn
from titanlite.schema import Optimizer
from titanlite.optim import build_optimizer, update
library = ctypes.CDLL(os.environ["LD_PRELOAD"])
model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(8))).to("cuda", torch.bfloat16)
optimizer = build_optimizer(model, Optimizer(state_dtype="bfloat16"), seed=0)
skip = torch.zeros((), dtype=torch.bool, device="cuda")
for parameter in model.parameters():
    parameter.grad = torch.zeros_like(parameter)
for _ in range(2):
    update(optimizer, skip=skip)
before = torch.cuda.memory_allocated()
torch.cuda.reset_peak_memory_stats()
torch.cuda.set_sync_debug_mode("error")
library.null_gpu_start(None)
update(optimizer, skip=skip)
with tempfile.NamedTemporaryFile("r") as file:
    library.null_gpu_stop(file.name.encode())
    events = [line.split("\\t") for line in file]
counted = {detail: int(count) for what, detail, count, *_ in events if what == "kernel"}
print(json.dumps([counted.get("_update", 0), sum(counted.values()), torch.cuda.max_memory_allocated() - before]))
"""


def test_it_computes_the_formula_and_the_same_random_bits(run_python: RunPython) -> None:
    found = json.loads(run_python(FORMULA, TRITON_INTERPRET="1").stdout.splitlines()[-1])
    assert found == [{"skipped": [0, 0, 0, 0], "taken": [0, 0, 0]}] * 6


def test_a_step_launches_one_kernel_for_each_tensor(run_python: RunPython) -> None:
    """16 tensors of two groups. What computes the scalars of a group's tensors is beside that."""
    updates, launches, memory = json.loads(run_python("-c", STEP).stdout.splitlines()[-1])
    assert updates == 16
    assert launches <= 16 + 2 * 12 + 1
    assert memory <= 64 * 512  # scalars; a slice of the largest tensor would take 2**20 * 4 bytes
