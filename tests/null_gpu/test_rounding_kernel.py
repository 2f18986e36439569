"""Rounding on the device: the bits and launches of AdamW's Triton kernel, and factors that stay float32."""

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


SCALE = """
import ctypes, os, tempfile, torch
from titanlite.loss import token_loss
from titanlite.ops import pick_kernels
from titanlite.runtime.private_torch.tensors import scale_in_place
library = ctypes.CDLL(os.environ["LD_PRELOAD"])
hidden, weight = (torch.zeros(*shape, device="cuda", dtype=torch.bfloat16, requires_grad=True)
                  for shape in ((2, 64, 32), (128, 32)))
labels, factor = torch.zeros(2, 64, dtype=torch.int64, device="cuda"), torch.zeros((), device="cuda")
loss = token_loss(hidden, weight, labels_BL=labels, kernels=pick_kernels(torch.device("cuda"))).total
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
gradients = [torch.zeros(1024, 1024, device="cuda", dtype=dtype) for dtype in DTYPES]
library.null_gpu_start(None)
torch.autograd.grad(loss, (hidden, weight), factor)
before = torch.cuda.memory_allocated()
torch.cuda.reset_peak_memory_stats()
scale_in_place(gradients, factor)
print(torch.cuda.max_memory_allocated() - before)
with tempfile.NamedTemporaryFile("r") as file:
    library.null_gpu_stop(file.name.encode())
    print(*(line for line in file if line.startswith("kernel")), sep="")
"""


def test_a_factor_of_bfloat16_gradients_is_not_rounded(run_python: RunPython) -> None:
    """Products of float and float, then rounded: 2 of the loss's gradients, and 3 of gradients to clip."""
    memory, *kernels = run_python("-c", SCALE).stdout.splitlines()
    assert memory == "0"
    products = [line for line in kernels if "MulFunctor" in line or "multiplies" in line]
    counts = [int(line.split("\t")[2]) for line in products]
    assert sum(counts) == 5
    assert all("BinaryFunctorIfff" in line or "ScalarTensorFunctorIf" in line for line in products), products
