"""Cache of a teacher in training: opened, and checked against the run. `entries.py` has its format."""

import os
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from titanlite.batch import Batch
from titanlite.data.samples import Source
from titanlite.loss import Targets
from titanlite.observer import Phase, StepObserver
from titanlite.runtime.dtypes import torch_dtype
from titanlite.runtime.errors import UserError
from titanlite.schema import Config, Distill
from titanlite.techniques.distill.divergence import TopK, distilled_loss
from titanlite.techniques.distill.entries import (
    COMMAND,
    PREFIX,
    TOP_K,
    CacheSettings,
    Entries,
    read_settings,
)


class TeacherCache(Targets):
    """Targets that batches contain, from a cache."""

    title = "teacher.cache: the teacher's cache"

    def __init__(self, folder: Path, cache: CacheSettings, distill: Distill) -> None:
        self.folder = folder
        self.cache = cache
        self.settings = {"teacher": cache.fingerprint}
        self.token_loss = partial(distilled_loss, distill=distill)

    def added_to(self, source: Source) -> Source:
        folder = self.folder / source.fingerprint
        if not folder.is_dir():
            raise UserError(
                f"teacher.cache: {self.folder} has nothing of {source.name} with its tokens and sequences as they are "
                f"now: `{COMMAND}` adds it"
            )
        return replace(source, add=Entries(folder, self.cache, len(source.sequences)))

    def empty(self, sequences: int, seq_len: int) -> Batch:
        size = sequences, seq_len, self.cache.top_k
        return {
            f"{PREFIX}ids": torch.zeros(size, dtype=torch.int32),
            f"{PREFIX}log_probs": torch.zeros(size, dtype=torch_dtype(self.cache.dtype)),
            f"{PREFIX}log_tail": torch.zeros(size[:2]),
        }

    def __call__(self, batch: Batch, observer: StepObserver) -> dict[str, Any]:
        observer.phase(Phase.TEACHER)
        return {"teacher": TopK(*(batch[f"{PREFIX}{name}"] for name in ("ids", "log_probs", "log_tail")))}


def cache_folder(path: str) -> Path:
    """Return the folder of `teacher.cache`."""
    return Path(os.path.expanduser(path))


def data_settings(config: Config, *, tokenizer: str, vocab_size: int) -> dict[str, Any]:
    """Return the settings of a cache that the data and the loss of a run give; see `CacheSettings`.

    Args:
        tokenizer: fingerprint of the tokenizer of the data.
    """
    return {
        "vocab_size": vocab_size,
        "tokenizer": tokenizer,
        "seq_len": config.training.seq_len,
        "packing": config.data.packing,
        "document_mask": config.data.document_mask,
        "temperature": config.distill.temperature,
    }


def open_cache(path: str, distill: Distill, wanted: dict[str, Any]) -> TeacherCache:
    """Open a cache.

    Args:
        wanted: settings of the run; see `CacheSettings`.

    Raises:
        UserError: there is none, or it was made with other settings.
    """
    folder = cache_folder(path)
    settings = read_settings(folder)
    if changed := settings.difference(wanted):
        raise UserError(
            f"teacher.cache: {folder} was made with other settings: {changed}. Restore them, or write another cache "
            f"with `{COMMAND}`"
        )
    return TeacherCache(folder, settings, distill)


def planned_cache(path: str, distill: Distill, *, vocab_size: int) -> TeacherCache:
    """Return the targets of a cache in a plan. One that is not written yet has the defaults.

    Raises:
        UserError: the folder is no cache.
    """
    folder = cache_folder(path)
    if folder.exists():
        return TeacherCache(folder, read_settings(folder), distill)
    entry = {"top_k": min(TOP_K, vocab_size), "vocab_size": vocab_size, "dtype": "float16"}
    unknown = dict.fromkeys(("teacher", "compute_dtype", "tokenizer", "packing"), "")
    others = {"seq_len": 1, "block_sequences": 1, "document_mask": False, "temperature": distill.temperature}
    return TeacherCache(folder, CacheSettings(**entry, **unknown, **others), distill)
