"""Contents of tensors and modules: parts of sharded and wrapped tensors, storages, buffers."""

from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.distributed.tensor import DTensor
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

TorchDispatchMode = _python_dispatch.TorchDispatchMode
"""Mode that sees each operator within it."""

# History of the CUDA caching allocator, for memory snapshots.


def record_memory_history(*, max_entries: int) -> None:
    """Record each allocation and free from here on, with its Python stack. The newest `max_entries` are kept."""
    torch.cuda.memory._record_memory_history(max_entries=max_entries, stacks="python")


def dump_memory_snapshot(path: Path) -> None:
    """Write the allocator's segments and the recorded history to a file that pytorch.org/memory_viz opens."""
    torch.cuda.memory._dump_snapshot(str(path))


ATTENTION_OPERATORS = {
    getattr(torch.ops.aten, f"_scaled_dot_product_{name}").default
    for name in ("flash_attention", "efficient_attention", "cudnn_attention", "flash_attention_for_cpu")
}
"""Operators that `F.scaled_dot_product_attention` dispatches to, but for the one of plain formulas."""


def chosen_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> int:
    """Return the value of the `SDPBackend` that attention takes: causal, or with a mask. It raises RuntimeError without
    any."""
    grouped = q.shape[1] != k.shape[1]
    return torch._fused_sdp_choice(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=grouped)


def softmax_gradient(gradient: Tensor, weights: Tensor) -> Tensor:
    """Return the gradient of the inputs of a softmax over the last dim, in one kernel.

    Args:
        gradient: of the weights.
        weights: result of the softmax.
    """
    return torch.ops.aten._softmax_backward_data(gradient, weights, -1, weights.dtype)


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


class LocalAdamW(torch.optim.AdamW):
    """AdamW that updates this rank's parts of sharded tensors as plain tensors.

    They have the same bits. The dispatch of DTensors would take longer than the fused kernel on small tensors.
    """

    def _init_group(self, group: dict[str, Any], *tensors: list[Tensor]) -> bool:  # pyright: ignore[reportIncompatibleMethodOverride]
        has_complex = super()._init_group(group, *tensors)
        for of_a_kind in tensors:
            of_a_kind[:] = map(local_tensor, of_a_kind)
        return has_complex


def call_pre_hooks(optimizer: torch.optim.Optimizer) -> None:
    """Call the hooks that an optimizer calls before its step."""
    for hook in [*optimizer._optimizer_step_pre_hooks.values()]:
        hook(optimizer, (), {})


def part_of(optimizer: torch.optim.Optimizer, by_group: Sequence[list[nn.Parameter]]) -> torch.optim.Optimizer:
    """Return the optimizer of some parameters of each group, which has the states of all, a copy of the present
    options, and no hooks."""
    part = object.__new__(type(optimizer))
    hooks = {f"_optimizer_step_{when}_hooks": {} for when in ("pre", "post")}
    groups = zip(optimizer.param_groups, by_group, strict=True)
    copies = [{**group, "params": parameters} for group, parameters in groups]
    part.__dict__ = optimizer.__dict__ | hooks | {"param_groups": copies}
    return part


def foreach_norms(tensors: Sequence[Tensor], *, dtype: torch.dtype) -> list[Tensor]:
    """Return the L2 norm of each tensor, in a few kernels for all."""
    return [*torch._foreach_norm(list(tensors), dtype=dtype)]


def add_in_place(tensors: Sequence[Tensor], value: Tensor) -> None:
    """Add a tensor to many tensors, in few kernels.

    The host would wait for the value if it were given once, for all of them.
    """
    torch._foreach_add_(list(tensors), [value] * len(tensors))


def factor_of(tensor: Tensor, factor: Tensor) -> Tensor:
    """Return a float32 scalar in the form that multiplies a tensor without being rounded to its dtype.

    CUDA's kernels would convert a scalar tensor to a narrower dtype first. By a tensor of one dimension they multiply
    in float32.
    """
    return factor.view(1) if tensor.is_cuda and tensor.itemsize < factor.itemsize else factor


def scale_in_place(tensors: Sequence[Tensor], factor: Tensor) -> None:
    """Multiply many tensors by a float32 scalar, in few kernels, without memory and without rounding the scalar."""
    same = []
    for tensor in tensors:
        if (exact := factor_of(tensor, factor)) is not factor:
            tensor.mul_(exact)
        else:
            same.append(tensor)
    if same:
        torch._foreach_mul_(same, factor)


def has_hardware_bfloat16() -> bool:
    """Return whether this CPU multiplies bfloat16 in hardware (AMX or AVX-512 BF16)."""
    return torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported()


def reshape_result(x: Tensor, shape: torch.Size) -> Tensor:
    """Return a contiguous tensor that nobody else uses with another shape, without a copy.

    It is no view for autograd. FSDP warns of views that its units return, as in-place operators on them would be wrong.
    """
    return torch.ops.aten._unsafe_view(x, shape)


def is_in_backward() -> bool:
    """Return whether autograd runs a backward pass in this thread, which may recompute forward."""
    return torch._C._current_graph_task_id() != -1


def has_saved_tensor_hooks() -> bool:
    """Return whether this thread is within `torch.autograd.graph.saved_tensors_hooks`, as in a checkpointed block."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None  # pyright: ignore[reportAttributeAccessIssue]


def version_of(tensor: Tensor) -> int:
    """Return how often a tensor was changed in place. PyTorch does not count it in inference mode: 0."""
    return 0 if tensor.is_inference() else tensor._version


def call_after_backward(function: Callable[[], None]) -> None:
    """Call a function when the backward pass that is running ends."""
    Variable._execution_engine.queue_callback(function)


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


def non_persistent_buffers(module: nn.Module) -> set[str]:
    """Return the names of a module's own buffers that do not belong in a checkpoint."""
    return module._non_persistent_buffers_set


def has_hooks(module: nn.Module) -> bool:
    """Return whether calling a module calls hooks of its own beside its forward, or another forward than its class'."""
    hooks = module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks
    return any(hooks) or "forward" in vars(module)


def replace_tensors(module: nn.Module, function: Callable[[Tensor], Tensor]) -> None:
    """Replace every parameter and buffer of a module by the result of a function, as `Module.to_empty` does it."""
    module._apply(function)
