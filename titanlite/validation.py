"""Validation: the loss on other data, by source, and tasks. Any number of processes gives the same result."""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from titanlite.batch import IGNORE, Batch
from titanlite.data.loader import to_device
from titanlite.data.samples import Source, as_batch, permute
from titanlite.loss import token_loss
from titanlite.ops.attention import document_arguments
from titanlite.ops.cross_entropy import SplitVocabulary
from titanlite.ops.kernels import Kernels
from titanlite.schema import Validation

if TYPE_CHECKING:
    from titanlite.tasks import Scorer as _Scorer
    from titanlite.tasks import Task

ORDER_KEY = 0
"""Key of the choice of sequences. It does not depend on the seed, so that runs with other seeds can be compared."""

ASK_BATCHES = 8
"""Batches between two questions whether to stop: each costs the ranks an all-reduce."""


class Validator:
    """Measures the loss on validation sources, and scores tasks.

    Args:
        sources: each gets metrics of its own.
        tasks: read for sequences of `seq_len` tokens.
        multiple_of: number that divides the length of each sequence that `split` can split.
        batch_size: sequences in one forward pass of one rank.
        token_bytes: [2, V], of `byte_sizes`.
        vocabulary: split of the vocabulary over processes, with tensor parallelism.
        rank, ranks: among the ranks that read different data.
        group: ranks whose token losses are summed.
        split: returns this rank's part of the sequences of a batch.
    """

    def __init__(
        self,
        config: Validation,
        sources: Sequence[Source],
        tasks: "Sequence[Task]" = (),
        *,
        seq_len: int,
        multiple_of: int = 1,
        batch_size: int,
        token_bytes: np.ndarray,
        kernels: Kernels,
        vocabulary: SplitVocabulary | None = None,
        device: torch.device,
        rank: int,
        ranks: int,
        group: dist.ProcessGroup,
        split: Callable[[Batch], Batch] = lambda batch: batch,
    ) -> None:
        self.config = config
        self.sources = sources
        self.batch_size = batch_size
        self.token_bytes = torch.from_numpy(token_bytes).to(device)
        self.device = device
        self.loss_function = partial(token_loss, kernels=kernels, vocabulary=vocabulary)
        self.rank, self.ranks = rank, ranks
        self.group = group
        self.split = split
        self.scorer: _Scorer | None = None
        if tasks:
            from titanlite.tasks import Scorer

            self.scorer = Scorer(
                tasks,
                seq_len=seq_len,
                multiple_of=multiple_of,
                batch_size=batch_size,
                kernels=kernels,
                vocabulary=vocabulary,
                device=device,
                rank=rank,
                ranks=ranks,
            )

    @torch.no_grad()
    def run(self, model: nn.Module, *, stops: Callable[[], bool] | None = None) -> dict[str, Any] | None:
        """Return the validation metrics, equal on all ranks; None if it was stopped.

        `loss` is in nats a token, over the tokens of all sources, if there are any. `sources` holds the `loss`,
        `bits_per_byte` (None where no label is text, or the bytes of text are not known), `tokens` and `sequences` of
        each source, and `tasks`, if there are any, the metrics of each task and its number of `questions`.

        Args:
            stops: asked every ASK_BATCHES batches whether to stop. The answer is the same on all ranks.
        """
        totals = torch.zeros(len(self.sources), 3, dtype=torch.float64, device=self.device)  # nats, tokens, bytes
        was_training = model.training
        model.eval()
        pairs = zip(self.sources, totals, strict=True)
        of_sources = (
            (partial(self._add_loss, total), batch) for source, total in pairs for batch in self._batches(source)
        )
        stopped = False
        for number, (measure, batch) in enumerate(chain(of_sources, self.scorer.batches() if self.scorer else ())):
            if stopped := stops is not None and number % ASK_BATCHES == 0 and stops():
                break
            measure(model, self.split(to_device(batch, self.device)))
        model.train(was_training)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # no backward pass does it here, and a checkpoint needs the shards
        if stopped:
            return None
        dist.all_reduce(totals, group=self.group)
        record: dict[str, Any] = {"loss": _ratio(totals[:, 0].sum(), totals[:, 1].sum())} if self.sources else {}
        record["sources"] = {}
        for source, (nats, tokens, text_bytes) in zip(self.sources, totals, strict=True):
            bits = _ratio(nats, text_bytes * math.log(2)) if text_bytes and source.counts_bytes else None
            record["sources"][source.name] = {
                "loss": _ratio(nats, tokens),
                "bits_per_byte": bits,
                "tokens": int(tokens),
                "sequences": self._count(source),
            }
        if self.scorer:
            record["tasks"] = self.scorer.measure(self.group)
        return record

    def _count(self, source: Source) -> int:
        return min(self.config.sequences or len(source.sequences), len(source.sequences))

    def _batches(self, source: Source) -> Iterator[Batch]:
        """Yield this rank's batches: as many on every rank, of the same shape. Labels past the end are IGNORE."""
        count = self._count(source)
        for start in range(0, count, self.ranks * self.batch_size):
            first = start + self.rank * self.batch_size
            sequences = []
            for number in range(first, first + self.batch_size):
                sequence = source.sequences.read(permute(min(number, count - 1), len(source.sequences), key=ORDER_KEY))
                if number >= count:
                    sequence = sequence._replace(labels=np.full_like(sequence.labels, IGNORE))
                sequences.append(sequence)
            yield as_batch(sequences, mark_documents=source.marks_documents)

    def _add_loss(self, total: Tensor, model: nn.Module, batch: Batch) -> None:
        """Add to the sums of nats, tokens and bytes of text: float64 [3]."""
        labels = batch["labels"]
        loss = model(batch["tokens"], loss=partial(self.loss_function, labels_BL=labels), **document_arguments(batch))
        counts = labels != IGNORE
        inside, first = self.token_bytes
        after_special = inside[batch["tokens"]] == 0
        text_bytes = torch.where(after_special, first[labels.clamp(min=0)], inside[labels.clamp(min=0)])[counts].sum()
        total += torch.stack([loss.cross_entropy.double(), counts.sum().double(), text_bytes.double()])


def _ratio(part: Tensor, whole: Tensor) -> float:
    return float(part / whole) if whole else math.nan
