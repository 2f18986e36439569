"""A run within a budget of memory: the losses are those of any run, and the memory is what was promised."""

import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from benchmarks.measured_memory import AllocationRecord
from tests.distributed.test_layouts import one_step, trained
from tests.helpers import TinyRun, run_ranks
from titanlite.config.schema import Config
from titanlite.ingest.prepare import prepare_text
from titanlite.models.registry import resolve_model
from titanlite.parallelize import RecomputePolicy
from titanlite.plan.budget import GIB, Chosen, choose_levels
from titanlite.preflight import preflight
from titanlite.runtime.process_group import Ranks
from titanlite.train import build

Levels = tuple[RecomputePolicy, ...]
SIZES = ["--model.args.dim=48", "--model.args.hidden_dim=144", "--training.seq_len=128", "--training.steps=3"]
KEY = "activation_checkpoint.memory_budget_gib"


def within(gib: float) -> list[str]:
    return ["--activation_checkpoint.mode=budget", f"--{KEY}={gib!r}"]


def choose(config: Config) -> Chosen:
    kind, args = resolve_model("llama3", "debug", config.model.args)
    args = replace(args, max_seq_len=config.training.seq_len)
    return choose_levels(config, kind, args, world_size=2, gpus_per_node=2, gpu=False)


@pytest.fixture(scope="module")
def between(tmp_path_factory: pytest.TempPathFactory) -> Chosen:
    """The choice for half of what activations take."""
    tiny = TinyRun(tmp_path_factory.mktemp("between"))
    free = choose(tiny.config(*SIZES, *within(1), world_size=2))
    half = (free.peak_none + free.peak_full) / 2 / GIB
    chosen = choose(tiny.config(*SIZES, *within(half), world_size=2))
    assert chosen.peak_full < chosen.peak <= chosen.budget < chosen.peak_none
    return chosen


def measured(rank: int, world_size: int, config: Config, every: list[Levels]) -> list[int]:
    """Most bytes that a step has held, beside what was there before it; for each choice of levels."""
    peaks = []
    ranks, device = Ranks(rank, world_size, rank, world_size), torch.device("cpu")
    for number, levels in enumerate(every):
        named = config.model_copy(update={"job": config.job.model_copy(update={"name": f"measured-{number}"})})
        resolved = replace(preflight(named, ranks, device), levels=levels)
        run = build(named, resolved, ranks=ranks, device=device, prepare_text=prepare_text)
        one_step(run)
        with AllocationRecord() as record, record.span("step"):
            one_step(run)
        peaks.append(record.peak(*record.find("step")))
    return peaks


@pytest.mark.nightly
def test_measured_peaks_are_in_the_order_of_the_predicted(tiny: TinyRun, between: Chosen) -> None:
    blocks = len(between.levels)
    config = tiny.config(*SIZES, *within(between.budget / GIB), world_size=2)
    lowest: Levels = ("full",) * blocks
    highest: Levels = ("none",) * blocks
    predicted = [between.peak_none, between.peak, between.peak_full]
    for none, chosen, full in run_ranks(measured, 2, config, [highest, between.levels, lowest]):
        assert none > chosen > full
        share = (chosen - full) / (none - full)
        assert share == pytest.approx((predicted[1] - predicted[2]) / (predicted[0] - predicted[2]), abs=0.05)


@pytest.mark.nightly
def test_a_budget_changes_no_loss(tiny: TinyRun, between: Chosen) -> None:
    """Shards are uneven: what is rehearsed as rank 0 must not stay with rank 1."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    options = ["--config", str(tiny.toml), *SIZES, *within(between.budget / GIB), "--job.name=budget"]
    result = subprocess.run(
        [*launcher, "-m", "titanlite", "train", *options],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        cwd=tiny.folder,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.count(str(between)) == 1
    assert len(set(between.levels)) > 1
    run_ranks(trained, 2, tiny.config(*SIZES, "--job.name=plain", world_size=2))
    assert tiny.losses("budget") == tiny.losses("plain")
