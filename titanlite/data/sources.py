"""Open the sources that `[data]` and `[validation]` name, and cut or pack their documents into sequences."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import torch.distributed as dist

from titanlite.data.custom import PREFIX, CustomSequences
from titanlite.data.packing import BestFit, Stream
from titanlite.data.prepared import open_prepared, prepared_tokens
from titanlite.data.samples import Samples, Source, Stage
from titanlite.data.tokenizer import Tokenizer, byte_sizes
from titanlite.data.tokens import TokenStore
from titanlite.runtime.errors import UserError
from titanlite.runtime.ranks import on_all
from titanlite.runtime.user_code import find_object
from titanlite.schema import Data, Validation, ValidationSource

FindText = Callable[[Sequence[str]], object]
"""Check that paths name text that can be read, without reading it: `titanlite.tools.ingest.inputs.find_files`.
Raises UserError."""


class PrepareText(Protocol):
    """Make token shards of text, in the cache folder unless they are there; see `tools.ingest.prepare.prepare_text`."""

    def __call__(self, paths: Sequence[str], *, data: Data, tokenizer: Tokenizer, cache_folder: Path) -> TokenStore: ...


def open_data(
    data: Data,
    validation: Validation,
    *,
    seq_len: int,
    seed: int,
    tokenizer: Tokenizer,
    cache_folder: Path,
    group: dist.ProcessGroup,
    prepare_text: PrepareText | None = None,
    numbers_tokens: bool = False,
    counts_tokens: bool = False,
) -> tuple[Samples, list[Source]]:
    """Return the samples to train on, and the sources to validate on. An error of one rank is raised on all.

    Args:
        group: all ranks; each opens the same.
        numbers_tokens: whether the samples have `draws`.
        counts_tokens: whether the model counts tokens, so that it must know which are padding.

    Other arguments and errors: see `open_sources`.
    """
    opened: list[list[Source]] = []

    def open_on_this_rank() -> None:
        whole = data.model_copy(update={"prepare": "before"})
        for section, options in ((data, data), (validation, whole)):
            opened.append(
                open_sources(
                    section,
                    options,
                    tokenizer=tokenizer,
                    seq_len=seq_len,
                    cache_folder=cache_folder,
                    prepare_text=prepare_text,
                )
            )

    on_all(group, open_on_this_rank)
    sources, validation_sources = opened
    stages = [Stage(-(-stage.until_tokens // seq_len), stage.weights) for stage in data.stages]
    samples = Samples(
        sources,
        seed=seed,
        stages=stages,
        shuffle=data.shuffle,
        window=data.shuffle_window,
        numbers_tokens=numbers_tokens,
        marks_padding=counts_tokens and data.packing == "best_fit",
        seq_len=seq_len,
    )
    return samples, validation_sources


def open_sources(
    section: Data | Validation,
    data: Data,
    *,
    tokenizer: Tokenizer,
    seq_len: int,
    cache_folder: Path,
    prepare_text: PrepareText | None = None,
) -> list[Source]:
    """Open the sources that a section names, in their order.

    Args:
        data: packing, document mask and options of tokens, in training and in validation.
        seq_len: tokens of a sequence.
        cache_folder: for tokens made of text, copies of remote tokens, and packing plans.
        prepare_text: makes tokens of sources that are text. Without it they are refused.

    Raises:
        UserError: a source cannot be read, is not complete or is too short.
        RunError: the cache cannot be written.
    """

    def tokens(source: ValidationSource) -> TokenStore:
        options = data.model_copy(update={"text_field": source.text_field or data.text_field})
        more = {"tokenizer": tokenizer, "cache_folder": cache_folder, "prepare_text": prepare_text}
        return open_tokens(source.path, data=options, **more)

    to_end = isinstance(section, Validation) and section.sequences == 0
    return [_open(source, data, tokenizer, seq_len, cache_folder, tokens, to_end) for source in section.all_sources()]


def open_tokens(
    path: str | list[str],
    *,
    data: Data,
    tokenizer: Tokenizer,
    cache_folder: Path,
    prepare_text: PrepareText | None = None,
) -> TokenStore:
    """Open the tokens of `data.path`: prepared ones as they are, text through `prepare_text`.

    Arguments and errors: see `open_sources`.
    """
    paths = _as_list(path)
    if places := prepared_tokens(paths, data.format):
        return open_prepared(places, data=data, tokenizer=tokenizer, cache_folder=cache_folder)
    if prepare_text is None:
        raise UserError(
            f"data.path: {paths[0]} is text: make tokens of it with `titanlite data prepare {paths[0]} --out DIR "
            f"--tokenizer {tokenizer.name}`, and set data.path to DIR"
        )
    return prepare_text(paths, data=data, tokenizer=tokenizer, cache_folder=cache_folder)


def check_path(path: str | list[str], find_text: FindText | None = None, form: str | None = None) -> None:
    """Check that `data.path` names something, without reading it.

    Args:
        form: `data.format`.
        find_text: checks paths of text. Without it they are not checked.

    Raises:
        UserError: there is nothing, or something that cannot be read.
    """
    paths = _as_list(path)
    if len(paths) == 1 and paths[0].startswith(PREFIX):
        find_object(paths[0].removeprefix(PREFIX))
    elif not prepared_tokens(paths, form) and find_text:
        find_text(paths)


def _as_list(path: str | list[str]) -> list[str]:
    if not path:
        raise UserError("an empty list of paths names nothing to read")
    return [path] if isinstance(path, str) else path


def _open(
    source: ValidationSource,
    data: Data,
    tokenizer: Tokenizer,
    seq_len: int,
    cache_folder: Path,
    tokens: Callable[[ValidationSource], TokenStore],
    to_end: bool,
) -> Source:
    weight = getattr(source, "weight", 1.0)
    if isinstance(source.path, str) and source.path.startswith(PREFIX):
        sequences = CustomSequences(source.path, seq_len=seq_len, vocab_size=tokenizer.vocab_size)
        if len(sequences) == 0:
            raise UserError(f"data.path: {source.path} has no sequences of {seq_len}")
        return Source(source.title, sequences, sequences.fingerprint, weight, data.document_mask)
    store = tokens(source)
    if data.packing == "best_fit":
        sequences = BestFit(store, seq_len=seq_len, plan_folder=cache_folder / "packing")
    else:
        sequences = Stream(store, seq_len=seq_len, document_mask=data.document_mask, to_end=to_end)
        sequences.wait_for(1)
    if len(sequences) == 0:
        raise UserError(
            f"data.path: {store.folder} holds {len(store)} tokens, less than one sequence of {seq_len} (and the token "
            "after it)"
        )
    fingerprint = f"{store.fingerprint}-{data.packing}-{seq_len}"
    inside, first = byte_sizes(tokenizer)
    # Without a mark between documents, nothing shows where a space was put before one.
    knows_beginnings = store.index["bos"] or store.index["eos"] or data.document_mask or bool((inside == first).all())
    counts_bytes = store.counts_bytes and knows_beginnings
    return Source(source.title, sequences, fingerprint, weight, data.document_mask, counts_bytes)


def store_of(source: Source) -> TokenStore | None:
    """Return the token store of a source, or None for a user's own sequences."""
    sequences = source.sequences
    return sequences.store if isinstance(sequences, Stream | BestFit) else None
