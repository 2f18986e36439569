"""The loss, as a sum over tokens. `step` divides it by the global count of tokens, so that every token of the global
batch weighs the same whatever the layout and the accumulation.

Logits [T, V] never exist at once. Tokens are processed in chunks whose logits fit into `CHUNK_BYTES`. The gradients of
a chunk are computed as soon as its logits exist, so that backward needs neither the logits nor another matmul.

Shape suffixes: see `models.layers`; C the tokens of a chunk.
"""

from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from titanlite.batch import IGNORE
from titanlite.config.schema import Training
from titanlite.kernels import DEFAULT_KERNELS, Kernels
from titanlite.runtime.user_code import find_object

CHUNK_BYTES = 2**28
"""Size of the float32 logits of a chunk: 512 tokens of a vocabulary of 131,072."""


class TokenLoss(NamedTuple):
    """Sums over valid tokens, in nats; float32 scalars."""

    total: Tensor
    """The minimized sum: cross entropy, and terms that are added to it."""
    cross_entropy: Tensor
    """Cross entropy alone, without a gradient."""


class LossFunction(Protocol):
    """Function that training minimizes: `token_loss`, or one of the user's."""

    def __call__(self, hidden_BLD: Tensor, weight_VD: Tensor, /, *, labels_BL: Tensor) -> TokenLoss:
        """Return sums over tokens, not means: the step divides by the valid labels of the global batch.

        Args:
            hidden_BLD: final hidden states; the logits are hidden @ weight^T.
            labels_BL: the next tokens, int64; IGNORE does not count.
        """
        ...


def build_loss(training: Training, kernels: Kernels) -> LossFunction:
    """Return the loss function of the config.

    Raises:
        UserError: no function has that name.
    """
    if training.loss:
        return find_object(training.loss)
    return partial(token_loss, z_loss=training.z_loss, kernels=kernels)


def token_loss(
    hidden_BLD: Tensor,
    weight_VD: Tensor,
    *,
    labels_BL: Tensor,
    z_loss: float = 0.0,
    kernels: Kernels = DEFAULT_KERNELS,
) -> TokenLoss:
    """Cross entropy of the logits hidden @ weight^T.

    Args:
        z_loss: weight of log(Z)^2, where Z is the sum in the denominator of softmax (arXiv:2204.02311).
    """
    chunk = max(1, CHUNK_BYTES // (4 * len(weight_VD)))
    hidden_TD, labels_T = hidden_BLD.flatten(0, 1), labels_BL.flatten()
    needs_gradients = torch.is_grad_enabled() and (hidden_TD.requires_grad or weight_VD.requires_grad)
    return TokenLoss(*_ChunkedLoss.apply(hidden_TD, weight_VD, labels_T, z_loss, chunk, needs_gradients, kernels))


class _ChunkedLoss(torch.autograd.Function):
    """Loss and gradients, chunk by chunk.

    `F.linear_cross_entropy` of torch 2.12 works like this. But it returns the loss in the dtype of the hidden states,
    which for bfloat16 is wrong in the third digit, and it has no z-loss.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_TD: Tensor,
        weight_VD: Tensor,
        labels_T: Tensor,
        z_loss: float,
        chunk: int,
        needs_gradients: bool,
        kernels: Kernels,
    ) -> tuple[Tensor, Tensor]:
        wide, narrow = kernels.logits_dtype(hidden_TD), kernels.matmul_dtype(hidden_TD)
        operand_VD = weight_VD.to(wide)
        narrow_VD = operand_VD if narrow == wide else weight_VD.to(narrow)
        d_hidden_TD = torch.empty_like(hidden_TD) if needs_gradients else None
        d_weight_VD: Tensor | None = None
        total, cross_entropy = torch.zeros((), device=hidden_TD.device), torch.zeros((), device=hidden_TD.device)
        for start in range(0, len(labels_T), chunk):
            x_CD, labels_C = hidden_TD[start : start + chunk].to(wide), labels_T[start : start + chunk]
            valid_C = (labels_C != IGNORE).float()
            index_C1 = labels_C.clamp(min=0).unsqueeze(1)
            buffer_CV = kernels.float32_mm(x_CD, operand_VD.t())  # logits, then their exponentials, then their gradient
            target_C1 = buffer_CV.gather(1, index_C1)
            largest_C1 = buffer_CV.amax(dim=1, keepdim=True)
            sum_C1 = buffer_CV.sub_(largest_C1).exp_().sum(dim=1, keepdim=True)
            log_z_C1 = largest_C1 + sum_C1.log()
            nats = ((log_z_C1 - target_C1).squeeze(1) * valid_C).sum()
            cross_entropy += nats
            total += nats + z_loss * (log_z_C1.squeeze(1).square() * valid_C).sum()
            if d_hidden_TD is None:
                continue
            # d(nats) = softmax - onehot, d(log_z^2) = 2 log_z softmax.
            valid_C1 = valid_C.unsqueeze(1)
            buffer_CV.mul_(valid_C1 * (1 + 2 * z_loss * log_z_C1) / sum_C1).scatter_add_(1, index_C1, -valid_C1)
            d_logits_CV, x_CD = buffer_CV.to(narrow), x_CD.to(narrow)
            d_hidden_TD[start : start + chunk] = kernels.float32_mm(d_logits_CV, narrow_VD)
            if d_weight_VD is None:
                d_weight_VD = kernels.float32_mm(d_logits_CV.t(), x_CD)
            else:
                _add_matmul(d_weight_VD, d_logits_CV.t(), x_CD, kernels)
            del buffer_CV, d_logits_CV  # before the next chunk allocates its own
        if d_weight_VD is not None:
            ctx.gradients = d_hidden_TD, d_weight_VD.to(weight_VD.dtype)
        ctx.mark_non_differentiable(cross_entropy)
        return total, cross_entropy

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        d_hidden_TD, d_weight_VD = ctx.gradients
        del ctx.gradients  # they are scaled in place, which can be done once
        return d_hidden_TD.mul_(gradients[0]), d_weight_VD.mul_(gradients[0]), None, None, None, None, None


def _add_matmul(total: Tensor, a: Tensor, b: Tensor, kernels: Kernels) -> None:
    """total += a @ b in place, for a float32 total; allocates at most CHUNK_BYTES."""
    if a.dtype == torch.float32:
        total.addmm_(a, b)
        return
    rows = max(1, CHUNK_BYTES // (4 * b.shape[1]))
    for start in range(0, len(total), rows):
        total[start : start + rows] += kernels.float32_mm(a[start : start + rows], b)
