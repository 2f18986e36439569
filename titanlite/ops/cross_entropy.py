"""Softmax of a chunk of logits, with the gradient of its cross entropy: operator by operator, and for the compiler.

Shape suffixes: see `layers`; C the tokens of a chunk.
"""

from typing import NamedTuple, Protocol

import torch
from torch import Tensor


class SplitVocabulary(Protocol):
    """Split of the vocabulary over several processes, in equal parts."""

    def place(self, tokens: Tensor, size: int) -> tuple[Tensor, Tensor]:
        """Return the index of each token in this process's part of `size` tokens (0 if the token is in another part),
        and whether it is in this one."""
        ...

    def largest(self, x: Tensor) -> Tensor:
        """Return the elementwise maximum over all processes."""
        ...

    def total(self, x: Tensor) -> Tensor:
        """Return the sum over processes."""
        ...

    def enter(self, x: Tensor) -> Tensor:
        """Return x, which is the same on all processes. Its gradient is summed over them."""
        ...


class LabelSoftmax(NamedTuple):
    """Softmax of logits, as far as a loss needs it, float32. The logarithm of its denominator Z is largest + log(sum).
    The cross entropy of a token is log(Z) - label_logit."""

    largest_C: Tensor
    """Largest logit of each token."""
    sum_C: Tensor
    """Sum of exp(logit - largest)."""
    label_logit_C: Tensor
    """Logit of the label."""
    d_logits_CV: Tensor | None
    """Gradient of the sum of cross entropies and z-losses. It may share the memory of the logits."""


def label_softmax_in_place(
    logits_CV: Tensor,
    labels_C: Tensor,
    valid_C: Tensor,
    *,
    z_loss: float,
    dtype: torch.dtype | None,
    vocabulary: SplitVocabulary | None = None,
    out: Tensor | None = None,
) -> LabelSoftmax:
    """Compute the softmax and its gradient in the memory of the logits, which are lost.

    Args:
        logits_CV: float32.
        labels_C: int64, from 0.
        valid_C: float32, 0 where the gradient is 0, else 1.
        z_loss: weight of log(Z)^2.
        dtype: of the gradient. None: no gradient.
        vocabulary: logits are those of this process's tokens of it; None: of all. Labels are of all, and so is the
            softmax.
        out: [C, V] of that dtype, for the gradient. Default: the memory of the logits where they have the dtype, else
            new memory.
    """
    label_C1, valid_C1 = labels_C.unsqueeze(1), valid_C.unsqueeze(1)
    is_here_C1 = None
    if vocabulary:
        label_C1, is_here_C1 = vocabulary.place(label_C1, logits_CV.shape[1])
    label_logit_C1 = logits_CV.gather(1, label_C1)
    largest_C1 = logits_CV.amax(dim=1, keepdim=True)
    if vocabulary and is_here_C1 is not None:
        largest_C1 = vocabulary.largest(largest_C1)
        label_logit_C1 = label_logit_C1.masked_fill(~is_here_C1, 0)
    sum_C1 = logits_CV.sub_(largest_C1).exp_().sum(dim=1, keepdim=True)
    if vocabulary:
        sum_C1, label_logit_C1 = vocabulary.total(torch.stack([sum_C1, label_logit_C1]))
    sums = largest_C1.squeeze(1), sum_C1.squeeze(1), label_logit_C1.squeeze(1)
    if dtype is None:
        return LabelSoftmax(*sums, None)
    # d(cross entropy) = softmax - onehot, d(log_z^2) = 2 log_z softmax.
    gradient_C1 = valid_C1 * (1 + 2 * z_loss * (largest_C1 + sum_C1.log())) if z_loss else valid_C1
    scale_C1 = gradient_C1 / sum_C1
    at_label_C1 = logits_CV.gather(1, label_C1).mul_(scale_C1)
    onehot_C1 = valid_C1 if is_here_C1 is None else valid_C1 * is_here_C1
    d_label_C1 = torch.sub(at_label_C1, onehot_C1, out=torch.empty_like(valid_C1, dtype=dtype))  # rounded once
    d_logits_CV = memory_of_gradient(logits_CV, dtype, out)
    torch.mul(logits_CV, scale_C1, out=d_logits_CV)
    d_logits_CV.scatter_(1, label_C1, d_label_C1)
    return LabelSoftmax(*sums, d_logits_CV)


def memory_of_gradient(logits_CV: Tensor, dtype: torch.dtype, out: Tensor | None) -> Tensor:
    """Return where the gradient of logits is written; see `label_softmax_in_place`."""
    if out is not None:
        return out
    return logits_CV if dtype == logits_CV.dtype else torch.empty_like(logits_CV, dtype=dtype)


def label_softmax(
    logits_CV: Tensor,
    labels_C: Tensor,
    valid_C: Tensor,
    *,
    z_loss: float,
    dtype: torch.dtype | None,
    out: Tensor | None = None,
) -> LabelSoftmax:
    """Compute what `label_softmax_in_place` does, written for torch.compile: its kernels read the logits twice.

    A float32 gradient overwrites the logits.
    """
    label_logit_C1 = logits_CV.gather(1, labels_C.unsqueeze(1))
    largest_C1 = logits_CV.amax(dim=1, keepdim=True)
    sum_C1 = (logits_CV - largest_C1).exp().sum(dim=1, keepdim=True)
    log_z_C1 = largest_C1 + sum_C1.log()
    sums = largest_C1.squeeze(1), sum_C1.squeeze(1), label_logit_C1.squeeze(1)
    if dtype is None:
        return LabelSoftmax(*sums, None)
    softmax_CV = (logits_CV - largest_C1).exp() / sum_C1
    is_label_CV = torch.arange(logits_CV.shape[1], device=logits_CV.device) == labels_C.unsqueeze(1)
    gradient_CV = (softmax_CV * (1 + 2 * z_loss * log_z_C1) - is_label_CV.float()) * valid_C.unsqueeze(1)
    if out is None and dtype == logits_CV.dtype:
        out = logits_CV
    d_logits_CV = gradient_CV.to(dtype) if out is None else out.copy_(gradient_CV)
    return LabelSoftmax(*sums, d_logits_CV)
