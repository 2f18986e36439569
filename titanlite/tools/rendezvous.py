"""Rendezvous of torchrun under run_train.sh: PyTorch's own (c10d), with what it lacks for long runs.

- Each generation of workers has a store of its own, which outlives its ranks. torchrun starts the workers again after a
  failure and when machines join or leave, and addresses of ended processes must not reach the next generation.
- On one machine everything listens on the loopback interface only. PyTorch's stores listen on all interfaces.
- No restart follows an end that would be the same again: wrong config, a stop by a rule, a signal.
- A dead network does not hold up the loop in which torchrun watches its workers.
"""

import math
import os
import socket
import sys
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from threading import Thread, Timer

from torch.distributed import PrefixStore, Store, TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousError,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend, create_backend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler, RendezvousTimeout

from titanlite.run.endings import FAILED, read_end

BACKEND = "titanlite"
"""Name of this rendezvous for torchrun's option --rdzv-backend."""
LOOPBACK = "127.0.0.1"
PORT_KEY = "titanlite/port"
JOIN_SECONDS = 600
"""Time that machines have to join, unless RDZV_CONF has join_timeout: PyTorch's own default."""
STORE_SECONDS = 60
"""Longest wait for the store, unless RDZV_CONF has read_timeout: PyTorch's own default."""
ANSWER_SECONDS, CLOSE_SECONDS = 1.0, 5.0
"""Longest waits for the number of machines that want to join, and for the end of the rendezvous."""
GRACE_SECONDS = 10.0
"""Time in which workers end by themselves after those of another machine have ended."""


OVER = "the processes of another machine have ended, see its output"


class FinalEnd(Exception):
    """End of the workers that no restart may follow."""


class Rendezvous(DynamicRendezvousHandler):
    """PyTorch's rendezvous; `from_backend` makes it. Set the attributes before it is used."""

    folder: Path
    """torchrun's folder of logs (--log-dir): it has the error files of the workers."""
    max_restarts: int
    endpoint: str | None
    """host:port of the first of several machines; None on one machine."""
    _store_of_workers: Store | None = None
    _restarts = 0
    _asking: Thread | None = None
    _machines_waiting = 0
    _over_since = math.inf

    def next_rendezvous(self) -> RendezvousInfo:
        """Start a generation.

        Raises:
            FinalEnd: the generation before has ended for good.
            RendezvousTimeoutError: too few machines have joined in time.
        """
        if self._store_of_workers is not None:
            self._check_end()
        if self._asking:
            self._asking.join()
        self._machines_waiting, self._over_since = 0, math.inf
        try:
            info = super().next_rendezvous()
        except RendezvousTimeoutError:
            raise RendezvousTimeoutError(
                f"too few machines have joined at {self.endpoint}: NNODES counts all of them, and "
                "RDZV_CONF=join_timeout=SECONDS waits longer"
            ) from None
        if self.endpoint is None:
            store = self._store_of_workers = _loopback_store()
            return RendezvousInfo(PrefixStore("agent", store), 0, 1, RendezvousStoreInfo(LOOPBACK, store.port))
        assert info.bootstrap_store_info is not None
        address = info.bootstrap_store_info.master_addr
        self._store_of_workers = info.store
        if info.rank == 0:
            self._store_of_workers = TCPStore(address, 0, is_master=True, wait_for_workers=False)
            info.store.set(PORT_KEY, str(self._store_of_workers.port))
        return RendezvousInfo(
            info.store, info.rank, info.world_size, RendezvousStoreInfo(address, int(info.store.get(PORT_KEY)))
        )

    @property
    def use_agent_store(self) -> bool:
        return True

    def get_backend(self) -> str:
        return BACKEND

    def _check_end(self) -> None:
        """Report why the workers start again.

        Raises:
            FinalEnd: they must not.
        """
        code, reason = read_end(newest_end(self.folder))
        waiting = self._machines_waiting or self.num_nodes_waiting()
        if self._is_over():
            raise FinalEnd
        if waiting:
            line = "the number of machines changes"  # torchrun itself has ended the workers
        elif code not in (None, FAILED):
            raise FinalEnd
        else:
            self._restarts += 1
            line = f"restart {self._restarts} of {self.max_restarts}: {reason}"
        os.environ["TITANLITE_LAST_END"] = reason
        print(f"{line}; the run resumes from its newest checkpoint", file=sys.stderr, flush=True)

    def num_nodes_waiting(self) -> int:
        """Return how many machines want to join, by the latest answer: above 0, torchrun ends its workers.

        A machine whose workers have ended counts too, after a while. A worker that is stopped (SIGSTOP) notices no
        other end.
        """
        if self.endpoint is None:
            return 0
        if self._asking is None or not self._asking.is_alive():
            self._asking = Thread(target=self._ask, daemon=True)
            self._asking.start()
        self._asking.join(ANSWER_SECONDS)
        if self._is_over() and not (end := newest_end(self.folder)).exists():
            end.write_text(f"{FAILED}\n{OVER}")  # so that SIGTERM is no request to stop
            print(f"error: {OVER}", file=sys.stderr, flush=True)
        return self._machines_waiting or int(self._is_over())

    def _is_over(self) -> bool:
        """Return whether the workers of another machine have ended some time ago."""
        return time.monotonic() - self._over_since > GRACE_SECONDS

    def _ask(self) -> None:
        try:
            self._machines_waiting, is_over = super().num_nodes_waiting(), self.is_closed()
        except RendezvousError:
            is_over = _refuses(self.endpoint or "")  # the first machine has ended
        self._over_since = min(self._over_since, time.monotonic()) if is_over else math.inf

    def shutdown(self) -> bool:
        closing = Thread(target=super().shutdown, daemon=True)
        closing.start()
        closing.join(CLOSE_SECONDS)
        return not closing.is_alive()


def connect(settings: RendezvousParameters, *, folder: Path, max_restarts: int) -> Rendezvous:
    """Connect to the rendezvous of this job.

    Args:
        folder: torchrun's folder of logs.
        max_restarts: restarts that torchrun makes after failures.

    Raises:
        RendezvousConnectionError: the first machine has not answered within join_timeout.
    """
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # PyTorch would keep one store for all generations
    is_alone = settings.max_nodes == 1
    if is_alone:
        store: Store = _loopback_store()
        backend = C10dRendezvousBackend(store, settings.run_id)
    else:
        backend, store = _connect_to_first(settings)
    timeouts = (settings.get_as_int(f"{name}_timeout") for name in ("join", "last_call", "close", "heartbeat"))
    made = Rendezvous.from_backend(
        settings.run_id,
        store,
        backend,
        settings.min_nodes,
        settings.max_nodes,
        LOOPBACK if is_alone else settings.local_addr,
        RendezvousTimeout(*(timedelta(seconds=seconds) if seconds else None for seconds in timeouts)),
        settings.get_as_int("keep_alive_interval", 5) or 5,
        settings.get_as_int("keep_alive_max_attempt", 3) or 3,
    )
    made.folder, made.max_restarts = folder, max_restarts
    made.endpoint = None if is_alone else settings.endpoint
    return made


def newest_end(folder: Path) -> Path:
    """Return the file of the newest generation with the code of the first of its workers that failed."""
    generations = sorted(folder.glob("*/attempt_*"), key=lambda path: path.stat().st_mtime)
    return [folder, *generations][-1] / "code"


def _connect_to_first(settings: RendezvousParameters) -> tuple[C10dRendezvousBackend, Store]:
    """Connect to the store of the first machine, which may start later than this one."""
    seconds = settings.get_as_int("join_timeout", JOIN_SECONDS) or JOIN_SECONDS
    answer = settings.get_as_int("read_timeout", STORE_SECONDS) or STORE_SECONDS
    settings.config["read_timeout"] = str(seconds)
    line = f"waiting for {settings.endpoint} (RDZV_ENDPOINT), which does not answer\n"
    waiting = Timer(min(answer, seconds / 2), lambda: print(line, end="", file=sys.stderr, flush=True))
    waiting.daemon = True
    waiting.start()
    try:
        backend, store = create_backend(settings)
    except RendezvousConnectionError:
        raise RendezvousConnectionError(
            f"{settings.endpoint} (RDZV_ENDPOINT) has not answered for {seconds} s: is run_train.sh started on that "
            "machine, and is the port open?"
        ) from None
    finally:
        waiting.cancel()
    store.set_timeout(timedelta(seconds=answer))
    return backend, store


def _refuses(endpoint: str) -> bool:
    """Return whether a machine answers that nothing listens at host:port: what listened there has ended."""
    host, _, port = endpoint.rpartition(":")
    with suppress(OSError):  # no answer: the network may come back
        try:
            socket.create_connection((host.strip("[]"), int(port)), ANSWER_SECONDS).close()
        except ConnectionRefusedError:
            return True
    return False


def _loopback_store() -> TCPStore:
    """Start a store that only processes of this machine can reach."""
    listener = socket.create_server((LOOPBACK, 0), backlog=1024)
    port = listener.getsockname()[1]
    return TCPStore(LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
