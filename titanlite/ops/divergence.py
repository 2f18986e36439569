"""Divergence of a student's next-token distribution from a teacher's, with its gradient, for a chunk of tokens.

Notation: p = softmax(student logits / T), q = softmax(teacher logits / T), m = (p + q) / 2, for the temperature T. Let
z be the student's logits. Each divergence D is scaled by T^2, which keeps gradients of the same size at any temperature
(arXiv:1503.02531).

    forward_kl  D = sum_i q_i log(q_i / p_i)                         T^2 dD/dz_i = T (p_i - q_i)
    reverse_kl  D = sum_i p_i log(p_i / q_i)                         T^2 dD/dz_i = T p_i (log(p_i / q_i) - D)
    js          D = (sum_i p_i log(p_i / m_i) + q_i log(q_i / m_i)) / 2
                                                 T^2 dD/dz_i = T p_i (log(p_i / m_i) - sum_j p_j log(p_j / m_j)) / 2

All of it is computed from log(p) and log(q). Where a logit is -inf, 0 log 0 = 0; reverse_kl is infinite where only q is
0, and forward_kl where only p is. With d = log(q / p), log(m / p) is
max(d, 0) + log(1 + (exp(-|d|) - 1) / 2): no exp overflows, no log is of 0, and d = 0 gives 0.

Of a teacher whose K most probable tokens are known, the divergence is that of K + 1 outcomes: those tokens, and the
tail, which is all others together. The tail has the logit t = T log(sum_r exp(z_r / T)) over the other tokens r, so
that its probability is their sum. The gradient of a tail token's logit is that of t, times its share of the tail:
dt/dz_r = exp((z_r - t) / T).

Shape suffixes: see `layers`; C the tokens of a chunk, K the known tokens.
"""

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor

Kind = Literal["forward_kl", "reverse_kl", "js"]


class ChunkDivergence(NamedTuple):
    """Divergence of each token, float32."""

    value_C: Tensor
    """T^2 D, in nats."""
    d_logits_CV: Tensor | None
    """Gradient of the sum of weight * T^2 D with respect to the student's logits."""


def divergence(
    logits_CV: Tensor,
    teacher_logits_CV: Tensor,
    *,
    kind: Kind,
    temperature: float,
    weight_C: Tensor | None,
) -> ChunkDivergence:
    """Compute T^2 D and its gradient. Up to six matrices [C, V] exist at once.

    Args:
        logits_CV: of the student, float32. They are kept.
        teacher_logits_CV: float32.
        weight_C: weight of each token in the gradient. None: no gradient.
    """
    log_p_CV = _log_softmax(logits_CV, temperature)
    log_q_CV = _log_softmax(teacher_logits_CV, temperature)
    del teacher_logits_CV
    match kind:
        case "forward_kl":
            d_CV = _finite(log_q_CV - log_p_CV, above=False)
            q_CV, p_CV = log_q_CV.exp_(), log_p_CV.exp_()
            value_C = d_CV.mul_(q_CV).sum(dim=1)
            gradient_CV = p_CV.sub_(q_CV)
        case "reverse_kl":
            d_CV = _finite(log_p_CV - log_q_CV, above=False)
            p_CV = log_p_CV.exp_()
            value_C = torch.mul(d_CV, p_CV, out=log_q_CV).sum(dim=1)
            gradient_CV = d_CV.sub_(value_C.unsqueeze(1)).mul_(p_CV)
        case "js":
            d_CV = _finite(log_q_CV - log_p_CV, above=True)
            q_CV, p_CV = log_q_CV.exp_(), log_p_CV.exp_()
            log_m_CV = d_CV.abs().neg_().expm1_().div_(2).log1p_()  # over the larger of p and q
            of_teacher_C = d_CV.neg().relu_().add_(log_m_CV).mul_(q_CV).sum(dim=1)
            log_m_p_CV = d_CV.relu_().add_(log_m_CV)
            of_student_C = torch.mul(p_CV, log_m_p_CV, out=q_CV).sum(dim=1)
            value_C = -(of_teacher_C + of_student_C) / 2
            gradient_CV = log_m_p_CV.sub_(of_student_C.unsqueeze(1)).mul_(p_CV).div_(-2)
    value_C = value_C * temperature**2
    if weight_C is None:
        return ChunkDivergence(value_C, None)
    return ChunkDivergence(value_C, gradient_CV.mul_((temperature * weight_C).unsqueeze(1)))


def _finite(log_ratio_CV: Tensor, *, above: bool) -> Tensor:
    """Make 0 log 0 = 0 where a logit is -inf. A divergence that is infinite stays so, unless `above`."""
    return log_ratio_CV.nan_to_num_(nan=0.0, posinf=None if above else torch.inf)


def _log_softmax(logits_CV: Tensor, temperature: float) -> Tensor:
    return torch.log_softmax(logits_CV if temperature == 1 else logits_CV / temperature, dim=1)


def most_probable(logits_CV: Tensor, k: int, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return what `top_k_divergence` needs of a teacher: the ids of its k most probable tokens [C, K], the logarithms
    of their probabilities, and that of the probability of all others [C]; -inf if there are none."""
    log_q_CV = _log_softmax(logits_CV, temperature)
    log_q_CK, ids_CK = log_q_CV.topk(k, dim=1)
    return ids_CK, log_q_CK, log_q_CV.scatter_(1, ids_CK, -torch.inf).logsumexp(1)


def top_k_divergence(
    logits_CV: Tensor,
    ids_CK: Tensor,
    log_q_CK: Tensor,
    log_tail_C: Tensor,
    *,
    kind: Kind,
    temperature: float,
    weight_C: Tensor | None,
    divergence: Callable[..., ChunkDivergence] = divergence,
) -> ChunkDivergence:
    """Compute T^2 D of K + 1 outcomes and its gradient. For K = V there is no tail, and D is that of all tokens.

    The teacher's outcomes are scaled so that their probabilities add up to 1: they may have been rounded.

    Args:
        logits_CV: of the student, float32. They are kept.
        ids_CK: tokens that the teacher finds most probable, int64; different ones.
        log_q_CK: logarithms of their probabilities by the teacher at the temperature, float32.
        log_tail_C: logarithm of the probability of all other tokens together, float32. Not read for K = V.
        weight_C: weight of each token in the gradient. None: no gradient.
        divergence: computes that of the outcomes.
    """
    options = {"kind": kind, "temperature": temperature, "weight_C": weight_C}
    known_CK = logits_CV.gather(1, ids_CK)
    if ids_CK.shape[1] == logits_CV.shape[1]:
        value_C, d_known_CK = divergence(known_CK, log_q_CK * temperature, **options)
        return ChunkDivergence(
            value_C, None if d_known_CK is None else torch.empty_like(logits_CV).scatter_(1, ids_CK, d_known_CK)
        )
    tail_CV = (logits_CV / temperature).scatter_(1, ids_CK, -torch.inf)
    tail_C1 = tail_CV.logsumexp(1, keepdim=True)
    log_q = torch.cat([log_q_CK, log_tail_C.unsqueeze(1)], dim=1)
    value_C, d_outcomes = divergence(
        torch.cat([known_CK, tail_C1 * temperature], dim=1), log_q * temperature, **options
    )
    if d_outcomes is None:
        return ChunkDivergence(value_C, None)
    d_logits_CV = tail_CV.sub_(tail_C1).exp_().mul_(d_outcomes[:, -1:])
    return ChunkDivergence(value_C, d_logits_CV.scatter_(1, ids_CK, d_outcomes[:, :-1]))
