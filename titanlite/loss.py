"""The loss, as a sum over tokens. `step` divides it by the global count of tokens, so that every token of the global
batch weighs the same whatever the layout and the accumulation.

Logits [T, V] never exist at once. Tokens are processed in chunks, whose size the kernels choose. The gradients of a
chunk are computed as soon as its logits exist, so that backward needs neither the logits nor another matmul.

Shape suffixes: see `models.layers`; C the tokens of a chunk.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor

from titanlite.batch import IGNORE
from titanlite.ops.cross_entropy import SplitVocabulary
from titanlite.ops.kernels import DEFAULT_KERNELS, Kernels
from titanlite.runtime.private_torch.tensors import factor_of
from titanlite.runtime.user_code import check_call, find_object
from titanlite.schema import Distill, Training

if TYPE_CHECKING:
    from titanlite.ops.divergence import ChunkDivergence

NO_DISTILLATION = Distill()


class TokenLoss(NamedTuple):
    """Sums over valid tokens, in nats; float32 scalars."""

    total: Tensor
    """The minimized sum: cross entropy, and terms that are added to it."""
    cross_entropy: Tensor
    """Cross entropy alone, without a gradient."""
    metrics: Mapping[str, Tensor] = MappingProxyType({})
    """Further sums for the metrics, by name, without a gradient. They are reported as means over tokens."""


class Divergence(Protocol):
    """Divergence of the student from the teacher, for the tokens of one micro-batch."""

    matrices: int
    """Matrices [C, V] of logits that exist beside the student's. Chunks are smaller for them."""

    def __call__(self, logits_CV: Tensor, part: slice, weight_C: Tensor | None) -> "ChunkDivergence":
        """Return T^2 D of the tokens of a chunk, and the gradient of its weighted sum.

        Args:
            logits_CV: of the student, float32; they are kept.
            part: the chunk, among the tokens [T] of the micro-batch.
            weight_C: weight of each token in the gradient. None: no gradient.
        """
        ...


class TeacherOutput(Protocol):
    """Output of a teacher for one micro-batch."""

    def divergence(self, distill: Distill, kernels: Kernels) -> AbstractContextManager[Divergence]:
        """Return the divergence that `[distill]` names. It can be computed within the context."""
        ...


class LossFunction(Protocol):
    """Function that training minimizes: `token_loss`, or one of the user's."""

    def __call__(self, hidden_BLD: Tensor, weight_VD: Tensor, /, *, labels_BL: Tensor) -> TokenLoss:
        """Return sums over tokens, not means: the step divides by the valid labels of the global batch.

        Args:
            hidden_BLD: final hidden states; the logits are hidden @ weight^T.
            labels_BL: the next tokens, int64; IGNORE does not count.

        With `[teacher]`, a further argument `teacher` is the `TeacherOutput` of the micro-batch.
        """
        ...


def build_loss(
    training: Training,
    kernels: Kernels,
    distill: Distill | None = None,
    *,
    vocabulary: SplitVocabulary | None = None,
) -> LossFunction:
    """Return the loss function of the config.

    Args:
        distill: of a run with a teacher.
        vocabulary: split of the vocabulary over processes, with tensor parallelism.

    Raises:
        UserError: no function has that name.
    """
    if training.loss:
        return find_object(training.loss)
    options: dict[str, Any] = {"distill": distill} if distill else {}
    return partial(token_loss, z_loss=training.z_loss, kernels=kernels, vocabulary=vocabulary, **options)


def check_loss(name: str, *, with_teacher: bool) -> None:
    """Check that a loss of the user's own exists, and takes the arguments of `LossFunction`.

    Raises:
        UserError: it does not.
    """
    check_call(name, "hidden", "weight", labels_BL=None, **({"teacher": None} if with_teacher else {}))


def token_loss(
    hidden_BLD: Tensor,
    weight_VD: Tensor,
    *,
    labels_BL: Tensor,
    z_loss: float = 0.0,
    kernels: Kernels = DEFAULT_KERNELS,
    teacher: TeacherOutput | None = None,
    distill: Distill = NO_DISTILLATION,
    vocabulary: SplitVocabulary | None = None,
) -> TokenLoss:
    """Cross entropy of the logits hidden @ weight^T; with a teacher (1 - ratio) * that + ratio * T^2 * divergence.

    The formulas of the divergences are in `ops.divergence`.

    Args:
        z_loss: weight of log(Z)^2, where Z is the sum in the denominator of softmax (arXiv:2204.02311).
        teacher: its output for the same tokens. The metric distill_loss is T^2 * divergence.
        vocabulary: the weight has this process's tokens of it only. None: it has all.
    """
    hidden_TD, labels_T = hidden_BLD.flatten(0, 1), labels_BL.flatten()
    if vocabulary:
        hidden_TD = vocabulary.enter(hidden_TD)
    needs_gradients = torch.is_grad_enabled() and (hidden_TD.requires_grad or weight_VD.requires_grad)
    inputs = hidden_TD, weight_VD, labels_T, z_loss, needs_gradients, kernels, vocabulary
    if teacher is None:
        return TokenLoss(*_ChunkedLoss.apply(*inputs, 0.0, None))
    with teacher.divergence(distill, kernels) as divergence:
        return TokenLoss(*_ChunkedLoss.apply(*inputs, distill.ratio, divergence))


class _ChunkedLoss(torch.autograd.Function):
    """Loss and gradients, chunk by chunk.

    `F.linear_cross_entropy` of torch 2.12 has no z-loss, and for bfloat16 a loss that is wrong in the third digit.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_TD: Tensor,
        weight_VD: Tensor,
        labels_T: Tensor,
        z_loss: float,
        needs_gradients: bool,
        kernels: Kernels,
        vocabulary: SplitVocabulary | None,
        ratio: float,
        divergence: Divergence | None,
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        wide, narrow = kernels.logits_dtype(hidden_TD), kernels.matmul_dtype(hidden_TD)
        operand_VD = weight_VD.to(wide)
        narrow_VD = operand_VD if narrow == wide else weight_VD.to(narrow)
        d_hidden_TD = torch.empty_like(hidden_TD) if needs_gradients else None
        d_weight_VD: Tensor | None = None
        valid_T, labels_T = (labels_T != IGNORE).float(), labels_T.clamp(min=0)
        own_T = valid_T * (1 - ratio) if ratio else valid_T  # weights of the gradients of both terms
        taught_T = valid_T * ratio if divergence and needs_gradients else None
        # Gradients of two terms are added before they are rounded.
        dtype = (torch.float32 if divergence else narrow) if needs_gradients else None
        terms: list[tuple[Tensor, Tensor, Tensor]] = []
        diverged: list[Tensor] = []
        matrices = 1 + divergence.matrices if divergence else 1
        chunk = kernels.loss_chunk(len(labels_T), matrices * len(weight_VD), hidden_TD.device)
        for start in range(0, len(labels_T), chunk):
            part = slice(start, start + chunk)
            x_CD = hidden_TD[part].to(wide)
            logits_CV = kernels.float32_mm(x_CD, operand_VD.t())
            taught = divergence(logits_CV, part, None if taught_T is None else taught_T[part]) if divergence else None
            softmax = kernels.label_softmax(
                logits_CV, labels_T[part], own_T[part], z_loss=z_loss, dtype=dtype, vocabulary=vocabulary
            )
            terms.append(softmax[:3])
            d_logits_CV = softmax.d_logits_CV
            if taught is not None:
                diverged.append(taught.value_C)
                if d_logits_CV is not None and taught.d_logits_CV is not None:
                    d_logits_CV = d_logits_CV.add_(taught.d_logits_CV).to(narrow)
            del logits_CV, softmax, taught  # before the next chunk allocates its own
            if d_hidden_TD is not None and d_logits_CV is not None:
                x_CD = x_CD.to(narrow)
                kernels.matmul_into(d_hidden_TD[part], d_logits_CV, narrow_VD)
                if ctx.needs_input_grad[1] and d_weight_VD is None:
                    d_weight_VD = kernels.float32_mm(d_logits_CV.t(), x_CD)
                elif d_weight_VD is not None:
                    kernels.add_matmul(d_weight_VD, d_logits_CV.t(), x_CD)
            del d_logits_CV
        if d_weight_VD is not None and weight_VD.dtype != torch.float16:  # the sum over tokens may overflow float16
            d_weight_VD = d_weight_VD.to(weight_VD.dtype)
        ctx.gradients = d_hidden_TD, d_weight_VD
        total, cross_entropy = _sums(terms, valid_T, z_loss)
        metrics = {"distill_loss": (torch.cat(diverged) * valid_T).sum()} if diverged else {}
        if diverged:
            total = total * (1 - ratio) + metrics["distill_loss"] * ratio
        ctx.mark_non_differentiable(cross_entropy)
        return total, cross_entropy, metrics

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        d_hidden_TD, d_weight_VD = ctx.gradients
        del ctx.gradients  # they are scaled in place, which can be done once
        for gradient in (d_hidden_TD, d_weight_VD):
            if gradient is not None:
                gradient.mul_(factor_of(gradient, gradients[0]))
        return d_hidden_TD, d_weight_VD, *[None] * 7


def _sums(terms: Sequence[tuple[Tensor, Tensor, Tensor]], valid_T: Tensor, z_loss: float) -> tuple[Tensor, Tensor]:
    """Return the minimized sum and the cross entropy.

    Args:
        terms: the largest logit, the sum of the softmax, and the logit of the label, of each chunk.
    """
    largest_T, sum_T, label_logit_T = (torch.cat(parts) for parts in zip(*terms, strict=True))
    log_z_T = largest_T + sum_T.log()
    cross_entropy = ((log_z_T - label_logit_T) * valid_T).sum()
    added = z_loss * (log_z_T.square() * valid_T).sum() if z_loss else None
    return cross_entropy.clone() if added is None else cross_entropy + added, cross_entropy
