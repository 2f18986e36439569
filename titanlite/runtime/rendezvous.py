"""Rendezvous of torchrun under run_train.sh: each generation of workers has a store and an exit file of its own.

torchrun starts its workers again after a failure, and when machines join or leave. Each start is a generation. What a
generation leaves must not reach the next one: addresses of ended processes in the store, and the exit code.

On one machine everything listens on the loopback interface only. PyTorch's own rendezvous listens on all interfaces.
"""

import os
import socket
import sys
from pathlib import Path

from torch.distributed import PrefixStore, TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)

from titanlite.runtime.endings import EXIT_FILE, FAILED, read_end
from titanlite.runtime.machines import SeveralMachines, connect

BACKEND = "titanlite"
"""Name of this rendezvous for torchrun's option --rdzv-backend."""
LOOPBACK = "127.0.0.1"
PORT_KEY = "titanlite/port"


class FinalEnd(Exception):
    """End of the workers that no restart may follow. Their exit file has the code."""


class Generations(RendezvousHandler):
    """Rendezvous that starts a store for each generation of workers, and refuses a generation after a final end.

    Args:
        folder: an empty folder, for the exit files.
        max_restarts: restarts that torchrun makes after failures.
    """

    def __init__(self, folder: Path, max_restarts: int) -> None:
        self._folder, self._max_restarts = folder, max_restarts
        self._run_id = ""
        self._machines: SeveralMachines | None = None
        self._generation = self._restarts = 0
        self._waiting = False
        self._server: TCPStore | None = None

    def register(self) -> None:
        """Let torchrun find this rendezvous by its name."""
        rendezvous_handler_registry.register(BACKEND, self._connect)

    def _connect(self, settings: RendezvousParameters) -> RendezvousHandler:
        self._run_id = settings.run_id
        if settings.max_nodes > 1:
            os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # PyTorch would keep one store for all generations
            several = RendezvousParameters(
                "c10d",
                settings.endpoint,
                settings.run_id,
                settings.min_nodes,
                settings.max_nodes,
                settings.local_addr,
                **settings.config,
            )
            self._machines = connect(several)
        return self

    @property
    def exit_file(self) -> Path:
        """File with the exit code of the present generation, if one of its workers has failed on this machine."""
        return self._folder / f"generation-{self._generation}" / "code"

    @property
    def use_agent_store(self) -> bool:
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Start a generation.

        Raises:
            FinalEnd: the generation before has ended for good.
        """
        if self._generation:
            self._check_end()
        self._generation += 1
        self.exit_file.parent.mkdir(parents=True)
        os.environ[EXIT_FILE] = str(self.exit_file)
        if self._machines is None:
            self._server = server = _loopback_store()
            return RendezvousInfo(PrefixStore("agent", server), 0, 1, RendezvousStoreInfo(LOOPBACK, server.port))
        info = self._machines.next_rendezvous()
        assert info.bootstrap_store_info is not None
        address = info.bootstrap_store_info.master_addr
        if info.rank == 0:
            self._server = server = TCPStore(address, 0, is_master=True, wait_for_workers=False)
            info.store.set(PORT_KEY, str(server.port))
        bootstrap = RendezvousStoreInfo(address, int(info.store.get(PORT_KEY)))
        return RendezvousInfo(info.store, info.rank, info.world_size, bootstrap)

    def _check_end(self) -> None:
        """Report why the workers start again.

        Raises:
            FinalEnd: they must not.
        """
        joins = self._waiting or self.num_nodes_waiting() > 0  # then torchrun itself has ended the workers
        self._waiting = False
        code, reason = read_end(self.exit_file)
        if joins:
            line = "the number of machines changes"
        elif code not in (None, FAILED):
            raise FinalEnd
        else:
            self._restarts += 1
            line = f"restart {self._restarts} of {self._max_restarts}: {reason}"
        os.environ["TITANLITE_LAST_END"] = reason
        print(f"{line}; the run resumes from its newest checkpoint", file=sys.stderr, flush=True)

    def num_nodes_waiting(self) -> int:
        waiting = self._machines.num_nodes_waiting() if self._machines else 0
        self._waiting = waiting > 0
        return waiting

    @property
    def is_over_elsewhere(self) -> bool:
        """Return whether the workers of another machine have ended."""
        return self._machines is not None and self._machines.is_over_elsewhere

    def get_backend(self) -> str:
        return BACKEND

    def get_run_id(self) -> str:
        return self._run_id

    def is_closed(self) -> bool:
        return self._machines is not None and self._machines.is_closed()

    def set_closed(self) -> None:
        if self._machines is not None:
            self._machines.set_closed()

    def shutdown(self) -> bool:
        return self._machines is None or self._machines.shutdown()


def _loopback_store() -> TCPStore:
    """Start a store that only processes of this machine can reach."""
    listener = socket.create_server((LOOPBACK, 0), backlog=1024)
    port = listener.getsockname()[1]
    return TCPStore(LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
