"""Killed at any time, a run loses nothing that was committed. Long form: benchmarks/crash_storm.py."""

import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.crash import CrashRun
from tests.support.local_crash import KINDS, LocalCrashRun


@pytest.mark.parametrize("kills", [pytest.param(2, marks=pytest.mark.slow), pytest.param(6, marks=pytest.mark.nightly)])
def test_killed_again_and_again_a_run_ends_as_if_never_killed(tmp_path: Path, kills: int) -> None:
    run = CrashRun(tmp_path, seed=0)
    for _ in range(kills):
        print(run.kill())
    assert run.finish() >= 4


@pytest.mark.nightly
def test_two_stages_of_a_pipeline_are_killed(tmp_path: Path) -> None:
    stages = ["--parallelism.pipeline_parallel_degree=2", "--training.local_batch_size=1", "--model.args.n_layers=2"]
    run = CrashRun(tmp_path, seed=1, options=stages)
    for _ in range(3):
        print(run.kill())
    assert run.finish() >= 4


OFTEN = "machine", "flip-both", "clock", "twice"
"""Faults that test_storm.py has not, and of which other tests have not the moment."""


@pytest.mark.parametrize(
    "kinds",
    [
        pytest.param(OFTEN, marks=pytest.mark.slow, id="4"),
        pytest.param((KINDS * 17)[:200], marks=pytest.mark.nightly, id="200"),
    ],
)
def test_local_copies_are_what_a_run_resumes_from(tmp_path: Path, kinds: Sequence[str]) -> None:
    """A storm of faults of 12 kinds, at random moments. Each run of this test has a seed of its own."""
    seed = random.SystemRandom().randrange(10**6)
    print(f"seed {seed}")  # pytest shows it when the test fails
    run = LocalCrashRun(tmp_path, seed=seed)
    for kind in kinds:
        print(run.fault(kind))
    assert run.finish() >= 3
