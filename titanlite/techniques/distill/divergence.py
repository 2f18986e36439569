"""The loss with a teacher, whose distribution of each next token is computed chunk by chunk.

`teacher.py` has the teacher itself, whose logits `head_logits` computes.

Shape suffixes: see `models.layers`; C the tokens of a chunk.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from titanlite.loss import LossTerm, TokenLoss, token_loss
from titanlite.ops.cross_entropy import SplitVocabulary
from titanlite.ops.divergence import ChunkDivergence
from titanlite.ops.kernels import DEFAULT_KERNELS, Kernels
from titanlite.schema import Distill

METRIC = "distill_loss"


class TeacherOutput(Protocol):
    """Output of a teacher for one micro-batch. Losses of the user's own get it as the argument `teacher`."""

    def divergence(self, distill: Distill, kernels: Kernels) -> AbstractContextManager[LossTerm]:
        """Return the divergence that `[distill]` names. It can be computed within the context."""
        ...


def distilled_loss(
    hidden_BLD: Tensor,
    weight_VD: Tensor,
    *,
    teacher: TeacherOutput | None,
    distill: Distill,
    kernels: Kernels = DEFAULT_KERNELS,
    labels_BL: Tensor,
    z_loss: float = 0.0,
    vocabulary: SplitVocabulary | None = None,
) -> TokenLoss:
    """Return (1 - ratio) * loss + ratio * T^2 * divergence, whose formulas are in `ops.divergence`.

    Args:
        teacher: its output for the same tokens. The metric distill_loss is T^2 * divergence. None: the loss alone.
        labels_BL, z_loss, vocabulary: as of `token_loss`.
    """
    with teacher.divergence(distill, kernels) if teacher else nullcontext() as term:
        return token_loss(
            hidden_BLD,
            weight_VD,
            labels_BL=labels_BL,
            z_loss=z_loss,
            kernels=kernels,
            term=term,
            vocabulary=vocabulary,
        )


def head_logits(hidden_TD: Tensor, weight_VD: Tensor, kernels: Kernels) -> Callable[[slice], Tensor]:
    """Return a function that computes a teacher's logits of some tokens: hidden @ weight^T, float32 [C, V].

    Args:
        hidden_TD: the teacher's final hidden states. D need not be that of the student.
    """
    dtype = kernels.logits_dtype(hidden_TD)
    operand_VD = weight_VD.to(dtype)

    @torch.no_grad()
    def of_part(part: slice) -> Tensor:
        return kernels.float32_mm(hidden_TD[part].to(dtype), operand_VD.t())

    return of_part


def head_divergence(hidden_TD: Tensor, weight_VD: Tensor, distill: Distill, kernels: Kernels) -> LossTerm:
    """Return the divergence from a teacher whose logits are hidden @ weight^T. Its logits [T, V] never exist at once.

    If the student has another number of tokens, the divergence is of the distributions over those that both have:
    releases of one tokenizer pad their vocabularies to different sizes.

    Args: as of `head_logits`.
    """
    logits, divergence = head_logits(hidden_TD, weight_VD, kernels), kernels.divergence(hidden_TD.device)
    options: dict[str, Any] = {"kind": distill.kind, "temperature": distill.temperature}

    @torch.no_grad()
    def of_chunk(logits_CV: Tensor, part: slice, weight_C: Tensor | None) -> ChunkDivergence:
        further = logits_CV.shape[1] - weight_VD.shape[0]
        theirs_CV = logits(part)
        if further < 0:
            theirs_CV = theirs_CV[:, :further].contiguous()
        ours_CV = logits_CV if further <= 0 else logits_CV[:, :-further].contiguous()
        value_C, d_CV = divergence(ours_CV, theirs_CV, weight_C=weight_C, **options)
        return ChunkDivergence(value_C, d_CV if d_CV is None or further <= 0 else F.pad(d_CV, (0, further)))

    return LossTerm(METRIC, distill.ratio, of_chunk)
