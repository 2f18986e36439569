"""Rendezvous of several machines that no dead network holds up.

torchrun's own asks its store, on the first machine, in the loop that watches the workers. When the network is gone, an
answer takes a minute or more, and so long torchrun notices neither that its workers have failed nor that it should end.
"""

import socket
import sys
import time
from contextlib import suppress
from threading import Thread

from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousTimeoutError,
    rendezvous_handler_registry,
)

JOIN_SECONDS = 600
"""Time that machines have to join, unless RDZV_CONF has join_timeout: PyTorch's own default."""
ANSWER_SECONDS = 1.0
CLOSE_SECONDS = 5.0


class SeveralMachines(RendezvousHandler):
    """Rendezvous that asks another one in threads, and waits for answers only a short time.

    Args:
        handler: the rendezvous to ask, of torchrun.
        endpoint: the store's host:port, for errors.
        answer_seconds: longest wait for the number of machines that want to join.
        close_seconds: longest wait for the end of the rendezvous.
    """

    def __init__(
        self,
        handler: RendezvousHandler,
        endpoint: str,
        *,
        answer_seconds: float = ANSWER_SECONDS,
        close_seconds: float = CLOSE_SECONDS,
    ) -> None:
        self._handler, self._endpoint = handler, endpoint
        self._answer_seconds, self._close_seconds = answer_seconds, close_seconds
        self._asking: Thread | None = None
        self._waiting = 0
        self._is_over = False
        self._is_shut = False

    def num_nodes_waiting(self) -> int:
        """Return how many machines want to join, by the latest answer."""
        if self._asking is None or not self._asking.is_alive():
            self._asking = Thread(target=self._ask, daemon=True)
            self._asking.start()
        self._asking.join(self._answer_seconds)
        return self._waiting

    def _ask(self) -> None:
        try:
            self._waiting = self._handler.num_nodes_waiting()
            self._is_over = self._handler.is_closed()
        except RendezvousError:
            self._is_over = _refuses(self._endpoint)

    @property
    def is_over_elsewhere(self) -> bool:
        """Return whether the workers of another machine have ended, by the latest answer: they close the rendezvous or
        wait for the next one, and the first machine takes the store with it."""
        return self._waiting > 0 or self._is_over

    def next_rendezvous(self) -> RendezvousInfo:
        """Meet the other machines.

        Raises:
            RendezvousTimeoutError: too few have come in time.
        """
        if self._asking:
            self._asking.join()
        self._waiting, self._is_over = 0, False
        try:
            return self._handler.next_rendezvous()
        except RendezvousTimeoutError:
            raise RendezvousTimeoutError(
                f"too few machines have joined at {self._endpoint}: NNODES counts all of them, and "
                "RDZV_CONF=join_timeout=SECONDS waits longer"
            ) from None

    def shutdown(self) -> bool:
        closing = Thread(target=self._close, daemon=True)
        closing.start()
        closing.join(self._close_seconds)
        return self._is_shut

    def _close(self) -> None:
        with suppress(RendezvousError):
            self._is_shut = self._handler.shutdown()

    @property
    def use_agent_store(self) -> bool:
        return self._handler.use_agent_store

    def get_backend(self) -> str:
        return self._handler.get_backend()

    def get_run_id(self) -> str:
        return self._handler.get_run_id()

    def is_closed(self) -> bool:
        return self._handler.is_closed()

    def set_closed(self) -> None:
        self._handler.set_closed()


def _refuses(endpoint: str) -> bool:
    """Return whether a machine answers that nothing listens at host:port: what listened there has ended."""
    host, _, port = endpoint.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), ANSWER_SECONDS).close()
    except ConnectionRefusedError:
        return True
    except OSError:  # no answer: the network may come back
        return False
    return False


def connect(settings: RendezvousParameters) -> SeveralMachines:
    """Connect to the rendezvous of several machines, as soon as the first machine is there.

    PyTorch's own gives up after a minute. Machines of a cluster start further apart.

    Raises:
        RendezvousConnectionError: the first machine has not answered within join_timeout.
    """
    seconds = settings.get_as_int("join_timeout", JOIN_SECONDS) or JOIN_SECONDS
    deadline = time.monotonic() + seconds
    is_reported = False
    while True:
        try:
            return SeveralMachines(rendezvous_handler_registry.create_handler(settings), settings.endpoint)
        except RendezvousConnectionError:
            if time.monotonic() >= deadline:
                raise RendezvousConnectionError(
                    f"{settings.endpoint} (RDZV_ENDPOINT) has not answered for {seconds} s: is run_train.sh started on "
                    "that machine, and is the port open?"
                ) from None
            if not is_reported:
                is_reported = True
                print(
                    f"waiting for {settings.endpoint} (RDZV_ENDPOINT), which does not answer",
                    file=sys.stderr,
                    flush=True,
                )
            time.sleep(1)
