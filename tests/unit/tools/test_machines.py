"""Tests of the machines in one process: disk, folder, and the table. Faults are planted."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.support.helpers import TinyRun, mentions
from titanlite.runtime.errors import UserError
from titanlite.runtime.process_group import Ranks
from titanlite.tools import cli
from titanlite.tools.machines import (
    Job,
    Result,
    check_disk,
    check_folder,
    kept_checkpoints,
    on_each,
    run,
)

CPU = torch.device("cpu")
ALONE = Job(Ranks(0, 1, 0, 1), ["host-a"])
GIB = 2**30


@pytest.mark.usefixtures("single_process_group")
def test_what_may_fail_is_a_problem_of_its_rank() -> None:
    def fails() -> Result:
        raise OSError(28, "No space left", "/x")

    merged = on_each(fails, ALONE)
    [problem] = merged.problems
    assert mentions(problem, "rank 0 on host-a", "/x: No space left")
    lines: list[str] = []
    tests = {"disk": lambda: merged, "x": lambda: Result("1 GB/s", warnings=["slow"])}
    assert run(tests, lines.append) == ["disk"]
    assert [line.split()[0] for line in lines if not line.startswith(" ")] == ["FAILED", "warning"]


def test_an_error_names_test_and_rank() -> None:
    """A collective that another rank never joins ends with an exception."""

    def fails() -> Result:
        raise RuntimeError("Timed out waiting 120000ms for recv operation")

    lines: list[str] = []
    with pytest.raises(UserError, match=r"^links: .*rank 0\b.*RuntimeError.*120000ms"):
        run({"clocks": lambda: Result("0 s apart"), "links": fails}, lines.append)
    assert [line.split()[:3] for line in lines] == [["ok", "clocks", "0"]]


# Disk


@pytest.mark.parametrize(
    ("options", "steps", "expected"),
    [
        (["interval=10", "keep_latest_k=3"], 100, 4),
        (["interval=10", "keep_latest_k=0"], 95, 10),
        (["interval=60", "keep_latest_k=3"], 100, 2),
        (["interval=10", "keep_latest_k=2", "keep_every=25"], 100, 5),
    ],
)
def test_checkpoints_at_the_same_time(options: list[str], steps: int, expected: int, tiny: TinyRun) -> None:
    config = tiny.config(*(f"--checkpoint.{option}" for option in options))
    assert kept_checkpoints(config.checkpoint, steps) == expected


@pytest.mark.usefixtures("single_process_group")
def test_a_disk_that_is_too_small(tiny: TinyRun) -> None:
    """What is there already needs no more space. Steps that `training.epochs` decides give a warning."""
    config = tiny.config("--checkpoint.interval=2", "--checkpoint.keep_latest_k=1", "--training.steps=4")
    place = tiny.folder / "outputs/tiny/checkpoints"
    size = shutil.disk_usage(tiny.folder).free * 6 // 10
    assert check_disk(str(place), size // 2, config, ALONE).status == "ok"
    assert check_disk(str(place), size, config, ALONE).status == "FAILED"
    epochs = tiny.config("--checkpoint.interval=2", "--training.epochs=1", "--training.steps=4")
    assert check_disk(str(place), size, epochs, ALONE).status == "warning"
    step = place / "step-00000002"
    step.mkdir(parents=True)
    with open(step / "data", "wb") as file:
        file.truncate(size)
    assert check_disk(str(place), size, config, ALONE).status == "ok"


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
    names = ["versions, config", "clocks", "checkpoint folder", "disk"]
    assert [line[9:27].strip() for line in lines[:-1] if not line.startswith(" ")] == names
    assert "FAILED" not in out
    assert mentions(lines[-1], "no test failed", "processes: 1, hosts: 1")
    assert not [path for path in (tiny.folder / "outputs").rglob("*") if path.is_file()]

    assert (
        cli.run([*words, "--checkpoint.interval=1", "--checkpoint.keep_latest_k=0", f"--training.steps={10**12}"]) == 2
    )
    out, err = capfd.readouterr()
    assert err == ""
    assert "FAILED   disk " in out
    assert "1 FAILED: disk (" in out
