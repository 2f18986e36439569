"""`titanlite checkpoint export`: a folder that transformers and its relatives load."""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from titanlite.models.formats import HuggingFace
from titanlite.runtime.console import progress_console
from titanlite.runtime.errors import UserError
from titanlite.tools.convert.check import CheckFailed, check_folder
from titanlite.tools.convert.layout import Outgoing, outgoing, values_of
from titanlite.tools.convert.safetensors_file import index_json, split, write, write_all
from titanlite.tools.convert.source import Source
from titanlite.tools.convert.target import LocalTarget, Target, Write
from titanlite.tools.convert.tokenizer_files import Generation, generation_beside, tokenizer_files


@dataclass(frozen=True)
class Exported:
    """Result of an export."""

    files: int
    """Files of weights."""
    bytes: int
    """Size of the weights."""
    architecture: str
    report: str
    """Result of the check; empty without one."""


def export_folder(
    source: Source,
    target: Target,
    *,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int,
    drop: Sequence[str] = (),
    with_tokenizer: bool = True,
    check: bool = False,
) -> Exported:
    """Write a Hugging Face folder. Memory peaks at the largest tensor and a copy of it in another dtype or layout.

    Args:
        dtype: of the weights; None keeps the stored ones.
        drop: globs of the model's tensors to leave out.
        check: read the folder back, and compare it with the model, before it counts.

    Raises:
        UserError: the folder exists, or the model cannot be written in this format.
        CheckFailed: the folder is not the model. It is deleted.
    """
    target.check()
    if check and not isinstance(target, LocalTarget):
        raise UserError("--check reads the folder back: name a local --out")
    form = format_of(source)
    tensors = outgoing(source, form.tensors, dtype=dtype, drop=drop)
    files = split(tensors, max_shard_bytes)
    small = {"model.safetensors.index.json": index_json(files)} if len(files) > 1 else {}
    small |= _small_files(source, form, tensors, with_tokenizer=with_tokenizer)
    target.begin()
    values = values_of(source)
    with _progress(sum(tensor.bytes for tensor in tensors)) as advance:
        for name, part in files.items():
            target.write(name, partial(write, tensors=part, values=values, on_write=advance))
    for name, data in small.items():
        target.write(name, content(data))
    report = _checked(source, target, tensors) if check and isinstance(target, LocalTarget) else ""
    target.commit()
    return Exported(len(files), sum(tensor.bytes for tensor in tensors), form.architecture, report)


def _checked(source: Source, target: LocalTarget, tensors: Sequence[Outgoing]) -> str:
    try:
        return check_folder(source, target.staging, tensors)
    except CheckFailed:
        target.discard()
        raise


def format_of(source: Source) -> HuggingFace:
    """Return the tables of the model's family.

    Raises:
        UserError: there is none.
    """
    model_cls = source.spec.model_cls
    if model_cls.formats.hugging_face is None:
        raise UserError(
            f"{model_cls.__name__} has no table of Hugging Face's names: give the class `formats`, as "
            "docs/add_a_model.md shows, or take its tensors in Python (docs/convert.md)"
        )
    return model_cls.formats.hugging_face


def _small_files(
    source: Source, form: HuggingFace, tensors: Sequence[Outgoing], *, with_tokenizer: bool
) -> dict[str, bytes]:
    """Return the content of all files but the weights; config.json is the last."""
    tokenizer = source.tokenizer
    if tokenizer is None and with_tokenizer:
        reason = f": {source.no_tokenizer}; or" if source.no_tokenizer else " is not on this machine:"
        raise UserError(
            f"the tokenizer of the run{reason} name its file or folder with --tokenizer, or leave its files out with "
            "--no-tokenizer"
        )
    args = source.spec.args
    if tokenizer and with_tokenizer and tokenizer.vocab_size > args.vocab_size:
        raise UserError(
            f"the tokenizer {tokenizer.name} has {tokenizer.vocab_size} tokens, and the model {args.vocab_size}: name "
            "that of the run with --tokenizer, or leave its files out with --no-tokenizer"
        )
    known = source.generation or (generation_beside(tokenizer) if tokenizer else Generation({}, {}))
    own = {"bos_token_id": tokenizer.bos_id, "eos_token_id": tokenizer.eos_id} if tokenizer else {}
    ends = {name: i for name, i in own.items() if i is not None} | known.ids
    dtypes = {tensor.dtype for tensor in tensors if tensor.dtype.is_floating_point}
    narrow = min(dtypes, key=lambda dtype: dtype.itemsize)
    config: dict[str, Any] = {**form.to_config(args), **ends, "torch_dtype": str(narrow).removeprefix("torch.")}
    generation = ends | known.config
    files = {"generation_config.json": json_bytes(generation)} if generation else {}
    if tokenizer and with_tokenizer:
        add_bos = bool(source.config and source.config.data.add_bos)
        files |= tokenizer_files(tokenizer, add_bos=add_bos, max_length=args.max_seq_len)
    return files | {"config.json": json_bytes(config)}


def json_bytes(value: Any) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()


def content(data: bytes) -> Write:
    return lambda file: write_all(file, data)


@contextmanager
def _progress(total: int) -> Iterator[Callable[[int], None]]:
    """Progress bar over bytes, silent when standard error is not a terminal."""
    columns = TextColumn("writing"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn()
    with Progress(*columns, console=progress_console(), transient=True) as bar:
        task = bar.add_task("", total=total)
        yield lambda size: bar.advance(task, size)
