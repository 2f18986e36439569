"""Rendezvous of run_train.sh: generations of workers, their stores and exit files, and ends that no restart follows."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from torch.distributed.elastic.rendezvous import RendezvousParameters, rendezvous_handler_registry
from torch.distributed.launcher.api import LaunchConfig

from titanlite.runtime import launch
from titanlite.runtime.endings import EXIT_FILE, another_has_ended, leaving_mark, read_end
from titanlite.runtime.rendezvous import FinalEnd, Generations


@pytest.fixture
def generations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Generations:
    monkeypatch.setenv(EXIT_FILE, "")  # restored afterwards
    monkeypatch.setenv("TITANLITE_LAST_END", "")
    return Generations(tmp_path, max_restarts=3)


@pytest.fixture
def exit_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(EXIT_FILE, str(tmp_path / "code"))
    monkeypatch.setenv("RANK", "2")
    return tmp_path / "code"


def dead_process() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_a_generation_has_a_store_and_an_exit_file_of_its_own(
    generations: Generations, capsys: pytest.CaptureFixture[str]
) -> None:
    first = generations.next_rendezvous()
    assert (first.rank, first.world_size) == (0, 1)
    assert first.bootstrap_store_info is not None
    assert first.bootstrap_store_info.master_addr == "127.0.0.1"
    first.store.set("address of a worker", "gone")
    generations.exit_file.write_text("1\nerror: rank 1 on node7 failed at step 3, forward: ValueError: planted")
    assert os.environ[EXIT_FILE] == str(generations.exit_file)
    second = generations.next_rendezvous()
    assert not second.store.check(["address of a worker"])
    assert os.environ[EXIT_FILE] == str(generations.exit_file)
    assert not generations.exit_file.exists()
    reason = "rank 1 on node7 failed at step 3, forward: ValueError: planted"
    assert os.environ["TITANLITE_LAST_END"] == reason
    line = f"restart 1 of 3: {reason}; the run resumes from its newest checkpoint\n"
    assert capsys.readouterr().err == line


@pytest.mark.parametrize("code", [2, 3, 75, 128 + signal.SIGTERM])
def test_no_restart_follows_a_final_end(generations: Generations, code: int) -> None:
    generations.next_rendezvous()
    generations.exit_file.write_text(f"{code}\nstopped after step 4 by SIGTERM")
    with pytest.raises(FinalEnd):
        generations.next_rendezvous()
    assert read_end(generations.exit_file) == (code, "stopped after step 4 by SIGTERM")


def test_a_restart_follows_a_killed_rank(generations: Generations, capsys: pytest.CaptureFixture[str]) -> None:
    generations.next_rendezvous()
    generations.exit_file.with_name("rank-1").write_text(str(dead_process()))
    generations.next_rendezvous()
    assert capsys.readouterr().err.startswith("restart 1 of 3: rank-1 was killed; the run resumes")
    generations.next_rendezvous()
    assert capsys.readouterr().err.startswith("restart 2 of 3: a process ended without an error of its own; ")


def test_torchrun_finds_the_rendezvous_and_one_machine_needs_no_other(generations: Generations) -> None:
    generations.register()
    found = rendezvous_handler_registry.create_handler(RendezvousParameters("titanlite", "localhost:0", "job", 1, 1))
    assert found is generations
    assert (found.get_run_id(), found.get_backend(), found.use_agent_store) == ("job", "titanlite", True)
    assert (found.num_nodes_waiting(), found.is_closed(), found.shutdown()) == (0, False, True)


def test_a_killed_process_leaves_its_mark(exit_file: Path) -> None:
    assert not another_has_ended()
    with leaving_mark():
        assert exit_file.with_name("rank-2").read_text() == str(os.getpid())
        assert not another_has_ended()
        exit_file.with_name("rank-0").write_text(str(dead_process()))
        assert another_has_ended(), "torchrun ends the others then, and that is no request to stop"
    assert not exit_file.with_name("rank-2").exists()
    assert read_end(exit_file) == (None, "rank-0 was killed")


def test_workers_have_an_hour_for_their_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch reads the environment variable under this name."""
    monkeypatch.setenv(launch.SHUTDOWN_VARIABLE, str(launch.SHUTDOWN_SECONDS))
    assert LaunchConfig(min_nodes=1, max_nodes=1, nproc_per_node=1).shutdown_timeout == 3600
