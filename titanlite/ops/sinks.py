"""Attention with sinks: a score of each query head that takes part in the softmax and has no value (arXiv:2309.17453).

Let lse be the log-sum-exp of a query's scores and O its output. A sink s makes the output O * exp(lse - lse') with
lse' = logaddexp(lse, s). The backward pass of flash attention computes weights as exp(score - lse), and the gradient of
a score from its weight and the product of output and gradient. So with lse' and the new output, it returns the
gradients of attention with the sink. Nothing is kept beyond what attention keeps.

Shape suffixes: see `models/layers.py`.
"""

from typing import Any

import torch
from torch import Tensor

from titanlite.runtime.private_torch.attention import (
    cpu_attention,
    cpu_attention_backward,
    packed_attention,
    packed_attention_backward,
)


def attend_on_cpu(
    q_BNLH: Tensor, k_BKSH: Tensor, v_BKSH: Tensor, sinks_N: Tensor, mask: Tensor | None, scale: float | None
) -> Tensor:
    """Causal attention with sinks, or with a mask -> [B, N, L, H]. Query heads can share key heads."""
    return _CpuAttention.apply(q_BNLH, k_BKSH, v_BKSH, sinks_N, mask, scale)


def attend_by_formula(
    q_BNLH: Tensor, k_BKSH: Tensor, v_BKSH: Tensor, sinks_N: Tensor, mask: Tensor | None, scale: float | None
) -> Tensor:
    """Compute what `attend_on_cpu` does on any device. It holds all scores [B, N, L, S], in float32."""
    factor = q_BNLH.shape[-1] ** -0.5 if scale is None else scale
    q_BKGLH = q_BNLH.unflatten(1, (k_BKSH.shape[1], -1))  # G query heads share a key head
    scores_BNLS = (q_BKGLH @ k_BKSH.unsqueeze(2).mT).float().mul(factor).flatten(1, 2)
    if mask is None:
        mask = torch.full(scores_BNLS.shape[-2:], -torch.inf, device=q_BNLH.device).triu(1)
    sinks_BNL1 = sinks_N.float().view(-1, 1, 1).expand_as(scores_BNLS[..., :1])
    weights_BNLS = torch.cat([scores_BNLS + mask, sinks_BNL1], dim=-1).softmax(-1)[..., :-1].type_as(v_BKSH)
    return (weights_BNLS.unflatten(1, (k_BKSH.shape[1], -1)) @ v_BKSH.unsqueeze(2)).flatten(1, 2)


def attend_packed(
    q_TNH: Tensor,
    k_TKH: Tensor,
    v_TKH: Tensor,
    sinks_N: Tensor,
    offsets: tuple[Tensor, Tensor],
    longest: tuple[int, int],
    *,
    sides: tuple[int, int],
    scale: float | None,
) -> Tensor:
    """`torch.nn.attention.varlen.varlen_attn` with sinks -> [T, N, H]."""
    of_queries, of_keys = offsets
    of_keys = None if of_keys is of_queries else of_keys  # the compiler takes no tensor twice
    return _PackedAttention.apply(q_TNH, k_TKH, v_TKH, sinks_N, of_queries, of_keys, longest, sides, scale)


def _add_sink(out_NLH: Tensor, lse_NL: Tensor, sinks_N1: Tensor) -> tuple[Tensor, Tensor]:
    """Return the output with sinks, and the log-sum-exp of the scores and the sink. Dims of batches can come first."""
    total_NL = torch.logaddexp(lse_NL, sinks_N1)
    share_NL1 = (lse_NL - total_NL).exp().unsqueeze(-1)
    if torch.compiler.is_compiling():
        return (out_NLH * share_NL1).type_as(out_NLH), total_NL
    # Activation checkpointing may keep the old output: it must not change.
    return torch.mul(out_NLH, share_NL1, out=torch.empty_like(out_NLH)), total_NL


def _sink_gradient(gradient_NLH: Tensor, out_NLH: Tensor, total_NL: Tensor, sinks_N: Tensor) -> Tensor:
    """Return the gradient of sinks [N]. A sink has the weight exp(s - lse') and the value 0."""
    along_NL = (gradient_NLH * out_NLH).sum(-1, dtype=torch.float32)
    of_each_N = (along_NL * (sinks_N.float().unsqueeze(1) - total_NL).exp()).sum(-1)
    return of_each_N.view(-1, len(sinks_N)).sum(0).neg().type_as(sinks_N)


class _CpuAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks_N: Tensor, mask: Tensor | None, scale: float | None
    ) -> Tensor:
        out_BNLH, lse_BNL = cpu_attention(q, k, v, mask=mask, scale=scale)
        out_BNLH, total_BNL = _add_sink(out_BNLH, lse_BNL, sinks_N.float().unsqueeze(1))
        ctx.save_for_backward(q, k, v, sinks_N, mask, out_BNLH, total_BNL)
        ctx.scale = scale
        return out_BNLH

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sinks_N, mask, out_BNLH, total_BNL = ctx.saved_tensors
        found = cpu_attention_backward(gradients[0], q, k, v, out_BNLH, total_BNL, mask=mask, scale=ctx.scale)
        return *found, _sink_gradient(gradients[0], out_BNLH, total_BNL, sinks_N), None, None


class _PackedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks_N: Tensor,
        query_offsets: Tensor,
        key_offsets: Tensor | None,
        longest: tuple[int, int],
        sides: tuple[int, int],
        scale: float | None,
    ) -> Tensor:
        offsets = query_offsets, query_offsets if key_offsets is None else key_offsets
        out_TNH, lse_NT = packed_attention(q, k, v, offsets, longest, sides=sides, scale=scale)
        out_NTH, total_NT = _add_sink(out_TNH.transpose(0, 1), lse_NT, sinks_N.float().unsqueeze(1))
        out_TNH = out_NTH.transpose(0, 1)
        ctx.save_for_backward(q, k, v, sinks_N, query_offsets, key_offsets, out_TNH, total_NT)
        ctx.arguments = longest, sides, scale
        return out_TNH

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sinks_N, query_offsets, key_offsets, out_TNH, total_NT = ctx.saved_tensors
        longest, sides, scale = ctx.arguments
        offsets = query_offsets, query_offsets if key_offsets is None else key_offsets
        found = packed_attention_backward(
            gradients[0], q, k, v, out_TNH, total_NT, offsets, longest, sides=sides, scale=scale
        )
        of_sinks = _sink_gradient(gradients[0].transpose(0, 1), out_TNH.transpose(0, 1), total_NT, sinks_N)
        return *found, of_sinks, None, None, None, None, None
