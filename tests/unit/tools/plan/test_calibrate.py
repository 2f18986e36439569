"""`titanlite calibrate`: the file that it writes, and what `plan` does with it."""

from pathlib import Path

import pytest

from tests.support.helpers import mentions
from titanlite.tools import cli
from titanlite.tools.plan.hardware import load_hardware
from titanlite.tools.plan.time import Collective, Group, collective_time


def test_mistakes(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("taken.toml").touch()
    for out, named in (("cpu.toml", "--gpu cpu"), ("taken.toml", "taken.toml"), ("none/cpu.toml", "none/cpu.toml")):
        assert cli.run(["calibrate", out]) == 2
        assert mentions(capsys.readouterr().err, named)
    assert [path.name for path in tmp_path.iterdir()] == ["taken.toml"]


def test_links_of_a_file_are_known(tmp_path: Path) -> None:
    """A long all-gather of 8 processes takes the measured time: `plan` takes 0.8 of what the file has."""
    (tmp_path / "mine.toml").write_text(f'base = "H100"\nlink_bandwidth = {3e11 / 0.8}\n')
    found = load_hardware(tmp_path / "mine.toml")
    seconds = collective_time(Collective("all_gather", 8 * 10**12, Group(8, 8)), found, 8)
    assert seconds == pytest.approx(7e12 / 3e11, rel=1e-4)
