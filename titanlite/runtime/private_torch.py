"""Training's uses of PyTorch's private API: names that PyTorch may change without notice.

Nothing else below titanlite/ uses a private name of PyTorch, but for `plan/private_torch.py`. Each function
here has a test in tests/unit/test_private_torch.py that fails when PyTorch changes what it relies on.
"""

import sys
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._functorch import config as functorch_config
from torch.autograd import Variable
from torch.distributed import distributed_c10d
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlanner
from torch.distributed.checkpoint.utils import _DistWrapper
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from titanlite.observer import StepObserver

T = TypeVar("T")
S = TypeVar("S")

# Tensors


def local_tensor(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor, sharded or not, without a gradient function.

    `to_local()` would add a gradient function, which takes longer than writing a small tensor.
    """
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def wrapped_tensors(tensor: Tensor) -> dict[str, Tensor]:
    """Return the tensors that a tensor subclass consists of, by the names of its attributes.

    A plain tensor has none.
    """
    if not is_traceable_wrapper_subclass(tensor):
        return {}
    names, _ = tensor.__tensor_flatten__()
    return {name: getattr(tensor, name) for name in names}


def storage_key(storage: torch.UntypedStorage) -> Hashable:
    """Return the identity of a storage: equal for all Python objects of the same memory, while it is alive."""
    return storage._cdata


def foreach_norms(tensors: Sequence[Tensor], *, dtype: torch.dtype) -> list[Tensor]:
    """Return the L2 norm of each tensor, in a few kernels for all."""
    return [*torch._foreach_norm(list(tensors), dtype=dtype)]


# Modules


def non_persistent_buffers(module: nn.Module) -> set[str]:
    """Return the names of a module's own buffers that do not belong in a checkpoint."""
    return module._non_persistent_buffers_set


ATTENTION_OPERATORS = {
    getattr(torch.ops.aten, f"_scaled_dot_product_{name}").default
    for name in ("flash_attention", "efficient_attention", "cudnn_attention", "flash_attention_for_cpu")
}
"""Operators that `F.scaled_dot_product_attention` dispatches to, but for the one of plain formulas."""


def chosen_attention(q: Tensor, k: Tensor, v: Tensor) -> int:
    """Return the value of the `SDPBackend` that causal attention takes. It raises RuntimeError without any."""
    return torch._fused_sdp_choice(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])


def replace_tensors(module: nn.Module, function: Callable[[Tensor], Tensor]) -> None:
    """Replace every parameter and buffer of a module by the result of a function, as `Module.to_empty` does it."""
    module._apply(function)


# Optimizers


def reads_found_inf(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether `optimizer.step()` skips itself where the tensor `optimizer.found_inf` is not 0.

    Gradient scalers ask the same. PyTorch's fused optimizers do.
    """
    return getattr(optimizer, "_step_supports_amp_scaling", False)


def fused_adamw_(
    weight: Tensor,
    gradient: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    *,
    step: Tensor,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    found_inf: Tensor | None,
) -> None:
    """Update one tensor and its moments in place by PyTorch's fused AdamW kernel.

    Args:
        step: number of this step, from 1; the public `torch.optim.adamw.adamw` would increase it.
        found_inf: nothing is changed where it is not 0.
    """
    torch._fused_adamw_(
        [weight], [gradient], [exp_avg], [exp_avg_sq], [], [step], lr=lr, beta1=betas[0], beta2=betas[1],
        weight_decay=weight_decay, eps=eps, amsgrad=False, maximize=False, grad_scale=None, found_inf=found_inf,
    )  # fmt: skip


def add_in_place(tensors: Sequence[Tensor], value: Tensor) -> None:
    """Add a tensor to many tensors, in few kernels.

    The host would wait for the value if it were given once, for all of them.
    """
    torch._foreach_add_(list(tensors), [value] * len(tensors))


# FSDP2


def fsdp_param_group(module: FSDPModule) -> Any:
    """Return FSDP's record of the parameters that a module gathers together; None if it has none of its own."""
    return module._get_fsdp_state()._fsdp_param_group


def release_all_reduce_input(param_group: Any) -> None:
    """Let go of the gradients that a group of parameters reduced last over replicas.

    FSDP holds them until the end of backward, so that their memory is not used again while the all-reduce runs.
    Recording the stream does the same.
    """
    if (state := param_group._all_reduce_state) is not None:
        if state.all_reduce_input.is_cuda:
            state.all_reduce_input.record_stream(torch.cuda.current_stream())
        param_group._all_reduce_state = None


def sharded_parameters(module: FSDPModule) -> list[nn.Parameter]:
    """Return the sharded parameters of an FSDP unit, with the gradients and hooks that the optimizer sees."""
    unit = fsdp_param_group(module)
    return [parameter.sharded_param for parameter in unit.fsdp_params] if unit else []


def has_gradient_hooks(parameter: nn.Parameter) -> bool:
    """Return whether `register_post_accumulate_grad_hook` was called on a parameter."""
    return bool(parameter._post_accumulate_grad_hooks)  # pyright: ignore[reportAttributeAccessIssue]


def gather_asynchronously(module: FSDPModule) -> None:
    """Let FSDP's all-gathers of a unit run beside compute, as on a GPU."""
    module._set_unshard_async_op(True)


def free_gather_buffer(module: FSDPModule) -> None:
    """Free the buffer of the last all-gather of forward. FSDP keeps it until another begins, so that both overlap."""
    unit = fsdp_param_group(module)
    state = unit.comm_ctx.all_gather_state if unit else None
    if state is not None:
        unit._wait_all_gather_streams_on_event(state.event)
        unit.comm_ctx.all_gather_state = None


def gather_in_place(module: FSDPModule) -> None:
    """Let a unit's gathered parameters share the memory of its sharded ones: nothing is copied, and nothing freed.

    This is right at shard degree 1 where the sharded parameters have the compute dtype already.
    """
    unit = fsdp_param_group(module)
    for parameter in unit.fsdp_params if unit else ():
        assert type(parameter) is FSDPParam
        parameter.__class__ = _InPlaceParam


class _InPlaceParam(FSDPParam):
    """FSDPParam whose all-gather output is its sharded memory."""

    def init_all_gather_outputs(self, *args: Any, **kwargs: Any) -> None:
        memory = self._sharded_param_data
        if not self.all_gather_outputs or self.all_gather_outputs[0] is not memory:
            self.all_gather_outputs = [memory]
            if hasattr(self, "_unsharded_param"):
                del self._unsharded_param  # it refers to the memory of the weights before

    def free_unsharded_param(self) -> None:
        """The memory is that of the sharded parameter, and stays."""


def observe_fsdp(model: nn.Module, observer: StepObserver) -> None:
    """Call an observer's hooks from inside FSDP, for every FSDP unit of a model.

    The hooks are the phases `backward NAME` and `reduce NAME`, collectives, and labels of gradients. NAME is that of
    the unit's first module.
    """
    names = {module: name for name, module in model.named_modules()}
    for module in model.modules():
        unit = fsdp_param_group(module) if isinstance(module, FSDPModule) else None
        if unit is not None and unit.modules[0] is module:  # a tied embedding and head have one unit
            assert type(unit) is FSDPParamGroup
            unit.__class__ = _ObservedUnit
            assert isinstance(unit, _ObservedUnit)
            unit.observer, unit.name = observer, names[unit.modules[0]]


class _ObservedUnit(FSDPParamGroup):
    """FSDPParamGroup that calls an observer's hooks."""

    observer: StepObserver
    name: str

    def unshard(self, async_op: bool = False) -> None:
        with self.observer.collective("all-gather", self.name):
            super().unshard(async_op)

    def wait_for_unshard(self) -> None:
        with self.observer.collective("all-gather", ""):
            super().wait_for_unshard()

    def reshard(self) -> None:
        with self.observer.collective("all-gather", ""):
            super().reshard()

    def pre_backward(self, default_prefetch: bool, *unused: Any) -> None:
        self.observer.phase(f"backward {self.name}")
        super().pre_backward(default_prefetch, *unused)

    def post_backward(self, *unused: Any) -> None:
        self.observer.phase(f"reduce {self.name}")
        unreduced = (_unsharded_gradient(it) for it in self.fsdp_params)  # not a list: it would keep them in memory
        self.observer.label((gradient for gradient in unreduced if gradient is not None), "reduce-scatter")
        with self.observer.collective("reduce-scatter", self.name):
            super().post_backward(*unused)
        sharded = (it.sharded_param.grad for it in self.fsdp_params)
        self.observer.label((gradient for gradient in sharded if gradient is not None), "gradients")


def _unsharded_gradient(parameter: FSDPParam) -> Tensor | None:
    """Return the gradient of a gathered parameter before it is reduced."""
    if not hasattr(parameter, "_unsharded_param"):
        return None
    if parameter.unsharded_accumulated_grad is not None:
        return parameter.unsharded_accumulated_grad_data
    return None if parameter.unsharded_param.grad is None else parameter.unsharded_grad_data


def is_in_backward() -> bool:
    """Return whether autograd runs a backward pass in this thread, which may recompute forward."""
    return torch._C._current_graph_task_id() != -1


def call_after_backward(function: Callable[[], None]) -> None:
    """Call a function when the backward pass that is running ends."""
    Variable._execution_engine.queue_callback(function)


# Checkpoints (DCP)

StorageInfo = filesystem._StorageInfo
"""Place of a tensor in a checkpoint: file, offset and length in bytes."""

MemoryFormat = metadata._MEM_FORMAT_ENCODING
"""Memory format of a tensor, in a checkpoint's metadata."""


def run_on_rank_0(group: dist.ProcessGroup, act: Callable[[], T]) -> T:
    """Return the result of rank 0 on every rank.

    Raises:
        CheckpointException: on every rank, if rank 0 fails.
    """
    return _DistWrapper(group, True, 0).broadcast("", act)


def run_on_all_ranks(group: dist.ProcessGroup, act: Callable[[], T], then: Callable[[list[T]], S]) -> S:
    """Call `act` on every rank, and `then` on rank 0 with all results. Return the result of `then` on every rank.

    Raises:
        CheckpointException: on every rank, if any rank fails.
    """
    return _DistWrapper(group, True, 0).all_reduce("", act, then)


def set_plan_cache_key(planner: DefaultSavePlanner, key: str) -> None:
    """Give a planner its own entry in DCP's cache of plans, which belongs to the class."""
    planner._cached_plans_key = key


def has_cached_plan(key: str) -> bool:
    return key in SavePlanner._cached_save_plan


def forget_cached_plans(key: str) -> None:
    """Delete what a planner has left in DCP's cache of plans."""
    caches: list[dict[str, Any]] = [
        SavePlanner._cached_save_plan,
        SavePlanner._cached_final_save_plan,
        SavePlanner._cached_all_plans,
        SavePlanner._cached_global_plan,
        SavePlanner._cached_metadata,
    ]
    for cache in caches:
        cache.pop(key, None)


# Process groups


def set_timeouts(seconds: float, *, but_for: str) -> None:
    """Set the timeout of collectives that start from now on, in every process group of this process.

    Args:
        but_for: description (`group_desc`) of groups that keep theirs.
    """
    for group in distributed_c10d._world.pg_map:
        if group.group_desc != but_for:
            distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), group)


# Compiler


def without_autograd_cache() -> AbstractContextManager[None]:
    """Compile without torch.compile's cache of traced code (AOTAutograd)."""
    return functorch_config.patch(enable_autograd_cache=False)


def compiled_graphs() -> int:
    """Return the number of graphs that torch.compile has compiled in this process. Does not import the compiler."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return dynamo.counters["stats"]["unique_graphs"] if dynamo else 0


def compile_seconds() -> float:
    """Return the wall time that torch.compile has spent in this process. Does not import the compiler."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return dynamo.calculate_time_spent()["total_wall_time"] if dynamo else 0.0


def last_recompile_reason() -> str:
    """Return the failed guard of the newest recompile, as the compiler reports it; "" if there is none."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    metrics = dynamo.get_compilation_metrics() if dynamo else []
    reasons = [one.recompile_reason for one in metrics if one.recompile_reason]
    return " ".join(reasons[-1].split()) if reasons else ""


def mark_dynamic(tensor: Tensor, *, dim: int) -> None:
    """Let the compiler expect a dim with another size in each batch, so that it need not recompile for it."""
    torch._dynamo.maybe_mark_dynamic(tensor, dim)


def scale_in_place(tensors: Sequence[Tensor], factor: Tensor) -> None:
    """Multiply many tensors by a scalar tensor, in few kernels."""
    torch._foreach_mul_(list(tensors), factor)


# CPU


def has_hardware_bfloat16() -> bool:
    """Return whether this CPU multiplies bfloat16 in hardware (AMX or AVX-512 BF16)."""
    return torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported()
