"""A small soak: real processes, faults, and the comparison with a run without faults."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.nightly
def test_a_small_soak(tmp_path: Path) -> None:
    """Two faults, and the same losses and samples as without them."""
    words = ["--steps=48", "--every=12", "--interval=4", "--kinds=kill-rank,disk-records", "--timeout=60"]
    command = [sys.executable, str(BENCHMARKS / "soak.py"), f"--out={tmp_path / 'out'}", *words]
    environ = os.environ | {"PYTHONPATH": str(BENCHMARKS.parent)}
    ended = subprocess.run(command, capture_output=True, text=True, env=environ, timeout=900, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    records = [json.loads(line) for line in (tmp_path / "out" / "soak.jsonl").read_text().splitlines()]
    faults = [record for record in records if record["event"] == "fault"]
    skipped = {record["kind"] for record in records if record["event"] == "skipped"}
    assert {fault["kind"] for fault in faults} == {"kill-rank", "disk-records"} - skipped
    assert len(faults) == 2
    assert {fault["left"] for fault in faults} == {0}
    assert records[-1]["problems"] == []
    assert records[-1]["largest_difference"] == 0
    assert records[-1]["hashes"] >= 48
    curves = json.loads((tmp_path / "out" / "curves.json").read_text())
    assert len(curves["faults"]) == 48
    assert curves["faults"] == curves["reference"]
