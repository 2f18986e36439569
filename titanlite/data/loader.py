"""Batches for one rank. The engine that reads ahead is torchdata's; the position is ours: one number, the count of
samples that the whole run has consumed. So worker processes, ranks and prefetch never change what is seen."""

import gc
import multiprocessing
import re
import warnings
from collections.abc import Callable, Generator, Iterator, Sequence
from multiprocessing.process import BaseProcess
from typing import Any

import torch
from torch.utils.data import Dataset
from torchdata.stateful_dataloader import StatefulDataLoader

from titanlite.batch import Batch
from titanlite.runtime.errors import RunError, UserError
from titanlite.runtime.signals import describe_end, end_with_parent, make_socket_folder, shielding_children
from titanlite.schedule import BatchSizes


class MicroBatches:
    """The global sample indices of each forward pass of one rank, without end.

    Step after step takes the next samples; each rank takes its even share of them, in micro-batches.

    Args:
        start, step: samples that are consumed, and the steps that have.
        sizes: how many samples each step has.
        together: ranks in a row whose first micro-batches are neighbours, then their second ones, and so on.
    """

    def __init__(
        self,
        start: int,
        *,
        sizes: BatchSizes,
        micro_batch_size: int,
        rank: int,
        ranks: int,
        step: int = 0,
        together: int = 1,
    ) -> None:
        self.step = step
        self.start = start
        self.sizes = sizes
        self.micro_batch_size = micro_batch_size
        self.rank = rank
        self.ranks = ranks
        self.together = together

    def __iter__(self) -> Iterator[list[int]]:
        step_start = self.start
        while True:
            size = self.sizes.at(step_start)
            for begin in self._begins(self.rank, size):
                yield list(range(step_start + begin, step_start + begin + self.micro_batch_size))
            step_start += size

    def first_of(self, step: int) -> int:
        """Return the first sample of a step."""
        return self.sizes.after(self.start, step - self.step - 1)

    def count(self, step: int) -> int:
        """Return the number of micro-batches of a rank in a step."""
        return self.sizes.at(self.first_of(step)) // (self.ranks * self.micro_batch_size)

    def _begins(self, rank: int, global_batch_size: int) -> range:
        """Return the first sample of each micro-batch of a rank, within a step."""
        block, place = divmod(rank, self.together)
        size = global_batch_size // self.ranks * self.together
        first = block * size + place * self.micro_batch_size
        return range(first, (block + 1) * size, self.together * self.micro_batch_size)

    def of_step(self, step: int, wanted: Sequence[Sequence[bool]]) -> list[int]:
        """Return the samples of a step: of the micro-batches with wanted[rank][number of the micro-batch], or if there
        are none, of all. Several ranks in a row may have the same samples."""
        same = max(1, len(wanted) // self.ranks)
        wanted = [[*map(any, zip(*wanted[i : i + same], strict=True))] for i in range(0, len(wanted), same)]
        first = self.first_of(step)
        size = self.sizes.at(first)
        ranks = ((self._begins(rank, size), flags) for rank, flags in enumerate(wanted))
        begins = [begin for begins, flags in ranks for begin, flag in zip(begins, flags, strict=True) if flag]
        found = [first + begin + number for begin in sorted(begins) for number in range(self.micro_batch_size)]
        return found or [*range(first, first + size)]


def build_loader(
    samples: Dataset[Batch],
    batches: MicroBatches,
    *,
    num_workers: int,
    device: torch.device,
    split: Callable[[Batch], Batch] = lambda batch: batch,
) -> Generator[Batch, None, None]:
    """Yield micro-batches on the device, read ahead by worker processes if there are any; `close()` ends those. Draws
    nothing from the global random state.

    Args:
        split: returns this rank's part of each sequence.

    Raises:
        UserError, OSError: of a worker.
        RunError: a worker has ended.

    Workers are forked from a server that does nothing else. A trainer has many threads (of process groups, of
    checkpoints), and a worker forked from it could wait for ever for a lock that one of them held.
    """
    context = multiprocessing.get_context("forkserver") if num_workers else None
    others = multiprocessing.active_children()
    if context:
        make_socket_folder()
        context.set_forkserver_preload([__name__])
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*set_vital.*")  # torchdata 0.11 warns so on torch 2.13
        loader = StatefulDataLoader(
            samples,
            batch_sampler=batches,
            num_workers=num_workers,
            snapshot_every_n_steps=0,  # workers have no state: the position is a number of samples
            multiprocessing_context=context,
            collate_fn=_as_is,
            worker_init_fn=_start_worker,
            pin_memory=device.type == "cuda",
            generator=torch.Generator().manual_seed(0),
        )
    with shielding_children():
        read_ahead = iter(loader)  # this starts the workers
    workers = [process for process in multiprocessing.active_children() if process not in others]
    try:
        for batch in read_ahead:
            yield split(to_device(batch, device))
    except (UserError, OSError) as error:  # the text of a worker's error has its traceback
        error.__traceback__ = None  # its frames hold the workers
        kind = UserError if isinstance(error, UserError) else OSError
        _check_workers(workers, error)
        raise kind(re.sub(r"^[\w.]+Error: ", "", str(error).rstrip().splitlines()[-1])) from None
    except (EOFError, RuntimeError) as error:
        _check_workers(workers, error)
        raise
    finally:
        if context:
            del loader, read_ahead, workers
            gc.collect()  # its queues are in a circle; Python complains of what is left of them when the process ends


def to_device(batch: Batch, device: torch.device) -> Batch:
    """Copy a batch to the device. The host does not wait for copies of pinned memory."""
    return {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}


def _start_worker(number: int) -> None:
    end_with_parent()


def _check_workers(workers: Sequence[BaseProcess], error: Exception) -> None:
    """Name the worker that has ended, where that is the reason of an error: a pipe or a socket that breaks.

    Raises:
        RunError: one has ended.
    """
    for number, worker in enumerate(workers):
        if isinstance(error, EOFError | ConnectionError | RuntimeError):
            worker.join(1)  # its end is known a moment later
        if worker.exitcode:
            error.__traceback__ = None  # its frames hold the workers
            raise RunError(
                f"data.num_workers: worker {number} of the data loader (process {worker.pid}) "
                f"{describe_end(worker.exitcode)}"
            ) from None


def _as_is(batch: Any) -> Any:
    return batch
