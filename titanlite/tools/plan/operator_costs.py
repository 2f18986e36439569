"""Cost of one operator: FLOPs, and bytes that its kernel reads or writes."""

from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

aten = torch.ops.aten

INDEXED = {aten.gather, aten.scatter_, aten.scatter_add_}
"""Operators that touch as many elements as their index has: their third argument."""

ATTENTION = {
    "aten._scaled_dot_product_flash_attention_for_cpu": (0, 2, 4),
    "aten._scaled_dot_product_flash_attention_for_cpu_backward": (1, 5, 7),
}
"""Kernels that PyTorch's table of FLOPs lacks: (place of the query among the arguments, number of matmuls over all
scores, place of is_causal)."""


def flops_of(func: Any, args: Any, kwargs: Any, result: Any) -> tuple[Literal["matmul", "attention", "memory"], int]:
    """Return the kind of a kernel and its FLOPs. Causal attention counts as half, as kernels skip masked scores."""
    packet = func.overloadpacket
    name = str(packet)
    if name in ATTENTION:
        first, matmuls, causal = ATTENTION[name]
        B, N, L, H = args[first].shape
        flops = matmuls * 2 * B * N * L * args[first + 1].shape[2] * H
        is_causal = kwargs.get("is_causal", args[causal] if len(args) > causal else False)
        return "attention", flops // 2 if is_causal else flops
    if name.startswith("torch_attn._varlen_attn"):
        is_backward = name.endswith("backward")
        (T, N, H), (queries, keys) = args[is_backward].shape, args[8:10] if is_backward else args[5:7]
        seen = keys - queries // 2  # on average, at most: as if each sequence were one document
        return "attention", (10 if is_backward else 4) * T * N * H * seen
    formula = flop_registry.get(packet) or (flop_registry[aten.addmm] if packet is aten.addmm_ else None)
    if formula is not None:
        operands = args[:3] if packet is aten.addmm else args  # the dtype of the result may follow
        return "matmul", int(formula(*operands, **kwargs, out_val=result))
    return "memory", 0


def moved_bytes(tensor: Tensor, touched: int | None) -> int:
    """Return the bytes that a kernel moves to read or write a tensor. An expanded tensor is read once.

    Args:
        touched: largest number of elements that the kernel touches. None: all.
    """
    elements = tensor.numel() if touched is None else min(touched, tensor.numel())
    return min(elements * tensor.element_size(), tensor.untyped_storage().nbytes())
