"""Cache of a teacher in training: opened, and checked against the run. `data.teacher_entries` has its format."""

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from titanlite.data.samples import Source
from titanlite.data.teacher_entries import COMMAND, CacheSettings, TaughtSequences, read_settings
from titanlite.runtime.errors import UserError
from titanlite.schema import Data, Distill


@dataclass(frozen=True)
class TeacherCache:
    """Cache that fits a run."""

    folder: Path
    settings: CacheSettings

    def teach(self, source: Source) -> Source:
        """Return a source whose sequences have the entries of the cache.

        Raises:
            UserError: there are none, or they are not complete.
        """
        folder = self.folder / source.fingerprint
        if not folder.is_dir():
            raise UserError(
                f"teacher.cache: {self.folder} has nothing of {source.name} with its tokens and sequences as they are "
                f"now: `{COMMAND}` adds it"
            )
        return replace(source, sequences=TaughtSequences(source.sequences, folder, self.settings))


def cache_folder(path: str) -> Path:
    """Return the folder of `teacher.cache`."""
    return Path(os.path.expanduser(path))


def data_settings(data: Data, distill: Distill, *, tokenizer: str, vocab_size: int, seq_len: int) -> dict[str, Any]:
    """Return the settings of a cache that the data and the loss of a run give; see `CacheSettings`.

    Args:
        tokenizer: fingerprint of the tokenizer of the data.
    """
    return {
        "vocab_size": vocab_size,
        "tokenizer": tokenizer,
        "seq_len": seq_len,
        "packing": data.packing,
        "document_mask": data.document_mask,
        "temperature": distill.temperature,
    }


def open_cache(path: str, wanted: dict[str, Any]) -> TeacherCache:
    """Open a cache.

    Args:
        wanted: settings of the run.

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
    return TeacherCache(folder, settings)
