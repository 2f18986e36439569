"""Runs with a recompute policy for each block: the losses of any run, and less memory as planned."""

import pytest
import torch

from benchmarks.measured_memory import AllocationRecord
from tests.helpers import TinyRun, run_in_turn, run_ranks
from tests.layouts import one_step, trained
from titanlite.checks.preflight import preflight
from titanlite.runtime.process_group import Ranks
from titanlite.schema import Config
from titanlite.tools.ingest.prepare import prepare_text
from titanlite.tools.plan.estimate import Layout
from titanlite.tools.plan.hardware import find_hardware
from titanlite.tools.plan.recompute_search import PolicyChoice, choose_policies
from titanlite.train import build

SIZES = ["--model.args.dim=48", "--model.args.hidden_dim=144", "--training.seq_len=128", "--training.steps=3"]


@pytest.fixture(scope="module")
def between(tmp_path_factory: pytest.TempPathFactory) -> PolicyChoice:
    """The choice for half the memory of activations."""
    config = TinyRun(tmp_path_factory.mktemp("between")).config(*SIZES, world_size=2)
    layout = Layout(2, find_hardware("cpu"), 2)
    free = choose_policies(config, layout, budget=2**40)
    chosen = choose_policies(config, layout, budget=(free.peak_none + free.peak_full) // 2)
    assert chosen.peak_full < chosen.peak <= chosen.budget < chosen.peak_none
    assert len(set(chosen.policies)) > 1
    return chosen


def written(chosen: PolicyChoice) -> list[str]:
    """Options of the chosen policies."""
    entries = ", ".join(f'"{entry}"' for entry in chosen.activation_checkpoint.per_block)
    return ["--activation_checkpoint.mode=per_block", f"--activation_checkpoint.per_block=[{entries}]"]


def measured(rank: int, world_size: int, config: Config) -> int:
    """Most bytes that a step has held, beside the bytes before it."""
    ranks, device = Ranks(rank, world_size, rank, world_size), torch.device("cpu")
    run = build(config, preflight(config, ranks, device), ranks=ranks, device=device, prepare_text=prepare_text)
    one_step(run)
    with AllocationRecord() as record, record.span("step"):
        one_step(run)
    return record.peak(*record.find("step"))


@pytest.mark.nightly
def test_measured_peaks_are_in_the_order_of_the_predicted(tiny: TinyRun, between: PolicyChoice) -> None:
    options = {
        "none": ["--activation_checkpoint.mode=none"],
        "chosen": written(between),
        "full": ["--activation_checkpoint.mode=full"],
    }
    configs = [tiny.config(*SIZES, *more, f"--job.name={name}", world_size=2) for name, more in options.items()]
    predicted = [between.peak_none, between.peak, between.peak_full]
    for none, chosen, full in zip(*run_in_turn(measured, 2, configs), strict=True):
        assert none > chosen > full
        share = (chosen - full) / (none - full)
        assert share == pytest.approx((predicted[1] - predicted[2]) / (predicted[0] - predicted[2]), abs=0.05)


@pytest.mark.nightly
def test_policies_change_no_loss(tiny: TinyRun, between: PolicyChoice) -> None:
    """Shards are uneven."""
    for name, options in (("per_block", written(between)), ("plain", [])):
        run_ranks(trained, 2, tiny.config(*SIZES, *options, f"--job.name={name}", world_size=2))
    assert tiny.losses("per_block") == tiny.losses("plain")
