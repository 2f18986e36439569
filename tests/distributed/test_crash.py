"""Killed at any time, a run loses nothing that was committed. Long form: benchmarks/crash_storm.py."""

from pathlib import Path

import pytest

from tests.support.crash import CrashRun


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
