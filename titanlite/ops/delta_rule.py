"""Gated delta rule (arXiv:2412.06464): linear attention whose state forgets, and corrects what it holds for a key.

A head has a state S [K, V] for its keys and values, and for each token

    S = exp(decay) * S
    S = S + k^T * beta * (v - k S)
    out = q S / sqrt(K)

Tokens are computed in chunks, by matmuls within a chunk and one state for each chunk (arXiv:2406.06484, section 3).

Shape suffixes: see `models/layers.py`; X value heads, K dims of a key, V of a value, G chunks of C tokens.
"""

from importlib.util import find_spec

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 64
"""Tokens of a chunk."""


def gated_delta_rule(
    q_BNLK: Tensor,
    k_BNLK: Tensor,
    v_BNLV: Tensor,
    decay_BNL: Tensor,
    beta_BNL: Tensor,
    *,
    positions_BL: Tensor | None = None,
    state_BNKV: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the outputs [B, N, L, V], and the state after the last token [B, N, K, V]. All tensors are float32.

    Args:
        decay_BNL: logarithms, at most 0.
        beta_BNL: between 0 and 1.
        positions_BL: of the tokens in their documents. Where it is 0, the state is reset. None: nowhere.
        state_BNKV: before the first token. None: zeros.
    """
    L, (K, V) = q_BNLK.shape[2], (q_BNLK.shape[-1], v_BNLV.shape[-1])
    C = min(CHUNK, L)
    more = -L % C  # tokens that change no state
    q, k, v = (F.pad(x, (0, 0, 0, more)).unflatten(2, (-1, C)) for x in (q_BNLK * K**-0.5, k_BNLK, v_BNLV))
    decay, beta = (F.pad(x, (0, more)).unflatten(2, (-1, C)) for x in (decay_BNL, beta_BNL))
    causal_CC = torch.ones(C, C, dtype=torch.bool, device=q.device).tril()
    seen, since_start = causal_CC, decay.cumsum(-1).exp()
    if positions_BL is not None:  # number of each token's document, from 0 for one that began in an earlier chunk
        ids_B1GC = F.pad(positions_BL == 0, (0, more)).unflatten(1, (-1, C)).cumsum(-1).unsqueeze(1)
        seen = causal_CC & (ids_B1GC.unsqueeze(-1) == ids_B1GC.unsqueeze(-2))
        since_start = since_start * (ids_B1GC == 0)
    # Decay from token j to token i is a sum of what lies between them: no token before j can change its bits,
    # as it would by a difference of cumulative sums over the chunk.
    between = decay.unsqueeze(-1).masked_fill(~causal_CC.tril(-1), 0).cumsum(-2).exp() * seen
    k_beta = k * beta.unsqueeze(-1)
    corrections = torch.linalg.solve_triangular(
        k_beta @ k.mT * between,
        torch.cat([v * beta.unsqueeze(-1), k_beta * since_start.unsqueeze(-1)], dim=-1),
        upper=False,
        unitriangular=True,
    )
    new, of_state = corrections.split([V, K], dim=-1)
    k_at_end, kept = (k * between[..., -1, :].unsqueeze(-1)).mT, since_start[..., -1:].unsqueeze(-1)
    batch = q.shape[:2]
    state = (q.new_zeros(*batch, K, V) if state_BNKV is None else state_BNKV).flatten(0, 1)
    states, values = [], []
    parts = (x.flatten(0, 1).unbind(1) for x in (new, of_state, k_at_end, kept))
    for new_XCV, of_state_XCK, k_XKC, kept_X11 in zip(*parts, strict=True):  # of X = B * N heads
        states.append(state)
        values.append(torch.baddbmm(new_XCV, of_state_XCK, state, alpha=-1))
        state = torch.baddbmm(state * kept_X11, k_XKC, values[-1])
    states_BNGKV, values_BNGCV = (torch.stack(chunks, dim=1).unflatten(0, batch) for chunks in (states, values))
    out = (q * since_start.unsqueeze(-1)) @ states_BNGKV + (q @ k.mT * between) @ values_BNGCV
    return out.flatten(2, 3)[:, :, :L], state.unflatten(0, batch)


def has_fused_kernels(device: torch.device, dtype: torch.dtype, key_dim: int) -> bool:
    """Return True if flash-linear-attention is installed and computes the rule on a device.

    It picks the fastest kernels at each start, which may add in another order, so that deterministic runs do not use
    it.
    """
    can = dtype in (torch.bfloat16, torch.float16) and key_dim <= 256 and device.type == "cuda"
    return can and not torch.are_deterministic_algorithms_enabled() and find_spec("fla") is not None


def fused_gated_delta_rule(
    q_BNLK: Tensor,
    k_BNLK: Tensor,
    v_BXLV: Tensor,
    decay_BXL: Tensor,
    beta_BXL: Tensor,
    *,
    dtype: torch.dtype,
    boundaries: Tensor | None = None,
) -> Tensor:
    """Compute the rule by the Triton kernels of flash-linear-attention -> [B, X, L, V]. Their states are float32.

    Args:
        dtype: of the operands of their matmuls.
        boundaries: start of each document among the B * L tokens, then B * L: int32. The host waits for their number
            of chunks, once for all layers that get the same tensor. None: each sequence is a document.
    """
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule  # pyright: ignore[reportMissingImports]

    q, k, v = (x.to(dtype) for x in (q_BNLK, k_BNLK, v_BXLV))
    inputs = [x.transpose(1, 2) for x in (q, k, v, decay_BXL, beta_BXL)]
    if boundaries is not None:
        inputs = [x.flatten(0, 1).unsqueeze(0) for x in inputs]
    out, _ = chunk_gated_delta_rule(*inputs, cu_seqlens=boundaries)
    return out.reshape(len(q), -1, *out.shape[2:]).transpose(1, 2)
