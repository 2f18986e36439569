"""Batches for one rank. The engine that reads ahead is torchdata's; the position is ours: one number, the count of
samples that the whole run has consumed. So worker processes, ranks and prefetch never change what is seen."""

import warnings
from collections.abc import Generator, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset
from torchdata.stateful_dataloader import StatefulDataLoader

from titanlite.data.order import Order
from titanlite.data.tokens import TokenStore
from titanlite.errors import UserError

Batch = dict[str, Tensor]


class Samples(Dataset[Tensor]):
    """Global sample indices -> stretches of tokens [B, L + 1], int64."""

    def __init__(self, store: TokenStore, *, seq_len: int, seed: int) -> None:
        self.store = store
        self.seq_len = seq_len
        self.order = Order(max(0, (len(store) - 1) // seq_len), seed)
        if self.order.sequences == 0:
            raise UserError(
                f"data.path: {store.folder} holds {len(store)} tokens, less than one sequence of {seq_len} (and the "
                "token after it)"
            )

    @property
    def fingerprint(self) -> str:
        """Equal where every global sample index means the same tokens."""
        return f"{self.store.fingerprint}-seq_len{self.seq_len}-seed{self.order.seed}"

    def __getitems__(self, samples: list[int]) -> Tensor:
        return torch.from_numpy(np.stack([self._stretch(sample) for sample in samples]))

    def _stretch(self, sample: int) -> np.ndarray:
        _, sequence = self.order.locate(sample)
        return self.store.read(sequence * self.seq_len, self.seq_len + 1)


class MicroBatches:
    """The global sample indices of each forward pass of one rank, without end.

    Step after step takes the next global_batch_size samples; each rank takes its even share of them, in micro-batches.
    """

    def __init__(self, *, start: int, global_batch_size: int, micro_batch_size: int, rank: int, ranks: int) -> None:
        self.start = start
        self.global_batch_size = global_batch_size
        self.micro_batch_size = micro_batch_size
        self.rank = rank
        self.ranks = ranks

    def __iter__(self) -> Iterator[list[int]]:
        share = self.global_batch_size // self.ranks
        step_start = self.start
        while True:
            first = step_start + self.rank * share
            for begin in range(first, first + share, self.micro_batch_size):
                yield list(range(begin, begin + self.micro_batch_size))
            step_start += self.global_batch_size


def build_loader(
    samples: Samples, batches: MicroBatches, *, num_workers: int, device: torch.device
) -> Generator[Batch, None, None]:
    """Micro-batches on the device, read ahead by worker processes if there are any; `close()` ends those. Draws nothing
    from the global random state."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*set_vital.*")  # torchdata 0.11 on torch 2.13
        loader = StatefulDataLoader(
            samples,
            batch_sampler=batches,
            num_workers=num_workers,
            collate_fn=_as_is,
            pin_memory=device.type == "cuda",
            generator=torch.Generator().manual_seed(0),
        )
    for stretches in loader:
        yield as_batch(stretches.to(device, non_blocking=True))


def as_batch(stretches: Tensor) -> Batch:
    """Stretches [B, L + 1] -> tokens [B, L] and labels [B, L], each the token that follows. After the copy to the
    device: a part of a pinned tensor would be copied once more, and the host would wait."""
    return {"tokens": stretches[:, :-1], "labels": stretches[:, 1:]}


def _as_is(batch: Any) -> Any:
    return batch
