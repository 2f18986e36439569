"""What `[data]` and `[validation]` name, opened: prepared if need be, and cut or packed into sequences."""

from pathlib import Path

import torch.distributed as dist

from titanlite.config.schema import Data, DataSource, Validation
from titanlite.data.custom import PREFIX, CustomRows
from titanlite.data.packing import BestFit, Stream
from titanlite.data.samples import Samples, Source
from titanlite.data.tokenizer import Tokenizer
from titanlite.data.tokens import TokenStore
from titanlite.ingest.prepare import open_tokens
from titanlite.runtime.errors import UserError
from titanlite.runtime.ranks import on_all


def open_data(
    data: Data,
    validation: Validation,
    *,
    seq_len: int,
    seed: int,
    tokenizer: Tokenizer,
    cache_folder: Path,
    group: dist.ProcessGroup,
) -> tuple[Samples, list[Source]]:
    """The samples to train on, and the sources to validate on. What fails on one rank fails on all."""
    opened: list[list[Source]] = []

    def open_on_this_rank() -> None:
        for section in (data, validation):
            opened.append(open_sources(section, data, tokenizer=tokenizer, seq_len=seq_len, cache_folder=cache_folder))

    on_all(group, open_on_this_rank)
    sources, validation_sources = opened
    samples = Samples(sources, seed=seed, shuffle=data.shuffle, document_mask=data.document_mask)
    return samples, validation_sources


def open_sources(
    section: Data | Validation, data: Data, *, tokenizer: Tokenizer, seq_len: int, cache_folder: Path
) -> list[Source]:
    """The sources that a section names, one after the other.

    Args:
        data: how documents become sequences, in training and in validation.
        cache_folder: for what is prepared or copied on the way.

    Raises:
        UserError: one cannot be read, is not complete or is too short.
    """
    return [_open(source, data, tokenizer, seq_len, cache_folder) for source in section.all_sources()]


def _open(source: DataSource, data: Data, tokenizer: Tokenizer, seq_len: int, cache_folder: Path) -> Source:
    if isinstance(source.path, str) and source.path.startswith(PREFIX):
        rows = CustomRows(source.path, seq_len=seq_len, vocab_size=tokenizer.vocab_size)
        if len(rows) == 0:
            raise UserError(f"data.path: {source.path} has no sequences of {seq_len}")
        return Source(source.title, rows, rows.fingerprint, source.weight, source.epochs)
    store = open_tokens(source.path, data=data, tokenizer=tokenizer, cache_folder=cache_folder)
    if data.packing == "best_fit":
        rows = BestFit(store, seq_len=seq_len, plan_folder=cache_folder / "packing")
    else:
        rows = Stream(store, seq_len=seq_len, document_mask=data.document_mask)
    if len(rows) == 0:
        raise UserError(
            f"data.path: {store.folder} holds {len(store)} tokens, less than one sequence of {seq_len} (and the token "
            "after it)"
        )
    fingerprint = f"{store.fingerprint}-{data.packing}-{seq_len}"
    return Source(source.title, rows, fingerprint, source.weight, source.epochs)


def store_of(source: Source) -> TokenStore | None:
    """Where its tokens are, if it has a place."""
    return source.rows.store if isinstance(source.rows, Stream | BestFit) else None
