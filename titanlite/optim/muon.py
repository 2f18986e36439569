"""Muon for sharded matrices: the algorithm of `torch.optim.Muon`, each matrix computed by one rank.

Muon replaces a matrix of momentum by the nearest orthogonal matrix, which takes the whole matrix. FSDP gives each rank
some rows of every matrix. So the S ranks of a shard group take S matrices at a time: an all-to-all sends all rows of
matrix j to rank j, which orthogonalizes it, and a second one sends the rows back. Rows are sent in the dtype of the
orthogonalization, usually bfloat16: nothing is lost. Replicas (HSDP) do the same, each within its own shard group.

Stacks of matrices that one axis shards by rows or columns are sent in the same way. Other matrices that are sharded by
columns or over several mesh axes are gathered, and orthogonalized by every rank.

Source: https://kellerjordan.github.io/posts/muon/
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from titanlite.runtime.dtensor import chunk_sizes, from_local_like, sharded_axes, slice_like
from titanlite.runtime.private_torch.tensors import local_tensor

Orthogonalize = Callable[[Tensor], Tensor]
"""[F, D] -> [F, D]; may overwrite its argument."""


class Muon(torch.optim.Optimizer):
    """Muon on matrices that may be sharded in any way.

    Args:
        params: float32 matrices [F, D], or stacks of them [E, F, D], in which each matrix is updated by itself.
        weight_decay: decoupled.
        ns_dtype: dtype of the Newton-Schulz iteration. "bfloat16", as in torch.optim.Muon; or "float32", for CPUs
            without hardware bfloat16, and to compare layouts.
        adjust_lr_fn: "match_rms_adamw" makes updates as large as AdamW's, so that one learning rate suits both;
            "original" is the default of torch.optim.Muon.

    Raises:
        ValueError: an argument or a parameter is not one of these.
    """

    _step_supports_amp_scaling = True  # `reads_found_inf` reads it

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: Sequence[float] = (3.4445, -4.7750, 2.0315),
        eps: float = 1e-7,
        ns_steps: int = 5,
        ns_dtype: str = "bfloat16",
        adjust_lr_fn: str = "match_rms_adamw",
    ) -> None:
        if not 0 <= momentum < 1:
            raise ValueError(f"momentum must be at least 0 and below 1, got {momentum}")
        if adjust_lr_fn not in ("match_rms_adamw", "original"):
            raise ValueError(f"adjust_lr_fn must be match_rms_adamw or original, got {adjust_lr_fn}")
        if ns_dtype not in ("bfloat16", "float32"):
            raise ValueError(f"ns_dtype must be bfloat16 or float32, got {ns_dtype}")
        if len(ns_coefficients) != 3:
            raise ValueError(f"ns_coefficients must be three numbers, got {ns_coefficients}")
        if not 1 <= ns_steps < 100:
            raise ValueError(f"ns_steps must be from 1 to 99, got {ns_steps}")
        options = {
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_coefficients": tuple(ns_coefficients),
            "eps": eps,
            "ns_steps": ns_steps,
            "ns_dtype": ns_dtype,
            "adjust_lr_fn": adjust_lr_fn,
        }
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, **options})
        for parameter in (parameter for group in self.param_groups for parameter in group["params"]):
            if parameter.ndim not in (2, 3) or parameter.dtype != torch.float32:
                raise ValueError(f"Muon is for matrices of float32, got {[*parameter.shape]} of {parameter.dtype}")

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        assert closure is None
        for group in self.param_groups:
            orthogonalize = partial(
                newton_schulz, coefficients=group["ns_coefficients"], steps=group["ns_steps"], eps=group["eps"]
            )
            for parameters, ranks in _batches(parameter for parameter in group["params"] if parameter.grad is not None):
                parts = [self._momentum(parameter, group) for parameter in parameters]
                if ranks is None:
                    pairs = zip(parts, parameters, strict=True)
                    parts = [_orthogonalize_gathered(part, parameter, orthogonalize) for part, parameter in pairs]
                else:
                    shapes = [parameter.shape for parameter in parameters]
                    parts = _orthogonalize_exchanged(parts, shapes, orthogonalize, ranks)
                for parameter, part in zip(parameters, parts, strict=True):
                    self._apply(parameter, part, group)

    def _momentum(self, parameter: nn.Parameter, group: dict[str, Any]) -> Tensor:
        """Update the momentum, and return a copy of this rank's part, in the dtype and on the device of the matmuls."""
        assert parameter.grad is not None
        state, skip = self.state[parameter], getattr(self, "found_inf", None)
        if not state:
            state["momentum_buffer"] = torch.zeros_like(parameter.grad)
        buffer, gradient = local_tensor(state["momentum_buffer"]), local_tensor(parameter.grad)
        if skip is not None:
            gradient = torch.where(skip != 0, buffer, gradient)  # the mean of the buffer and itself is the buffer
        buffer.lerp_(gradient, 1 - group["momentum"])
        update = gradient.lerp(buffer, group["momentum"]) if group["nesterov"] else buffer
        # With CPU offload, matrices are exchanged and orthogonalized on the GPU all the same.
        device = parameter.device_mesh.device_type if isinstance(parameter, DTensor) else parameter.device
        return update.to(device, getattr(torch, group["ns_dtype"]), copy=True)

    def _apply(self, parameter: nn.Parameter, update: Tensor, group: dict[str, Any]) -> None:
        weight, skip = local_tensor(parameter), getattr(self, "found_inf", None)
        rows, columns = parameter.shape[-2:]
        scale = update_scale(rows, columns, group["adjust_lr_fn"])
        new = weight * (1 - group["lr"] * group["weight_decay"])
        new.add_(update.to(weight.device), alpha=-(group["lr"] * scale))
        weight.copy_(new if skip is None else torch.where(skip != 0, weight, new))


def update_scale(rows: float, columns: float, adjust_lr_fn: str) -> float:
    """Return the factor of an orthogonal matrix in an update, which is the spectral norm of the update / lr."""
    if adjust_lr_fn == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(max(1, rows / columns))


def newton_schulz(matrix: Tensor, *, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    """Return nearly the nearest orthogonal matrix, by the iteration of torch.optim.Muon in the dtype of the matrix.

    Args:
        matrix: [F, D]; is overwritten.
        eps: least norm to divide by.
    """
    a, b, c = coefficients
    wide = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    wide.div_(wide.norm().clamp(min=eps))
    for _ in range(steps):
        gram = wide @ wide.T
        wide = torch.addmm(wide, torch.addmm(gram, gram, gram, beta=b, alpha=c), wide, beta=a)
    return wide.T if matrix.shape[0] > matrix.shape[1] else wide


def _exchange_group(parameter: Tensor) -> dist.ProcessGroup | None:
    """Return the ranks that exchange rows of a matrix; None where it is whole, or sharded in a way they cannot."""
    axes = sharded_axes(parameter)
    if parameter.ndim == 2 and isinstance(parameter, DTensor) and [*axes.values()] == [0]:
        return parameter.device_mesh.get_group(*axes)
    return None


def _batches(parameters: Iterable[nn.Parameter]) -> Iterator[tuple[list[nn.Parameter], dist.ProcessGroup | None]]:
    """Yield as many matrices at a time as there are ranks to compute them, with those ranks.

    Matrices of about the same size come together, so that no rank waits long.
    """
    by_group: dict[dist.ProcessGroup | None, list[nn.Parameter]] = {}
    for parameter in sorted(parameters, key=lambda p: (p.numel(), *p.shape)):
        by_group.setdefault(_exchange_group(parameter), []).append(parameter)
    for group, members in by_group.items():
        size = 1 if group is None else group.size()
        for start in range(0, len(members), size):
            yield members[start : start + size], group


def _orthogonalize_gathered(part: Tensor, parameter: Tensor, orthogonalize: Orthogonalize) -> Tensor:
    """Return this rank's part of a matrix or stack, orthogonalized. It is gathered first unless its matrices are whole.

    Args:
        part: [F, D] or [E, F, D], sharded as the parameter is.
    """
    if axis := _axis_of_stacks(parameter):
        return _orthogonalize_swapped(part, parameter, *axis, orthogonalize)
    if any(dim >= parameter.ndim - 2 for dim in sharded_axes(parameter).values()):  # its matrices are not whole
        whole = from_local_like(part, parameter)
        assert isinstance(whole, DTensor)
        return slice_like(_orthogonalize_each(whole.full_tensor(), orthogonalize), parameter)
    return _orthogonalize_each(part, orthogonalize)


def _axis_of_stacks(parameter: Tensor) -> tuple[int, int] | None:
    """Return the mesh axis that shards the matrices of a stack, and the dim. None unless it is the only one."""
    axes = [(axis, dim) for axis, dim in sharded_axes(parameter).items() if dim > 0]
    return axes[0] if parameter.ndim == 3 and len(axes) == 1 else None


def _orthogonalize_swapped(
    part: Tensor, parameter: Tensor, axis: int, dim: int, orthogonalize: Orthogonalize
) -> Tensor:
    """Return this rank's part of the matrices of a stack that it shares with the ranks of one axis, orthogonalized.

    Each of these ranks computes some of their matrices, whole, between two all-to-alls.
    """
    assert isinstance(parameter, DTensor)
    group = parameter.device_mesh.get_group(axis)
    size, counts = group.size(), chunk_sizes(len(part), group.size())
    mine = counts[group.rank()]
    received = part.new_empty(size * mine, *part.shape[1:])
    dist.all_to_all_single(received, part, [mine] * size, counts, group=group)
    matrices = _orthogonalize_each(torch.cat(received.unflatten(0, (size, mine)).unbind(), dim=dim), orthogonalize)
    dist.all_to_all_single(part, torch.cat(matrices.chunk(size, dim=dim)), counts, [mine] * size, group=group)
    return part


def _orthogonalize_each(matrices: Tensor, orthogonalize: Orthogonalize) -> Tensor:
    """Overwrite a matrix [F, D], or each of a stack [E, F, D]."""
    for matrix in matrices if matrices.ndim == 3 else matrices[None]:
        matrix.copy_(orthogonalize(matrix))
    return matrices


def _orthogonalize_exchanged(
    parts: list[Tensor], shapes: list[torch.Size], orthogonalize: Orthogonalize, ranks: dist.ProcessGroup
) -> list[Tensor]:
    """Return this rank's rows of each matrix, orthogonalized. Rank j computes matrix j.

    Args:
        parts: [rows, D] of each of up to as many matrices as there are ranks. A rank may have no rows at all.
        shapes: shapes of the whole matrices.
    """
    size, me = ranks.size(), ranks.rank()
    to_others = [part.numel() for part in parts] + [0] * (size - len(parts))
    has_matrix = me < len(parts)
    from_others = [rows * shapes[me][1] for rows in chunk_sizes(shapes[me][0], size)] if has_matrix else [0] * size
    rows = torch.cat([part.flatten() for part in parts])
    matrix = rows.new_empty(sum(from_others))
    dist.all_to_all_single(matrix, rows, from_others, to_others, group=ranks)
    if has_matrix:
        matrix = orthogonalize(matrix.view(shapes[me])).flatten()
    dist.all_to_all_single(rows, matrix, to_others, from_others, group=ranks)
    new = rows.split(to_others[: len(parts)])
    return [flat.view_as(part) for flat, part in zip(new, parts, strict=True)]
