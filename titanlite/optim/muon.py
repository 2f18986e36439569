"""Muon for sharded matrices: the algorithm of `torch.optim.Muon`, on whole matrices, each computed by one rank.

Muon replaces a matrix of momenta by the nearest orthogonal one, which needs the whole matrix; FSDP gives each rank some
rows of every matrix. So S matrices at a time, S ranks trade rows for matrices: rank j is sent all rows of matrix j,
orthogonalizes it, and sends the rows back. They are sent in the type that the orthogonalization computes in, bfloat16
as a rule: nothing is lost. Replicas (HSDP) do the same, each among its own ranks.

Source: https://kellerjordan.github.io/posts/muon/
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim._muon import (
    DEFAULT_A,
    DEFAULT_B,
    DEFAULT_C,
    DEFAULT_NS_STEPS,
    EPS,
    _adjust_lr,
    _zeropower_via_newtonschulz,
)

from titanlite.runtime.private_torch import local_tensor


class Muon(torch.optim.Optimizer):
    """Args:
    params: matrices [F, D], or stacks of them [E, F, D] of which each is a matrix by itself. float32; not sharded, or
        by the first dimension over one axis of the mesh.
    weight_decay: decoupled.
    ns_dtype: "bfloat16", as torch.optim.Muon computes; or "float32", for CPUs that are slow at it, and to compare
        layouts.
    adjust_lr_fn: "match_rms_adamw" makes updates as large as AdamW's, so that one learning rate does for both;
        "original" is torch.optim.Muon's default.

    Raises:
        ValueError: an argument is not one of these.
    """

    _step_supports_amp_scaling = True  # reads found_inf

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: Sequence[float] = (DEFAULT_A, DEFAULT_B, DEFAULT_C),
        eps: float = EPS,
        ns_steps: int = DEFAULT_NS_STEPS,
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
            _shard_group(parameter)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        assert closure is None
        for group in self.param_groups:
            orthogonalize = partial(
                _zeropower_via_newtonschulz if group["ns_dtype"] == "bfloat16" else _newton_schulz_in_float32,
                ns_coefficients=group["ns_coefficients"],
                ns_steps=group["ns_steps"],
                eps=group["eps"],
            )
            for parameters, ranks in _rounds(p for p in group["params"] if p.grad is not None):
                parts = [self._momentum(parameter, group) for parameter in parameters]
                if ranks is None:
                    parts = [_each_matrix(part, orthogonalize) for part in parts]
                else:
                    parts = _trade(parts, [parameter.shape for parameter in parameters], orthogonalize, ranks)
                for parameter, part in zip(parameters, parts, strict=True):
                    self._apply(parameter, part, group)

    def _momentum(self, parameter: nn.Parameter, group: dict[str, Any]) -> Tensor:
        """This rank's part of what is to be orthogonalized, as and where that is computed."""
        assert parameter.grad is not None
        state, skip = self.state[parameter], getattr(self, "found_inf", None)
        if not state:
            state["momentum_buffer"] = torch.zeros_like(parameter.grad)
        buffer, gradient = local_tensor(state["momentum_buffer"]), local_tensor(parameter.grad)
        if skip is not None:
            gradient = torch.where(skip != 0, buffer, gradient)  # the mean of the buffer and itself: unchanged
        buffer.lerp_(gradient, 1 - group["momentum"])
        update = gradient.lerp(buffer, group["momentum"]) if group["nesterov"] else buffer
        # With offload, matrices are traded and orthogonalized on the GPU all the same.
        place = parameter.device_mesh.device_type if isinstance(parameter, DTensor) else parameter.device
        return update.to(place, getattr(torch, group["ns_dtype"]), copy=True)  # it is overwritten

    def _apply(self, parameter: nn.Parameter, update: Tensor, group: dict[str, Any]) -> None:
        weight, skip = local_tensor(parameter), getattr(self, "found_inf", None)
        lr = _adjust_lr(group["lr"], group["adjust_lr_fn"], parameter.shape[-2:])
        new = weight * (1 - group["lr"] * group["weight_decay"])
        new.add_(update.to(weight.device), alpha=-lr)
        weight.copy_(new if skip is None else torch.where(skip != 0, weight, new))


def _shard_group(parameter: Tensor) -> dist.ProcessGroup | None:
    """Ranks that have rows of this matrix; None where matrices are whole.

    Raises:
        ValueError: it is sharded in another way.
    """
    if not isinstance(parameter, DTensor):
        return None
    axes = [axis for axis, placement in enumerate(parameter.placements) if not placement.is_replicate()]
    if len(axes) > 1 or not all(parameter.placements[axis].is_shard(0) for axis in axes):
        raise ValueError(f"Muon cannot gather matrices that are sharded by {parameter.placements}")
    mesh = parameter.device_mesh
    is_whole = parameter.ndim == 3 or not axes or mesh.size(axes[0]) == 1
    return None if is_whole else mesh.get_group(axes[0])


def _rounds(parameters: Iterable[nn.Parameter]) -> Iterator[tuple[list[nn.Parameter], dist.ProcessGroup | None]]:
    """As many matrices at a time as there are ranks to compute them: alike ones together, so that nobody waits long."""
    by_ranks: dict[dist.ProcessGroup | None, list[nn.Parameter]] = {}
    for parameter in sorted(parameters, key=lambda p: (p.numel(), *p.shape)):
        by_ranks.setdefault(_shard_group(parameter), []).append(parameter)
    for ranks, members in by_ranks.items():
        size = 1 if ranks is None else ranks.size()
        for start in range(0, len(members), size):
            yield members[start : start + size], ranks


def _newton_schulz_in_float32(
    matrix: Tensor, *, ns_coefficients: tuple[float, float, float], ns_steps: int, eps: float
) -> Tensor:
    """As `_zeropower_via_newtonschulz`, which computes in bfloat16 alone."""
    a, b, c = ns_coefficients
    flat = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    flat = flat / flat.norm().clamp(min=eps)
    for _ in range(ns_steps):
        gram = flat @ flat.T
        flat = torch.addmm(flat, torch.addmm(gram, gram, gram, beta=b, alpha=c), flat, beta=a)
    return flat.T if matrix.shape[0] > matrix.shape[1] else flat


def _each_matrix(whole: Tensor, orthogonalize: Callable[[Tensor], Tensor]) -> Tensor:
    """[F, D], or [E, F, D] with E matrices."""
    for matrix in whole if whole.ndim == 3 else whole[None]:
        matrix.copy_(orthogonalize(matrix))
    return whole


def _trade(
    parts: list[Tensor],
    shapes: list[torch.Size],
    orthogonalize: Callable[[Tensor], Tensor],
    ranks: dist.ProcessGroup,
) -> list[Tensor]:
    """This rank's rows of each matrix -> those of each, orthogonalized. Rank j computes the matrix j.

    Args:
        parts: [rows, D] of each of up to as many matrices as there are ranks. Ranks may have no rows at all.
        shapes: of the whole matrices.
    """
    size, me = ranks.size(), ranks.rank()
    to_others = [part.numel() for part in parts] + [0] * (size - len(parts))
    has_matrix = me < len(parts)
    from_others = _elements_by_rank(shapes[me], size) if has_matrix else [0] * size
    rows = torch.cat([part.flatten() for part in parts])
    matrix = rows.new_empty(sum(from_others))
    dist.all_to_all_single(matrix, rows, from_others, to_others, group=ranks)
    if has_matrix:
        matrix = orthogonalize(matrix.view(shapes[me])).flatten()
    dist.all_to_all_single(rows, matrix, to_others, from_others, group=ranks)
    new = rows.split(to_others[: len(parts)])
    return [flat.view_as(part) for flat, part in zip(new, parts, strict=True)]


def _elements_by_rank(shape: torch.Size, size: int) -> list[int]:
    """How much of a matrix each rank has: full chunks of rows, then a smaller one, then none (`torch.chunk`)."""
    rows, columns = shape
    chunk = -(-rows // size)
    return [min(chunk, max(0, rows - rank * chunk)) * columns for rank in range(size)]
