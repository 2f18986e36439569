"""Muon for sharded matrices: the algorithm of `torch.optim.Muon`, each matrix computed by one rank.

Muon replaces a matrix of momentum by the nearest orthogonal matrix, which takes the whole matrix. FSDP gives each rank
some rows of every matrix. So the S ranks of a shard group take S matrices at a time: an all-to-all sends all rows of
matrix j to rank j, which orthogonalizes it, and a second one sends the rows back. Rows are sent in the dtype of the
orthogonalization, usually bfloat16: nothing is lost. Replicas (HSDP) do the same, each within its own shard group.

Stacks of matrices that one axis shards by rows or columns are sent in the same way. Other matrices that are sharded by
columns or over several mesh axes are gathered, and orthogonalized by every rank.

Small matrices of one shape that a rank has are computed together, because each operator takes as long as its start.

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

from titanlite.ops.kernels import DEFAULT_KERNELS
from titanlite.runtime.dtensor import chunk_sizes, from_local_like, sharded_axes, slice_like
from titanlite.runtime.private_torch.tensors import local_tensor

Orthogonalize = Callable[[Tensor], Tensor]
"""Overwrites a matrix [F, D], or each matrix of a stack [E, F, D], and returns it."""

TOGETHER = 2**24
"""Elements of the matrices that are computed together. A larger matrix keeps a GPU busy by itself."""
GRAM_RATIO, GRAM_STEPS = 2, 3
"""Least ratio of the sides of matrices whose Gram matrix is iterated, and the steps after which it is computed anew,
because its rounding grows by a factor of 12 in each."""


class Muon(torch.optim.Optimizer):
    """Muon on matrices that may be sharded in any way.

    Args:
        params: float32 matrices [F, D], or stacks of them [E, F, D], in which each matrix is updated by itself.
        weight_decay: decoupled.
        ns_dtype: dtype of the Newton-Schulz iteration. "bfloat16", as in torch.optim.Muon, which is float32 where
            `kernels` multiply it so; or "float32", to compare layouts.
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
        self.kernels = DEFAULT_KERNELS
        """Of the device that multiplies matrices."""
        self.together = TOGETHER
        """Largest number of elements of the matrices that are computed together. With 1, each is computed by itself, so
        that its bits do not depend on the others."""
        for parameter in (parameter for group in self.param_groups for parameter in group["params"]):
            if parameter.ndim not in (2, 3) or parameter.dtype != torch.float32:
                raise ValueError(f"Muon is for matrices of float32, got {[*parameter.shape]} of {parameter.dtype}")

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        assert closure is None
        for group in self.param_groups:
            orthogonalize = partial(
                orthogonalized,
                together=self.together,
                coefficients=group["ns_coefficients"],
                steps=group["ns_steps"],
                eps=group["eps"],
            )
            with_gradients = (parameter for parameter in group["params"] if parameter.grad is not None)
            for parameters, ranks in _batches(with_gradients, self.together):
                parts = [self._momentum(parameter, group) for parameter in parameters]
                if ranks is not None:
                    shapes = [parameter.shape for parameter in parameters]
                    parts = _orthogonalize_exchanged(parts, shapes, orthogonalize, ranks)
                elif len(parts) > 1:
                    parts = orthogonalize(torch.stack(parts)).unbind()
                else:
                    parts = [_orthogonalize_gathered(parts[0], parameters[0], orthogonalize)]
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
        return update.to(device, self.kernels.matmul_dtype(getattr(torch, group["ns_dtype"])), copy=True)

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


def orthogonalized(
    matrices: Tensor, *, together: int, coefficients: tuple[float, float, float], steps: int, eps: float
) -> Tensor:
    """Overwrite a matrix [F, D], or each of a stack [E, F, D], by `newton_schulz`.

    Args:
        together: largest number of elements of the matrices that are computed together; 1: each by itself.
        coefficients, steps, eps: as for `newton_schulz`.
    """
    stack = matrices.view(-1, *matrices.shape[-2:])
    for part in stack.split(max(1, together // math.prod(stack.shape[1:]))):
        some = part if len(part) > 1 else part.squeeze(0)
        part.copy_(newton_schulz(some, coefficients=coefficients, steps=steps, eps=eps))
    return matrices


def newton_schulz(matrix: Tensor, *, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    """Return nearly the nearest orthogonal matrix, by the iteration of torch.optim.Muon in the dtype of the matrix.

    Args:
        matrix: [F, D], or a stack of them [E, F, D]; is overwritten.
        eps: least norm to divide by.
    """
    wide = matrix.mT if matrix.shape[-2] > matrix.shape[-1] else matrix
    wide.div_((wide.norm() if wide.ndim == 2 else wide.norm(dim=(1, 2), keepdim=True)).clamp(min=eps))
    dtype = _gram_dtype(matrix)
    if dtype is None or wide.shape[-1] < GRAM_RATIO * wide.shape[-2]:
        wide = _iterate(wide, coefficients, steps)
    else:
        wide = wide.to(dtype)
        for start in range(0, steps, GRAM_STEPS):
            wide = _iterate_gram(wide, coefficients, min(GRAM_STEPS, steps - start))
    return wide.mT if matrix.shape[-2] > matrix.shape[-1] else wide


def _gram_dtype(matrix: Tensor) -> torch.dtype | None:
    """Return the dtype in which to iterate Gram matrices; None: not at all.

    With the eight bits of bfloat16, results are three times as far from exact ones as without Gram matrices; with the
    eleven of float16 nearer. Here no value is too large for it. CPUs multiply it slowly.
    """
    if matrix.dtype == torch.bfloat16:
        return torch.float16 if matrix.is_cuda else None
    return matrix.dtype


def _iterate(wide: Tensor, coefficients: tuple[float, float, float], steps: int) -> Tensor:
    """Replace a matrix X by (a + b G + c G^2) X, where G = X X^T, in each step."""
    a, b, c = coefficients
    add_product = torch.addmm if wide.ndim == 2 else torch.baddbmm
    for _ in range(steps):
        gram = wide @ wide.mT
        wide = add_product(wide, add_product(gram, gram, gram, beta=b, alpha=c), wide, beta=a)
    return wide


def _iterate_gram(wide: Tensor, coefficients: tuple[float, float, float], steps: int) -> Tensor:
    """Do the steps of `_iterate` on the small matrix G, and multiply X by the product of all factors at the end.

    A factor is a + P, with P = b G + c G^2, and the next G is (a + P) G (a + P). The multiple of the identity in the
    factors and in their product is kept by itself, since their diagonals would be rounded to its size.
    """
    a, b, c = coefficients
    add_product = torch.addmm if wide.ndim == 2 else torch.baddbmm
    gram = wide @ wide.mT
    identity, product = a, add_product(gram, gram, gram, beta=b, alpha=c)
    factor = product
    for _ in range(steps - 1):
        half = add_product(gram, factor, gram, beta=a)
        gram = add_product(half, half, factor, beta=a)
        factor = add_product(gram, gram, gram, beta=b, alpha=c)
        product = add_product(product, factor, product, beta=a).add_(factor, alpha=identity)
        identity *= a
    return add_product(wide, product, wide, beta=identity)


def _exchange_group(parameter: Tensor) -> dist.ProcessGroup | None:
    """Return the ranks that exchange rows of a matrix; None where it is whole, or sharded in a way they cannot."""
    axes = sharded_axes(parameter)
    if parameter.ndim == 2 and isinstance(parameter, DTensor) and [*axes.values()] == [0]:
        return parameter.device_mesh.get_group(*axes)
    return None


def _batches(
    parameters: Iterable[nn.Parameter], together: int
) -> Iterator[tuple[list[nn.Parameter], dist.ProcessGroup | None]]:
    """Yield matrices that are orthogonalized at the same time: as many as there are ranks to compute them, with those
    ranks; or some of one shape that this rank has, with None.

    Matrices of about the same size come together, so that no rank waits long.

    Args:
        together: largest number of elements of those that a rank computes together.
    """
    by_kind: dict[tuple[dist.ProcessGroup | None, torch.Size | None], list[nn.Parameter]] = {}
    for parameter in sorted(parameters, key=lambda p: (p.numel(), *p.shape)):
        group, is_whole = _exchange_group(parameter), parameter.ndim == 2 and not sharded_axes(parameter)
        by_kind.setdefault((group, parameter.shape if is_whole else None), []).append(parameter)
    for (group, shape), members in by_kind.items():
        size = group.size() if group else max(1, together // shape.numel()) if shape else 1
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
        return slice_like(orthogonalize(whole.full_tensor()), parameter)
    return orthogonalize(part)


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
    matrices = orthogonalize(torch.cat(received.unflatten(0, (size, mine)).unbind(), dim=dim))
    dist.all_to_all_single(part, torch.cat(matrices.chunk(size, dim=dim)), counts, [mine] * size, group=group)
    return part


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
