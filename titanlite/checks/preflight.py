"""Checks before a process group starts and memory is allocated: names, model, tokenizer, data, memory and disk."""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from titanlite.checks.memory import bytes_on_disk, check_model_memory
from titanlite.checks.model import check_attention, check_exports, check_own_model, check_quantized_moments
from titanlite.config.checks import no_known_problem
from titanlite.data.sources import FindText, check_path
from titanlite.data.tokenizer import Tokenizer, load_tokenizer
from titanlite.loss import Targets, check_loss
from titanlite.metrics.loggers import check_logger
from titanlite.models.base import Model, ModelArgs
from titanlite.models.frozen import OpenModel
from titanlite.models.registry import ModelSpec, resolve_model
from titanlite.optim.checks import check_optimizer
from titanlite.optim.registry import compiles_updates
from titanlite.runtime.compilers import check_compiler
from titanlite.runtime.errors import ConfigError, Problem, UserError
from titanlite.runtime.files import why_not_writable
from titanlite.runtime.process_group import Ranks
from titanlite.schema import Config, Data, ModelSelection, Optimizer, Validation
from titanlite.storage.storage import open_storage
from titanlite.techniques import asked_for, places
from titanlite.techniques.technique import Technique, reads_of

if TYPE_CHECKING:
    from titanlite.tasks import Task

T = TypeVar("T")
OpenTasks = Callable[[Config, Tokenizer], "Sequence[Task]"]
"""Read the tasks of `[validation]`: `titanlite.tools.tasks.read.open_tasks`. Raises UserError."""


@dataclass(frozen=True)
class RunInputs:
    """What the names in a config stand for, and a run is built from."""

    model: ModelSpec
    tokenizer: Tokenizer
    targets: Targets | None
    tasks: "Sequence[Task]" = ()


def preflight(
    config: Config,
    ranks: Ranks,
    device: torch.device,
    *,
    find_text: FindText | None = None,
    open_model: OpenModel | None = None,
    open_tasks: OpenTasks | None = None,
) -> RunInputs:
    """Resolve the model, the tokenizer and the data by name, and check that they fit together and fit in memory.

    Raises:
        ConfigError: lists all problems.
    """
    inputs, problems = examine(config, ranks, device, find_text=find_text, open_model=open_model, open_tasks=open_tasks)
    if problems:
        raise ConfigError(problems)
    assert inputs is not None
    return inputs


def examine(
    config: Config,
    ranks: Ranks,
    device: torch.device,
    bad_keys: Collection[str] = (),
    *,
    find_text: FindText | None = None,
    open_model: OpenModel | None = None,
    open_tasks: OpenTasks | None = None,
    judge_memory: bool = True,
) -> tuple[RunInputs | None, list[Problem]]:
    """Find the inputs of a run, and the further problems of its config.

    Args:
        config: with defaults in place of the options in bad_keys.
        bad_keys: options with a reported problem. Checks that read one of them are skipped.
        find_text: checks sources that are text, which are not checked without it.
        open_model: opens the weights of a frozen model. Without it, a config with one is refused.
        open_tasks: reads tasks. Without it, a config with some is refused.
        judge_memory: whether the run must fit in this machine's memory and on its disk.

    Returns:
        the inputs of the run, or None if the model or the tokenizer is unknown, and all further problems.
    """
    report = _Report(config, bad_keys)
    training = config.training
    report.attempt("job.dump_folder", ["job.dump_folder"], lambda: _check_writable(config.job.dump_folder))
    if config.checkpoint.enable:
        asks = judge_memory and ranks.rank == 0
        report.attempt("checkpoint.folder", ["checkpoint", "job"], lambda: _check_checkpoint_folder(config, asks=asks))
    tokenizer = report.attempt("data.tokenizer", ["data.tokenizer"], lambda: load_tokenizer(config.data.tokenizer))
    keys = ["model.name", "model.file", "model.flavor", "model.args"]
    spec = report.attempt("model", keys, lambda: select_model(config.model, tokenizer))
    for key, path in [*_paths(config.data, "data"), *_paths(config.validation, "validation")]:
        report.attempt(key, [key], partial(check_path, path, find_text, config.data.format))
    if config.compile.enable:
        report.attempt("compile.enable", ["compile"], lambda: check_compiler(device))
    report.ask(lambda technique: technique.check_machine, config, device)
    if loss := training.loss:
        targets = ["teacher"] if config.teacher.path else []
        report.attempt("training.loss", ["training.loss"], lambda: check_loss(loss, targets))
    for name in config.metrics.loggers:
        report.attempt("metrics.loggers", ["metrics.loggers"], partial(check_logger, name))
    model = _build_model(report, spec, config) if spec else None
    report.attempt("checkpoint", ["checkpoint"], lambda: check_exports(config.checkpoint, model))
    checked = report.attempt(
        "optimizer", ["optimizer", "training.dtype"], lambda: _check_optimizer(config.optimizer, model, training.dtype)
    )
    if checked and compiles_updates(config.optimizer):
        report.attempt("optimizer.name", [], lambda: check_compiler(device))
    if spec is None or model is None:
        return None, report.problems
    args = spec.args
    report.ask(lambda technique: technique.check_model, config, spec, model, ranks.world_size)
    attention = ["training", "data.document_mask"]
    report.attempt("training.attention_backend", attention, lambda: check_attention(model, config, device))
    if checked:
        moments = partial(check_quantized_moments, model, config, ranks.world_size)
        report.attempt("optimizer.name", ["optimizer", "parallelism"], moments)
    report.attempt("training.seq_len", ["training.seq_len"], lambda: _check_seq_len(training.seq_len, args))
    if tokenizer:
        report.attempt("data.tokenizer", [], lambda: _check_vocabulary(tokenizer, args))
    teacher = None
    if config.teacher.path:
        from titanlite.techniques.distill.source import check_and_open_teacher

        teacher = check_and_open_teacher(
            config, student=spec, tokenizer=tokenizer, open_model=open_model, attempt=report.attempt
        )
    reads = ["data", "validation", "training.seq_len"]
    tasks = report.attempt("validation.tasks", reads, lambda: _open_tasks(config, tokenizer, open_tasks))
    if checked and judge_memory:
        fits = partial(check_model_memory, model, config, ranks, device, frozen=teacher.frozen if teacher else None)
        report.attempt("model.flavor", ["training", "parallelism", "offload", "teacher"], fits)
        if "disk" in places(config).values() and no_known_problem(["training", "parallelism"], bad_keys):
            from titanlite.techniques.offload import check_disk

            needed = partial(bytes_on_disk, model, config, ranks)
            reads = ["offload", "training", "parallelism", "job"]
            report.attempt("offload.path", reads, lambda: check_disk(config, needed()))
    spec = spec._replace(args=replace(args, max_seq_len=training.seq_len))
    return (RunInputs(spec, tokenizer, teacher, tasks or ()) if tokenizer else None), report.problems


def select_model(selection: ModelSelection, tokenizer: Tokenizer | None) -> ModelSpec:
    """Return the model of `[model]`, with a vocabulary for the tokenizer, if that is known.

    Raises:
        ConfigError: the model, its flavor or one of its arguments is unknown.
    """
    size = tokenizer.vocab_size if tokenizer else None
    name, flavor, args, file = selection.name, selection.flavor, selection.args, selection.file
    return resolve_model(name, flavor, args, file, path=selection.path, tokenizer_size=size)


def _build_model(report: "_Report", spec: ModelSpec, config: Config) -> Model | None:
    """Return the model on the meta device, with its adapters, and frozen parameters marked."""
    model = report.attempt("model.file", [], spec.build)
    if model is None:
        return None
    if config.model.file:
        predicts_next = config.training.loss is None
        report.attempt("model.file", [], lambda: check_own_model(spec, model, predicts_next=predicts_next))
    if config.model.path:
        options = {"with_documents": config.data.document_mask, "seq_len": config.training.seq_len}
        reads = ["data.document_mask", "training.seq_len"]
        report.attempt("model.path", reads, lambda: check_decoder(spec, **options))
    report.ask(lambda technique: technique.choose_trained, model, config)
    return model


def check_decoder(spec: ModelSpec, *, with_documents: bool = False, seq_len: int = 0) -> None:
    """Compare a decoder of transformers with transformers' own forward, see `check_forward`."""
    from titanlite.checks.transformers import check_forward  # transformers is there if this model is

    check_forward(spec, with_documents=with_documents, seq_len=seq_len)


class _Report:
    """Collector of the problems of independent checks."""

    def __init__(self, config: Config, bad_keys: Collection[str]) -> None:
        self.problems: list[Problem] = []
        self._techniques, self._bad_keys = asked_for(config), bad_keys

    def attempt(self, key: str, reads: Sequence[str], check: Callable[[], T]) -> T | None:
        """Run a check, and return its result; None if it has problems or was skipped.

        Args:
            key: key of the problem, if the check does not give one.
            reads: options that the check depends on.
        """
        if not no_known_problem(reads, self._bad_keys):
            return None
        try:
            return check()
        except ConfigError as error:
            self.problems += error.problems
        except UserError as error:
            self.problems.append(Problem(key, str(error).removeprefix(f"{key}: ")))
        return None

    def ask(self, check_of: Callable[[Technique], Callable[..., object]], *arguments: Any) -> None:
        """Run a check of every technique that the config asks for."""
        for technique in self._techniques:
            check = check_of(technique)
            self.attempt(technique.option, reads_of(check), partial(check, *arguments))


def _paths(section: Data | Validation, name: str) -> Iterator[tuple[str, str | list[str]]]:
    for number, source in enumerate(section.all_sources()):
        yield (f"{name}.sources.{number}.path" if section.sources else f"{name}.path"), source.path


def _check_checkpoint_folder(config: Config, *, asks: bool) -> None:
    """Check that checkpoints can be written, in their own folder or in the run's.

    Args:
        asks: whether an object store is listed. Some make a bucket of any name at the first save.
    """
    own, of_run = config.checkpoint.folder, Path(config.job.dump_folder, str(config.job.name), "checkpoints")
    if own is None and of_run.is_dir():  # not there yet: the run creates it
        _check_writable(str(of_run))
    elif own is not None and "://" not in own:
        _check_writable(own)
    elif own is not None and asks:
        open_storage(own).list()
    if config.checkpoint.local_interval and (local := config.checkpoint.local_folder) is not None:
        _check_writable(local)


def _check_writable(folder: str) -> None:
    if problem := why_not_writable(folder):
        raise UserError(problem)


def _check_seq_len(seq_len: int, args: ModelArgs) -> None:
    if seq_len > args.max_seq_len:
        raise UserError(
            f"{seq_len} is more than the {args.max_seq_len} positions of the model (lower it, or raise "
            "model.args.max_seq_len)"
        )


def _check_vocabulary(tokenizer: Tokenizer, args: ModelArgs) -> None:
    if tokenizer.vocab_size > args.vocab_size:
        raise UserError(
            f"has {tokenizer.vocab_size} tokens, the model only {args.vocab_size} (leave model.args.vocab_size out, so "
            "that it follows the tokenizer, or raise it)"
        )


def _open_tasks(config: Config, tokenizer: Tokenizer | None, open_tasks: OpenTasks | None) -> "Sequence[Task]":
    if tokenizer is None or not (config.validation.enable and config.validation.tasks):
        return ()
    if open_tasks is None:
        raise UserError("are not read here: set validation.enable = false")
    return open_tasks(config, tokenizer)


def _check_optimizer(config: Optimizer, model: Model | None, dtype: str) -> bool:
    """Check the optimizer; without a model, only what does not depend on one."""
    if problems := check_optimizer(config, model, dtype=dtype):
        raise ConfigError(problems)
    return True
