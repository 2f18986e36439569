# pyright: reportUnknownMemberType=false
"""The loss, as a sum over tokens. `step` divides it by the global count of tokens, so that every token of the global
batch weighs the same whatever the layout and the accumulation.

Logits [T, V] never exist at once. Tokens are processed in chunks, whose size the kernels choose. The gradients are
computed as soon as the logits exist, so that backward needs neither the logits nor another matmul.

Shape suffixes: see `models.layers`; C the tokens of a chunk, G those of a group of chunks.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor

from titanlite.batch import IGNORE, Batch
from titanlite.observer import OnPhase
from titanlite.ops.cross_entropy import SplitVocabulary
from titanlite.ops.kernels import DEFAULT_KERNELS, Kernels
from titanlite.runtime.private_torch.tensors import factor_of
from titanlite.runtime.user_code import check_call, find_object
from titanlite.schema import Training

if TYPE_CHECKING:
    from titanlite.models.base import Model
    from titanlite.models.frozen import FrozenModel
    from titanlite.ops.divergence import ChunkDivergence


class TokenLoss(NamedTuple):
    """Sums over valid tokens, in nats; float32 scalars, or those of each part of the sequences: [parts]."""

    total: Tensor
    """The minimized sum: cross entropy, and terms that are added to it."""
    cross_entropy: Tensor
    """Cross entropy alone, without a gradient."""
    metrics: Mapping[str, Tensor] = MappingProxyType({})
    """Further sums for the metrics, by name, without a gradient. They are reported as means over tokens."""


class LossTerm(NamedTuple):
    """Second term of the loss, of the tokens of one micro-batch: the divergence from a teacher, for example."""

    metric: str
    """Name of its sum among the metrics."""
    share: float
    """Weight of this term in the minimized loss: (1 - share) * loss + share * term."""
    of_chunk: Callable[[Tensor, slice, Tensor | None], "ChunkDivergence"]
    """(logits_CV, part, weight_C) -> values of the tokens of a chunk, and the gradient of their weighted sum. One more
    matrix [C, V] may exist for it.

    logits_CV: float32; they are kept.
    part: the chunk, among the tokens [T] of the micro-batch.
    weight_C: weight of each token in the gradient. None: no gradient.
    """


class LossFunction(Protocol):
    """Function that training minimizes: `token_loss`, or one of the user's."""

    def __call__(self, hidden_BLD: Tensor, weight_VD: Tensor, /, *, labels_BL: Tensor) -> TokenLoss:
        """Return sums over tokens, not means: the step divides by the valid labels of the global batch.

        Args:
            hidden_BLD: final hidden states; the logits are hidden @ weight^T.
            labels_BL: the next tokens, int64; IGNORE does not count.

        The `Targets` of a run are given as further arguments; None with the labels after the next, which they lack.
        """
        ...


def build_loss(
    training: Training,
    kernels: Kernels,
    targets: "Targets | None" = None,
    *,
    vocabulary: SplitVocabulary | None = None,
) -> LossFunction:
    """Return the loss function of the config.

    Args:
        targets: of the run. Default: labels only.
        vocabulary: split of the vocabulary over processes, with tensor parallelism.

    Raises:
        UserError: no function has that name.
    """
    if training.loss:
        return find_object(training.loss)
    own = targets.token_loss if targets else token_loss
    return partial(own, z_loss=training.z_loss, kernels=kernels, vocabulary=vocabulary)


def check_loss(name: str, targets: Collection[str]) -> None:
    """Check that a loss of the user's own exists, and takes the arguments of `LossFunction`.

    Args:
        targets: names of further arguments.

    Raises:
        UserError: it does not.
    """
    check_call(name, "hidden", "weight", labels_BL=None, **dict.fromkeys(targets))


def token_loss(
    hidden_BLD: Tensor,
    weight_VD: Tensor,
    *,
    labels_BL: Tensor,
    z_loss: float = 0.0,
    kernels: Kernels = DEFAULT_KERNELS,
    term: LossTerm | None = None,
    vocabulary: SplitVocabulary | None = None,
) -> TokenLoss:
    """Cross entropy of the logits hidden @ weight^T.

    Args:
        z_loss: weight of log(Z)^2, where Z is the sum in the denominator of softmax (arXiv:2204.02311).
        term: second term of the loss.
        vocabulary: the weight has this process's tokens of it only. None: it has all.
    """
    hidden_TD, labels_T = hidden_BLD.flatten(0, 1), labels_BL.flatten()
    if vocabulary:
        hidden_TD = vocabulary.enter(hidden_TD)
    needs_gradients = torch.is_grad_enabled() and (hidden_TD.requires_grad or weight_VD.requires_grad)
    inputs = hidden_TD, weight_VD, labels_T, z_loss, needs_gradients, kernels, vocabulary, term
    return TokenLoss(*_ChunkedLoss.apply(*inputs))


class Targets(Protocol):
    """What the loss of a run compares the model with beside labels: the outputs of a teacher, for example.

    The checks before a run open them.
    """

    title: str
    """Words for error messages."""
    settings: Mapping[str, str]
    """Settings that must match when a run resumes."""
    frozen: "FrozenModel"
    """Model that computes them beside the one that is trained."""
    model: "Model | None"
    """The same with its weights, after `use`."""
    token_loss: LossFunction
    """titanlite's own loss with them."""

    def use(self, model: "Model") -> None:
        """Compute them with a model that was made of `frozen`."""

    def __call__(self, batch: Batch, on_phase: OnPhase) -> dict[str, Any]:
        """Return further arguments of the loss function, for a micro-batch whose forward pass comes next."""
        ...


class _ChunkedLoss(torch.autograd.Function):
    """Loss and gradients: the softmax chunk by chunk, and the matmuls of gradients once for a group of chunks.

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
        term: LossTerm | None,
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        wide, narrow = kernels.logits_dtype(hidden_TD), kernels.matmul_dtype(hidden_TD.dtype)
        operand_VD = weight_VD.to(wide)
        narrow_VD = operand_VD if narrow == wide else weight_VD.to(narrow)
        d_hidden_TD = torch.empty_like(hidden_TD) if needs_gradients else None
        d_weight_VD: Tensor | None = None
        valid_T, labels_T = (labels_T != IGNORE).float(), labels_T.clamp(min=0)
        share = term.share if term else 0.0
        own_T = valid_T * (1 - share) if share else valid_T  # weights of the gradients of both terms
        term_T = valid_T * share if term and needs_gradients else None
        # Gradients of two terms are added before they are rounded.
        dtype = (torch.float32 if term else narrow) if needs_gradients else None
        sums: list[tuple[Tensor, Tensor, Tensor]] = []
        values: list[Tensor] = []
        tokens, size = len(labels_T), len(weight_VD)
        groups = term is None and ctx.needs_input_grad[1] and dtype is not None and dtype.itemsize < 4
        chunk, group = kernels.loss_chunks(tokens, size * (2 if term else 1), hidden_TD.device, groups=groups)
        d_logits_GV = memory_CV = None
        if group > chunk:  # the same memory for all, which the weight's gradient, allocated between two, would split
            d_logits_GV = weight_VD.new_empty(min(group, tokens), size, dtype=dtype)
            memory_CV = weight_VD.new_empty(chunk, size, dtype=torch.float32)
        for start in range(0, tokens, chunk):
            end, first = min(start + chunk, tokens), start // group * group
            part, whole = slice(start, end), slice(first, end)
            logits_CV = weight_VD.new_empty(end - start, size, dtype=torch.float32) if memory_CV is None else memory_CV
            logits_CV = logits_CV[: end - start]
            kernels.matmul_into(logits_CV, hidden_TD[part].to(wide), operand_VD.t())
            further = term.of_chunk(logits_CV, part, None if term_T is None else term_T[part]) if term else None
            softmax = kernels.label_softmax(
                logits_CV,
                labels_T[part],
                own_T[part],
                z_loss=z_loss,
                dtype=dtype,
                vocabulary=vocabulary,
                out=None if d_logits_GV is None else d_logits_GV[start - first : end - first],
            )
            sums.append(softmax[:3])
            d_logits_CV = softmax.d_logits_CV
            if further is not None:
                values.append(further.value_C)
                if d_logits_CV is not None and further.d_logits_CV is not None:
                    d_logits_CV = d_logits_CV.add_(further.d_logits_CV).to(narrow)
            del logits_CV, softmax, further  # before the gradient of the weight is allocated
            if end == tokens:
                memory_CV = None
            if d_hidden_TD is None or d_logits_CV is None or (end % group and end < tokens):
                continue  # no gradients are wanted, or those of the group are not complete
            if d_logits_GV is not None:
                d_logits_CV = d_logits_GV[: end - first]
            x_CD = hidden_TD[whole].to(narrow)
            kernels.matmul_into(d_hidden_TD[whole], d_logits_CV, narrow_VD)
            if ctx.needs_input_grad[1] and d_weight_VD is None:
                d_weight_VD = kernels.float32_mm(d_logits_CV.t(), x_CD)
            elif d_weight_VD is not None:
                kernels.add_matmul(d_weight_VD, d_logits_CV.t(), x_CD)
            del d_logits_CV
        del d_logits_GV
        if d_weight_VD is not None and weight_VD.dtype != torch.float16:  # the sum over tokens may overflow float16
            d_weight_VD = d_weight_VD.to(weight_VD.dtype)
        ctx.gradients = d_hidden_TD, d_weight_VD
        total, cross_entropy = _sums(sums, valid_T, z_loss)
        metrics: dict[str, Tensor] = {}
        if term and values:
            metrics[term.metric] = (torch.cat(values) * valid_T).sum()
            total = total * (1 - share) + metrics[term.metric] * share
        ctx.mark_non_differentiable(cross_entropy)
        return total, cross_entropy, metrics

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        d_hidden_TD, d_weight_VD = ctx.gradients
        del ctx.gradients  # they are scaled in place, which can be done once
        for gradient in (d_hidden_TD, d_weight_VD):
            if gradient is not None:
                gradient.mul_(factor_of(gradient, gradients[0]))
        return d_hidden_TD, d_weight_VD, *[None] * 6


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
