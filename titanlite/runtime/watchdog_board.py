"""Heartbeats of all ranks in torchrun's store, by a connection of its own that training never waits for."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar

import torch.distributed as dist

from titanlite.runtime.watchdog_report import Beat

T = TypeVar("T")


@dataclass
class Answer:
    """Entries of the store about a suspected hang."""

    episode: int = 0
    """Number of suspected hangs that are over."""
    report: str = ""
    """Report of the present hang, if a rank has made it."""
    claimed: bool = False
    """This call made this rank the one that reports."""
    beats: dict[int, Beat] = field(default_factory=dict)
    """Newest heartbeat of each rank, where they were asked for."""


class Board:
    """Keys of the watchdogs in a store.

    Args:
        connect: returns the store by a new connection. It is called again after an error.
    """

    def __init__(self, connect: Callable[[], dist.Store], rank: int, world_size: int) -> None:
        self._connect = connect
        self._connected: dist.Store | None = None
        self._closing: set[int] = set()
        self.rank, self.world_size = rank, world_size

    @property
    def _store(self) -> dist.Store:
        if self._connected is None:
            self._connected = dist.PrefixStore("watchdog", self._connect())
        return self._connected

    def reconnect(self) -> None:
        """Use a new connection from now on."""
        self._connected = None

    def beat(self, beat: Beat) -> Answer:
        """Publish a heartbeat. One call of the store: training without a hang costs no more."""
        for episode in [*self._closing]:
            if self._store.add(f"closed-{episode}", 1) == 1:
                self._store.add("episode", 1)
            self._closing.remove(episode)
        self._store.set(f"rank-{self.rank}", beat.to_json().decode())
        return Answer()

    def ask(self, beat: Beat, *, attempt: int, read: bool) -> Answer:
        """Publish a heartbeat that is suspicious, and look for a report.

        Args:
            attempt: number of the attempt to become the rank that reports; the first that asks wins an attempt.
            read: read all heartbeats.
        """
        self.beat(beat)
        episode = self._store.add("episode", 0)
        report = f"report-{episode}"
        if self._store.check([report]):
            return Answer(episode, self._store.get(report).decode(), beats=self._read() if read else {})
        claimed = self._store.add(f"claim-{episode}-{attempt}", 1) == 1
        return Answer(episode, claimed=claimed, beats=self._read() if read or claimed else {})

    def report(self, episode: int, text: str) -> bool:
        """Make a report known to all ranks. Return False if another rank was first."""
        if self._store.add(f"reported-{episode}", 1) > 1:
            return False
        self._store.set(f"report-{episode}", text)
        return True

    def close(self, episode: int) -> None:
        """End a suspected hang with the next heartbeat, so that another one is reported again."""
        self._closing.add(episode)

    def _read(self) -> dict[int, Beat]:
        keys = [f"rank-{rank}" for rank in range(self.world_size)]
        if not self._store.check(keys):
            keys = [key for key in keys if self._store.check([key])]
        beats = [Beat.from_json(text) for text in self._store.multi_get(keys)] if keys else []
        return {beat.rank: beat for beat in beats}


class Aside(Generic[T]):
    """Calls functions in a thread of its own, one after another. A call that blocks holds up no other thread."""

    def __init__(self, name: str) -> None:
        self._calls: SimpleQueue[Callable[[], T] | None] = SimpleQueue()
        self._results: SimpleQueue[T | Exception] = SimpleQueue()
        self.is_busy = False
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def call(self, function: Callable[[], T], seconds: float) -> T | Exception | None:
        """Return the result of a function, or its exception; None if it takes longer, or the call before still does."""
        if self.is_busy and self._results.empty():
            return None
        while not self._results.empty():
            self._results.get()  # of a call that took too long
        self.is_busy = True
        self._calls.put(function)
        try:
            result = self._results.get(timeout=seconds)
        except Empty:
            return None
        self.is_busy = False
        return result

    def close(self, seconds: float = 0) -> None:
        """End the thread after the calls that were posted.

        Args:
            seconds: longest wait for that.
        """
        self._calls.put(None)
        self._thread.join(seconds)

    def post(self, function: Callable[[], T]) -> None:
        """Call a function later, without its result."""
        self._calls.put(function)

    def _work(self) -> None:
        while (function := self._calls.get()) is not None:
            try:
                self._results.put(function())
            except Exception as error:
                self._results.put(error)
