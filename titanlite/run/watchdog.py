"""Watchdog of each rank: names the ranks that do not arrive, and why, long before the timeout ends a run that hangs.

Each rank writes to one key of the job's store: its step, its phase, and how long it has given no sign of life. A sign
is a new phase or a new collective. In phases of unknown length, work of the process is one, too: it computes, reads or
writes. Time for which a rank waits for a core does not count. After 20 s without a sign, `faulthandler` writes the
stacks of a rank to its log. One rank reads the keys of all, and prints one line about those that lag. The run is ended
by its timeout alone: by that of a collective, or here, where a process waits for something else.
"""

import faulthandler
import json
import logging
import math
import os
import platform
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import IO

import torch
import torch.distributed as dist

from titanlite.observer import Phase, Position
from titanlite.run.endings import HANG
from titanlite.run.proc import (
    COLLECTIVE,
    DEBUGGER,
    STATES,
    Activity,
    Starvation,
    Waiting,
    machine,
    main_thread_waits_for,
    state_of,
)
from titanlite.run.timeouts import CHECKPOINT_GROUP, COPY_GROUP, PhaseTimeouts
from titanlite.runtime.files import put_aside_unless_file
from titanlite.runtime.private_torch.process_groups import connect_to_store, count_collectives, recent_collectives
from titanlite.runtime.process_group import Ranks
from titanlite.runtime.ranks import ranks_text

logger = logging.getLogger(__name__)

QUIET = 20.0
"""Seconds without a sign of life that are suspicious. A third of the timeout, where that is less."""
USUAL = 3
"""Multiple of the longest recent time between two signs that is suspicious, where that is more."""
RECENT = 300
"""Signs of life from which the usual time between two is known."""
LOOK_SHARE = 0.4
"""Share of the suspicious time after which the keys of the other ranks are read."""
INTERVAL = 2.0
TICKS = 150
"""Looks at training within the shortest timeout, at least."""
MOST_WRITES = 2000
"""Keys that all ranks write in a second, at most."""
WITNESSES = 8
"""Ranks that may report. The first of them that is alive does."""
MARGIN_SHARE = 1 / 10
"""Share of a timeout for which collectives have time to end a run, before the watchdog ends its process."""
TRACES = "TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"
"""Environment variables that name the files of PyTorch's flight recorder. PyTorch adds the rank."""


@dataclass(frozen=True)
class Beat:
    """What a rank writes to its key."""

    rank: int
    host: str
    pid: int
    number: int
    """Number of beats before this one. It does not change while the rank is silent."""
    step: int
    phase: str
    quiet: float
    """Seconds without a new phase or collective."""
    limit: float
    """Seconds without a sign of life from which on the rank is suspicious now."""
    collectives: int
    """Collectives that were started, in all groups."""
    kind: str = ""
    """Kind of what the main thread waits for. "" while nothing is suspicious."""
    text: str = ""
    """What the main thread waits for, as a predicate."""
    machine: str = ""
    """Machine as `proc.machine` names it, because host names may be equal."""

    @property
    def place(self) -> str:
        return str(Position(self.step, Phase(self.phase), 0))


def suspicious_after(timeout: float, phase: Phase, *, is_starting: bool, is_busy: bool, usual: float) -> float:
    """Return the seconds without a sign of life that are suspicious.

    Args:
        timeout: timeout of the phase.
        is_starting: the step may compile.
        is_busy: the process works: it compiles, reads or writes.
        usual: longest recent time between two signs of life in steps.
    """
    if is_busy and phase in (Phase.START, Phase.DATA_PREPARATION):
        return math.inf  # preparing text takes hours
    if is_busy and (is_starting or phase.timeout != "step"):
        return timeout / 2
    return max(min(QUIET, timeout / 3), min(USUAL * usual, max(timeout / 2, 2 * usual)))


def find_culprits(beats: Mapping[int, Beat], silent: Sequence[int], *, on_gpu: bool = False) -> list[int]:
    """Return the ranks that the others wait for; none if all are in the same collective.

    All ranks start the same collectives, so that those which have started the fewest lag. Ranks that have started as
    many as the others, and are in none, are culprits themselves.

    Args:
        silent: ranks that do not write their keys.
        on_gpu: a host that runs code may wait for a GPU, which waits in a collective.
    """
    if silent:
        return sorted(silent)
    if len(beats) == 1:
        return [*beats]
    fewest = min(beat.collectives for beat in beats.values())
    lagging = [rank for rank, beat in beats.items() if beat.collectives == fewest]
    if len(lagging) < len(beats):
        return sorted(lagging)
    if on_gpu and len(beats) > 1 and all(beat.kind == "code" for beat in beats.values()):
        return []
    return sorted(rank for rank, beat in beats.items() if beat.kind != COLLECTIVE)


def may_report(beats: Mapping[int, Beat], culprits: Sequence[int], silent: Sequence[int], mine: Beat) -> bool:
    """Return whether the culprits are over their limits, too, and none is in a debugger.

    A rank whose key has no reason yet gives one soon, or becomes silent. The last key of a silent rank may be of an
    earlier step, which could have compiled: its limit no longer counts.
    """
    suspects = [beats[rank] for rank in culprits if rank in beats] if culprits else [mine]
    if any(beat.kind == DEBUGGER or (not beat.kind and beat.rank not in silent) for beat in suspects):
        return False
    if any(beat.quiet < beat.limit for beat in suspects if beat.rank not in silent):  # the rank is slow, but works
        return False
    limits = [beat.limit for beat in suspects if beat.rank not in silent or beat.step >= mine.step]
    return mine.quiet >= max(limits, default=0)


def explain(beats: Mapping[int, Beat], culprits: Sequence[int], silent: Sequence[int], *, ranks: int, here: str) -> str:
    """Return which ranks did not arrive, and why, as a sentence.

    Args:
        ranks: number of all ranks.
        here: this machine, on which states of processes can be read.
    """
    if not culprits:
        hosts = sorted({beat.host for beat in beats.values()})
        where = f"the network between {', '.join(hosts)}" if len(hosts) > 1 else f"the network of {hosts[0]}"
        return f"all {ranks} ranks are in the same collective, which does not end: look at {where}"

    def reason(rank: int) -> tuple[str, str]:
        beat = beats.get(rank)
        if beat is None:
            return "", "has never sent a heartbeat"
        if rank in silent:
            return f" on {beat.host}", f"sends no heartbeat{_state(beat, is_here=beat.machine == here)}"
        return f" on {beat.host}", f"{beat.text} since {beat.quiet:.0f} s"

    clauses = []
    for (place, text), members in groupby(culprits, reason):
        several = [*members]
        process = f" (process {beats[several[0]].pid})" if len(several) == 1 and several[0] in beats else ""
        each = "each of " if len(several) > 1 else ""
        clauses.append(f"{each}{ranks_text(several)}{place}{process} {text}")
    waiting = sorted({*range(ranks)} - {*culprits})
    verb, whom = "waits" if len(waiting) == 1 else "wait", "it" if len(culprits) == 1 else "them"
    return "; ".join([*clauses, *([f"{ranks_text(waiting)} {verb} for {whom}"] if waiting else [])])


def _state(beat: Beat, *, is_here: bool) -> str:
    """Return why a rank is silent."""
    if not is_here:
        return ": the process is stopped, or the host is dead or unreachable"
    state = state_of(beat.pid)
    if state in STATES:
        hint = f": `kill -CONT {beat.pid}` resumes it" if state == "T" else ""
        return f": the process {STATES[state]} (state {state}){hint}"
    return ", though the process runs: a call outside of Python does not return" if state else ": the process is gone"


class Watchdog:
    """Watches this rank. `look` and `talk` are called again and again, each by a thread of its own.

    Args:
        phase: phase of training, with its timeout.
        connect: returns the job's store by a connection of its own. It is called again after an error.
        logs: folder of the logs, logs/rank-N.log, once it is there.
        end: prints a line, and ends this process with an exit code.
        on_gpu: the host may wait for a GPU.
        clock: seconds, without those in which the machine sleeps.
        count: returns the collectives that were started, by process group.
        starved: returns the seconds since the last call for which this process could run, and got no core.
    """

    def __init__(
        self,
        phase: PhaseTimeouts,
        ranks: Ranks,
        *,
        connect: Callable[[], dist.Store] = connect_to_store,
        logs: Path,
        end: Callable[[str, int], object],
        on_gpu: bool = False,
        clock: Callable[[], float] = time.monotonic,
        count: Callable[[], dict[str, int]] = count_collectives,
        waits_for: Callable[[], Waiting] | None = None,
        is_busy: Callable[[float], bool] | None = None,
        starved: Callable[[], float] | None = None,
    ) -> None:
        self._phase, self._ranks, self._connect, self._end = phase, ranks, connect, end
        self._on_gpu, self._clock, self._count = on_gpu, clock, count
        self._waits_for = waits_for or partial(main_thread_waits_for, is_alone=ranks.world_size == 1)
        self._is_busy = is_busy or Activity().is_busy
        self._starved = starved or Starvation().since_last
        self.interval = max(min(phase.shortest_timeout / TICKS, INTERVAL), ranks.world_size / MOST_WRITES, 0.1)
        self.is_over = threading.Event()
        self.report = ""
        """Report of the present hang, of whichever rank."""
        self._is_mine = self._has_traces = self._clears = False
        self._since = self._last_look = self._worked = self._answered = clock()
        self._gaps: deque[float] = deque([0.0], maxlen=RECENT)
        self._mark = phase.position, 0, True
        self._log = logs / f"rank-{ranks.rank}.log"
        self._file: IO[str] | None = None
        self._store: dist.Store | None = None
        self._line: threading.Thread | None = None
        self._seen: dict[int, tuple[int, float]] = {}
        self._machine = machine()
        self._beat = self._make_beat(self._since)

    # This rank

    def look(self) -> None:
        """Look once at training."""
        now = self._clock()
        if now - self._last_look > 3 * self.interval + 1:  # the whole process did not run: a laptop slept, or SIGSTOP
            self._since = self._worked = now
        # A machine of many other processes gives this one a small share of a core: that time does not count.
        starved = min(self._starved(), now - self._last_look)
        self._since, self._worked = min(self._since + starved, now), min(self._worked + starved, now)
        self._last_look = now
        position, counts = self._phase.position, self._count()
        is_saving = position.name.timeout == "save"
        counted = [name for name in counts if is_saving or CHECKPOINT_GROUP not in name]
        started = sum(counts[name] for name in counted if COPY_GROUP not in name)  # those differ from rank to rank
        if (position, started) != self._mark[:2]:
            self._notice_progress(now)
            self._mark = position, started, self._phase.is_starting
        beat = self._beat = self._make_beat(now)
        if beat.quiet < beat.limit:
            self._write_stacks_after(min(beat.limit - beat.quiet, 3600) + self.interval)
        elif not self._has_traces:
            self._has_traces = True
            self._aside(self._write_traces)
        self._report_without_store(now)
        self._end_if_nothing_else_does(now)

    def _notice_progress(self, now: float) -> None:
        lost = now - self._since
        if self._is_mine:
            self._aside(logger.warning, f"hang is over: training continues ({self._phase}), {lost:.0f} s are lost")
            self._clears = True
        before, _, was_starting = self._mark
        if not self.report and before.name.timeout == "step" and not was_starting:
            self._gaps.append(lost)
        self.report, self._is_mine, self._has_traces, self._seen = "", False, False, {}
        self._since = self._worked = now

    def _make_beat(self, now: float) -> Beat:
        position, collectives, _ = self._mark
        quiet, number = now - self._since, self._beat.number + 1 if hasattr(self, "_beat") else 0
        waiting = Waiting("", "")
        if is_suspect := quiet >= LOOK_SHARE * self._limit():
            waiting = self._waits_for()
        is_busy = is_suspect and self._is_busy(now)
        if is_busy:
            self._worked = now
        return Beat(
            rank=self._ranks.rank, host=platform.node(), pid=os.getpid(), number=number, step=position.step,
            phase=position.name, quiet=quiet, limit=self._limit(is_busy=is_busy), collectives=collectives,
            kind=waiting.kind, text=waiting.text, machine=self._machine,
        )  # fmt: skip

    def _limit(self, *, is_busy: bool = False) -> float:
        position, _, is_starting = self._mark
        timeout, usual = self._phase.timeout[1], max([*self._gaps])
        return suspicious_after(timeout, position.name, is_starting=is_starting, is_busy=is_busy, usual=usual)

    def _write_stacks_after(self, seconds: float) -> None:
        """Write the stacks of all threads to the log, unless this is called again in time. It needs no Python: a call
        outside of Python may keep all its threads from running, this one among them."""
        with suppress(OSError):
            if self._file is None and self._log.exists():
                self._file = open(self._log, "a")  # noqa: SIM115 (open as long as the process)
                main = threading.main_thread().ident or 0
                print(f"the watchdog has begun; the main thread is 0x{main:016x}", file=self._file, flush=True)
        if self._file is not None:
            faulthandler.dump_traceback_later(seconds, file=self._file)

    def _write_traces(self) -> None:
        with suppress(OSError):
            traces = self._log.with_name(f"collectives-{self._log.stem}.json")
            put_aside_unless_file(traces)
            traces.write_bytes(recent_collectives())

    def _end_if_nothing_else_does(self, now: float) -> None:
        """End this process where no collective will: it waits for data, for a file, or in its own code."""
        beat, (option, timeout) = self._beat, self._phase.timeout
        idle = now - max(self._since, self._worked)
        if beat.kind in (COLLECTIVE, DEBUGGER, "") or beat.phase in (Phase.START, Phase.DATA_PREPARATION):
            return
        if idle > timeout * (1 + MARGIN_SHARE) + 2 * self.interval:
            text = (
                f"error: rank {beat.rank} on {beat.host} (process {beat.pid}) {beat.text} since {idle:.0f} s "
                f"({beat.place}), longer than {option} = {timeout}: ended. Stacks: {self._log}"
            )
            self._aside(self._write, text).join(1)  # the console may be what hangs
            self._end(text, 1)

    def _write(self, text: str) -> None:
        with suppress(OSError), open(self._log, "a") as file:
            print(text, file=file)

    # All ranks

    def talk(self) -> None:
        """Write this rank's key. Read those of the others where this rank gives no sign of life, and report a hang."""
        beat = self._beat
        try:
            self._store = store = self._store or dist.PrefixStore("watchdog", self._connect())
            if self._clears:
                self._clears = False
                store.set("report", "")
            store.set(f"rank-{beat.rank}", json.dumps(asdict(beat)))
            if beat.quiet >= LOOK_SHARE * self._limit():
                self._ask(store, beat)
        except (RuntimeError, OSError):
            self._store = None
            return
        self._answered = self._clock()

    def _ask(self, store: dist.Store, beat: Beat) -> None:
        if store.check(["report"]) and (report := store.get("report").decode()) and beat.quiet >= self._limit():
            self.report = report
        world = self._ranks.world_size
        witnesses = range(0, world, max(world // WITNESSES, 1))
        if self.report or beat.rank not in witnesses:
            return
        keys = [f"rank-{rank}" for rank in range(world)]
        keys = keys if store.check(keys) else [key for key in keys if store.check([key])]
        found = [Beat(**json.loads(text)) for text in store.multi_get(keys)]
        beats = {other.rank: other for other in found} | {beat.rank: beat}
        now, seen = self._clock(), self._seen
        for rank in range(world):
            number = beats[rank].number if rank in beats else -1
            if rank not in seen or seen[rank][0] != number:
                seen[rank] = number, now
        silent_after = max(LOOK_SHARE * self._limit(), 3 * self.interval)
        silent = [rank for rank in range(world) if now - seen[rank][1] >= silent_after]
        culprits = find_culprits(beats, silent, on_gpu=self._on_gpu)
        is_first = beat.rank == min((rank for rank in witnesses if rank not in silent), default=-1)
        if is_first and beat.quiet >= self._limit() and may_report(beats, culprits, silent, beat):
            text = explain(beats, culprits, silent, ranks=world, here=beat.machine)
            if store.compare_set("report", "", text).decode() == text:
                self._print(text, beat, beats)

    def _report_without_store(self, now: float) -> None:
        """Report a hang without the other ranks' keys: one rank of this machine does."""
        beat, silence = self._beat, now - self._answered
        if self.report or silence < LOOK_SHARE * beat.limit or beat.quiet < beat.limit:
            return
        text = (
            f"the store of torchrun does not answer since {silence:.0f} s, so that the other hosts cannot be asked: "
            f"look at the network of {beat.host}. Rank {beat.rank} (process {beat.pid}) {beat.text}"
        )
        if self._ranks.local_rank == 0:
            self._print(text, beat, {beat.rank: beat})
        self.report = text

    def _print(self, text: str, beat: Beat, beats: Mapping[int, Beat]) -> None:
        """Print the one line about a hang."""
        self.report, self._is_mine = text, True
        option, timeout = self._phase.timeout
        places: dict[str, list[int]] = {}
        for rank, other in sorted(beats.items()):
            places.setdefault(other.place, []).append(rank)
        phases = "; ".join(f"{ranks_text(members)} in {place}" for place, members in places.items())
        line = (
            f"{HANG}{'no step' if beat.step else 'no progress'} for {beat.quiet:.0f} s ({beat.place}): {text}. "
            f"Stacks of all ranks: {self._log.parent}/rank-*.log. Phases: {phases}"
        )
        if beat.phase not in (Phase.START, Phase.DATA_PREPARATION):
            line += f". The run ends in {max(timeout - beat.quiet, 0):.0f} s ({option})"
        self._aside(logger.warning, line)

    def _aside(self, function: Callable[..., object], *arguments: object) -> threading.Thread:
        """Call a function in a thread of its own: the console or the file system may be what hangs."""
        self._line = threading.Thread(target=function, args=arguments, name="watchdog line", daemon=True)
        self._line.start()
        return self._line

    def close(self) -> None:
        """End the threads of this watchdog, with the last line on its way."""
        self.is_over.set()
        faulthandler.cancel_dump_traceback_later()
        if self._line is not None:
            self._line.join(1)


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
    watchdog = Watchdog(phase, ranks, logs=logs, end=end, on_gpu=device.type == "cuda")

    def repeat(act: Callable[[], None]) -> None:
        try:
            act()  # at once, so that a rank that stops in its first steps is known by its host and process
            while not watchdog.is_over.wait(watchdog.interval):
                act()
        except Exception as error:
            logger.warning(f"the watchdog of this rank has failed, hangs are not noticed: {error!r}")

    looking = threading.Thread(target=repeat, args=[watchdog.look], name="watchdog", daemon=True)
    looking.start()
    threading.Thread(target=repeat, args=[watchdog.talk], name="watchdog store", daemon=True).start()
    try:
        yield
        watchdog.is_over.set()
        looking.join(watchdog.interval)
        watchdog.look()  # training may have left a hang behind on its last steps
    except Exception as error:
        if watchdog.report:
            error.add_note(HANG + watchdog.report)
        raise
    finally:
        watchdog.close()


def keep_traces(environ: MutableMapping[str, str], folder: Path) -> None:
    """Let PyTorch's flight recorder write its traces at a timeout to nccl-rank-N in a folder, unless the user has named
    other files.

    Call it before the process group starts. PyTorch's own choice is a folder that all runs of a user share.
    """
    if not any(name in environ for name in TRACES):
        environ[TRACES[0]] = str(folder.absolute() / "nccl-rank-")
