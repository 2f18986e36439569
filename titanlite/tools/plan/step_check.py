"""What `titanlite check` tries beyond the config itself: the data is opened, and one step runs on fake tensors."""

import logging
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from titanlite.checks.preflight import RunInputs
from titanlite.data.custom import PREFIX
from titanlite.data.prepared import prepared_tokens
from titanlite.data.samples import Samples, Source
from titanlite.data.sources import open_sources, store_of
from titanlite.loss import token_loss
from titanlite.models.registry import ModelSpec
from titanlite.models.trial import unused_parameters
from titanlite.runtime.errors import UserError
from titanlite.runtime.private_torch.tracing import ValueNeeded
from titanlite.runtime.process_group import Ranks
from titanlite.schema import Config, Data, Validation
from titanlite.tools.plan.estimate import can_vary, first_blocks, period_of, trained_model
from titanlite.tools.plan.trace import trace_step
from titanlite.version import PACKAGE

MOST_CHARACTERS = 300
"""Length of the message of an error of code of the user's own."""
NEEDS_REAL_TENSORS = ("fake", "subclass", "data pointer", "inputs of bf16 type")
"""Words of errors of code that may be right on real tensors, such as `numpy()`, operators of the user's own, and
grouped matmuls in float32."""


def check_step(config: Config, inputs: RunInputs, ranks: Ranks, device: torch.device) -> Iterator[str]:
    """Yield what was found right, as parts of a line.

    Raises:
        UserError: the data cannot be read, or one step fails.
    """
    data = _try_data(config, inputs)
    yield _try_step(config, inputs, ranks, device)
    yield data
    if config.model.file and (unused := unused_parameters(inputs.model, token_loss)):
        names = ", ".join(unused[:3]) + (f" and {len(unused) - 3} more" if unused[3:] else "")
        yield f"{names} without a gradient: forward does not use them"
    if config.model.file and inputs.model.model_cls.formats.hugging_face is None:
        yield "export to Hugging Face would need `formats` in the model (docs/add_a_model.md)"


# Data


def _try_data(config: Config, inputs: RunInputs) -> str:
    """Open local tokens and sequences of the user's own, and read their first and last sequence.

    Of text only the names are checked, and tokens at a URL are not copied.
    """
    seq_len, opened, others = config.training.seq_len, 0, 0
    for section in (config.data, config.validation):
        local = [source for source in section.all_sources() if _is_at_hand(source.path, config.data.format)]
        others += len(section.all_sources()) - len(local)
        sources = _open(section, local, config, inputs)
        for source in sources:
            for index in sorted({0, len(source.sequences) - 1}):
                source.sequences.read(index)
        if isinstance(section, Data) and sources:
            Samples(sources, seed=config.debug.seed)
            opened = sum(_tokens(source, seq_len) for source in sources)
    unread = "text and URLs are not read here" if others else ""
    return ", ".join(part for part in (f"{opened:,} tokens opened" if opened else "", unread) if part)


def _is_at_hand(path: str | list[str], form: str | None) -> bool:
    paths = [path] if isinstance(path, str) else path
    if len(paths) == 1 and paths[0].startswith(PREFIX):
        return True
    places = prepared_tokens(paths, form)
    return bool(places) and not any("://" in place for place in places)


def _open(section: Data | Validation, local: list[Any], config: Config, inputs: RunInputs) -> list[Source]:
    if not local:
        return []
    return open_sources(
        section.model_copy(update={"sources": local}),
        config.data.model_copy(update={"packing": "stream"}),  # packing takes long, and writes its plan
        tokenizer=inputs.tokenizer,
        seq_len=config.training.seq_len,
        cache_folder=Path(config.job.dump_folder),
    )


def _tokens(source: Source, seq_len: int) -> int:
    store = store_of(source)
    return len(source.sequences) * seq_len if store is None else len(store)


# One step


def _try_step(config: Config, inputs: RunInputs, ranks: Ranks, device: torch.device) -> str:
    """Trace one step of one micro-batch of one sequence. Compiled blocks run as they are."""
    degree = config.parallelism.degrees(ranks.world_size).data_parallel
    stages = config.parallelism.pipeline_parallel_degree
    training = config.training.model_copy(update={"local_batch_size": 1, "global_batch_size": degree * stages})
    compiler = config.compile.model_copy(update={"enable": False})
    small = config.model_copy(update={"training": training, "compile": compiler})
    spec = inputs.model
    if not config.model.file and stages == 1:  # an own model's blocks and those of pipelines are all tried
        spec = _few_blocks(spec, config, period_of(config, spec.build()))
    trace = partial(trace_step, small, spec.model_cls, spec.args, world_size=ranks.world_size)
    targets = copy(inputs.targets)
    if targets:
        targets.frozen = replace(targets.frozen, spec=_few_blocks(targets.frozen.spec, Config(), 1))
    what = f"one step of {ranks.world_size} processes" if ranks.world_size > 1 else "one step"
    try:
        with _quiet():
            # A model of one's own always as on a GPU, with FSDP units: what a laptop trains should train on a cluster.
            trace(gpu=device.type == "cuda" or config.model.file is not None, targets=targets)
    except UserError as error:
        if not isinstance(error.__cause__, ValueNeeded):
            raise
        return str(error)
    except (Exception, SystemExit) as error:  # code of the user's own may raise anything
        reason = _describe(error).replace("FakeTensor", "Tensor")
        needs_values = any(word in reason.lower() for word in NEEDS_REAL_TENSORS)
        if needs_values or (config.model.path and _has_a_step(inputs.model)):
            return f"{what} could not be traced ({reason})"
        raise UserError(f"{_suspect(config)}: one step fails: {reason}") from error
    return f"{what} was traced"


@contextmanager
def _quiet() -> Iterator[None]:
    """Log nothing within the context: PyTorch logs what it raises."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)


def _few_blocks(spec: ModelSpec, config: Config, period: int) -> ModelSpec:
    """Return the model with its first blocks that differ, and two periods of the rest, if it has more."""
    args: Any = spec.args
    model = trained_model(spec, config)
    few = first_blocks(model) + 2 * period
    if len(model.layers) <= few or not can_vary(spec, config, model, few):
        return spec
    return spec._replace(args=replace(args, n_layers=few))


def _has_a_step(spec: ModelSpec) -> bool:
    """Return whether a few blocks of a decoder of transformers make a step with values, at their own size."""
    from titanlite.checks.transformers import small_decoder

    try:
        model = small_decoder(spec, 1).train()
        model(torch.zeros(1, 8, dtype=torch.int64)).sum().backward()
    except Exception:  # layers may raise anything, and the model may be too large
        return False
    return True


def _suspect(config: Config) -> str:
    """Return the option to which the mistake of a step belongs: code of the user's own, or else the model."""
    optimizers = [config.optimizer.name, *(group.name or "" for group in config.optimizer.groups)]
    has_own_optimizer = any("." in name or ":" in name for name in optimizers)
    options = {
        "model.file": config.model.file, "training.loss": config.training.loss, "optimizer.name": has_own_optimizer,
        "model.path": config.model.path,
    }  # fmt: skip
    return next((option for option, value in options.items() if value), "model.args")


def _describe(error: BaseException) -> str:
    """Return an error on one line, with the innermost line that is neither PyTorch's nor titanlite's."""
    words = " ".join(f"{type(error).__name__}: {error}".split())
    words = words if len(words) <= MOST_CHARACTERS else f"{words[:MOST_CHARACTERS]}..."
    ours = f"{Path(str(torch.__file__)).parent}/", f"{PACKAGE}/"
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith((*ours, "<"))]
    frames = [frame for frame in frames if "/site-packages/" not in frame.filename] or frames  # wandb wraps sys.exit
    return f"{Path(frames[-1].filename).name}:{frames[-1].lineno}: {words}" if frames else words
