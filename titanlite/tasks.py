"""Tasks: questions whose answers a model scores by their log-likelihood, as EleutherAI's lm-evaluation-harness does.

`tools/tasks` reads them from files. Any number of processes gives the same scores.

Shape suffixes: see `models.layers`; C the tokens of a chunk, N those of all answers in a batch.
"""

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from titanlite.batch import IGNORE, Batch
from titanlite.ops.attention import document_arguments
from titanlite.ops.cross_entropy import SplitVocabulary
from titanlite.ops.kernels import Kernels

CHUNK = 64
"""Tokens whose logits exist at once. Each chunk has as many: the order of the sums in a matmul may depend on that."""
SHORTEST = 64
"""Least number of tokens that sequences are cut to."""


class Answer(NamedTuple):
    """What is scored: the last tokens of a sequence, after all before them."""

    tokens: np.ndarray
    """int64: the end of the context, as far as it fits, and the answer."""
    scored: int
    """Number of tokens of the answer, at least 1 and less than all."""


class Question(NamedTuple):
    answers: Sequence[Answer]
    """Of a multiple choice, all choices."""
    texts: Sequence[str]
    """The answers, without what separates them from the context."""
    right: int
    """Place of the right answer among them."""


@dataclass(frozen=True)
class Task:
    name: str
    metrics: Sequence[str]
    """For a multiple choice: acc, and acc_norm (log-likelihoods divided by the characters of the answers). For one
    answer: acc (each of its tokens is the most probable one) and perplexity (of whole answers)."""
    is_choice: bool
    questions: Sequence[Question]

    @property
    def answers(self) -> list[Answer]:
        return [answer for question in self.questions for answer in question.answers]

    @property
    def fingerprint(self) -> str:
        """Text that differs for other questions."""
        digest = hashlib.sha256(f"{self.name} {self.metrics}".encode())
        for question in self.questions:
            digest.update(f"{question.texts} {question.right}".encode())
            for answer in question.answers:
                digest.update(b"%d " % answer.scored + answer.tokens.tobytes())
        return digest.hexdigest()[:16]

    def measure(self, scores: np.ndarray) -> dict[str, float]:
        """Return the metrics, and the number of questions.

        Args:
            scores: of `answers`, see `Scorer`. Where one is not finite, all metrics are NaN: the model is broken, and
                NaN would be the least of several scores.
        """
        if not np.isfinite(scores).all():
            return {**dict.fromkeys(self.metrics, math.nan), "questions": len(self.questions)}
        parts = np.split(scores, np.cumsum([len(question.answers) for question in self.questions])[:-1])
        pairs = [*zip(self.questions, parts, strict=True)]
        means = {metric: sum(self._value(metric, *pair) for pair in pairs) / len(pairs) for metric in self.metrics}
        if "perplexity" in means:
            means["perplexity"] = math.exp(min(means["perplexity"], 700))
        return {**means, "questions": len(pairs)}

    def _value(self, metric: str, question: Question, scores: np.ndarray) -> float:
        nats, misses = scores.T
        if not self.is_choice:
            return nats[0] if metric == "perplexity" else float(misses[0] == 0)
        lengths = [len(text) if metric == "acc_norm" else 1 for text in question.texts]
        return float(np.argmin(nats / lengths) == question.right)


class Scorer:
    """Scores tasks. `scores` has a row for each answer: its nats, and how many of its tokens are not the most probable
    ones; float64, and 0 for the answers that other ranks score.

    Sequences are as short as half of `seq_len`, a quarter and so on, as long as the answer fits. Nothing else changes
    the length, so that an answer has the same bits in any batch.

    The arguments are those of `Validator`.
    """

    def __init__(
        self,
        tasks: Sequence[Task],
        *,
        seq_len: int,
        multiple_of: int = 1,
        batch_size: int,
        kernels: Kernels,
        vocabulary: SplitVocabulary | None = None,
        device: torch.device,
        rank: int = 0,
        ranks: int = 1,
    ) -> None:
        self.tasks = tasks
        self.answers = [answer for task in tasks for answer in task.answers]
        self.scores = torch.zeros(len(self.answers), 2, dtype=torch.float64, device=device)
        self._seq_len, self._multiple_of = seq_len, math.lcm(multiple_of, SHORTEST)
        self._batch_size = batch_size
        self._loss = partial(answer_scores, kernels=kernels, vocabulary=vocabulary)
        self._rank, self._ranks = rank, ranks

    def batches(self) -> Iterator[tuple[Callable[[nn.Module, Batch], None], Batch]]:
        """Yield this rank's batches, each with the function that scores it: as many on every rank, of the same shapes.
        The last batches of a length are filled with sequences without labels."""
        self.scores.zero_()
        lengths = [self._length(len(answer.tokens) - 1) for answer in self.answers]
        for length in sorted({*lengths}):
            numbers = [number for number, its in enumerate(lengths) if its == length]
            for start in range(0, len(numbers), self._ranks * self._batch_size):
                first = start + self._rank * self._batch_size
                own = numbers[first : first + self._batch_size]
                yield partial(self._score, own), self._batch(own, length)

    def measure(self, group: dist.ProcessGroup) -> dict[str, dict[str, float]]:
        """Return the metrics of each task by its name, equal on all ranks, after all batches.

        Args:
            group: ranks that have different tokens.
        """
        dist.all_reduce(self.scores, group=group)
        counts = [len(task.answers) for task in self.tasks]
        parts = np.split(self.scores.cpu().numpy(), np.cumsum(counts)[:-1])
        return {task.name: task.measure(part) for task, part in zip(self.tasks, parts, strict=True)}

    def _length(self, tokens: int) -> int:
        length = self._seq_len
        while length % (2 * self._multiple_of) == 0 and length // 2 >= tokens:
            length //= 2
        return length

    def _batch(self, numbers: Sequence[int], length: int) -> Batch:
        tokens = torch.zeros(self._batch_size, length, dtype=torch.int64)
        labels = torch.full_like(tokens, IGNORE)
        for row, number in enumerate(numbers):
            answer, scored = self.answers[number]
            end = len(answer) - 1
            tokens[row, :end] = torch.from_numpy(answer[:-1])
            labels[row, end - scored : end] = torch.from_numpy(answer[-scored:])
        return {"tokens": tokens, "labels": labels}

    def _score(self, numbers: Sequence[int], model: nn.Module, batch: Batch) -> None:
        loss = partial(self._loss, labels_BL=batch["labels"])
        # torch.compile would compile each block again for sequences of another length.
        with torch.compiler.set_stance("force_eager"):
            scores = model(batch["tokens"], loss=loss, **document_arguments(batch))
        self.scores[numbers] = scores[: len(numbers)]


def answer_scores(
    hidden_BLD: Tensor,
    weight_VD: Tensor,
    *,
    labels_BL: Tensor,
    kernels: Kernels,
    vocabulary: SplitVocabulary | None = None,
) -> Tensor:
    """Return the nats of each sequence's labels, and how many of them are not the most probable token: float64 [B, 2].
    The nats are NaN or infinite where logits are NaN or overflow.

    Only the logits of tokens with a label are computed. Of several most probable tokens, each counts as one.
    """
    hidden_TD, labels_T = hidden_BLD.flatten(0, 1), labels_BL.flatten()
    scores_T2 = torch.zeros(len(labels_T), 2, dtype=torch.float64, device=labels_T.device)
    wide = kernels.logits_dtype(hidden_TD)
    operand_DV = weight_VD.to(wide).t()
    [places_N] = (labels_T != IGNORE).nonzero(as_tuple=True)
    for part in places_N.split(CHUNK):
        places_C = torch.cat([part, part.new_zeros(CHUNK - len(part))])
        logits_CV = kernels.float32_mm(hidden_TD[places_C].to(wide), operand_DV)
        labels_C = labels_T[places_C].clamp(min=0)
        softmax = kernels.label_softmax(
            logits_CV, labels_C, torch.ones_like(labels_C, dtype=torch.float32), z_loss=0, dtype=None,
            vocabulary=vocabulary,
        )  # fmt: skip
        nats_C = softmax.largest_C + softmax.sum_C.log() - softmax.label_logit_C
        both_C2 = torch.stack([nats_C, softmax.label_logit_C < softmax.largest_C], dim=1)
        scores_T2[part] = both_C2[: len(part)].double()
    return scores_T2.view(*labels_BL.shape, 2).sum(dim=1)
