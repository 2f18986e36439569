"""Watchdog of each rank: notices a hang long before the timeout, names the ranks that did not arrive, and why.

A thread looks at the phase of training and at the collectives that were started. While they change, all is well. If
they have not changed for much longer than usual, each rank writes its stacks to its log, and one rank reports. At the
timeout, the collectives of the waiting ranks end them. A process that waits for something else is ended here.
"""

import logging
import os
import platform
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from titanlite.observer import Position
from titanlite.runtime import watchdog_report as reports
from titanlite.runtime import watchdog_waiting as waits
from titanlite.runtime.endings import HANG
from titanlite.runtime.private_torch.process_groups import connect_to_store, count_collectives
from titanlite.runtime.proc import state_of
from titanlite.runtime.process_group import Ranks
from titanlite.runtime.timeouts import CHECKPOINT_GROUP, PhaseTimeouts
from titanlite.runtime.watchdog_board import Answer, Aside, Board
from titanlite.runtime.watchdog_log import RankLog
from titanlite.runtime.watchdog_report import Beat, explain, find_culprits, may_report, suspicious_after
from titanlite.runtime.watchdog_waiting import Activity, Waiting, main_thread_waits_for

logger = logging.getLogger(__name__)

TICKS = 150
"""Looks at training within the shortest timeout: every 2 s of 300."""
SHORTEST_INTERVAL = 0.1
MOST_BEATS = 500
"""Heartbeats of all ranks in a second, at most."""
LOOK_SHARE = 0.4
"""Share of the suspicious time after which the rank that will report begins to read the heartbeats of the others."""
NEXT_ATTEMPT = 1.5
"""Multiple of the suspicious time after which another rank reports, if the first one does not."""
MARGIN_SHARE = 1 / 10
"""Share of a timeout for which collectives have time to end a run, before the watchdog ends its process."""
STORE_SECONDS = 5.0
"""Longest wait for an answer of the store."""


class Watchdog:
    """Watches this rank.

    Args:
        phase: phase of training, with its timeout.
        board: heartbeats of all ranks.
        logs: folder of the logs, logs/rank-N.log, once it is there.
        end: prints a line, and ends this process with an exit code.
        on_gpu: the host may wait for a GPU.
        clock: seconds, without those in which the machine sleeps.
        count: returns the collectives that were started, by process group.
    """

    def __init__(
        self,
        phase: PhaseTimeouts,
        board: Board,
        ranks: Ranks,
        *,
        logs: Path,
        end: Callable[[str, int], object],
        on_gpu: bool = False,
        clock: Callable[[], float] = time.monotonic,
        count: Callable[[], dict[str, int]] = count_collectives,
        waits_for: Callable[[], Waiting] = main_thread_waits_for,
        is_busy: Callable[[float], bool] | None = None,
    ) -> None:
        self._phase, self._board, self._ranks, self._end = phase, board, ranks, end
        self._on_gpu, self._clock, self._count, self._waits_for = on_gpu, clock, count, waits_for
        self._activity = Activity()
        self._is_busy = is_busy or self._activity.is_busy
        self.interval = max(phase.shortest_timeout / TICKS, ranks.world_size / MOST_BEATS, SHORTEST_INTERVAL)
        self._host, self._pid = platform.node(), os.getpid()
        self._beats = 0
        self._mark: tuple[Position, dict[str, int]] = phase.position, {}
        self._since = self._last_tick = self._worked = clock()
        self._store = Aside[Answer]("watchdog store")
        self._answered = self._since
        self._log = RankLog(logs, ranks.rank)
        self._forget()

    def _forget(self) -> None:
        """Begin anew after progress."""
        self.report = ""
        """Report of the present hang, of whichever rank."""
        self._wrote_stacks = self._reported = self._reads = False
        self._episode: int | None = None
        self._seen: dict[int, tuple[int, float]] = {}
        self._reads_since = 0.0
        self._activity.forget()

    def tick(self) -> None:
        """Look once at training."""
        now = self._clock()
        if now - self._last_tick > 3 * self.interval + 1:  # the whole process did not run: a laptop slept, or SIGSTOP
            self._since = self._worked = now
        self._last_tick = now
        self._notice_progress(now)
        beat = self._beat(now)
        base = self._limit(is_busy=False)
        self._log.write_stacks_after(max(2 * base, 10 * self.interval))
        if beat.waited < LOOK_SHARE * base:
            self._ask(lambda: self._board.beat(beat), now)
            return
        attempt = int(beat.waited / (NEXT_ATTEMPT * base))
        reads = self._reads
        answer = self._ask(lambda: self._board.ask(beat, attempt=attempt, read=reads), now)
        if answer is None:
            self._without_store(beat, now)
        else:
            self._with_store(beat, answer, now)
        self._end_if_nothing_else_does(beat, now)

    # What training does

    def _notice_progress(self, now: float) -> None:
        position = self._phase.position
        counts = self._count()
        if position.name not in reports.SAVING_PHASES:
            counts = {group: count for group, count in counts.items() if CHECKPOINT_GROUP not in group}
        if (position, counts) == self._mark:
            return
        lost = now - self._since
        self._since = self._worked = now
        self._mark = position, counts
        if self._episode is not None or self._reads or self.report or self._reported:
            self._resolve(lost)

    def _limit(self, *, is_busy: bool) -> float:
        """Return the seconds without progress that are suspicious now."""
        return suspicious_after(
            self._phase.timeout[1],
            phase=self._mark[0].name,
            is_starting=self._phase.is_starting,
            is_busy=is_busy,
            longest_step=max([*self._phase.recent_steps], default=0.0),
        )

    def _beat(self, now: float) -> Beat:
        position, counts = self._mark
        waited = now - self._since
        waiting, busy = None, False
        if waited >= LOOK_SHARE * self._limit(is_busy=False):
            waiting, busy = self._waits_for(), self._is_busy(now)
        if busy:
            self._worked = now
        self._beats += 1
        return Beat(
            rank=self._ranks.rank, host=self._host, pid=self._pid, number=self._beats, step=position.step,
            phase=position.name, waited=waited, limit=self._limit(is_busy=busy), collectives=counts, busy=busy,
            kind=waiting.kind if waiting else "", text=waiting.text if waiting else "", on_gpu=self._on_gpu,
        )  # fmt: skip

    # The other ranks

    def _ask(self, call: Callable[[], Answer], now: float) -> Answer | None:
        answer = self._store.call(call, min(STORE_SECONDS, self.interval))
        if isinstance(answer, Exception):
            self._board.reconnect()
        if not isinstance(answer, Answer):
            return None
        self._answered = now
        return answer

    def _with_store(self, beat: Beat, answer: Answer, now: float) -> None:
        self._episode = answer.episode
        if answer.report:
            self.report = answer.report
            self._write_stacks(beat)
            return
        if answer.claimed and not self._reads:
            self._reads, self._reads_since = True, now
        if not self._reads or not answer.beats:
            return
        beats = answer.beats | {beat.rank: beat}
        for rank, other in beats.items():
            if self._seen.get(rank, (0, 0.0))[0] != other.number:
                self._seen[rank] = other.number, now
        silent_after = max(LOOK_SHARE * min(beat.limit, self._phase.timeout[1]), 3 * self.interval)
        silent = [
            rank
            for rank in range(self._ranks.world_size)
            if now - self._seen.get(rank, (0, self._reads_since))[1] >= silent_after
        ]
        culprits = find_culprits(beats, silent)
        if may_report(beats, culprits, silent, beat) and (culprits or beat.waited >= beat.limit):
            here = {it: state_of(beats[it].pid) for it in silent if it in beats and beats[it].host == self._host}
            text = explain(beats, culprits, silent, here, ranks=self._ranks.world_size)
            ends = len(culprits) < self._ranks.world_size or not beats[beat.rank].busy
            whole = self._head(beat) + text + self._tail(beat, ends=ends)
            self._store.call(lambda: self._publish(answer.episode, text, whole), self.interval)

    def _publish(self, episode: int, text: str, whole: str) -> Answer:
        """Report a hang, unless another rank has."""
        if self._board.report(episode, text):
            self._reported = True
            self._log.warn(whole)
        return Answer()

    def _without_store(self, beat: Beat, now: float) -> None:
        """Report a hang without the other ranks' heartbeats: one rank of this machine does."""
        if now - self._answered < LOOK_SHARE * beat.limit or beat.waited < beat.limit or self.report:
            return
        self.report = (
            f"the store of torchrun does not answer since {now - self._answered:.0f} s, so that the other hosts cannot "
            f"be asked: look at the network of {self._host}. Rank {beat.rank} (process {beat.pid}) {beat.text}"
        )
        self._write_stacks(beat)
        if self._ranks.local_rank == 0:
            self._reported = True
            self._log.warn(self._head(beat) + self.report + self._tail(beat, ends=True))

    def _resolve(self, lost: float) -> None:
        """End a suspected hang: training continues."""
        if self.report:
            self._phase.forget_step()  # its time is not usual
        if self._reported:
            self._log.warn(f"hang is over: training continues ({self._phase}), {lost:.0f} s are lost")
        if self._reads and self._episode is not None:
            self._board.close(self._episode)
        self._forget()

    def end_of_run(self) -> None:
        """End a suspected hang that training has left behind on its last steps."""
        if self._reported:
            self._resolve(self._clock() - self._since)

    # What people read

    def _head(self, beat: Beat) -> str:
        what = "no step" if beat.step else "no progress"
        return f"{HANG}{what} for {beat.waited:.0f} s ({_place(beat)}): "

    def _tail(self, beat: Beat, *, ends: bool) -> str:
        option, timeout = self._phase.timeout
        stacks = f". Stacks of all ranks: {self._log.folder}/rank-*.log"
        if not ends or beat.phase in reports.ENDLESS_PHASES:
            return stacks
        return f"{stacks}. The run ends in {max(timeout - beat.waited, 0):.0f} s ({option})"

    def _write_stacks(self, beat: Beat) -> None:
        if not self._wrote_stacks:
            self._wrote_stacks = True
            self._log.write_stacks(f"hang: {_place(beat)}")

    def _end_if_nothing_else_does(self, beat: Beat, now: float) -> None:
        """End this process where no collective will: it waits for data, for a file, or in its own code."""
        option, timeout = self._phase.timeout
        idle = now - max(self._since, self._worked)
        if beat.kind in (waits.COLLECTIVE, waits.DEBUGGER, waits.OUTPUT, "") or beat.phase in reports.ENDLESS_PHASES:
            return
        if idle > timeout * (1 + MARGIN_SHARE) + 2 * self.interval:
            self._end(
                f"error: rank {beat.rank} on {beat.host} (process {beat.pid}) {beat.text} since {idle:.0f} s "
                f"({_place(beat)}), longer than {option} = {timeout}: ended. Stacks: {self._log.path}",
                1,
            )

    def close(self) -> None:
        """End the threads of this watchdog, without a wait for calls that block."""
        self._store.close()
        self._log.close()


def _place(beat: Beat) -> str:
    return str(Position(beat.step, beat.phase, 0))


@contextmanager
def watching(
    phase: PhaseTimeouts, ranks: Ranks, *, device: torch.device, logs: Path, end: Callable[[str, int], object]
) -> Iterator[None]:
    """Watch this rank in this context. The process group has to be there.

    An exception that leaves the context gets the report of the hang as a note.

    Args:
        logs: folder of the logs of all ranks.
        end: prints a line, and ends this process with an exit code.
    """
    board = Board(connect_to_store, ranks.rank, ranks.world_size)
    watchdog = Watchdog(phase, board, ranks, logs=logs, end=end, on_gpu=device.type == "cuda")
    is_over = threading.Event()

    def watch() -> None:
        try:
            while not is_over.wait(watchdog.interval):
                watchdog.tick()
        except Exception as error:
            logger.warning(f"the watchdog of this rank has failed, hangs are not noticed: {error!r}")

    thread = threading.Thread(target=watch, name="watchdog", daemon=True)
    thread.start()
    try:
        yield
        is_over.set()
        thread.join(watchdog.interval)
        watchdog.end_of_run()
    except Exception as error:
        if watchdog.report:
            error.add_note(HANG + watchdog.report)
        raise
    finally:
        is_over.set()
        watchdog.close()
