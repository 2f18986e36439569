"""`titanlite parity` on two processes."""

import json

import pytest

from tests.support.helpers import TinyRun
from titanlite.tools import cli
from titanlite.tools.report.parity import ONE


@pytest.mark.nightly
def test_the_command_trains_compares_and_exits_with_the_result(
    tiny: TinyRun, capfd: pytest.CaptureFixture[str]
) -> None:
    arguments = ["parity", "--config", str(tiny.toml), "--steps=4", "--processes", "2", "--only"]
    assert cli.run([*arguments, "DDP"]) == 0
    lines = capfd.readouterr().out.splitlines()
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("|")]
    assert [row[0] for row in cells[2:]] == [ONE, "DDP 2 x 1"]
    assert float(cells[3][4]) < 1e-5
    assert cells[3][6:] == ["within 1e-05", "yes"]
    curves = json.loads((tiny.folder / "outputs" / "tiny-parity" / "parity.json").read_text())
    assert [len(curve["losses"]) for curve in curves.values()] == [4, 4]
    assert curves[ONE]["losses"][0] == pytest.approx(5.5, abs=0.1)

    assert cli.run([*arguments, "DDP", "--tolerance=-1"]) == 1  # sums of two ranks can be equal to the last bit
    captured = capfd.readouterr()
    assert captured.err == "error: not equal: DDP 2 x 1\n"
    assert "| NO  |" in captured.out
