"""Every use of PyTorch's private API: names that PyTorch may change without notice.

Nothing else below titanlite/ uses a private name of PyTorch. Each function here has a test in
tests/unit/test_private_torch.py that fails when PyTorch changes what it relies on.
"""

import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._functorch import config as functorch_config
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlanner
from torch.distributed.checkpoint.utils import _DistWrapper
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

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


def foreach_norms(tensors: Sequence[Tensor], *, dtype: torch.dtype) -> list[Tensor]:
    """Return the L2 norm of each tensor, in a few kernels for all."""
    return [*torch._foreach_norm(list(tensors), dtype=dtype)]


# Modules


def non_persistent_buffers(module: nn.Module) -> set[str]:
    """Return the names of a module's own buffers that do not belong in a checkpoint."""
    return module._non_persistent_buffers_set


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


# Fake tensors and fake process groups
