"""GPU memory: settings of the allocator before torch is imported, the pools that tensors come from, and allocator
retries. No GPU is needed."""

import os
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.helpers import mentions
from tests.support.models import plain_step
from titanlite.mesh import build_mesh
from titanlite.metrics.recorder import Memory
from titanlite.models.base import build_on_meta
from titanlite.models.llama3 import Llama3
from titanlite.ops.cpu import CpuKernels
from titanlite.parallelize.fsdp import shard
from titanlite.parallelize.materialize import materialize
from titanlite.parallelize.reductions import AllToAllReduceScatter, ReduceScatter, keeps_reduced_gradients
from titanlite.runtime.allocator import VARIABLES, allocator_settings, use_expandable_segments
from titanlite.runtime.private_torch.fsdp import _param_group
from titanlite.runtime.private_torch.tensors import local_tensor
from titanlite.runtime.private_torch.tracing import fake_process_group
from titanlite.schema import Config, Debug, Optimizer, Parallelism, Training
from titanlite.step import reduces_once
from titanlite.tools.plan.gpu_kernels import GpuKernels

AT_IMPORT_OF_TORCH = """
import os, sys

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            print("PYTORCH_ALLOC_CONF =", os.environ.get("PYTORCH_ALLOC_CONF"), flush=True)
            os._exit(0)

sys.meta_path.insert(0, Finder())
from titanlite.tools.cli import run
run(["train", "debug"])
"""


def test_segments_are_expandable_by_default() -> None:
    environ: dict[str, str] = {}
    use_expandable_segments(environ)
    assert environ == {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    assert allocator_settings(environ) == "expandable_segments:True (PYTORCH_ALLOC_CONF)"


@pytest.mark.parametrize("name", VARIABLES)
@pytest.mark.parametrize("value", ["expandable_segments:False", ""])
def test_settings_of_the_user_stay(name: str, value: str) -> None:
    environ = {name: value}
    use_expandable_segments(environ)
    assert environ == {name: value}
    assert allocator_settings(environ) == f"{value} ({name})"


@pytest.mark.long
def test_train_sets_the_allocator_before_it_imports_torch() -> None:
    environ = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    result = subprocess.run(
        [sys.executable, "-c", AT_IMPORT_OF_TORCH], env=environ, capture_output=True, text=True, check=True
    )
    assert result.stdout == "PYTORCH_ALLOC_CONF = expandable_segments:True\n"


def test_a_warning_when_allocator_retries_grow(caplog: pytest.LogCaptureFixture) -> None:
    watch = Memory(torch.device("cpu"))
    assert watch.retries() == 0
    for step, retries in [(1, 0), (10, 3), (20, 3), (30, 5)]:
        watch.warn(retries, step=step)
    first, second = caplog.messages
    assert mentions(first, 3, "step 10", "training.local_batch_size")
    assert mentions(second, 2, "step 30")


class Allocations(TorchDispatchMode):
    """Streams that each size of `torch.empty` was called on. Streams of CPUs are names only."""

    def __init__(self) -> None:
        super().__init__()
        self.streams: dict[tuple[int, ...], list[Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.empty.memory_format:
            self.streams.setdefault((*args[0],), []).append(torch.cpu.current_stream())
        return func(*args, **(kwargs or {}))


def backward(comm: ReduceScatter) -> Any:
    """Return a layer with reduced gradients."""
    model: Any = nn.Linear(4, 6, bias=False)
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    model.set_custom_reduce_scatter(comm)
    model(torch.ones(1, 4)).sum().backward()
    return model


@pytest.mark.parametrize("shares", [False, True])
def test_gradients_come_from_the_pool_of_activations(shares: bool) -> None:
    with fake_process_group(2), Allocations() as mode:
        model = backward(ReduceScatter(ranks=2, shares=shares))
        compute, reduces = torch.cpu.current_stream(), _param_group(model).comm_ctx.reduce_scatter_stream
    assert compute != reduces
    assert mode.streams[(12,)] == [compute if shares else reduces]


def test_an_input_that_was_not_reduced_does_not_exchange_inputs_and_outputs() -> None:
    """Backward raised between the two allocations. The next one begins with an input again."""
    device, reduces = torch.device("cpu"), torch.cpu.Stream()
    comm = ReduceScatter(ranks=2, shares=True)

    def allocate(size: int, *streams: Any) -> Any:
        with ExitStack() as stack, Allocations() as mode:
            for stream in streams:
                stack.enter_context(torch.cpu.stream(stream))
            comm.allocate((size,), dtype=torch.float32, device=device)
        return mode.streams[(size,)]

    compute, other = torch.cpu.current_stream(), torch.cpu.Stream()
    assert allocate(8) == [compute]
    assert allocate(8) == [compute]
    assert allocate(4, reduces) == [compute]
    assert allocate(8) == [compute]
    assert allocate(8, other) == [other], "an input on another stream"
    assert allocate(4, reduces) == [other]


@pytest.mark.usefixtures("single_process_group")
def test_the_only_rank_copies_no_gradients() -> None:
    allocated: list[int] = []
    for shares in (False, True):
        with Allocations() as mode:
            model = backward(ReduceScatter(ranks=1, shares=shares))
        allocated.append(len(mode.streams[(24,)]))
        assert torch.equal(model.weight.grad.full_tensor(), torch.ones(6, 4))
    assert allocated[0] - allocated[1] == 1


def test_the_input_of_an_awaited_reduction_is_freed_at_once() -> None:
    sizes: list[tuple[int, int]] = []

    class Watched(ReduceScatter):
        def __call__(self, output_tensor: Tensor, input_tensor: Tensor, *args: Any, **kwargs: Any) -> None:
            before = input_tensor.untyped_storage().nbytes()
            super().__call__(output_tensor, input_tensor, *args, **kwargs)
            sizes.append((before, input_tensor.untyped_storage().nbytes()))

    for waits in (False, True):
        with fake_process_group(2):
            backward(Watched(ranks=2, shares=True, waits=waits))
    assert sizes == [(96, 96), (96, 0)]


@pytest.mark.parametrize(
    ("ranks", "batch", "local_batch", "seq_len", "waits", "shares"),
    [
        (8, 16, 2, 8192, True, True),
        (8, 8, 1, 8192, False, True),  # the loss is the peak
        (8, 16, 1, 8192, False, False),  # gradients are there in the forward pass of the second micro-batch
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
            shard(model, Config(training=training), mesh=mesh, kernels=kernels)
            units: list[Any] = [model.head, *model.layers]
            comms: list[Any] = [_param_group(unit)._reduce_scatter_comm for unit in units]
        on_gpu = isinstance(kernels, GpuKernels)
        if on_gpu:
            assert [comm._waits for comm in comms] == [waits, *[False] * len(model.layers)]
            assert [comm._shares for comm in comms] == [shares] * len(units)
        else:
            assert {type(comm) for comm in comms} == {AllToAllReduceScatter}


@pytest.mark.parametrize("axis", ["", "context", "tensor", "expert"])
def test_cpus_gather_beside_compute_where_blocks_communicate_nothing(axis: str) -> None:
    degrees: dict[str, Any] = {f"{axis}_parallel_degree": 2} if axis else {}
    parallelism = Parallelism(**degrees)
    with fake_process_group(4):
        model = build_on_meta(Llama3, Llama3.flavors["debug"])
        mesh = build_mesh(parallelism, world_size=4, device_type="cpu")
        config = Config(parallelism=parallelism, training=Training(global_batch_size=4))
        shard(model, config, mesh=mesh, kernels=CpuKernels())
        units: list[Any] = [model.head, *model.layers]
        assert {_param_group(unit).unshard_async_op for unit in units} == {not axis}  # pyright: ignore[reportOptionalMemberAccess]


@pytest.mark.parametrize(
    ("keeps", "options", "updates"),
    [
        (True, {}, False),
        (False, {}, True),
        (False, {"enable_cpu_offload": True}, False),
        (False, {"dtype": "bfloat16"}, False),
        (True, {"dtype": "bfloat16", "mixed_precision_reduce": "bfloat16"}, False),
        (False, {"global_batch_size": 16}, False),
    ],
)
def test_where_reduced_gradients_last_until_after_backward(keeps: bool, options: Any, updates: bool) -> None:
    training = Training(**{"global_batch_size": 8, "local_batch_size": 1, **options})
    config = Config(training=training, optimizer=Optimizer(in_backward=updates))
    with fake_process_group(8):
        for replicas in (1, 2):
            parallelism = Parallelism(data_parallel_replicate_degree=replicas)
            mesh = build_mesh(parallelism, world_size=8, device_type="cpu")
            assert keeps_reduced_gradients(config, mesh) == keeps
        once = config.model_copy(update={"parallelism": Parallelism(fsdp_reduce_gradients="last")})
        is_kept = keeps or training.global_batch_size == 16
        assert keeps_reduced_gradients(once, mesh) == is_kept, "one reduction a step"
        summed = config.model_copy(update={"debug": Debug(reproducible_layouts=True)})
        assert keeps_reduced_gradients(summed, mesh) == is_kept, "the step adds them"


@pytest.mark.parametrize(
    ("shards", "options", "found"),
    [
        (1, {}, True),
        (2, {}, False),
        (1, {"debug": {"reproducible_layouts": True}}, False),
        (1, {"training": {"enable_cpu_offload": True}}, False),
        (1, {"training": {"mixed_precision_reduce": "bfloat16"}}, False),  # they would be added in bfloat16
        (1, {"training": {"dtype": "bfloat16", "mixed_precision_reduce": "bfloat16"}}, True),
    ],
)
def test_ranks_with_whole_parameters_reduce_once_a_step(shards: int, options: dict[str, Any], found: bool) -> None:
    config = Config.model_validate({**options, "parallelism": {"data_parallel_replicate_degree": 4 // shards}})
    with fake_process_group(4):
        mesh = build_mesh(config.parallelism, world_size=4, device_type="cpu")
        assert reduces_once(config, mesh) == found


@pytest.mark.usefixtures("single_process_group")
def test_a_step_works_after_a_backward_pass_that_raised() -> None:
    """The gradients are those of a step that never failed."""
    training = Training(global_batch_size=2, local_batch_size=2, seq_len=16)
    model = build_on_meta(Llama3, replace(Llama3.flavors["debug"], n_layers=2, dim=48, hidden_dim=64, vocab_size=64))
    mesh = build_mesh(Parallelism(), world_size=1, device_type="cpu")
    shard(model, Config(training=training), mesh=mesh, kernels=CpuKernels())
    materialize(model, device=torch.device("cpu"), dtype=torch.float32, seed=0)
    tokens = torch.arange(32).view(2, 16)
    batch: Any = {"tokens": tokens, "labels": tokens.roll(-1, 1)}
    fails = [False, True, False]

    def gradients() -> Tensor:
        def block_failed(gradient: Tensor) -> None:
            if fails[0]:
                raise RuntimeError("planted")

        handle = model.layers[0].register_full_backward_pre_hook(lambda module, gradients: block_failed(gradients[0]))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        kept: list[Tensor] = []
        optimizer.register_step_pre_hook(
            lambda *_: kept.extend(
                local_tensor(parameter.grad).clone() for parameter in model.parameters() if parameter.grad is not None
            )
        )
        try:
            plain_step(model, optimizer)([batch])
        finally:
            handle.remove()
            optimizer.zero_grad()
            fails.pop(0)
        return torch.cat([tensor.flatten() for tensor in kept])

    before = gradients()
    with pytest.raises(RuntimeError, match="planted"):
        gradients()
    assert torch.equal(gradients(), before)
