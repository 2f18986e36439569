"""Tests of the machines in one process: folder, and the table. Faults are planted."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.support.helpers import TinyRun, mentions
from titanlite.runtime.errors import UserError
from titanlite.runtime.process_group import Ranks
from titanlite.tools import cli
from titanlite.tools.machines import Job, Result, check_folder, on_each, run

CPU = torch.device("cpu")
ALONE = Job(Ranks(0, 1, 0, 1), ["host-a"])


@pytest.mark.usefixtures("single_process_group")
def test_what_may_fail_is_a_problem_of_its_rank() -> None:
    def fails() -> Result:
        raise OSError(28, "No space left", "/x")

    merged = on_each(fails, ALONE)
    [problem] = merged.problems
    assert mentions(problem, "rank 0 on host-a", "/x: No space left")
    lines: list[str] = []
    tests = {"folder": lambda: merged, "x": lambda: Result("1 GB/s", warnings=["slow"])}
    assert run(tests, lines.append) == ["folder"]
    assert [line.split()[0] for line in lines if not line.startswith(" ")] == ["FAILED", "warning"]


def test_an_error_names_test_and_rank() -> None:
    """A collective that another rank never joins ends with an exception."""

    def fails() -> Result:
        raise RuntimeError("Timed out waiting 120000ms for recv operation")

    lines: list[str] = []
    with pytest.raises(UserError, match=r"^links: .*rank 0\b.*RuntimeError.*120000ms"):
        run({"versions": lambda: Result("0.1"), "links": fails}, lines.append)
    assert [line.split()[:3] for line in lines] == [["ok", "versions", "0.1"]]


# The folder and the command


@pytest.mark.usefixtures("single_process_group")
@pytest.mark.parametrize("place", [lambda path: str(path / "new/run/checkpoints"), lambda path: "memory://selfcheck"])
def test_a_folder_has_nothing_of_the_test_afterwards(place: Callable[[Path], str], tmp_path: Path) -> None:
    result = check_folder(place(tmp_path), ALONE)
    assert result.status == "ok"
    assert [path for path in tmp_path.rglob("*") if path.is_file() or path.name.startswith("check-")] == []


@pytest.mark.usefixtures("single_process_group")
def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    result = check_folder(str(tmp_path / "file" / "checkpoints"), ALONE)
    assert result.status == "FAILED"
    assert "Not a directory" in result.problems[0]
    assert check_folder("nosuch://bucket", ALONE).status == "FAILED"


@pytest.mark.long
@pytest.mark.usefixtures("own_process_group")
def test_the_command_of_one_process(tiny: TinyRun, capfd: pytest.CaptureFixture[str]) -> None:
    words = ["check", "--machines", str(tiny.toml)]
    assert cli.run(words) == 0
    out, err = capfd.readouterr()
    assert err == ""
    lines = out.splitlines()
    names = ["versions, config", "checkpoint folder"]
    assert [line[9:27].strip() for line in lines[:-1] if not line.startswith(" ")] == names
    assert "FAILED" not in out
    assert mentions(lines[-1], "no test failed", "processes: 1, hosts: 1")
    assert not [path for path in (tiny.folder / "outputs").rglob("*") if path.is_file()]
