"""The loss: summed over tokens here, divided by the global count of tokens in `step`, so that every token of the global
batch weighs the same whatever the layout and the accumulation.

Logits [T, V] never exist at once. Tokens are taken in chunks whose logits fit into `CHUNK_BYTES`, and the gradients of
a chunk are computed as soon as its logits are there, so that backward needs neither them nor another product.

Shape suffixes: see `models.layers`; C the tokens of a chunk.
"""

from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from titanlite.batch import IGNORE
from titanlite.config.schema import Training
from titanlite.models.layers import matmul_dtype
from titanlite.runtime.user_code import find_object

CHUNK_BYTES = 2**28
"""Of float32 logits at a time: 512 tokens of a vocabulary of 131,072."""


class TokenLoss(NamedTuple):
    """Sums over valid tokens, in nats; fp32 scalars."""

    total: Tensor
    """What is trained on: the cross entropy, and what is added to it."""
    cross_entropy: Tensor
    """Alone. It has no gradient."""


class LossFunction(Protocol):
    """What training minimizes: `token_loss`, or a function of the user's."""

    def __call__(self, hidden_BLD: Tensor, weight_VD: Tensor, /, *, labels_BL: Tensor) -> TokenLoss:
        """Args:
        hidden_BLD: final hidden states; the logits are hidden @ weight^T.
        labels_BL: the next tokens, int64; IGNORE does not count.

        Returns:
            sums, not means: the step divides by the labels that count in the whole global batch.
        """
        ...


def build_loss(training: Training) -> LossFunction:
    """Raises:
    UserError: there is no function of that name.
    """
    return find_object(training.loss) if training.loss else partial(token_loss, z_loss=training.z_loss)


def token_loss(hidden_BLD: Tensor, weight_VD: Tensor, *, labels_BL: Tensor, z_loss: float = 0.0) -> TokenLoss:
    """Cross entropy of the logits hidden @ weight^T.

    Args:
        z_loss: weight of log(Z)^2, Z being the sum that softmax divides by (arXiv:2204.02311).
    """
    chunk = max(1, CHUNK_BYTES // (4 * len(weight_VD)))
    hidden_TD, labels_T = hidden_BLD.flatten(0, 1), labels_BL.flatten()
    wants_gradients = torch.is_grad_enabled() and (hidden_TD.requires_grad or weight_VD.requires_grad)
    return TokenLoss(*_ChunkedLoss.apply(hidden_TD, weight_VD, labels_T, z_loss, chunk, wants_gradients))


class _ChunkedLoss(torch.autograd.Function):
    """`F.linear_cross_entropy` of torch 2.12 works like this. It returns the loss in the type of the hidden states,
    which for bfloat16 is wrong in the third digit, and it knows no z-loss."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_TD: Tensor,
        weight_VD: Tensor,
        labels_T: Tensor,
        z_loss: float,
        chunk: int,
        wants_gradients: bool,
    ) -> tuple[Tensor, Tensor]:
        wide, narrow = logits_operand_dtype(hidden_TD), matmul_dtype(hidden_TD)
        operand_VD = weight_VD.to(wide)
        narrow_VD = operand_VD if narrow == wide else weight_VD.to(narrow)
        d_hidden_TD = torch.empty_like(hidden_TD) if wants_gradients else None
        d_weight_VD: Tensor | None = None
        total, cross_entropy = torch.zeros((), device=hidden_TD.device), torch.zeros((), device=hidden_TD.device)
        for start in range(0, len(labels_T), chunk):
            x_CD, labels_C = hidden_TD[start : start + chunk].to(wide), labels_T[start : start + chunk]
            valid_C = (labels_C != IGNORE).float()
            index_C1 = labels_C.clamp(min=0).unsqueeze(1)
            buffer_CV = _product(x_CD, operand_VD.t())  # logits, then their exponentials, then their gradient
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
            d_hidden_TD[start : start + chunk] = _product(d_logits_CV, narrow_VD)
            if d_weight_VD is None:
                d_weight_VD = _product(d_logits_CV.t(), x_CD)
            else:
                _add_product(d_weight_VD, d_logits_CV.t(), x_CD)
            del buffer_CV, d_logits_CV  # before the next chunk has its own
        if d_weight_VD is not None:
            ctx.gradients = d_hidden_TD, d_weight_VD.to(weight_VD.dtype)
        ctx.mark_non_differentiable(cross_entropy)
        return total, cross_entropy

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        d_hidden_TD, d_weight_VD = ctx.gradients
        del ctx.gradients  # they are scaled in place, and so good for one backward
        return d_hidden_TD.mul_(gradients[0]), d_weight_VD.mul_(gradients[0]), None, None, None, None


def logits_operand_dtype(hidden_TD: Tensor) -> torch.dtype:
    """Of what makes the logits. CPUs make no float32 of bfloat16 operands, and rounded logits show in the loss."""
    return hidden_TD.dtype if hidden_TD.is_cuda else torch.float32


def gives_float32(device: torch.device) -> bool:
    """Whether products of bfloat16 operands can be had as the float32 that they are summed up in."""
    return device.type == "cuda" and not torch.version.hip


def _product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b in float32: from bfloat16 operands without a rounding in between, where the device can do that."""
    if a.dtype == torch.float32:
        return a @ b
    return torch.mm(a, b, out_dtype=torch.float32) if gives_float32(a.device) else (a @ b).float()


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b, where total is float32; holds no more than CHUNK_BYTES for it."""
    if a.dtype == torch.float32:
        total.addmm_(a, b)
        return
    rows = max(1, CHUNK_BYTES // (4 * b.shape[1]))
    for start in range(0, len(total), rows):
        total[start : start + rows] += _product(a[start : start + rows], b)
