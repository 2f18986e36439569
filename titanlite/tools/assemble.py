"""A config made ready and built with everything that serves training: text, chat templates, weights of other programs,
teachers. The command and the Python interface share it; training itself imports none of these.

Each is imported where a config asks for it: a run that reads prepared tokens and its own checkpoints needs none.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from titanlite.checks.preflight import RunInputs, examine
from titanlite.config.load import Draft
from titanlite.data.tokenizer import Tokenizer
from titanlite.models.frozen import ModelWeights
from titanlite.models.registry import ModelSpec
from titanlite.observer import CurrentPhase
from titanlite.runtime.process_group import Ranks
from titanlite.schema import Config, Data
from titanlite.train import Run, build

if TYPE_CHECKING:
    from titanlite.checkpoint.dcp_read import RankReader
    from titanlite.data.tokens import TokenStore
    from titanlite.tasks import Task


def resolve(draft: Draft, ranks: Ranks, device: torch.device, *, judge_memory: bool = True) -> tuple[Config, RunInputs]:
    """Check a config against this machine, and resolve the names in it.

    Args:
        judge_memory: whether the run must fit in this machine's memory and on its disk.

    Raises:
        ConfigError: lists all problems that were not reported before.
    """
    inputs, problems = examine(
        draft.config,
        ranks,
        device,
        draft.bad_keys,
        find_text=_find_text,
        open_model=_open_model,
        open_tasks=_open_tasks,
        judge_memory=judge_memory,
    )
    draft.add(problems)
    if inputs is not None and draft.config.data.chat_template is not None:
        from titanlite.tools.ingest.chat import template_problems

        draft.add(template_problems(draft.config.data, inputs.tokenizer))
    config = draft.resolve()
    assert inputs is not None
    return config, inputs


def assemble(
    config: Config, inputs: RunInputs, *, ranks: Ranks, device: torch.device, phase: CurrentPhase | None = None
) -> Run:
    """Build a run, as `build` does, from data that may be text and weights that may be another program's."""
    return build(
        config,
        inputs,
        ranks=ranks,
        device=device,
        prepare_text=_prepare_text,
        open_weights=_open_weights,
        phase=phase,
    )


def _find_text(paths: Sequence[str]) -> object:
    from titanlite.tools.ingest.inputs import find_files

    return find_files(paths)


def _prepare_text(paths: Sequence[str], *, data: Data, tokenizer: Tokenizer, cache_folder: Path) -> "TokenStore":
    from titanlite.tools.ingest.prepare import prepare_text

    return prepare_text(paths, data=data, tokenizer=tokenizer, cache_folder=cache_folder)


def _open_model(path: str, config: str | None, section: str) -> ModelWeights:
    from titanlite.tools.convert.source import open_model

    return open_model(path, config, section)


def _open_weights(path: str, spec: ModelSpec, allow_changes: Sequence[str]) -> "RankReader | None":
    from titanlite.tools.convert.weights import open_weights

    return open_weights(path, spec, allow_changes)


def _open_tasks(config: Config, tokenizer: Tokenizer) -> "Sequence[Task]":
    from titanlite.tools.tasks.read import open_tasks

    return open_tasks(config, tokenizer)
