"""Examples run as they stand."""

import runpy
import sys
from pathlib import Path

import pytest

from tests.helpers import TinyRun

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.long
def test_a_sweep_and_a_sweep_that_is_repeated(
    tiny: TinyRun, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["sweep.py", str(tiny.toml), "1e-3", "1e-2"])
    tables = []
    for _ in range(2):
        runpy.run_path(str(EXAMPLES / "sweep.py"), run_name="__main__")
        tables.append(capsys.readouterr().out.partition("      lr")[2].splitlines())
    rows = [line.split() for line in tables[0][1:]]
    assert [row[0] for row in rows] == ["1.0e-03", "1.0e-02"]
    assert [float(row[1]) for row in rows] == [
        pytest.approx(tiny.losses(name)[-1], abs=1e-4) for name in ("tiny-lr-0.001", "tiny-lr-0.01")
    ]
    assert tables[1][1:] == tables[0][1:]
