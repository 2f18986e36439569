"""Rendezvous of run_train.sh: generations of workers, their stores and ends, late machines, and a dead network."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from threading import Event, Timer

import pytest
from torch.distributed import HashStore, TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousParameters,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousTimeout
from torch.distributed.launcher.api import LaunchConfig

from tests.support.helpers import free_port, mentions
from titanlite.run.endings import ERROR_FILE, another_has_ended, leaving_mark, read_end
from titanlite.tools import launch, rendezvous
from titanlite.tools.rendezvous import FinalEnd, Rendezvous, connect, newest_end


@pytest.fixture(autouse=True)
def _no_events(monkeypatch: pytest.MonkeyPatch) -> None:
    """Name no method in PyTorch's record of events: its look at the stack takes half a second beside many modules."""
    monkeypatch.setattr("torch.distributed.elastic.rendezvous.dynamic_rendezvous.get_method_name", lambda depth=2: "")


@pytest.fixture
def environ(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restore afterwards what the rendezvous sets."""
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "")
    monkeypatch.setenv("TITANLITE_LAST_END", "")


@pytest.fixture
def one_machine(tmp_path: Path, environ: None) -> Rendezvous:
    settings = RendezvousParameters("titanlite", "localhost:0", "job", 1, 1)
    return connect(settings, folder=tmp_path, max_restarts=3)


def attempt(folder: Path, number: int = 0) -> Path:
    """Make the folder in which torchrun and the workers leave how an attempt ended."""
    made = folder / "job_x" / f"attempt_{number}"
    made.mkdir(parents=True)
    return made


@pytest.fixture
def exit_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(ERROR_FILE, str(tmp_path / "1" / "error.json"))
    monkeypatch.setenv("RANK", "2")
    return tmp_path / "code"


def dead_process() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_a_generation_has_a_store_of_its_own(
    one_machine: Rendezvous, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (one_machine.get_run_id(), one_machine.get_backend(), one_machine.use_agent_store) == (
        "job", "titanlite", True,
    )  # fmt: skip
    first = one_machine.next_rendezvous()
    assert (first.rank, first.world_size, one_machine.num_nodes_waiting()) == (0, 1, 0)
    assert first.bootstrap_store_info is not None
    assert first.bootstrap_store_info.master_addr == "127.0.0.1"
    first.store.set("address of a worker", "gone")
    (attempt(tmp_path) / "code").write_text("1\nerror: rank 1 on node7 failed at step 3, forward: ValueError: planted")
    second = one_machine.next_rendezvous()
    assert not second.store.check(["address of a worker"])
    reason = "rank 1 on node7 failed at step 3, forward: ValueError: planted"
    assert os.environ["TITANLITE_LAST_END"] == reason
    assert capsys.readouterr().err.startswith(f"restart 1 of 3: {reason}; ")


@pytest.mark.parametrize("code", [2, 3, 75, 128 + signal.SIGTERM])
def test_no_restart_follows_a_final_end(one_machine: Rendezvous, tmp_path: Path, code: int) -> None:
    one_machine.next_rendezvous()
    (attempt(tmp_path) / "code").write_text(f"{code}\nstopped after step 4 by SIGTERM")
    with pytest.raises(FinalEnd):
        one_machine.next_rendezvous()
    assert read_end(newest_end(tmp_path)) == (code, "stopped after step 4 by SIGTERM")


def test_a_restart_follows_a_killed_rank(
    one_machine: Rendezvous, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one_machine.next_rendezvous()
    (attempt(tmp_path) / "rank-1").write_text(str(dead_process()))
    one_machine.next_rendezvous()
    assert mentions(capsys.readouterr().err, "1 of 3", "rank-1")
    time.sleep(0.01)  # of the times of folders, the newest counts
    attempt(tmp_path, 1)
    one_machine.next_rendezvous()
    assert mentions(capsys.readouterr().err, "2 of 3")


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


# Several machines


class Network(HashStore):
    """A store that answers while its network is up."""

    def __init__(self) -> None:
        super().__init__()
        self.is_up = Event()
        self.is_up.set()
        self.error: Exception | None = None

    def get(self, key: str) -> bytes:
        self.is_up.wait()
        if self.error:
            raise self.error
        return super().get(key)

    def compare_set(self, key: str, expected_value: str, desired_value: str) -> bytes:
        self.is_up.wait()
        return super().compare_set(key, expected_value, desired_value)


def machine(network: Network, endpoint: str = "node0:29500", join: float = 60, least: int = 2) -> Rendezvous:
    timeout = RendezvousTimeout(join=timedelta(seconds=join), last_call=timedelta(milliseconds=1))
    backend = C10dRendezvousBackend(network, "job")
    made = Rendezvous.from_backend("job", network, backend, least, 2, "127.0.0.1", timeout)
    made.endpoint = endpoint
    return made


@pytest.fixture
def network() -> Iterator[Network]:
    made = Network()
    yield made
    made.is_up.set()


@pytest.mark.long
def test_a_network_that_is_cut_holds_nothing_up(network: Network, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "ANSWER_SECONDS", 0.2)
    monkeypatch.setattr(rendezvous, "CLOSE_SECONDS", 0.2)
    here = machine(network)
    assert here.num_nodes_waiting() == 0
    network.is_up.clear()
    began = time.monotonic()
    assert [here.num_nodes_waiting() for _ in range(3)] == [0, 0, 0], "the latest answer"
    assert not here.shutdown()
    assert time.monotonic() - began < 30
    network.is_up.set()
    assert machine(network).shutdown()


def test_too_few_machines_is_an_error_that_names_the_place(network: Network) -> None:
    with pytest.raises(RendezvousTimeoutError, match=r"node0:29500.*NNODES"):
        machine(network, join=0.1).next_rendezvous()


@pytest.mark.long
@pytest.mark.parametrize("ended", ["closed", "gone", "unreachable"])
def test_the_workers_end_some_time_after_those_of_another_machine(
    ended: str,
    network: Network,
    tmp_path: Path,
    environ: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    port, end = free_port(), attempt(tmp_path) / "code"
    here = machine(network, f"127.0.0.1:{port}", least=1)
    here.folder, here.max_restarts = tmp_path, 3
    here.next_rendezvous()
    assert here.num_nodes_waiting() == 0
    if ended == "closed":
        here.set_closed()
    else:
        network.error = RuntimeError("no connection")
    time.sleep(1.1)  # PyTorch takes an older answer for as long
    with socket.create_server(("127.0.0.1", port)) if ended == "unreachable" else nullcontext():
        assert here.num_nodes_waiting() == 0, "they end by themselves, and report their errors"
        monkeypatch.setattr(rendezvous, "GRACE_SECONDS", 0)
        is_over = ended != "unreachable"  # there the store does not answer, and may again
        assert here.num_nodes_waiting() == int(is_over)
    assert read_end(end)[0] == (1 if is_over else None), "the workers know that SIGTERM is no request to stop"
    if is_over:
        assert capsys.readouterr().err.startswith("error: ")
        with pytest.raises(FinalEnd):
            here.next_rendezvous()


def settings(port: int, join_timeout: int) -> RendezvousParameters:
    endpoint = f"127.0.0.1:{port}"
    return RendezvousParameters(
        "titanlite", endpoint, "job", 2, 2, join_timeout=join_timeout, read_timeout=1, is_host=False
    )


@pytest.mark.slow
@pytest.mark.usefixtures("environ")
def test_a_first_machine_that_starts_late_is_waited_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """PyTorch's own wait ends after read_timeout."""
    port, servers = free_port(), []
    late = Timer(4, lambda: servers.append(TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)))
    late.start()
    made = connect(settings(port, join_timeout=100), folder=tmp_path, max_restarts=0)
    late.join()
    assert made.get_backend() == "titanlite"
    assert capsys.readouterr().err.count(f"127.0.0.1:{port} (RDZV_ENDPOINT)") == 1


@pytest.mark.long
@pytest.mark.usefixtures("environ")
def test_a_first_machine_that_never_starts_is_an_error(tmp_path: Path) -> None:
    port = free_port()
    with pytest.raises(RendezvousConnectionError, match=rf"127.0.0.1:{port} \(RDZV_ENDPOINT\)"):
        connect(settings(port, join_timeout=1), folder=tmp_path, max_restarts=0)
