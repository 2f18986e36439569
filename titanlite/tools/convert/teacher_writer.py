"""Writer of a teacher's entries; `data.teacher_entries` has their format.

Files have a fixed number of sequences each. Every process computes a file of its own at a time: it writes it beside its
place, and renames it when it is whole. So a start after an interruption finds whole files, and makes the others.
"""

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.device_mesh import DeviceMesh

from titanlite.batch import Batch
from titanlite.data.loader import to_device
from titanlite.data.samples import Source, as_batch
from titanlite.data.teacher_entries import (
    COMMAND,
    FORMAT,
    MANIFEST,
    CacheSettings,
    block_name,
    block_sizes,
    checksum,
    has_block,
    make_manifest,
)
from titanlite.mesh import data_parallel_rank, world_group
from titanlite.ops.divergence import most_probable
from titanlite.ops.kernels import Kernels
from titanlite.runtime.errors import RunError, UserError
from titanlite.runtime.files import write_atomically
from titanlite.runtime.ranks import on_all, on_rank_0
from titanlite.techniques.distill.divergence import HeadLogits
from titanlite.techniques.distill.teacher import Teacher


def write_json(path: Path, fields: dict[str, Any]) -> None:
    write_atomically(path, json.dumps({"format": FORMAT, **fields}, indent=1) + "\n")


@contextmanager
def on_disk(folder: Path) -> Iterator[None]:
    """Turn an error of the disk into one line. What was written before stays."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"teacher.cache: {folder} cannot be written: {error.strerror or error}. The files that are whole are kept: "
            f"`{COMMAND}` resumes with the rest"
        ) from None


def rounds(blocks: Sequence[int], *, rank: int, ranks: int) -> Iterator[tuple[Sequence[int], int, bool]]:
    """Deal files to ranks, one to each in a round.

    Yields:
        the files of a round, the one that this rank computes, and whether it is its own. In the last round, ranks
        without a file compute along: all of them gather the teacher's parameters together.
    """
    for first in range(0, len(blocks), ranks):
        of_ranks = blocks[first : first + ranks]
        has_own = rank < len(of_ranks)
        yield of_ranks, of_ranks[rank if has_own else 0], has_own


class CacheWriter:
    """Writer of entries. All ranks run the teacher together, each for a file of its own.

    Args:
        batch_size: sequences that a rank computes at once.
    """

    def __init__(
        self, teacher: Teacher, settings: CacheSettings, *, kernels: Kernels, mesh: DeviceMesh, batch_size: int
    ) -> None:
        self._teacher = teacher
        self._settings = settings
        self._kernels = kernels
        self._device = torch.device(mesh.device_type)
        self._group = world_group(mesh)
        self._rank, self._ranks = data_parallel_rank(mesh)
        self._batch_size = batch_size

    def write(self, folder: Path, source: Source, blocks: Sequence[int], *, advance: Callable[[int], None]) -> None:
        """Write some files of a source, and its manifest.

        Args:
            folder: of the source.
            advance: called with the number of sequences that were written.
        """
        sizes = block_sizes(len(source.sequences), self._settings)
        for of_ranks, block, has_own in rounds(blocks, rank=self._rank, ranks=self._ranks):
            begin = block * self._settings.block_sequences
            batches = self._batches(begin, sizes[block])
            longest = self._batches(0, max(sizes[it] for it in of_ranks))
            records = [self._records(source, batches[min(at, len(batches) - 1)]) for at in range(len(longest))]
            own = records[: len(batches)] if has_own else []
            on_all(self._group, partial(self._store, folder, block, own))
            advance(sum(sizes[it] for it in of_ranks))
        on_rank_0(self._group, lambda: self._finish(folder, sizes))

    def _batches(self, begin: int, count: int) -> list[range]:
        """Return the sequences of each forward pass for a file."""
        end = begin + count
        return [range(at, min(at + self._batch_size, end)) for at in range(begin, end, self._batch_size)]

    def _records(self, source: Source, numbers: range) -> np.ndarray:
        """Return the records of some sequences."""
        sequences = [source.sequences.read(number) for number in numbers]
        batch = to_device(as_batch(sequences, document_mask=self._settings.document_mask), self._device)
        entries = self._entries(batch)
        records = np.empty(len(sequences), dtype=self._settings.record)
        records["entries"] = entries
        records["checksum"] = [checksum(of_one, it) for of_one, it in zip(entries, sequences, strict=True)]
        return records

    @torch.no_grad()
    def _entries(self, batch: Batch) -> np.ndarray:
        """Return the entries [B, L] of a batch."""
        settings, parts = self._settings, []
        hidden_TD = self._teacher(batch).hidden_BLD.flatten(0, 1)
        with self._teacher.head_weight() as weight_VD:
            logits = HeadLogits(hidden_TD, weight_VD, self._kernels)
            chunk = self._kernels.loss_chunk(len(hidden_TD), 2 * len(weight_VD), hidden_TD.device)
            for start in range(0, len(hidden_TD), chunk):
                part = logits(slice(start, start + chunk))
                parts.append([it.cpu() for it in most_probable(part, settings.top_k, settings.temperature)])
        entries = np.empty(len(hidden_TD), dtype=settings.entry)
        ids, log_probs, log_tail = (torch.cat(values).numpy() for values in zip(*parts, strict=True))
        entries["ids"], entries["log_tail"] = ids, log_tail
        entries["log_probs"] = np.maximum(log_probs, np.finfo(settings.dtype).min)  # float16 ends at -65504
        return entries.reshape(batch["tokens"].shape)

    def _store(self, folder: Path, block: int, records: Sequence[np.ndarray]) -> None:
        """Write a file, if there are records for it.

        Raises:
            RunError: the teacher's probabilities are not finite.
        """
        if not records:
            return
        if not all(np.isfinite(part["entries"]["log_probs"]).all() for part in records):
            raise RunError("the teacher's probabilities are not finite: its weights or teacher.dtype do not fit")
        staging = folder / f".{block_name(block)}"
        with on_disk(folder):
            try:
                with open(staging, "wb") as file:
                    for part in records:
                        file.write(part.tobytes())
                    file.flush()
                    os.fsync(file.fileno())
                os.replace(staging, folder / block_name(block))
            except OSError:
                staging.unlink(missing_ok=True)  # a full disk has room again
                raise

    def _finish(self, folder: Path, sizes: Sequence[int]) -> None:
        with on_disk(folder):
            there = [has_block(folder, block, count, self._settings) for block, count in enumerate(sizes)]
            if not all(there):
                raise UserError(
                    f"teacher.cache: {folder / block_name(there.index(False))} is not there for rank 0: the folder "
                    "must be the same on all machines"
                )
            write_json(folder / MANIFEST, make_manifest(self._settings, sum(sizes)))
