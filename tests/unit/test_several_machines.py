"""Rendezvous of several machines: a network that does not answer, and machines that start late."""

import socket
import time
from collections.abc import Iterator
from threading import Event, Timer

import pytest
from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousTimeoutError,
)

from titanlite.runtime.machines import SeveralMachines, connect


class Answers(RendezvousHandler):
    """A rendezvous that answers while its network is up."""

    def __init__(self) -> None:
        self.network = Event()
        self.network.set()
        self.waiting = 0
        self.closed = False
        self.error: RendezvousError | None = None

    def num_nodes_waiting(self) -> int:
        self.network.wait()
        if self.error:
            raise self.error
        return self.waiting

    def next_rendezvous(self) -> RendezvousInfo:
        raise RendezvousTimeoutError

    def shutdown(self) -> bool:
        self.network.wait()
        return True

    def get_backend(self) -> str:
        return "answers"

    def get_run_id(self) -> str:
        return "job"

    def is_closed(self) -> bool:
        return self.closed

    def set_closed(self) -> None:
        raise NotImplementedError

    @property
    def use_agent_store(self) -> bool:
        return True


@pytest.fixture
def answers() -> Iterator[Answers]:
    handler = Answers()
    yield handler
    handler.network.set()


@pytest.mark.long
def test_a_network_that_is_cut_holds_nothing_up(answers: Answers) -> None:
    machines = SeveralMachines(answers, "node0:29500", answer_seconds=0.2, close_seconds=0.2)
    assert machines.num_nodes_waiting() == 0
    answers.waiting = 1
    assert machines.num_nodes_waiting() == 1
    answers.waiting = 2
    answers.network.clear()
    began = time.monotonic()
    assert [machines.num_nodes_waiting() for _ in range(3)] == [1, 1, 1], "the latest answer"
    assert not machines.shutdown()
    assert time.monotonic() - began < 30
    answers.network.set()
    machines = SeveralMachines(answers, "node0:29500", answer_seconds=60, close_seconds=60)
    assert machines.num_nodes_waiting() == 2
    assert machines.shutdown()


def test_too_few_machines_is_an_error_that_names_the_place(answers: Answers) -> None:
    with pytest.raises(RendezvousTimeoutError, match="too few machines have joined at node0:29500: NNODES counts"):
        SeveralMachines(answers, "node0:29500").next_rendezvous()


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def test_the_end_of_workers_elsewhere_is_known(answers: Answers) -> None:
    port = free_port()
    machines = SeveralMachines(answers, f"127.0.0.1:{port}", answer_seconds=60)

    def is_over() -> bool:
        machines.num_nodes_waiting()
        return machines.is_over_elsewhere

    assert not is_over()
    answers.waiting = 1
    assert is_over(), "a machine waits for the next generation"
    answers.waiting, answers.closed = 0, True
    assert is_over(), "a machine has closed the rendezvous"
    answers.closed, answers.error = False, RendezvousConnectionError()
    assert is_over(), "nothing listens: the first machine has ended"
    with socket.create_server(("127.0.0.1", port)):
        assert not is_over(), "the store is there, and does not answer"


def settings(port: int, join_timeout: int) -> RendezvousParameters:
    endpoint = f"127.0.0.1:{port}"
    return RendezvousParameters("c10d", endpoint, "job", 2, 2, join_timeout=join_timeout, read_timeout=1, is_host=False)


@pytest.mark.slow
def test_a_first_machine_that_starts_late_is_waited_for(capsys: pytest.CaptureFixture[str]) -> None:
    """PyTorch's own wait ends after read_timeout."""
    port, servers = free_port(), []
    late = Timer(4, lambda: servers.append(TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)))
    late.start()
    machines = connect(settings(port, join_timeout=100))
    late.join()
    assert machines.get_backend() == "c10d"
    line = f"waiting for 127.0.0.1:{port} (RDZV_ENDPOINT), which does not answer\n"
    assert capsys.readouterr().err.count(line) == 1


@pytest.mark.long
def test_a_first_machine_that_never_starts_is_an_error() -> None:
    port = free_port()
    with pytest.raises(
        RendezvousConnectionError, match=rf"127.0.0.1:{port} \(RDZV_ENDPOINT\) has not answered for 2 s"
    ):
        connect(settings(port, join_timeout=2))
