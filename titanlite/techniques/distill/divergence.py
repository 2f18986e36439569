"""Interface between the loss and a teacher: the teacher's distribution of each next token, chunk by chunk.

`teacher.py` has the teacher itself, of which `HeadDivergence` computes the logits. `TopK` is what a cache on disk holds
of a teacher.

Shape suffixes: see `models.layers`; C the tokens of a chunk, K the tokens that a cache holds for each.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from titanlite.batch import Batch
from titanlite.ops.divergence import ChunkDivergence, Kind, top_k_divergence
from titanlite.ops.kernels import Kernels
from titanlite.schema import Distill


class HeadLogits:
    """Logits of a teacher: hidden @ weight^T, a part of the tokens at a time.

    Args:
        hidden_TD: the teacher's final hidden states. D need not be that of the student.
    """

    def __init__(self, hidden_TD: Tensor, weight_VD: Tensor, kernels: Kernels) -> None:
        self._hidden_TD = hidden_TD
        self._dtype = kernels.logits_dtype(hidden_TD)
        self._weight_VD = weight_VD.to(self._dtype)
        self._float32_mm = kernels.float32_mm

    @torch.no_grad()
    def __call__(self, part: slice) -> Tensor:
        """Return the logits [C, V] of some tokens, float32."""
        return self._float32_mm(self._hidden_TD[part].to(self._dtype), self._weight_VD.t())


class HeadDivergence:
    """Divergence from a teacher whose logits are hidden @ weight^T. Its logits [T, V] never exist at once.

    Args: as of `HeadLogits`.
    """

    matrices = 1

    def __init__(self, hidden_TD: Tensor, weight_VD: Tensor, distill: Distill, kernels: Kernels) -> None:
        self._logits = HeadLogits(hidden_TD, weight_VD, kernels)
        self._divergence: Callable[..., ChunkDivergence] = kernels.divergence(hidden_TD.device)
        self._options = {"kind": distill.kind, "temperature": distill.temperature}

    @torch.no_grad()
    def __call__(self, logits_CV: Tensor, part: slice, weight_C: Tensor | None) -> ChunkDivergence:
        return self._divergence(logits_CV, self._logits(part), weight_C=weight_C, **self._options)


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
    def divergence(self, distill: Distill, kernels: Kernels) -> Iterator["TopKDivergence"]:
        yield TopKDivergence(self, distill, kernels)


def cached_output(batch: Batch) -> TopK:
    """Return what the cache holds of the teacher for a micro-batch."""
    return TopK(batch["teacher_ids"], batch["teacher_log_probs"], batch["teacher_log_tail"])


class TopKDivergence:
    """Divergence of K + 1 outcomes; see `models.divergence`."""

    matrices = 1

    def __init__(self, output: TopK, distill: Distill, kernels: Kernels) -> None:
        self._ids_TK = output.ids_BLK.flatten(0, 1)
        self._log_probs_TK = output.log_probs_BLK.flatten(0, 1)
        self._log_tail_T = output.log_tail_BL.flatten()
        self._divergence = kernels.divergence(output.ids_BLK.device)
        self._kind: Kind = distill.kind
        self._temperature = distill.temperature

    @torch.no_grad()
    def __call__(self, logits_CV: Tensor, part: slice, weight_C: Tensor | None) -> ChunkDivergence:
        return top_k_divergence(
            logits_CV,
            self._ids_TK[part].long(),
            self._log_probs_TK[part].float(),
            self._log_tail_T[part],
            kind=self._kind,
            temperature=self._temperature,
            weight_C=weight_C,
            divergence=self._divergence,
        )
