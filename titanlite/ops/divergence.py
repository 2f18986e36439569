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

Shape suffixes: see `layers`; C the tokens of a chunk.
"""

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
