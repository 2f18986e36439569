"""Ranks that start with different software, config or environment: real gloo ranks, and two processes as two hosts."""

import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.helpers import TinyRun, run_ranks
from titanlite.run.versions import check_equal_start, compare, facts_of
from titanlite.runtime.errors import UserError

CPU = torch.device("cpu")


def compared(rank: int, world_size: int, tiny: TinyRun) -> list[object]:
    """Compare equal facts, another version on rank 1, another variable on rank 1; then start with another option."""
    config = tiny.config(world_size=world_size)
    same = facts_of(config.model_dump(mode="json"), CPU, {})
    old = replace(same, versions=same.versions | {"torch": "1.0"}) if rank else same
    threads = replace(same, settings={"OMP_NUM_THREADS": str(rank)})
    found: list[object] = [compare(facts) for facts in (same, old, threads)]
    other = tiny.config(f"--optimizer.lr={rank + 1}", world_size=world_size)
    try:
        check_equal_start(other.model_dump(mode="json"), CPU)
    except UserError as error:
        found.append(str(error))
    return found


def test_a_difference_is_found_on_every_rank(tiny: TinyRun) -> None:
    first, second = run_ranks(compared, 2, tiny)
    assert first == second
    equal, (errors, _), (none, warnings), config = first
    assert equal is None
    assert len(errors) == 1
    assert errors[0].startswith("rank 1 on ")
    assert f" has torch 1.0, rank 0 on {os.uname().nodename} has torch {torch.__version__}: install" in errors[0]
    assert none == []
    assert " has OMP_NUM_THREADS=1, rank 0 on " in warnings[0]
    assert "has optimizer.lr = 2.0, rank 0 on" in config


@pytest.mark.slow
def test_hosts_with_other_options_end_with_code_2(tiny: TinyRun, tmp_path: Path) -> None:
    """Each process is started by hand, as a scheduler starts one on each host. Nothing is prepared or saved."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    processes = []
    for rank in (0, 1):
        environ = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
        words = ["-m", "titanlite", "train", str(tiny.toml), f"--debug.seed={rank}"]
        processes.append(
            subprocess.Popen(
                [sys.executable, *words], env={**os.environ, **environ}, cwd=tmp_path, stderr=subprocess.PIPE, text=True
            )
        )
    errors = [process.communicate(timeout=120)[1] for process in processes]
    assert [process.returncode for process in processes] == [2, 2]
    for text in errors:
        [line] = [line for line in text.splitlines() if line.startswith("error")]
        assert line.startswith("error: rank 1 on ")
        assert "has debug.seed = 1, rank 0 on " in line
        assert line.endswith("has debug.seed = 0: start all hosts with the same config and options")
    assert not [*(tiny.folder / "outputs").rglob("checkpoints")]
