"""Updates on the host that do not end before training waits for them, for tests on a CPU."""

import threading
import time
from typing import Any

import pytest

from titanlite.runtime.private_torch.fsdp import unit_of
from titanlite.techniques.offload import updates

LONGEST = 3.0
"""Seconds for which an update waits to be waited for."""
MORE = 0.002
"""Seconds that it takes from then on."""


class SlowUpdates:
    """Lets CPUs update beside training, as late as they may, and counts what overlaps."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.threads: set[str] = set()
        """Names of the threads that have updated."""
        self.waits = 0
        """How often a unit was not updated yet when it was waited for alone, as FSDP does before it gathers it."""
        kind, update, is_awaited = updates.HostUpdates, updates.update, threading.Event()
        start, wait, finish = kind._start, kind.wait, kind.finish

        def slow(optimizer: Any, **options: Any) -> None:
            self.threads.add(threading.current_thread().name)
            is_awaited.wait(LONGEST)
            time.sleep(MORE)
            update(optimizer, **options)

        def started(of: Any, *arguments: Any) -> None:
            is_awaited.clear()
            start(of, *arguments)

        def waited(of: Any, module: Any) -> None:
            future = of._updates.get(unit_of(module))
            if future is not None and not future.done():
                self.waits += 1
                is_awaited.set()
            wait(of, module)

        def finished(of: Any) -> None:
            is_awaited.set()
            finish(of)

        monkeypatch.setattr(updates, "DEVICES", {"cpu"})
        monkeypatch.setattr(updates, "update", slow)
        for name, method in (("_start", started), ("wait", waited), ("finish", finished)):
            monkeypatch.setattr(kind, name, method)
