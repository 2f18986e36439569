"""A config made ready and built with everything that serves training: text, chat templates, weights of other programs,
teachers. The command and the Python interface share it; training itself imports none of these."""

import torch

from titanlite.checks.preflight import ResolvedConfig, examine
from titanlite.config.load import Draft
from titanlite.observer import CurrentPhase
from titanlite.runtime.process_group import Ranks
from titanlite.schema import Config
from titanlite.tools.convert.source import open_model
from titanlite.tools.convert.weights import open_weights
from titanlite.tools.ingest.chat import template_problems
from titanlite.tools.ingest.inputs import find_files
from titanlite.tools.ingest.prepare import prepare_text
from titanlite.tools.tasks.read import open_tasks
from titanlite.train import Run, build


def resolve(
    draft: Draft, ranks: Ranks, device: torch.device, *, judge_memory: bool = True
) -> tuple[Config, ResolvedConfig]:
    """Check a config against this machine, and resolve the names in it.

    Args:
        judge_memory: whether the run must fit in this machine's memory and on its disk.

    Raises:
        ConfigError: lists all problems that were not reported before.
    """
    resolved, problems = examine(
        draft.config,
        ranks,
        device,
        draft.bad_keys,
        find_text=find_files,
        open_model=open_model,
        open_tasks=open_tasks,
        judge_memory=judge_memory,
    )
    draft.add(problems)
    if resolved is not None:
        draft.add(template_problems(draft.config.data, resolved.tokenizer))
    config = draft.resolve()
    assert resolved is not None
    return config, resolved


def assemble(
    config: Config, resolved: ResolvedConfig, *, ranks: Ranks, device: torch.device, phase: CurrentPhase | None = None
) -> Run:
    """Build a run, as `build` does, from data that may be text and weights that may be another program's."""
    return build(
        config,
        resolved,
        ranks=ranks,
        device=device,
        prepare_text=prepare_text,
        open_weights=open_weights,
        phase=phase,
    )
