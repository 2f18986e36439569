"""`titanlite distill cache`: run a teacher once over the training data, and write its most probable tokens.

`techniques.distill.entries` has the format. Files have a fixed number of sequences each. Every process computes a file
of its own at a time: it writes it beside its place, and renames it when it is whole. So a start after an interruption
finds whole files, and makes the others.
"""

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from titanlite.batch import Batch
from titanlite.checks.preflight import select_model
from titanlite.config.load import load
from titanlite.data.loader import to_device
from titanlite.data.samples import Source, as_batch
from titanlite.data.sources import open_data
from titanlite.data.tokenizer import load_tokenizer
from titanlite.mesh import data_parallel_rank, world_group
from titanlite.ops import pick_kernels
from titanlite.ops.divergence import most_probable
from titanlite.ops.kernels import Kernels
from titanlite.parallelize import build_mesh
from titanlite.parallelize.frozen import build_frozen
from titanlite.runtime.console import progress_bar
from titanlite.runtime.errors import RunError, UserError
from titanlite.runtime.files import FileLocked, lock_file, write_atomically
from titanlite.runtime.process_group import pick_device, process_group, read_ranks
from titanlite.runtime.ranks import check_same_everywhere, on_all, on_rank_0
from titanlite.schema import Teacher as TeacherConfig
from titanlite.schema import Validation
from titanlite.techniques.distill.cache import cache_folder, data_settings
from titanlite.techniques.distill.divergence import head_logits
from titanlite.techniques.distill.entries import (
    BLOCK_BYTES,
    COMMAND,
    FORMAT,
    SETTINGS,
    TOP_K,
    CacheSettings,
    StoredDtype,
    block_name,
    block_sizes,
    checksum,
    has_block,
    read_settings,
)
from titanlite.techniques.distill.source import open_teacher
from titanlite.techniques.distill.teacher import Teacher
from titanlite.tools.arguments import Count
from titanlite.tools.convert.source import open_model
from titanlite.tools.ingest.prepare import prepare_text


def cache_teacher(
    config: str,
    overrides: Sequence[str],
    *,
    top_k: Count | None = None,
    dtype: Literal["float16", "float32"] = "float16",
    batch_size: Count = 4,
) -> None:
    """Run the teacher once over the training data, and keep its most probable tokens.

    Runs teacher.path over all of the training data once, and writes to the folder teacher.cache. For each token it
    keeps the K most probable next tokens with the logarithms of their probabilities, and the probability of all others
    together. Training with the same config reads them, and the teacher is not in memory. The same command resumes after
    an interruption, and adds sources that the data has got since.

    Several processes: torchrun --nproc_per_node N -m titanlite ...

    Args:
        top_k (K): tokens to keep of each position; default: 64
        dtype: of the logarithms of probabilities
        batch_size (B): sequences computed at once

    Example:
        distill_example --teacher.cache=outputs/teacher_cache --top-k 64
    """
    write_cache(config, overrides, top_k=top_k or TOP_K, dtype=dtype, batch_size=batch_size)


def write_cache(
    path: str,
    overrides: Sequence[str],
    *,
    top_k: int,
    dtype: StoredDtype,
    batch_size: int,
    block_bytes: int = BLOCK_BYTES,
) -> None:
    """Write the cache of a config, or what an interruption has left out of it.

    Args:
        overrides: of the command line.
        batch_size: sequences that a process computes at once.
        block_bytes: largest size of a file, of a new cache.

    Raises:
        UserError: the config names no teacher or no cache, they do not fit the data or each other, or the disk is full.
    """
    ranks = read_ranks(os.environ)
    config = load(path, overrides, world_size=ranks.world_size)
    device, training, folder = pick_device(ranks), config.training, _folder(config.teacher)
    tokenizer = load_tokenizer(config.data.tokenizer)
    student = select_model(config.model, tokenizer)
    try:
        teacher = open_teacher(config, student=student, tokenizer=tokenizer, open_model=open_model)
    except UserError as error:
        raise UserError(f"teacher.path: {str(error).removeprefix('teacher.path: ')}") from None
    assert teacher
    frozen = teacher.frozen
    assert frozen
    wanted = data_settings(config, tokenizer=tokenizer.fingerprint, vocab_size=student.args.vocab_size)
    wanted |= {**teacher.settings, "compute_dtype": frozen.dtype}
    settings = _settings(top_k=top_k, dtype=dtype, block_bytes=block_bytes, **wanted)
    # Entries are of whole sequences: ranks that would split them shard the teacher instead.
    whole = {"context_parallel_degree": 1, "data_parallel_shard_degree": -1}
    config = config.model_copy(update={"parallelism": config.parallelism.model_copy(update=whole)})
    with process_group(ranks, device, deterministic=config.debug.deterministic):
        mesh = build_mesh(config.parallelism, world_size=ranks.world_size, device_type=device.type)
        group = world_group(mesh)
        with _opened(folder, settings, group) as settings:
            samples, _ = open_data(
                config.data.model_copy(update={"prepare": "before"}),
                Validation(),
                seq_len=training.seq_len,
                seed=config.debug.seed,
                tokenizer=tokenizer,
                cache_folder=Path(config.data.cache_folder or Path(config.job.dump_folder, "data_cache")),
                group=group,
                prepare_text=prepare_text,
            )
            missing = on_rank_0(group, lambda: _missing(folder, samples.sources, settings))
            kernels = pick_kernels(device, compiles=config.compile.enable, attention_backend=training.attention_backend)
            check_same_everywhere(str(teacher.settings), teacher.title, group=group)
            teacher.use(build_frozen(frozen, config, mesh=mesh, kernels=kernels, device=device))
            writer = CacheWriter(teacher, settings, kernels=kernels, mesh=mesh, batch_size=batch_size)
            _write(writer, folder, samples.sources, missing, settings, shown=ranks.rank == 0)


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
        """Write some files of a source.

        Args:
            folder: of the source.
            advance: called with the number of sequences that were written.
        """
        sizes = block_sizes(len(source.sequences), self._settings)
        for first in range(0, len(blocks), self._ranks):
            of_ranks = blocks[first : first + self._ranks]
            # A rank without a file computes along: all of them gather the teacher's parameters together.
            has_own = self._rank < len(of_ranks)
            block = of_ranks[self._rank if has_own else 0]
            begin = block * self._settings.block_sequences
            batches = self._batches(begin, sizes[block])
            longest = self._batches(0, max(sizes[it] for it in of_ranks))
            records = [self._records(source, batches[min(at, len(batches) - 1)]) for at in range(len(longest))]
            own = records[: len(batches)] if has_own else []
            on_all(self._group, partial(self._store, folder, block, own))
            advance(sum(sizes[it] for it in of_ranks))

    def _batches(self, begin: int, count: int) -> list[range]:
        """Return the sequences of each forward pass for a file."""
        end = begin + count
        return [range(at, min(at + self._batch_size, end)) for at in range(begin, end, self._batch_size)]

    def _records(self, source: Source, numbers: range) -> np.ndarray:
        """Return the records of some sequences."""
        sequences = [source.sequences.read(number) for number in numbers]
        batch = to_device(as_batch(sequences, mark_documents=source.marks_documents), self._device)
        entries = self._entries(batch)
        records = np.empty(len(sequences), dtype=self._settings.record)
        records["entries"] = entries
        records["checksum"] = [checksum(of_one, it) for of_one, it in zip(entries, sequences, strict=True)]
        return records

    @torch.no_grad()
    def _entries(self, batch: Batch) -> np.ndarray:
        """Return the entries [B, L] of a batch."""
        settings, parts = self._settings, []
        hidden_TD = self._teacher.hidden_states(batch).hidden_BLD.flatten(0, 1)
        with self._teacher.head_weight() as weight_VD:
            logits = head_logits(hidden_TD, weight_VD, self._kernels)
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


def _folder(config: TeacherConfig) -> Path:
    """Return the folder to write.

    Raises:
        UserError: there is none, or no teacher.
    """
    if config.cache is None:
        raise UserError("teacher.cache: is not set: name the folder to write, as --teacher.cache=DIR")
    if config.path is None:
        raise UserError("teacher.path: is not set: name the weights of the teacher")
    return cache_folder(config.cache)


def _write(
    writer: CacheWriter,
    folder: Path,
    sources: Sequence[Source],
    missing: Sequence[Sequence[int]],
    settings: CacheSettings,
    *,
    shown: bool,
) -> None:
    """Write the files that are missing, source by source, and report what the cache has.

    Args:
        shown: whether this process shows it.
    """
    sizes = [block_sizes(len(source.sequences), settings) for source in sources]
    sequences, made = sum(map(sum, sizes)), sum(map(len, missing))
    left = sum(of_source[block] for of_source, blocks in zip(sizes, missing, strict=True) for block in blocks)
    with progress_bar("sequences", sequences, done=sequences - left, of_bytes=False, shown=shown) as advance:
        for source, blocks in zip(sources, missing, strict=True):
            writer.write(folder / source.fingerprint, source, blocks, advance=advance)
    if shown:
        print(
            f"{folder}: {sequences * settings.seq_len:,} tokens, the {settings.top_k:,} most probable of "
            f"{settings.vocab_size:,} for each, {settings.entry.itemsize:,} bytes a token, "
            f"{sequences * settings.record.itemsize / 2**20:,.1f} MiB in {sum(map(len, sizes)):,} files; {made:,} of "
            "them were made now"
        )


def _settings(*, top_k: int, block_bytes: int, vocab_size: int, **others: Any) -> CacheSettings:
    if top_k > vocab_size:
        raise UserError(f"--top-k: {top_k:,} is more than the {vocab_size:,} tokens of the vocabulary")
    settings = CacheSettings(top_k=top_k, vocab_size=vocab_size, block_sequences=1, **others)
    return replace(settings, block_sequences=max(1, block_bytes // settings.record.itemsize))


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


@contextmanager
def _opened(folder: Path, settings: CacheSettings, group: dist.ProcessGroup) -> Iterator[CacheSettings]:
    """Open a cache, or begin it. No other command can write to it within the context.

    Yields:
        the settings, with the size of its files.
    """
    locks: list[IO[str]] = []

    def begin() -> CacheSettings:
        with on_disk(folder):
            folder.mkdir(parents=True, exist_ok=True)
            try:
                locks.append(lock_file(folder / ".lock", timeout=0))
            except FileLocked as error:
                raise UserError(f"teacher.cache: {error.holder} is writing {folder}: wait for it") from None
            if not (folder / SETTINGS).exists():
                if [path for path in folder.iterdir() if not path.name.startswith(".")]:  # the lock, and staging
                    raise UserError(f"teacher.cache: {folder} holds other files: name a folder of its own")
                fields = {"format": FORMAT, **asdict(settings)}
                write_atomically(folder / SETTINGS, json.dumps(fields, indent=1) + "\n")
            there = read_settings(folder)
            mine = asdict(replace(settings, block_sequences=there.block_sequences))
            if changed := there.difference(mine):
                raise UserError(
                    f"teacher.cache: {folder} has other settings: {changed}. Name another folder, or delete it"
                )
            return there

    try:
        yield on_rank_0(group, begin)
    finally:
        for lock in locks:
            lock.close()


def _missing(folder: Path, sources: Sequence[Source], settings: CacheSettings) -> list[list[int]]:
    """Return the files of each source that are not there, and remove what an interruption has left."""
    found = []
    with on_disk(folder):
        for source in sources:
            place = folder / source.fingerprint
            place.mkdir(exist_ok=True)
            for left in place.glob(".*"):
                left.unlink()
            sizes = block_sizes(len(source.sequences), settings)
            found.append([block for block, count in enumerate(sizes) if not has_block(place, block, count, settings)])
    return found
