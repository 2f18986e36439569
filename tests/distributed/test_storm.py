"""What lies between features: workers of the loader, a small /dev/shm, local copies, rollbacks and kills together."""

import json
import random
from pathlib import Path

import pytest

from tests.support.helpers import needs_forks
from tests.support.storm import BAD_STEP, Storm

pytestmark = needs_forks

COPY = 2_700_000
"""Bytes of a copy of all ranks, which each machine has."""


@pytest.mark.slow
def test_a_run_in_a_storm_ends_with_the_bits_of_an_undisturbed_one(tmp_path: Path) -> None:
    """Two copies and a half fit. Each run of this test has a seed of its own."""
    seed = random.SystemRandom().randrange(10**6)
    print(f"seed {seed}")  # pytest shows it when the test fails
    storm = Storm(tmp_path, seed=seed, room=round(2.5 * COPY / 0.9))
    with storm.machines():
        while storm.expected <= BAD_STEP:
            print(storm.fault(storm.random.choice(["rank", "at-once", "while-copying", "half-sent"])))
        assert storm.finish() > BAD_STEP
        assert not [home for home in storm.homes if any(home.glob("torch_*"))], "what workers have sent"
    backs = [
        [json.loads(line)["rollback"] for line in (tmp_path / "outputs" / name / "skipped.jsonl").open()]
        for name in ("tiny", "whole")
    ]
    for [back] in backs:
        assert (back["checkpoint"], back["samples"], back["rollbacks"]) == (BAD_STEP - 2, 8 * BAD_STEP, 1)
    for output in tmp_path.glob("start-*"):
        missed = [line for line in output.read_text().splitlines() if "no local copy was made" in line]
        assert all("gloo" in line for line in missed), "only for want of a rank that was killed"
