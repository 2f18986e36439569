"""PyTorch's private API does what titanlite/runtime/private_torch/ relies on."""

import copyreg
import ctypes
import io
import math
import pickle
import subprocess
import sys
import warnings
import weakref
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch._functorch import config as functorch_config
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import TensorProperties
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std, start_processes
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.nn.attention import SDPBackend
from torch.testing._internal.two_tensor import TwoTensor

from tests.support import packed_kernel
from tests.support.helpers import world
from tests.support.operators import Operators
from titanlite.checkpoint.dcp_read import unpickle_metadata
from titanlite.parallelize.reductions import Reductions
from titanlite.runtime.private_torch.attention import (
    cpu_attention,
    cpu_attention_backward,
    packed_attention,
    packed_attention_backward,
)
from titanlite.runtime.private_torch.checkpoint import (
    MemoryFormat,
    StorageInfo,
    StoredProperties,
    forget_cached_plans,
    has_cached_plan,
    pickle_metadata,
    set_plan_cache_key,
)
from titanlite.runtime.private_torch.compiler import (
    compile_seconds,
    compiled_graphs,
    mark_dynamic,
    without_autograd_cache,
)
from titanlite.runtime.private_torch.elastic import has_lost_cuda, read_log_level, start_workers_by
from titanlite.runtime.private_torch.fsdp import (
    _param_group,
    before_gathering,
    gather_asynchronously,
    gather_in_place,
    gather_local_parts,
    mixed_precision,
    observe_fsdp,
    release_all_reduce_input,
    sharded_parameters,
    unit_of,
)
from titanlite.runtime.private_torch.process_groups import (
    connect_to_store,
    count_collectives,
    flatten_axes,
    has_open_run,
    join_meshes,
    naming_open_run,
    recent_collectives,
    run_on_all_ranks,
    run_on_rank_0,
    send_rows,
    set_timeouts,
    unflatten_axis,
    wait_for_rows,
)
from titanlite.runtime.private_torch.tensors import (
    ATTENTION_OPERATORS,
    LocalAdamW,
    add_in_place,
    call_after_backward,
    call_pre_hooks,
    chosen_attention,
    dump_memory_snapshot,
    factor_of,
    foreach_norms,
    fused_adamw_,
    has_hardware_bfloat16,
    has_hooks,
    has_saved_tensor_hooks,
    is_in_backward,
    local_tensor,
    part_of,
    reads_found_inf,
    record_memory_history,
    reshape_result,
    scale_in_place,
    softmax_gradient,
    version_of,
    wrapped_tensors,
)
from titanlite.runtime.private_torch.tracing import (
    FakeTensor,
    FakeTensorMode,
    ValueNeeded,
    changed_arguments,
    fake_process_group,
    is_mutating,
    propagate_shardings_without_modes,
    run_random_operators_plainly,
    unboxed_group,
    without_fake_tensors,
)


def test_wrapped_tensors() -> None:
    first, second = torch.ones(2), torch.zeros(2)
    assert wrapped_tensors(first) == {}
    found = wrapped_tensors(TwoTensor(first, second))
    assert list(found) == ["a", "b"]
    assert found["a"] is first
    assert found["b"] is second


def test_changes_in_place_are_counted() -> None:
    tensor = torch.ones(2)
    before = version_of(tensor)
    tensor.add_(1)
    assert version_of(tensor) == before + 1
    with torch.inference_mode():
        assert version_of(torch.ones(2).add_(1)) == 0


def test_foreach_norms() -> None:
    tensors = [torch.tensor([3.0, 4.0], dtype=torch.bfloat16), torch.full((2, 8), 0.5)]
    found = foreach_norms(tensors, dtype=torch.float32)
    assert [norm.dtype for norm in found] == [torch.float32] * 2
    assert torch.stack(found).tolist() == [5.0, 2.0]


def test_add_in_place() -> None:
    tensors = [torch.tensor(1.0), torch.tensor(2.0)]
    add_in_place(tensors, torch.tensor(0.5))
    assert torch.stack(tensors).tolist() == [1.5, 2.5]


def test_only_fused_optimizers_read_found_inf() -> None:
    weight = nn.Parameter(torch.ones(4))
    fused = torch.optim.AdamW([weight], fused=True)
    assert reads_found_inf(fused)
    assert not reads_found_inf(torch.optim.AdamW([weight]))
    weight.grad = torch.ones(4)
    fused.grad_scale, fused.found_inf = None, torch.ones(())  # pyright: ignore[reportAttributeAccessIssue]
    fused.step()
    assert torch.equal(weight, torch.ones(4))


def test_fused_adamw() -> None:
    """Two steps are those of the public optimizer; one with `found_inf` changes nothing."""
    generator = torch.Generator().manual_seed(0)
    theirs = nn.Parameter(torch.randn(50, generator=generator))
    ours = [theirs.detach().clone(), torch.zeros(50), torch.zeros(50)]
    optimizer = torch.optim.AdamW([theirs], lr=0.1, betas=(0.8, 0.9), eps=1e-5, weight_decay=0.2, fused=True)
    for step in (1.0, 2.0):
        theirs.grad = torch.randn(50, generator=generator)
        optimizer.step()
        weight, mean, square = ours
        for found_inf in (torch.ones(()), None):
            before = [tensor.clone() for tensor in ours]
            fused_adamw_(
                weight, theirs.grad.clone(), mean, square, step=torch.tensor(step), lr=0.1, betas=(0.8, 0.9), eps=1e-5,
                weight_decay=0.2, found_inf=found_inf,
            )  # fmt: skip
            assert all(map(torch.equal, before, ours)) == (found_inf is not None)
    state = optimizer.state[theirs]
    assert all(map(torch.equal, ours, (theirs, state["exp_avg"], state["exp_avg_sq"])))


@pytest.mark.usefixtures("single_process_group")
def test_adamw_updates_local_parts() -> None:
    """Two steps on a DTensor have the bits of PyTorch's on a plain tensor, and no operator sees a DTensor."""
    values, gradients = torch.randn(2, 3, 5), torch.randn(2, 3, 5)
    plain = nn.Parameter(values[0].clone())
    mesh = init_device_mesh("cpu", (1,))
    sharded = nn.Parameter(distribute_tensor(values[0].clone(), mesh, [Shard(0)]))
    options: dict[str, Any] = {"lr": 0.1, "weight_decay": 0.2, "fused": True}
    theirs, ours = torch.optim.AdamW([plain], **options), LocalAdamW([sharded], **options)
    for gradient in gradients:
        plain.grad, sharded.grad = gradient.clone(), DTensor.from_local(gradient.clone(), mesh, [Shard(0)])
        theirs.step()
        with Operators() as seen:
            ours.step()
        updated = [tensor for name, (tensors, *_) in seen.calls if "_fused_adamw_" in str(name) for tensor in tensors]
        assert [type(tensor) for tensor in updated] == [Tensor]
    assert isinstance(sharded, DTensor)
    assert torch.equal(plain, sharded.to_local())


def test_a_part_of_an_optimizer_has_its_states_and_a_copy_of_its_options() -> None:
    first, second = (nn.Parameter(torch.ones(2)) for _ in range(2))
    whole = LocalAdamW([{"params": [first, second], "lr": 0.5}], fused=True, weight_decay=0.0)
    called: list[Any] = []
    whole.register_step_pre_hook(lambda optimizer, *_: called.append(optimizer))
    call_pre_hooks(whole)
    assert called == [whole]
    part = part_of(whole, [[second]])
    whole.param_groups[0]["lr"] = 0.0
    first.grad, second.grad = torch.ones(2), torch.ones(2)
    part.step()
    assert called == [whole], "the part has no hooks"
    assert whole.state.keys() == {second}
    assert torch.equal(first, torch.ones(2))
    assert torch.allclose(second, torch.full((2,), 0.5))
    part.zero_grad()
    assert first.grad is not None
    assert second.grad is None


@pytest.mark.usefixtures("single_process_group")
@pytest.mark.parametrize("prefetches", [False, True])
def test_before_an_fsdp_unit_gathers_its_parameters(prefetches: bool) -> None:
    """The call comes before FSDP reads them: what it writes is used."""
    model: Any = small_model()
    if prefetches:
        model[0].set_modules_to_forward_prefetch([model[1]])
    called = []

    def write(number: int) -> None:
        called.append(number)
        for parameter in sharded_parameters(model[number]):
            local_tensor(parameter).detach().fill_(number + 1)

    for number in (0, 1):
        before_gathering(model[number], lambda number=number: write(number))
    x = torch.ones(1, 4)
    assert torch.equal(model(x), torch.full((1, 4), 32.0))
    assert called == ([0, 1, 1] if prefetches else [0, 1])


class Reduced:
    """Stands for FSDP's record of an all-reduce."""

    all_reduce_input: Tensor = torch.ones(2)


@pytest.mark.usefixtures("single_process_group")
def test_param_groups_of_fsdp() -> None:
    model: Any = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    fully_shard(model[0], mp_policy=(policy := MixedPrecisionPolicy(param_dtype=torch.bfloat16)))
    fully_shard(model)
    assert [mixed_precision(module) for module in (model, model[0])] == [MixedPrecisionPolicy(), policy]
    assert unit_of(model[0]) not in (None, unit_of(model))
    groups = [_param_group(module) for module in (model, model[0])]
    assert [sharded_parameters(module) for module in (model, model[0])] == [
        [*model[1].parameters()],
        [*model[0].parameters()],
    ]
    root: Any = small_model()
    assert sharded_parameters(root) == [], "all of its parameters are in other units"
    assert (unit_of(root), mixed_precision(root)) == (None, None)
    assert groups[0]._all_reduce_state is None
    release_all_reduce_input(model)
    groups[0]._all_reduce_state = Reduced()
    release_all_reduce_input(model)
    assert groups[0]._all_reduce_state is None


def test_without_autograd_cache() -> None:
    before = functorch_config.enable_autograd_cache
    with without_autograd_cache():
        assert functorch_config.enable_autograd_cache is False
    assert functorch_config.enable_autograd_cache == before


def checkpoint(folder: Path) -> Any:
    """Save a checkpoint by plain DCP in this process, and return its metadata."""
    dcp.save({"a": torch.ones(3)}, storage_writer=dcp.FileSystemWriter(folder), no_dist=True)
    return pickle.loads((folder / ".metadata").read_bytes())


def test_classes_of_a_checkpoints_metadata(tmp_path: Path) -> None:
    metadata = checkpoint(tmp_path)
    [info] = metadata.storage_data.values()
    assert type(info) is StorageInfo
    assert StorageInfo("file", 1, 2) == StorageInfo(relative_path="file", offset=1, length=2)
    assert (info.offset, info.transform_descriptors) == (0, None)
    properties = metadata.state_dict_metadata["a"].properties.__getstate__()
    assert [part for part in properties if isinstance(part, MemoryFormat)] == [MemoryFormat.TORCH_CONTIGUOUS_FORMAT]


def test_metadata_of_all_releases(tmp_path: Path) -> None:
    """Torch 2.15 adds strides to the properties of a tensor; older releases read the five fields before them only."""
    metadata = checkpoint(tmp_path)
    properties = metadata.state_dict_metadata["a"].properties
    of_2_15 = (*properties.__getstate__()[:5], (1,))
    pickler = pickle.Pickler(stream := io.BytesIO())
    pickler.dispatch_table = copyreg.dispatch_table | {TensorProperties: lambda _: (TensorProperties, (), of_2_15)}
    pickler.dump(metadata)
    found: Any = unpickle_metadata(stream.getvalue(), "a checkpoint of 2.15").state_dict_metadata["a"]
    read = found.properties
    assert type(read) is StoredProperties
    assert (read.dtype, read.layout, read.memory_format) == (torch.float32, torch.strided, torch.contiguous_format)
    states: list[tuple[Any, ...]] = []

    class Recorder(TensorProperties):
        def __setstate__(self, state: tuple[Any, ...]) -> None:
            states.append(state)

    class Unpickler(pickle.Unpickler):
        def find_class(self, module_name: str, global_name: str) -> Any:
            return Recorder if global_name == "TensorProperties" else super().find_class(module_name, global_name)

    pickled = pickle_metadata(metadata)
    Unpickler(io.BytesIO(pickled)).load()
    assert states == [of_2_15[:5]]
    again = pickle.loads(pickled)
    assert again.storage_data == metadata.storage_data
    assert again.state_dict_metadata["a"].chunks == metadata.state_dict_metadata["a"].chunks
    assert again.state_dict_metadata["a"].properties.__getstate__()[:5] == of_2_15[:5]


@pytest.mark.usefixtures("single_process_group")
def test_work_on_ranks() -> None:
    group: Any = dist.group.WORLD
    assert run_on_rank_0(group, lambda: 3) == 3
    assert run_on_all_ranks(group, lambda: 3, sum) == 3
    error = ValueError("of a rank")

    def fail() -> None:
        raise error

    for run in (lambda: run_on_rank_0(group, fail), lambda: run_on_all_ranks(group, fail, len)):
        with pytest.raises(CheckpointException) as raised:
            run()
        assert repr(raised.value.failures[0][0]) == repr(error)


@pytest.mark.usefixtures("single_process_group")
def test_cached_plans(tmp_path: Path) -> None:
    planner = DefaultSavePlanner(enable_plan_caching=True)
    set_plan_cache_key(planner, "mine")
    assert not has_cached_plan("mine")
    dcp.save({"a": torch.ones(3)}, storage_writer=dcp.FileSystemWriter(tmp_path), planner=planner)
    assert has_cached_plan("mine")
    forget_cached_plans("mine")
    caches = [cache for name, cache in vars(dcp.planner.SavePlanner).items() if name.startswith("_cached_")]
    assert len(caches) >= 5
    assert not [cache for cache in caches if "mine" in cache]


@pytest.mark.long
def test_counters_of_the_compiler() -> None:
    def double(x: Tensor) -> Tensor:
        return x * 2

    graphs, seconds = compiled_graphs(), compile_seconds()
    compiled = torch.compile(double, backend="eager", dynamic=False)
    compiled(torch.ones(2))
    assert compiled_graphs() == graphs + 1
    assert compile_seconds() > seconds
    compiled(torch.ones(3))
    assert compiled_graphs() == graphs + 2


def test_fake_tensors() -> None:
    with FakeTensorMode(allow_non_fake_inputs=True) as fakes:
        fake = torch.zeros(3, 2)
        assert type(fake) is FakeTensor
        assert fake.fake_mode is fakes
        assert fake.untyped_storage().nbytes() == 24
        with without_fake_tensors():
            assert type(torch.zeros(2)) is Tensor
        for needs_values, operator in ((Tensor.item, "_local_scalar_dense"), (torch.nonzero, "nonzero")):
            with pytest.raises(ValueNeeded) as raised:
                needs_values(fake[0, 0])
            assert operator in str(raised.value.func)


def test_shardings_are_propagated_outside_of_modes() -> None:
    """DTensor makes a tensor of the global shape, 64, to learn the result's shape; the local part has 8 elements."""

    def shapes_made(operator: Callable[[Tensor], Tensor]) -> set[torch.Size]:
        with FakeTensorMode(), LocalOperators() as mode:
            operator(DTensor.from_local(torch.zeros(8), mesh, [Shard(0)]))
        assert mode.calls
        return {argument.shape for _, arguments in mode.calls for argument in arguments if type(argument) is FakeTensor}

    with fake_process_group(8):
        mesh = init_device_mesh("cpu", (8,))
        _clear_sharding_prop_cache()
        with propagate_shardings_without_modes():
            assert torch.Size([64]) not in shapes_made(torch.Tensor.cos)
        assert torch.Size([64]) in shapes_made(torch.Tensor.sin)


def test_hooks_of_saved_tensors_are_seen() -> None:
    assert not has_saved_tensor_hooks()
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
        assert has_saved_tensor_hooks()
    assert not has_saved_tensor_hooks()


def test_is_in_backward() -> None:
    found = []
    weight = torch.ones(2, requires_grad=True)
    weight.register_hook(lambda _: found.append(is_in_backward()))
    assert not is_in_backward()
    weight.sum().backward()
    assert found == [True]
    assert not is_in_backward()


class LocalOperators(Operators):
    """Records operators on plain fake tensors: for a DTensor, on its local part."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(cls is not FakeTensor for cls in types):
            return NotImplemented
        return super().__torch_dispatch__(func, types, args, kwargs)


@pytest.mark.usefixtures("single_process_group")
def test_operators_of_a_dispatch_mode() -> None:
    tensor = torch.ones(2)
    with Operators() as mode:
        tensor.add_(1)
        torch.add(tensor, 1)
        dist.all_reduce(tensor)
    in_place, out_of_place, (all_reduce, arguments) = mode.calls
    assert is_mutating(in_place[0])
    assert not is_mutating(out_of_place[0])
    assert str(all_reduce.overloadpacket) == "c10d.allreduce_"
    [group] = [group for argument in arguments if (group := unboxed_group(argument)) is not None]
    assert dist.group.WORLD is not None
    assert group.group_name == dist.group.WORLD.group_name


def test_what_operators_on_lists_change() -> None:
    weights, gradients, means, squares = ([torch.ones(2), torch.ones(3)] for _ in range(4))
    steps = [torch.ones(()), torch.ones(())]
    with Operators() as mode:
        torch._foreach_mul_(gradients, 2.0)
        torch._fused_adamw_(
            weights, gradients, means, squares, [], steps, lr=0.1, beta1=0.9, beta2=0.95,
            weight_decay=0.1, eps=1e-8, amsgrad=False, maximize=False,
        )  # fmt: skip
    (multiply, of_multiply), (update, of_update) = mode.calls
    assert changed_arguments(multiply, of_multiply, {}) == [gradients]
    assert changed_arguments(update, of_update, {}) == [weights, means, squares, []]
    scaled = {"grad_scale": torch.ones(())}
    assert changed_arguments(update, of_update, scaled) == [weights, gradients, means, squares, []]


# Tensors, modules and operators


def test_scale_in_place() -> None:
    tensors = [torch.ones(2), torch.full((3,), 2.0)]
    scale_in_place(tensors, torch.tensor(0.5))
    assert [tensor.tolist() for tensor in tensors] == [[0.5, 0.5], [1.0, 1.0, 1.0]]
    x, factor = torch.randn(1000, generator=torch.Generator().manual_seed(0)).bfloat16(), torch.tensor(1 / 3)
    assert not torch.equal(x * factor.bfloat16(), expected := (x.float() * factor).bfloat16())
    scale_in_place([x], factor)
    assert torch.equal(x, expected), "the factor is not rounded to bfloat16"
    assert factor_of(x, factor) is factor, "CPUs do not round it"


def test_softmax_gradient() -> None:
    x, upstream = torch.randn(3, 5, requires_grad=True), torch.randn(3, 5)
    weights = x.softmax(dim=-1)
    [expected] = torch.autograd.grad(weights, x, upstream)
    torch.testing.assert_close(softmax_gradient(upstream, weights.detach()), expected)


def test_chosen_attention() -> None:
    q, k = torch.ones(1, 4, 8, 16), torch.ones(1, 2, 8, 16)
    assert chosen_attention(q, k, k, None) == SDPBackend.FLASH_ATTENTION.value
    mask = torch.zeros(1, 1, q.shape[2], k.shape[2], requires_grad=True)
    assert chosen_attention(q, k, k, mask) == SDPBackend.MATH.value, "no fused kernel has the gradient of a mask"


def test_attention_on_a_cpu_is_one_of_the_attention_operators() -> None:
    q = torch.randn(1, 2, 8, 16)
    with Operators() as mode:
        nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
    assert len({func for func, _ in mode.calls} & ATTENTION_OPERATORS) == 1


def gradients_by_formula(q: Tensor, v: Tensor, upstream: Tensor) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """Output, log-sum-exp and gradients of causal attention of q to itself, with a scale of 0.5."""
    scores = (q @ q.mT * 0.5).masked_fill(torch.ones(8, 8, dtype=torch.bool).triu(1), -torch.inf)
    out = scores.softmax(-1) @ v
    return out, scores.logsumexp(-1), torch.autograd.grad(out, (q, v), upstream)


def test_cpu_attention_and_its_backward() -> None:
    q, v, upstream = (torch.randn(1, 2, 8, 16, requires_grad=requires_grad) for requires_grad in (True, True, False))
    out, lse, (d_q, d_v) = gradients_by_formula(q, v, upstream)
    tensors = [tensor.detach() for tensor in (q, q, v)]
    for mask in (None, torch.full((1, 1, 8, 8), -torch.inf).triu(1)):
        found, found_lse = cpu_attention(*tensors, mask=mask, scale=0.5)
        torch.testing.assert_close((found, found_lse), (out, lse))
        options: Any = {"out_BNLH": found, "mask": mask, "scale": 0.5}
        of_q, of_k, of_v = cpu_attention_backward(upstream, *tensors, lse_BNL=found_lse, **options)
        torch.testing.assert_close((of_q + of_k, of_v), (d_q, d_v))
        smaller = cpu_attention_backward(upstream, *tensors, lse_BNL=found_lse + 1, **options)[2]
        torch.testing.assert_close(smaller, of_v / math.e)  # weights are exp(score - lse)


def test_packed_attention_and_its_backward() -> None:
    q, v, upstream = (torch.randn(2, 8, 16, requires_grad=requires_grad) for requires_grad in (True, True, False))
    out, lse, (d_q, d_v) = gradients_by_formula(q, v, upstream)
    tensors = [tensor.detach().transpose(0, 1) for tensor in (upstream, q, q, v, out)]
    offsets = torch.tensor([0, 8], dtype=torch.int32)
    options: Any = {"offsets": (offsets, offsets), "longest": (8, 8), "sides": (-1, 0), "scale": 0.5}
    with packed_kernel.on_cpu():
        q_TNH, k_TNH, v_TNH = tensors[1:4]
        found = packed_attention(q_TNH, k_TNH, v_TNH, **options)
        of_q, of_k, of_v = packed_attention_backward(*tensors, lse_NT=lse.detach(), **options)
    torch.testing.assert_close(found, (tensors[4], lse.detach()))
    torch.testing.assert_close([gradient.transpose(0, 1) for gradient in (of_q + of_k, of_v)], [d_q, d_v])


def test_hardware_bfloat16_is_what_the_kernel_reports() -> None:
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.exists():
        pytest.skip("needs Linux")
    flags = cpuinfo.read_text()
    assert has_hardware_bfloat16() is ("avx512_bf16" in flags or "amx_tile" in flags)


# FSDP units


def small_model() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    return model


@pytest.mark.usefixtures("single_process_group")
@pytest.mark.parametrize("is_alone", [True, False])
def test_cpus_gather_ahead_unless_blocks_communicate(is_alone: bool) -> None:
    model: Any = small_model()
    reductions = Reductions(on_gpu=False, keeps_gradients=True, overlaps=is_alone, awaited=None, reduce=None)
    reductions.apply([*model], shard_degree=2)
    group: Any = _param_group(model[0])
    assert group.unshard_async_op == is_alone


@pytest.mark.usefixtures("single_process_group")
def test_gathering_in_place_copies_nothing_and_follows_the_weights() -> None:
    model: Any = small_model()
    gather_in_place(model)
    for unit in (*model, model):
        gather_asynchronously(unit)
    memory = local_tensor(model[0].weight).data_ptr()
    gathered: list[int] = []
    model[0].register_forward_pre_hook(lambda module, _: gathered.append(module.weight.data_ptr()))
    x = torch.ones(2, 4)
    before = model(x).detach().clone()
    assert gathered == [memory]
    with torch.no_grad():
        local_tensor(model[0].weight).mul_(2)
    assert torch.allclose(model(x), 2 * before)
    model(x).sum().backward()
    assert model[0].weight.grad is not None


@pytest.mark.usefixtures("single_process_group")
def test_rows_that_are_sent_come_back_from_one_process() -> None:
    x = torch.randn(2, 3).t()
    assert torch.equal(wait_for_rows(send_rows(x, [3], [3], world().group_name)), x)


@pytest.mark.usefixtures("single_process_group")
def test_parameters_on_further_axes_are_gathered_as_plain_tensors() -> None:
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("shard", "tensor"))
    model: Any = nn.Linear(4, 4)
    values = model.weight.detach().clone()
    for name, parameter in [*model.named_parameters()]:
        whole = distribute_tensor(parameter.detach(), mesh["tensor"], [Shard(0)])
        model.register_parameter(name, nn.Parameter(whole))
    fully_shard(model, mesh=mesh["shard"])
    gather_local_parts(model, gradient_hooks={(model, "weight"): lambda gradient: 2 * gradient})
    gathered: list[Tensor] = []
    model.register_forward_pre_hook(lambda *_: gathered.extend(model.parameters()))
    for _ in range(2):
        model(torch.ones(3, 4)).sum().backward()
    assert [type(parameter) for parameter in gathered] == [nn.Parameter] * 4
    assert model.weight.device_mesh.mesh_dim_names == ("shard", "tensor")
    assert torch.equal(model.weight.full_tensor(), values)
    assert model.weight.grad.placements == model.weight.placements
    assert torch.equal(model.weight.grad.full_tensor(), torch.full((4, 4), 2 * 2 * 3.0))
    assert torch.equal(model.bias.grad.full_tensor(), torch.full((4,), 2 * 3.0))


def test_hooks_of_a_module() -> None:
    linear = nn.Linear(2, 2)
    assert not has_hooks(linear)
    for register in (
        linear.register_forward_hook,
        linear.register_forward_pre_hook,
        linear.register_full_backward_hook,
        linear.register_full_backward_pre_hook,
    ):
        handle = register(lambda *_: None)  # pyright: ignore[reportArgumentType]
        assert has_hooks(linear)
        handle.remove()
    assert not has_hooks(linear)
    linear.forward = linear.forward
    assert has_hooks(linear), "it calls another forward"


class Heard:
    """Remembers units, the labels and shapes of tensors, and how many unreduced gradients are in memory when the
    reduced ones get their label."""

    def __init__(self) -> None:
        self.heard: list[str] = []
        self.unreduced: list[weakref.ref[Tensor]] = []
        self.alive: list[int] = []

    def unit(self, name: str) -> None:
        self.heard.append(name)

    def collective(self, category: str, unit: str) -> AbstractContextManager[None]:
        return nullcontext()

    def label(self, tensors: Iterable[Tensor], category: str) -> None:
        for tensor in tensors:
            self.heard.append(f"{category} {tuple(tensor.shape)}")
            if category == "reduce-scatter":
                self.unreduced.append(weakref.ref(tensor))
        if category == "gradients":
            self.alive.append(sum(reference() is not None for reference in self.unreduced))


REDUCED = ["reduce-scatter (4, 4)", "gradients (4, 4)"]


@pytest.mark.usefixtures("single_process_group")
def test_an_observer_hears_of_every_unit_once_and_keeps_no_gradients_in_memory() -> None:
    """A tied embedding and head are two modules of one unit."""
    tied: Any = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    tied[1].weight = tied[0].weight
    fully_shard([tied[0], tied[1]])
    fully_shard(tied)
    for model, units in ((small_model(), "10"), (tied, "0")):
        observe_fsdp(model, observer := Heard())
        model(torch.ones(2, 4)).sum().backward()
        expected = [event for name in units for event in (f"backward {name}", f"reduce {name}", *REDUCED)]
        assert observer.heard == expected
        assert len(observer.unreduced) == len(observer.alive) == len(units)
        assert not any(observer.alive)


def test_call_after_backward() -> None:
    calls: list[str] = []
    x = torch.ones(1, requires_grad=True)
    y = x * 2
    y.register_hook(lambda _: call_after_backward(lambda: calls.append("after")))
    x.register_post_accumulate_grad_hook(lambda _: calls.append("gradient"))
    y.backward()
    assert calls == ["gradient", "after"]


# The compiler and fakes


def test_a_dynamic_dim_is_not_recompiled() -> None:
    from torch._dynamo.testing import CompileCounter  # here, since it imports much for one test

    counter = CompileCounter()
    compiled = torch.compile(lambda x: x * 2, backend=counter)
    for size in (3, 5, 7):
        x = torch.ones(size)
        mark_dynamic(x, dim=0)
        compiled(x)
    assert counter.frame_count == 1
    torch.compiler.reset()


def test_random_operators_are_seen_by_a_mode() -> None:
    from torch._prims.rng_prims import run_and_save_rng_state, run_with_rng_state

    class Seen(Operators):
        pass

    run_random_operators_plainly(Seen)
    add = torch.ops.aten.add.Tensor
    with Seen() as seen:
        state, result = run_and_save_rng_state(add, torch.ones(2), torch.ones(2))
        again = run_with_rng_state(state, add, torch.ones(2), torch.ones(2))
    assert [func for func, _ in seen.calls].count(add) == 2
    assert result.tolist() == again.tolist() == [2.0, 2.0]
    assert state.numel() == 0


@pytest.mark.usefixtures("single_process_group")
def test_timeouts_are_set_in_all_groups_but_one() -> None:
    kept = dist.new_group(backend="gloo", timeout=timedelta(seconds=5), group_desc="kept")
    other = dist.new_group(backend="gloo", timeout=timedelta(seconds=5))
    with warnings.catch_warnings(action="error"):  # a private name that PyTorch has made public warns
        set_timeouts(7.5, but_for="kept")
    groups = [dist.group.WORLD, other, kept]
    seconds = [group._get_backend(torch.device("cpu")).options._timeout.total_seconds() for group in groups if group]
    assert seconds == [7.5, 7.5, 5]


@pytest.mark.usefixtures("single_process_group")
def test_what_the_watchdog_asks_process_groups() -> None:
    """tests/distributed/test_timeouts.py counts the collectives of two ranks."""
    assert count_collectives() == {}  # groups of one rank do not count
    dist.all_reduce(torch.ones(3))
    assert b'"gloo:all_reduce"' in recent_collectives()
    store = connect_to_store()
    assert store.add("a key of this test", 2) == 2
    assert isinstance(store, dist.Store)


def test_memory_history_and_snapshot(tmp_path: Path) -> None:
    """Without a GPU, PyTorch takes the arguments and fails, or since torch 2.14 (CUDA build) writes an empty snapshot.
    Of a GPU: tests/gpu/test_gpu.py."""
    if torch.cuda.is_available():
        pytest.skip("the history would go on in this process")
    no_gpu = AttributeError, RuntimeError
    with pytest.raises(no_gpu, match=r"record_memory_history|NVIDIA|CUDA"):
        record_memory_history(max_entries=100)
    with suppress(*no_gpu):
        dump_memory_snapshot(tmp_path / "snapshot")
        assert pickle.loads((tmp_path / "snapshot").read_bytes())["device_traces"] == []


def test_parts_of_a_mesh() -> None:
    with fake_process_group(16, rank=13):
        mesh = init_device_mesh("cpu", (2, 2, 2, 2), mesh_dim_names=("a", "b", "c", "d"))
        flat = flatten_axes(mesh, ("b", "c"), "bc")
        assert dist.get_process_group_ranks(flat.get_group()) == [9, 11, 13, 15]
        assert flat.get_local_rank() == 2
        assert flatten_axes(mesh, ("b", "c"), "bc") is flat
        both = join_meshes(mesh["a"], flat)
        assert both.mesh_dim_names == ("a", "bc")
        assert both.mesh.tolist() == [[1, 3, 5, 7], [9, 11, 13, 15]]
        assert both.get_group("bc") is flat.get_group()
        parts = unflatten_axis(flat, (2, 2), ("outer", "inner"))
        assert dist.get_process_group_ranks(parts.get_group("inner")) == [13, 15]
        assert dist.get_process_group_ranks(parts.get_group("outer")) == [9, 13]


def test_a_reshaped_result_is_no_view() -> None:
    x = torch.ones(2, 3, requires_grad=True)
    doubled = 2 * x
    result = reshape_result(doubled, torch.Size([3, 2]))
    assert result.data_ptr() == doubled.data_ptr()
    assert not result._is_view()
    result.mul(torch.arange(6.0).view(3, 2)).sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, 2 * torch.arange(6.0).view(2, 3))


def test_a_fake_world_uses_no_groups_of_an_earlier_one() -> None:
    for _ in range(2):
        with fake_process_group(2):
            mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tensor",))
            part = DTensor.from_local(torch.ones(2), mesh, [Shard(0)])
            detached = part.detach()
            assert isinstance(detached, DTensor)
            assert detached.device_mesh is mesh


def test_workers_of_torchelastic_are_started_by_a_function(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SubprocessHandler, "_popen", SubprocessHandler._popen)  # as it is again after this test
    started: list[tuple[tuple[str, ...], str, str]] = []

    def start(args: tuple[str, ...], env: dict[str, str]) -> "subprocess.Popen[bytes]":
        started.append((args, env["RANK"], env["TORCHELASTIC_ERROR_FILE"]))
        return subprocess.Popen(["sh", "-c", f"exit {5 * int(env['RANK'])}"], start_new_session=True)

    start_workers_by(start)
    command, redirected = ("-c", "import sys; sys.exit(7)"), tmp_path / "redirected"
    for folder, redirects, codes in ((tmp_path / "plain", Std.NONE, [5]), (redirected, Std.ALL, [7])):
        folder.mkdir()
        workers = start_processes(
            name="worker", entrypoint=sys.executable, args={0: command, 1: command},
            envs={rank: {"RANK": str(rank)} for rank in (0, 1)},
            logs_specs=DefaultLogsSpecs(log_dir=str(folder), redirects=redirects),
        )  # fmt: skip
        while not (result := workers.wait(10, 0.02)):
            pass
        ended = {rank: failure.exitcode for rank, failure in result.failures.items()}  # the first ends the other
        assert {*ended.values()} - {-15} == {*codes}
    assert [(args, rank) for args, rank, _ in started] == [((sys.executable, *command), rank) for rank in ("0", "1")]
    assert all(file.startswith(str(tmp_path)) for _, _, file in started)


def test_the_log_level_is_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    library = ctypes.CDLL(str(Path(torch.__file__).with_name("lib") / "libc10.so"))
    level = ctypes.c_int.in_dll(library, "FLAGS_caffe2_log_level")
    before = level.value
    try:
        for name, number in (("ERROR", 2), ("INFO", 0), ("WARNING", 1)):
            monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", name)
            read_log_level()
            assert level.value == number
    finally:
        level.value = before
    assert not has_lost_cuda()


@pytest.mark.usefixtures("single_process_group")
def test_a_process_group_says_whether_a_run_is_open() -> None:
    before = dist.group.WORLD.group_desc  # pyright: ignore[reportOptionalMemberAccess]
    assert not has_open_run()
    with suppress(ZeroDivisionError), naming_open_run():
        assert has_open_run()
        raise ZeroDivisionError
    assert not has_open_run()
    assert dist.group.WORLD.group_desc == before  # pyright: ignore[reportOptionalMemberAccess]
