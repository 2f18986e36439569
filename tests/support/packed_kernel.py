"""torch's operators of attention of variable length, which run on GPUs only: in their place, formulas on a CPU."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import varlen


def _parts(query_starts: Tensor, key_starts: Tensor) -> Iterator[tuple[slice, slice]]:
    """Queries and keys of each document."""
    for ends in zip(pairwise(query_starts.tolist()), pairwise(key_starts.tolist()), strict=True):
        yield slice(*ends[0]), slice(*ends[1])


def _heads(x: Tensor, like: Tensor) -> Tensor:
    return x.repeat_interleave(like.shape[1] // x.shape[1], dim=1)


def _scores(q_LNH: Tensor, k_SKH: Tensor, scale: float | None, window: list[int]) -> Tensor:
    """Scores [N, L, S]; the last query is aligned with the last key."""
    scores = torch.einsum("inh,jnh->nij", q_LNH, _heads(k_SKH, q_LNH)) * (scale or q_LNH.shape[-1] ** -0.5)
    queries, keys = scores.shape[1:]
    distance = torch.arange(keys - queries, keys)[:, None] - torch.arange(keys)
    left = keys if window[0] < 0 else window[0]
    return scores.masked_fill((distance < 0) | (distance > left), -torch.inf)


def forward(
    query: Tensor, key: Tensor, value: Tensor, query_starts: Tensor, key_starts: Tensor, *options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    _, _, _, scale, window, *_ = options
    out, lse = torch.empty_like(query), query.new_empty(query.shape[1], len(query))
    for of_q, of_k in _parts(query_starts, key_starts):
        scores = _scores(query[of_q], key[of_k], scale, window)
        lse[:, of_q] = scores.logsumexp(-1)
        out[of_q] = torch.einsum("nij,jnh->inh", scores.softmax(-1), _heads(value[of_k], query))
    return out, lse, torch.zeros(2, dtype=torch.uint64)


def backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, *options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    query_starts, key_starts, _, _, _, _, scale, window = options
    dq, dk, dv = (torch.zeros_like(x) for x in (query, key, value))
    for of_q, of_k in _parts(query_starts, key_starts):
        g, q, o, k, v = gradient[of_q], query[of_q], out[of_q], key[of_k], value[of_k]
        p = (_scores(q, k, scale, window) - lse[:, of_q, None]).exp()
        ds = p * (torch.einsum("inh,jnh->nij", g, _heads(v, q)) - (g * o).sum(-1).T[:, :, None])
        ds = ds * (scale or q.shape[-1] ** -0.5)
        dq[of_q] = torch.einsum("nij,jnh->inh", ds, _heads(k, q))
        dk[of_k] = torch.einsum("nij,inh->jnh", ds, q).unflatten(1, (k.shape[1], -1)).sum(2)
        dv[of_k] = torch.einsum("nij,inh->jnh", p, g).unflatten(1, (v.shape[1], -1)).sum(2)
    return dq, dk, dv


@contextmanager
def on_cpu(forward: Callable[..., Any] = forward, backward: Callable[..., Any] = backward) -> Iterator[None]:
    """Let the operators run functions on CPUs."""
    varlen._varlen_attn.register_kernel("cpu")(forward)
    varlen._varlen_attn_backward.register_kernel("cpu")(backward)
    with varlen._varlen_attn.set_kernel_enabled("cpu"), varlen._varlen_attn_backward.set_kernel_enabled("cpu"):
        yield
