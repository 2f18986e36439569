"""`titanlite evaluate`: loss and bits per byte of a checkpoint on any data, and tasks, as validation computes them."""

import math
import os
import re
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import torch.distributed as dist
from rich.console import Console
from rich.table import Column, Table

from titanlite.data.prepared import open_stores, prepared_tokens
from titanlite.data.samples import Source
from titanlite.data.sources import open_sources
from titanlite.data.tokenizer import Tokenizer, byte_sizes
from titanlite.metrics.recorder import task_text
from titanlite.models.base import Model
from titanlite.ops import pick_kernels
from titanlite.parallelize.fsdp import DTYPES
from titanlite.runtime.console import progress_bar
from titanlite.runtime.errors import RunError, UserError, did_you_mean
from titanlite.runtime.files import json_text
from titanlite.runtime.process_group import Ranks, pick_device, process_group
from titanlite.schema import Config, Data, Validation, ValidationSource
from titanlite.tasks import Task
from titanlite.tools.arguments import AnyWeights, Count, Index, ModelFile, OfAverage, RunConfig, RunTokenizer
from titanlite.tools.convert.generation import NOT_FINITE
from titanlite.tools.convert.prompts import opening_ids
from titanlite.tools.convert.source import OpenedWeights, default_dtype, load_model, open_source, tokenizer_of
from titanlite.tools.ingest.prepare import prepare_text
from titanlite.tools.tasks.read import read_tasks
from titanlite.validation import ASK_BATCHES, Validator

SEQ_LEN = 2048
"""Tokens of a sequence for weights of another program, if the model can compute as many."""


def evaluate(
    path: AnyWeights,
    *,
    config: RunConfig | None = None,
    model_file: ModelFile | None = None,
    tokenizer: RunTokenizer | None = None,
    average: OfAverage = False,
    data: Sequence[str] = (),
    task: Sequence[str] = (),
    lm_eval: Sequence[str] = (),
    text_field: Sequence[str] = (),
    sequences: Index | None = None,
    seq_len: Count | None = None,
    batch_size: Count = 4,
    dtype: Literal["bfloat16", "float32"] | None = None,
    cache_folder: str | None = None,
    json_: bool = False,
) -> None:
    """Measure the loss of a checkpoint on any data, or score tasks.

    The loss is in nats a token, and bits per byte compares models with different tokenizers. Sequence length, packing,
    document mask and dtype are those of the run, so that the values are those of its validation. Text is tokenized into
    a cache on first use.

    Args:
        data ([NAME=]PATH): a source, as data.path: text or prepared tokens; repeat it for more; default: the run's
            [validation]
        task (TASK): a task as in validation.tasks: a file of JSON lines, or python_cloze or number_choice; repeat it
            for more
        lm_eval (NAME): a task of lm-evaluation-harness, which must be installed (lm_eval); repeat it for more
        text_field ([NAME=]FIELD): field of a record that has the text, of one source or of all; default: the run's
        sequences: sequences of each source, always the same ones; 0 takes all; default: validation.sequences (256)
        seq_len (L): tokens of a sequence; default: the run's
        batch_size (B): sequences computed at once
        dtype: of weights and matmuls; default: the run's
        cache_folder (DIR): for the tokens made of text; default: the run's
        json_: print one JSON object instead of a table

    Raises:
        UserError: the checkpoint or the data cannot be used, or they do not fit together.
        RunError: the model's logits are NaN or overflow.

    Example:
        outputs/debug --data stdlib:// --data mine='texts/*.jsonl'
        outputs/debug --json
        outputs/debug --task python_cloze --task mine.jsonl
    """
    weights = open_source(path, config=config, tokenizer=tokenizer, model_file=model_file, average=average)
    known = tokenizer_of(weights)
    run_config, max_seq_len = weights.config, weights.spec.args.max_seq_len
    length = seq_len or (run_config.training.seq_len if run_config else min(SEQ_LEN, max_seq_len))
    if length > max_seq_len:
        raise UserError(f"--seq-len: {length:,} is more than the max_seq_len {max_seq_len:,} of the model")
    if lm_eval and find_spec("lm_eval") is None:
        raise UserError("--lm-eval needs the package lm_eval: pip install lm_eval")
    if data or not (task or lm_eval):
        _check_refused(weights, data)
    section = _section(data, [*task], run_config, sequences, text_field, is_needed=not lm_eval)
    options, folder = (run_config.data, run_config.job.dump_folder) if run_config else (Data(), "outputs")
    cache = Path(cache_folder or options.cache_folder or Path(folder, "data_cache"))
    places = {"tokenizer": known, "seq_len": length, "cache_folder": cache, "prepare_text": prepare_text}
    sources = []
    for source in section.sources:
        alone = section.model_copy(update={"sources": [source]})
        try:
            sources += open_sources(alone, _options_of(source, options, cache, known), **places)
        except UserError as error:
            raise UserError(f"--data: {source.title}: {str(error).removeprefix('data.path: ')}") from None
    opening = opening_ids(known, run_config)
    tasks = read_tasks(section.tasks, tokenizer=known, opening=opening, seq_len=length) if section.tasks else []
    ranks = Ranks(0, 1, 0, 1)
    device = pick_device(ranks)
    own_dtype = run_config.training.mixed_precision_param if run_config else default_dtype(device)
    model = load_model(weights, dtype=DTYPES[dtype or own_dtype], device=device)
    layout = {"tokenizer": known, "seq_len": length, "batch_size": batch_size}
    record: dict[str, Any] = {"sources": {}}
    if sources or tasks:
        with process_group(ranks, device):
            record = _measure(model, section, sources, tasks, **layout)
        _check_finite(record)
    if lm_eval:
        from titanlite.tools.tasks.harness import CheckpointLM, evaluate_tasks

        harness = CheckpointLM(model, opening=opening, kernels=pick_kernels(device), **layout)
        record["tasks"] = record.get("tasks", {}) | evaluate_tasks(harness, lm_eval)
    if json_:
        print(json_text({"checkpoint": weights.where, "seq_len": length, **record}))
    else:
        _print_table(record)


def _section(
    data: Sequence[str],
    tasks: list[str],
    config: Config | None,
    sequences: int | None,
    fields: Sequence[str],
    *,
    is_needed: bool,
) -> Validation:
    """Return the sources and tasks that the command names, or else those of the run's own validation.

    Args:
        fields: values of --text-field. A field for one source takes precedence over a field for all.
        is_needed: whether there must be a source or a task.

    Raises:
        UserError: there is none, two have the same name, or a field names a source that is not there.
    """
    base = config.validation if config else Validation()
    own = [_source(text) for text in data]
    if not data and not tasks and is_needed:
        own, tasks = base.all_sources(), base.tasks if base.enable else []
        if not own and not tasks:
            raise UserError("name the data, with --data PATH, or a --task: the run has no [validation] of its own")
    names = [source.title for source in own]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise UserError(f"--data: two sources are called {twice}: name one, as --data NAME=PATH")
    by_name = {name: field for name, _, field in (text.rpartition("=") for text in fields)}  # "" stands for all sources
    if other := next((name for name in by_name if name not in ("", *names)), None):
        raise UserError(f"--text-field: no source is called {other}{did_you_mean(other, names)}")
    own = [
        source.model_copy(update={"text_field": by_name.get(source.title) or by_name.get("") or source.text_field})
        for source in own
    ]
    count = base.sequences if sequences is None else sequences
    section = {"enable": True, "path": None, "sources": own, "sequences": count, "tasks": tasks}
    return base.model_copy(update=section)


def _source(text: str) -> ValidationSource:
    """Return the source of a value of --data, which is [NAME=]PATH."""
    match = re.fullmatch(r"([\w.-]+)=(.+)", text, re.DOTALL)
    if match and not os.path.exists(text):
        return ValidationSource(name=match[1], path=match[2])
    if not text.strip():
        raise UserError("--data: an empty path")
    return ValidationSource(path=text)


def _check_refused(weights: OpenedWeights, data: Sequence[str]) -> None:
    """Check that what is measured does not depend on data or a template that only the checkpoint's own config names.

    Raises:
        UserError: it does.
    """
    for key, value in weights.refused.items():
        if key == "validation" and data:
            continue
        fix = "--data PATH, or --config with the run's config" if key == "validation" else "--config"
        raise UserError(
            f"{weights.where}: the config names {key} = {value!r}, and it may be of others: refused, nothing was read. "
            f"If you trust it, name it yourself, with {fix}"
        )


def _options_of(source: ValidationSource, data: Data, cache_folder: Path, tokenizer: Tokenizer) -> Data:
    """Return the options of the data for one source: prepared tokens keep the document ends that they have."""
    paths = [source.path] if isinstance(source.path, str) else source.path
    places = prepared_tokens(paths, data.format)
    if not places or places[0].startswith("python://"):
        return data.model_copy(update={"prepare": "before"})
    store = open_stores(places[:1], data=data, tokenizer=tokenizer, cache_folder=cache_folder)
    return data.model_copy(update={"add_bos": store.index["bos"], "add_eos": store.index["eos"], "chat_template": None})


def _measure(
    model: Model,
    section: Validation,
    sources: list[Source],
    tasks: list[Task],
    *,
    tokenizer: Tokenizer,
    seq_len: int,
    batch_size: int,
) -> dict[str, Any]:
    """Return the validation metrics."""
    group, device = dist.group.WORLD, next(model.parameters()).device
    assert group is not None
    total = sum(min(section.sequences or len(source.sequences), len(source.sequences)) for source in sources)
    total += sum(len(task.answers) for task in tasks)
    validator = Validator(
        section,
        sources,
        tasks,
        seq_len=seq_len,
        batch_size=batch_size,
        token_bytes=byte_sizes(tokenizer),
        kernels=pick_kernels(device),
        device=device,
        rank=0,
        ranks=1,
        group=group,
    )
    with progress_bar("sequences", total, of_bytes=False) as advance:

        def show() -> bool:
            advance(ASK_BATCHES * batch_size)
            return False

        record = validator.run(model, stops=show)
    assert record is not None, "only a training run interrupts its validation"
    return record


def _check_finite(record: dict[str, Any]) -> None:
    """Check that all losses and metrics are finite. Only a source without a token to predict has no loss.

    Raises:
        RunError: one is not.
    """
    losses = [source["loss"] for source in record["sources"].values() if source["tokens"]]
    metrics = [value for task in record.get("tasks", {}).values() for value in task.values()]
    if not all(map(math.isfinite, [*losses, *metrics])):
        raise RunError(NOT_FINITE)


def _print_table(record: dict[str, Any]) -> None:
    names = ("loss", "perplexity", "bits/byte", "tokens", "sequences")
    columns = [Column(name, justify="right", no_wrap=True) for name in names]
    table = Table(Column("source", no_wrap=True), *columns, box=None, pad_edge=False, padding=(0, 2, 0, 0))
    rows = [*record["sources"].items()]
    if len(rows) > 1:
        totals = {key: sum(row[key] for _, row in rows) for key in ("tokens", "sequences")}
        rows.append(("all", {"loss": record["loss"], "bits_per_byte": None, **totals}))
    for name, row in rows:
        perplexity = f"{math.exp(row['loss']):,.2f}" if row["loss"] < 50 else "-"
        bits = "-" if row["bits_per_byte"] is None else f"{row['bits_per_byte']:.4f}"
        table.add_row(name, f"{row['loss']:.4f}", perplexity, bits, f"{row['tokens']:,}", f"{row['sequences']:,}")
    wide = None if sys.stdout.isatty() else 1000  # lines in a pipe are not wrapped
    console = Console(width=wide, markup=False, emoji=False, highlight=False)
    if rows:
        console.print(table)
    for name, task in record.get("tasks", {}).items():
        console.print(f"{name}  {task_text(task)}")
