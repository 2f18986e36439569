"""A metrics recorder in a folder of its own, results of steps for it, and the records that it wrote."""

import json
from pathlib import Path
from typing import Any

import torch

from tests.support.helpers import world
from titanlite.metrics.recorder import MetricsRecorder
from titanlite.observer import CurrentPhase
from titanlite.run.run_folder import RunFolder
from titanlite.schema import Metrics
from titanlite.step import StepResult


def recorder(
    folder: Path,
    *,
    step: int = 0,
    log_freq: int = 2,
    phase: CurrentPhase | None = None,
) -> MetricsRecorder:
    group = world()
    if phase is None:
        phase = CurrentPhase()
        phase.begin_step(step + 1)
    return MetricsRecorder(
        Metrics(log_freq=log_freq, loggers=[]),
        folder=RunFolder(folder, run_id="x", data_cache=folder),
        step=step,
        steps=100,
        seq_len=125,
        samples=8 * step,
        flops_per_token=lambda first, end, causal: 4_000_000 if causal else 5_000_000,
        device=torch.device("cpu"),
        compute_type="bfloat16",
        group=group,
        phase=phase,
    )


def result_of(loss: float, grad_norm: float) -> StepResult:
    zero = torch.zeros(())
    return StepResult(torch.tensor(loss), zero, torch.tensor(grad_norm), zero, zero[None], torch.tensor(grad_norm))


def records(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
