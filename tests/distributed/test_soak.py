"""A soak of half a minute: real processes, faults from a random seed, and the comparison with a run without faults."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
KINDS = [
    "kill-rank", "kill-rank-in-save", "kill-launcher", "term-rank", "term-launcher", "term-in-save",
    "usr1-in-validation", "nan", "disk-checkpoints", "disk-records", "flip", "truncate", "manifest",
]  # fmt: skip
"""Kinds that one host and no long wait suffice for. All kinds: `python benchmarks/soak.py`."""
STEPS = 70


@pytest.mark.nightly
def test_a_small_soak(tmp_path: Path) -> None:
    """Two faults of different kinds, and the same losses, samples and last checkpoint as without them.

    Each run of this test has faults of its own.
    """
    seed = random.SystemRandom().randrange(10**6)
    print(f"seed {seed}")  # pytest shows it when the test fails
    words = f"--seed={seed} --steps={STEPS} --every=20 --interval=5 --timeout=60 --kinds={','.join(KINDS)}".split()
    command = [sys.executable, str(BENCHMARKS / "soak.py"), f"--out={tmp_path / 'out'}", *words]
    environ = os.environ | {"PYTHONPATH": str(BENCHMARKS.parent)}
    ended = subprocess.run(command, capture_output=True, text=True, env=environ, timeout=850, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    records = [json.loads(line) for line in (tmp_path / "out" / "soak.jsonl").read_text().splitlines()]
    faults = [record for record in records if record["event"] == "fault"]
    assert len({fault["kind"] for fault in faults}) == len(faults) == 2
    assert {fault["left"] for fault in faults} == {0}
    assert records[-1]["problems"] == []
    assert records[-1]["largest_difference"] == 0
    assert records[-1]["hashes"] >= STEPS
    curves = json.loads((tmp_path / "out" / "curves.json").read_text())
    assert len(curves["faults"]) == STEPS
    assert curves["faults"] == curves["reference"]
