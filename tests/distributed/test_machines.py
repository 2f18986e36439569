"""Tests of the machines on two gloo ranks that stand for two hosts, healthy and with planted faults."""

import platform
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.support.helpers import TinyRun, mentions, run_ranks, run_train
from titanlite.run.versions import facts_of
from titanlite.runtime.errors import UserError
from titanlite.runtime.process_group import Ranks
from titanlite.tools import machines
from titanlite.tools.machines import (
    Job,
    Result,
    check_folder,
    check_software,
    check_values,
    machine_tests,
    open_job,
    run,
)
from titanlite.tools.plan.calibrate import COLLECTIVES

CPU = torch.device("cpu")


def job_of(rank: int, world_size: int) -> Job:
    """Return the job, with names that this machine alone cannot give. Long collectives are shorter than elsewhere."""
    machines.SIZES["cpu"] = 2**16, 2**18
    job = open_job(Ranks(rank, world_size, 0, 1))
    return replace(job, hosts=[f"host-{rank}" for rank in range(world_size)])


def wrong_sum(whole: torch.Tensor, part: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Reduce as usual, and spoil one value on rank 1."""
    dist.all_reduce(whole, group=group)
    if dist.get_rank() == 1:
        whole[3] += 2


def with_faults(rank: int, world_size: int, tiny: TinyRun) -> dict[str, Result]:
    with pytest.raises(UserError, match=rf"{platform.node()} 1, {platform.node()} 2"):
        open_job(Ranks(rank, world_size, 0, rank + 1))
    job = job_of(rank, world_size)
    facts = facts_of({}, CPU)
    old = facts | {"torch": "1.0"} if rank else facts

    return {
        "collectives": check_values(CPU, job, {**COLLECTIVES, "all_reduce": wrong_sum}),
        "folder": check_folder(str(tiny.folder / f"own-{rank}"), job, wait=0.2),
        "unwritable": check_folder(str(tiny.folder / ("shared" if rank else "tiny.toml")), job, wait=0.2),
        "software": check_software(old, CPU),
    }


def test_each_planted_fault_is_found_and_named(tiny: TinyRun) -> None:
    first, second = run_ranks(with_faults, 2, tiny)
    found, on_rank_1 = (
        {name: [*result.problems, *result.warnings] for name, result in results.items()} for results in (first, second)
    )
    assert found == on_rank_1, "every rank has the same lines"
    assert [result.status for result in first.values()] == ["FAILED"] * 4

    assert mentions(found["collectives"][0], "rank 1 on host-1", "all_reduce", "65,536 bytes", 14, 12)
    for rank, line in zip((0, 1), found["folder"], strict=True):
        assert line.startswith(f"rank {rank} on host-{rank}: {tiny.folder}/own-{rank} ")
        assert mentions(line, f"rank {1 - rank} on host-{1 - rank}", "checkpoint.folder")
    [line] = found["unwritable"]
    assert line.startswith(f"rank 0 on host-0: {tiny.folder}/tiny.toml")
    assert line.endswith(("Not a directory", "File exists"))
    assert " has torch 1.0, rank 0 on " in found["software"][0]
    assert not [*tiny.folder.rglob("check-*")], "everything is deleted"


def healthy(rank: int, world_size: int, tiny: TinyRun) -> tuple[list[str], list[str]]:
    """Run all tests as the command does."""
    config = tiny.config(world_size=world_size)
    job = job_of(rank, world_size)
    lines: list[str] = []
    failed = run(machine_tests(config, job, CPU), lines.append)
    return failed, lines


def test_healthy_hosts(tiny: TinyRun) -> None:
    for failed, lines in run_ranks(healthy, 2, tiny):
        assert failed == []
        by_name = {line[9:27].strip(): line for line in lines if not line.startswith(" ")}
        assert [*by_name] == ["versions, config", "collectives", "bandwidths", "checkpoint folder"]
        assert all(f"{name} " in by_name["bandwidths"] for name in COLLECTIVES)
    assert [path for path in (tiny.folder / "outputs").rglob("*") if path.is_file()] == []


@pytest.mark.nightly
def test_the_script_tests_all_processes(tiny: TinyRun, tmp_path: Path) -> None:
    """`run_train.sh check` reports a failed test once, and ends with 2. Nothing is left."""
    words = ["check", "--config", str(tiny.toml), "--checkpoint.interval=1", "--checkpoint.keep_latest_k=0"]
    result = run_train(*words, f"--training.steps={10**12}", cwd=tmp_path, NPROC="2")
    assert result.returncode == 2, result.stderr
    lines = result.stdout.splitlines()
    assert [line[9:27].strip() for line in lines if line.startswith("FAILED")] == ["disk"]
    assert sum(line.startswith("ok ") for line in lines) >= 5
    assert mentions(lines[-1], "1 FAILED", "disk", "processes: 2", "hosts: 1")
    assert "error" not in result.stderr
