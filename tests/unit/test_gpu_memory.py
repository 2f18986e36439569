"""GPU memory: settings of the allocator before torch is imported, the pools that tensors come from, and allocator
retries. No GPU is needed."""

import logging
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

from titanlite.config.schema import Parallelism, Training
from titanlite.cpu.kernels import CpuKernels
from titanlite.metrics.memory_watch import MemoryWatch
from titanlite.models.base import build_on_meta
from titanlite.models.llama3 import Llama3
from titanlite.parallelize.fsdp import shard
from titanlite.parallelize.mesh import build_mesh
from titanlite.plan.gpu_kernels import GpuKernels
from titanlite.runtime.allocator import VARIABLES, allocator_settings, use_expandable_segments
from titanlite.runtime.gradient_memory import share_memory_of_gradients
from titanlite.runtime.private_torch.fsdp import fsdp_param_group, reduce_scatter_of
from titanlite.runtime.private_torch.tracing import fake_process_group

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


@pytest.mark.long
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


class Allocations(TorchDispatchMode):
    """Streams that each size of `torch.empty` was called on. Streams of CPUs are names only."""

    def __init__(self) -> None:
        super().__init__()
        self.streams: dict[tuple[int, ...], list[Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.empty.memory_format:
            self.streams.setdefault((*args[0],), []).append(torch.cpu.current_stream())
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("shares", [False, True])
def test_gradients_come_from_the_pool_of_activations(shares: bool) -> None:
    with fake_process_group(2):
        model: Any = nn.Linear(4, 6, bias=False)
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
        if shares:
            share_memory_of_gradients([model])
        found: list[list[Any]] = []
        for _ in range(2):  # the second backward pass adds to the gradients of the first, and frees its own
            with Allocations() as mode:
                model(torch.ones(1, 4)).sum().backward()
            found.append(mode.streams[(12,)])
        compute, reduces = torch.cpu.current_stream(), fsdp_param_group(model).comm_ctx.reduce_scatter_stream
    assert compute != reduces
    assert found == [[compute if shares else reduces], [reduces]]


@pytest.mark.parametrize(
    ("ranks", "batch", "local_batch", "seq_len", "waits", "shares"),
    [
        (8, 16, 2, 8192, True, True),
        (8, 8, 1, 8192, False, True),  # the loss is the peak
        (16, 32, 2, 8192, False, True),  # more ranks than a node has
        (8, 16, 1, 8192, False, False),  # gradients are there in the forward pass of the second micro-batch
        (2, 2, None, 16384, True, True),
    ],
)
def test_where_backward_waits_and_gradients_share_memory(
    ranks: int, batch: int, local_batch: int | None, seq_len: int, waits: bool, shares: bool
) -> None:
    training = Training(global_batch_size=batch, local_batch_size=local_batch, seq_len=seq_len)
    for kernels in (GpuKernels(), CpuKernels()):
        with fake_process_group(ranks):
            model = build_on_meta(Llama3, Llama3.flavors["debug"])
            mesh = build_mesh(Parallelism(), world_size=ranks, device_type="cpu")
            shard(model, mesh=mesh, kernels=kernels, parallelism=Parallelism(), training=training)
            units: list[Any] = [model.head, *model.layers]
            groups = [fsdp_param_group(unit) for unit in units]
        on_gpu = isinstance(kernels, GpuKernels)
        assert [type(it).__name__ for it in groups] == [
            "_AwaitedUnit" if waits and on_gpu else "FSDPParamGroup",
            *["FSDPParamGroup"] * len(model.layers),
        ]
        assert {type(reduce_scatter_of(it)).__name__ for it in groups} == {
            ("_ReduceScatter" if shares else "DefaultReduceScatter") if on_gpu else "AllToAllReduceScatter"
        }
