"""Tests of the machines in one process: disk, folder, and the table. Faults are planted."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.helpers import TinyRun
from titanlite.checks.preflight import preflight
from titanlite.runtime.errors import UserError
from titanlite.runtime.process_group import Ranks
from titanlite.tools import cli
from titanlite.tools.machines import (
    Free,
    Job,
    Need,
    Result,
    check_disk,
    check_folder,
    disk_needs,
    kept_checkpoints,
    merge,
    run,
)

CPU = torch.device("cpu")
ALONE = Job(Ranks(0, 1, 0, 1), ["host-a"])
GIB = 2**30


def cluster(nodes: int, within: int) -> Job:
    hosts = [f"host-{rank // within}" for rank in range(nodes * within)]
    return Job(Ranks(0, nodes * within, 0, within), hosts)


def test_a_line_of_several_ranks_comes_once() -> None:
    job = cluster(2, 2)
    results = [Result("a"), Result(problems=["bad"]), OSError(28, "No space left", "/x"), Result(problems=["bad"])]
    merged = merge(results, job)
    assert merged.problems == [
        "rank 1 on host-0 and rank 3 on host-1: bad", "rank 2 on host-1: /x: No space left",
    ]  # fmt: skip
    lines: list[str] = []
    tests = [("disk", lambda: merged), ("x", lambda: Result("1 GB/s", warnings=["slow"]))]
    assert run(iter(tests), lines.append) == ["disk"]
    assert [line.split()[0] for line in lines if not line.startswith(" ")] == ["FAILED", "warning"]


def test_an_error_names_test_and_rank() -> None:
    """A collective that another rank never joins ends with an exception."""

    def fails() -> Result:
        raise RuntimeError("Timed out waiting 120000ms for recv operation")

    lines: list[str] = []
    with pytest.raises(UserError, match=r"^links: rank 0 on \S+: RuntimeError: Timed out waiting 120000ms"):
        run(iter([("clocks", lambda: Result("0 s apart")), ("links", fails)]), lines.append)
    assert lines == ["ok       clocks             0 s apart"]


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


def test_checkpoints_that_are_there_need_no_more_space(tiny: TinyRun) -> None:
    config = tiny.config("--checkpoint.interval=2", "--checkpoint.keep_latest_k=1")
    resolved = preflight(config, ALONE.ranks, CPU)
    model = resolved.model.build()
    before = disk_needs(config, model)[0]
    step = tiny.folder / "outputs/tiny/checkpoints/step-00000002"
    step.mkdir(parents=True)
    (step / "data").write_bytes(bytes(1000))
    after = disk_needs(config, model)[0]
    assert before.bytes - after.bytes == 1000
    assert after.what.endswith(", 1 of them are there")


def disk_of(size: int, *needs_here: Need) -> Result:
    return check_disk(lambda: needs_here, ALONE, free=lambda place: Free(1, size))


@pytest.mark.usefixtures("single_process_group")
def test_a_disk_that_is_too_small() -> None:
    run = Need("4 checkpoints", "/shared", 8 * GIB)
    assert disk_of(10 * GIB, run).status == "ok"
    [warning] = disk_of(9 * GIB, run).warnings
    assert warning == "rank 0 on host-a: the run writes 8 GiB and 9 GiB are free (4 checkpoints in /shared)"
    [problem] = disk_of(5 * GIB, run).problems
    assert problem.startswith("rank 0 on host-a: the run writes 8 GiB and 5 GiB are free (4 checkpoints in /shared): ")
    other = Need("exports", "/exports", 4 * GIB, is_estimate=True)
    assert disk_of(10 * GIB, run, other).status == "warning", "both are on one file system"
    apart = check_disk(lambda: [run, other], ALONE, free=lambda place: Free(len(place), 10 * GIB))
    assert apart.status == "ok"


# The folder and the command


@pytest.mark.usefixtures("single_process_group")
@pytest.mark.parametrize("place", [lambda path: str(path / "new/run/checkpoints"), lambda path: "memory://selfcheck"])
def test_a_folder_is_left_as_it_was(place: Callable[[Path], str], tmp_path: Path) -> None:
    (tmp_path / "new").mkdir()
    result = check_folder(place(tmp_path), ALONE, size=2**20)
    assert result.status == "ok"
    assert "1 MiB: written at" in result.value
    assert [*tmp_path.rglob("*")] == [tmp_path / "new"]


@pytest.mark.usefixtures("single_process_group")
def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    result = check_folder(str(tmp_path / "file" / "checkpoints"), ALONE, size=2**20)
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
    assert lines[-1].startswith("no test failed (processes: 1, hosts: 1, time: ")
    assert not (tiny.folder / "outputs").exists()

    assert (
        cli.run([*words, "--checkpoint.interval=1", "--checkpoint.keep_latest_k=0", f"--training.steps={10**12}"]) == 2
    )
    out, err = capfd.readouterr()
    assert err == ""
    assert "FAILED   disk " in out
    assert "1 FAILED: disk (" in out
