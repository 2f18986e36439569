"""The loss with a teacher, whose distribution of each next token is computed chunk by chunk.

`teacher.py` has the teacher itself, whose logits `head_logits` computes. `TopK` is what a cache on disk holds
of a teacher.

Shape suffixes: see `models.layers`; C the tokens of a chunk, K the tokens that a cache holds for each.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from titanlite.loss import LossTerm, TokenLoss, token_loss
from titanlite.ops.divergence import ChunkDivergence, top_k_divergence
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
    **options: Any,
) -> TokenLoss:
    """Return (1 - ratio) * loss + ratio * T^2 * divergence, whose formulas are in `ops.divergence`.

    Args:
        teacher: its output for the same tokens. The metric distill_loss is T^2 * divergence. None: the loss alone.
        options: as `token_loss`.
    """
    with teacher.divergence(distill, kernels) if teacher else nullcontext() as term:
        return token_loss(hidden_BLD, weight_VD, kernels=kernels, term=term, **options)


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

    Args: as of `head_logits`.
    """
    logits, divergence = head_logits(hidden_TD, weight_VD, kernels), kernels.divergence(hidden_TD.device)
    options: dict[str, Any] = {"kind": distill.kind, "temperature": distill.temperature}

    @torch.no_grad()
    def of_chunk(logits_CV: Tensor, part: slice, weight_C: Tensor | None) -> ChunkDivergence:
        return divergence(logits_CV, logits(part), weight_C=weight_C, **options)

    return LossTerm(METRIC, distill.ratio, of_chunk)


@dataclass(frozen=True)
class TopK:
    """`TeacherOutput` of a cache: the teacher's most probable tokens, and the probability of all others together."""

    ids_BLK: Tensor
    """Token ids, int32."""
    log_probs_BLK: Tensor
    """Logarithms of their probabilities at the temperature of `[distill]`, float16 or float32."""
    log_tail_BL: Tensor
    """Logarithm of the probability of the other tokens, float32. -inf if there are none."""

    @contextmanager
    def divergence(self, distill: Distill, kernels: Kernels) -> Iterator[LossTerm]:
        """Yield the divergence of K + 1 outcomes; see `ops.divergence`."""
        ids_TK, log_probs_TK = self.ids_BLK.flatten(0, 1), self.log_probs_BLK.flatten(0, 1)
        log_tail_T, divergence = self.log_tail_BL.flatten(), kernels.divergence(self.ids_BLK.device)
        options: dict[str, Any] = {"kind": distill.kind, "temperature": distill.temperature, "divergence": divergence}

        @torch.no_grad()
        def of_chunk(logits_CV: Tensor, part: slice, weight_C: Tensor | None) -> ChunkDivergence:
            known = ids_TK[part].long(), log_probs_TK[part].float(), log_tail_T[part]
            return top_k_divergence(logits_CV, *known, weight_C=weight_C, **options)

        yield LossTerm(METRIC, distill.ratio, of_chunk)
