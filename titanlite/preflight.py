"""What can be known to be wrong before any process group starts and anything is allocated."""

import os
import shutil
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from inspect import signature
from pathlib import Path
from typing import TypeVar

import torch

from titanlite.config.checks import are_right
from titanlite.config.schema import Config, Data, Optimizer, Validation
from titanlite.data.sources import FindText, check_path
from titanlite.data.tokenizer import Tokenizer, load_tokenizer
from titanlite.models.base import Model, ModelArgs
from titanlite.models.registry import ModelSpec, resolve_model
from titanlite.optim import check_optimizer
from titanlite.optim.registry import compiles_updates
from titanlite.optim.state_size import state_bytes
from titanlite.parallelize.activation_checkpoint import recompute_policies
from titanlite.parallelize.float8 import check_float8
from titanlite.parallelize.materialize import check_memory, largest_shard
from titanlite.runtime.disk import check_room, folder_of
from titanlite.runtime.errors import ConfigError, Problem, UserError
from titanlite.runtime.process_group import Ranks
from titanlite.runtime.user_code import find_object

SIZES = {"bfloat16": 2, "float32": 4}

T = TypeVar("T")


@dataclass(frozen=True)
class ResolvedConfig:
    """The model and the tokenizer that a config names."""

    model: ModelSpec
    tokenizer: Tokenizer


def preflight(
    config: Config, ranks: Ranks, device: torch.device, *, find_text: FindText | None = None
) -> ResolvedConfig:
    """Resolve the model, the tokenizer and the data by name, and check that they fit together and fit in memory.

    Raises:
        ConfigError: with everything that does not.
    """
    resolved, problems = examine(config, ranks, device, find_text=find_text)
    if problems:
        raise ConfigError(problems)
    assert resolved is not None
    return resolved


def examine(
    config: Config,
    ranks: Ranks,
    device: torch.device,
    bad_keys: Collection[str] = (),
    *,
    find_text: FindText | None = None,
) -> tuple[ResolvedConfig | None, list[Problem]]:
    """As `preflight`, of a config that may have mistakes: all further problems, and what could be found all the same.

    Args:
        config: with defaults in place of the options in bad_keys.
        bad_keys: options that were reported already; a check that would read one is left out.
        find_text: checks sources that are text, which are not checked without it.
    """
    report = _Report(bad_keys)
    training, float8 = config.training, config.quantize.linear.float8
    selected = config.model
    spec = report.attempt(
        "model",
        ["model.name", "model.file", "model.flavor", "model.args"],
        lambda: resolve_model(selected.name, selected.flavor, selected.args, selected.file),
    )
    tokenizer = report.attempt("data.tokenizer", ["data.tokenizer"], lambda: load_tokenizer(config.data.tokenizer))
    for key, path in [*_paths(config.data, "data"), *_paths(config.validation, "validation")]:
        report.attempt(key, [key], partial(check_path, path, find_text))
    report.attempt("quantize.linear.float8.enable", ["quantize"], lambda: check_float8(float8))
    for key, names in (("training.loss", [training.loss]), ("metrics.loggers", config.metrics.loggers)):
        for name in filter(None, names):
            report.attempt(key, [key], partial(_check_callable, name))
    if config.compile.enable:
        report.attempt("compile.enable", ["compile"], lambda: check_compiler(device))
    model = spec.build() if spec else None
    checked = report.attempt(
        "optimizer", ["optimizer", "training.dtype"], lambda: _check_optimizer(config.optimizer, model, training.dtype)
    )
    if checked and compiles_updates(config.optimizer):
        report.attempt("optimizer.name", [], lambda: check_compiler(device))
    if spec is None or model is None:
        return None, report.problems
    args, recompute = spec.args, config.activation_checkpoint
    key = "activation_checkpoint.per_block"
    report.attempt(key, ["activation_checkpoint"], lambda: recompute_policies(recompute, len(model.layers)))
    report.attempt("data.document_mask", ["data.document_mask"], lambda: _check_documents(model, config.data))
    report.attempt("training.seq_len", ["training.seq_len"], lambda: _check_seq_len(training.seq_len, args))
    if tokenizer:
        report.attempt("data.tokenizer", [], lambda: _check_vocabulary(tokenizer, args))
    if checked:
        sizes = ["training", "parallelism", "offload"]
        report.attempt("model.flavor", sizes, lambda: _check_memory(model, config, ranks, device))
        if config.offload.is_used:
            report.attempt("offload.path", [*sizes, "job"], lambda: _check_disk(model, config, ranks))
    spec = spec._replace(args=replace(args, max_seq_len=training.seq_len))
    return (ResolvedConfig(spec, tokenizer) if tokenizer else None), report.problems


class _Report:
    """Problems of checks that run one after the other, whatever the others find."""

    def __init__(self, bad_keys: Collection[str]) -> None:
        self.problems: list[Problem] = []
        self._bad_keys = bad_keys

    def attempt(self, key: str, reads: Sequence[str], check: Callable[[], T]) -> T | None:
        """What the check returns, if it can run and finds nothing.

        Args:
            key: what to blame, if the check does not say.
            reads: the options that it depends on.
        """
        if not are_right(reads, self._bad_keys):
            return None
        try:
            return check()
        except ConfigError as error:
            self.problems += error.problems
        except UserError as error:
            self.problems.append(Problem(key, str(error).removeprefix(f"{key}: ")))
        return None


def check_compiler(device: torch.device) -> None:
    """Raises:
    UserError: torch.compile would not find the compiler that it hands its code to.
    """
    if device.type == "cuda":
        if find_spec("triton") is None:
            raise UserError("compiling for a GPU needs triton, which is not installed: pip install triton")
        return
    # As torch._inductor.config.cpp.cxx: one name, and no other is tried.
    compiler = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")
    if shutil.which(compiler) is None and not os.environ.get("TORCH_INDUCTOR_INSTALL_GXX"):
        chosen = "the environment variable CXX says" if "CXX" in os.environ else "CXX in the environment names another"
        raise UserError(f"compiling for the CPU needs a C++ compiler, and there is no {compiler} ({chosen})")


def _paths(section: Data | Validation, name: str) -> Iterator[tuple[str, str | list[str]]]:
    for number, source in enumerate(section.all_sources()):
        yield (f"{name}.sources.{number}.path" if section.sources else f"{name}.path"), source.path


def _check_callable(name: str) -> None:
    if not callable(find_object(name)):
        raise UserError(f"{name} is not a function or class")


def _check_documents(model: Model, data: Data) -> None:
    parameters = signature(model.forward).parameters.values()
    if data.document_mask and not any(it.name == "documents" or it.kind is it.VAR_KEYWORD for it in parameters):
        raise UserError(
            f"true needs a model whose forward takes `documents`, and {type(model).__name__}.forward does not: add the "
            "argument and mask attention by it (docs/add_a_model.md), or set data.document_mask = false"
        )


def _check_seq_len(seq_len: int, args: ModelArgs) -> None:
    if seq_len > args.max_seq_len:
        raise UserError(f"{seq_len} is more than the {args.max_seq_len} positions of the model")


def _check_vocabulary(tokenizer: Tokenizer, args: ModelArgs) -> None:
    if tokenizer.vocab_size > args.vocab_size:
        raise UserError(f"has {tokenizer.vocab_size} tokens, the model only {args.vocab_size} (model.args.vocab_size)")


def _check_optimizer(config: Optimizer, model: Model | None, dtype: str) -> bool:
    """Also what does not depend on the model, where that is not known."""
    if problems := check_optimizer(config, model, dtype=dtype):
        raise ConfigError(problems)
    return True


def _check_memory(model: Model, config: Config, ranks: Ranks, device: torch.device) -> None:
    in_memory, _ = _bytes_per_parameter(model, config)
    check_memory(
        model,
        bytes_per_parameter=in_memory,
        shard_degree=config.parallelism.degrees(ranks.world_size)[1],
        local_world_size=ranks.local_world_size,
        device=device,
        offload=config.training.enable_cpu_offload,
    )


def _check_disk(model: Model, config: Config, ranks: Ranks) -> None:
    _, on_disk = _bytes_per_parameter(model, config)
    of_a_rank = on_disk * largest_shard(model, config.parallelism.degrees(ranks.world_size)[1])
    folder = folder_of(config.offload, Path(config.job.dump_folder, str(config.job.name)))
    check_room(folder, of_a_rank * ranks.local_world_size)


def _bytes_per_parameter(model: Model, config: Config) -> tuple[float, float]:
    """(in memory, on disk): itself, its gradient (a part at a time, with updates in backward) and its states."""
    weight = SIZES[config.training.dtype]
    gradient = 0 if config.optimizer.in_backward else weight
    states = state_bytes(config.optimizer, model, dtype=config.training.dtype)
    moments = states / sum(p.numel() for p in model.parameters())
    on_disk = weight * (config.offload.parameters == "disk") + moments * (config.offload.optimizer == "disk")
    return weight + gradient + moments - on_disk, on_disk
