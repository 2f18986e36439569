"""Report of a suspected hang: which ranks did not arrive, and why."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import groupby

from titanlite.runtime.proc import STATES
from titanlite.runtime.ranks import ranks_text
from titanlite.runtime.watchdog_waiting import COLLECTIVE, DEBUGGER

SUSPICIOUS_SHARE = 1 / 15
"""Share of a phase's timeout without progress that is suspicious: 20 s of 300."""
LEAST_SECONDS = 1.0
"""The least that is suspicious."""
PATIENT_SHARE = 1 / 2
"""The same for phases of unknown length, while a process works."""
USUAL_TIMES = 10
"""Multiple of the longest recent step that is suspicious."""
PATIENT_PHASES = ("start", "data preparation", "model", "checkpoint load", "validation", "checkpoint", "export", "end")
ENDLESS_PHASES = ("start", "data preparation")
"""Phases that may work for hours: preparing text has no timeout."""
PLURALS = {"is": "are", "has": "have", "sends": "send", "waits": "wait", "writes": "write", "runs": "run"}
SAVING_PHASES = ("checkpoint", "end")


@dataclass(frozen=True)
class Beat:
    """Heartbeat of a rank: where it is, and since when."""

    rank: int
    host: str
    pid: int
    number: int
    """Heartbeats before this one."""
    step: int
    phase: str
    waited: float
    """Seconds without progress."""
    limit: float
    """Seconds without progress that are suspicious now."""
    collectives: dict[str, int] = field(default_factory=dict)
    """Collectives that were started, by process group."""
    kind: str = ""
    """Kind of the wait. "" while nothing is suspicious."""
    text: str = ""
    """Wait of the main thread, as a predicate."""
    on_gpu: bool = False
    busy: bool = False
    """The process works: it computes, or reads and writes."""

    def to_json(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_json(cls, text: bytes) -> "Beat":
        return cls(**json.loads(text))


def suspicious_after(timeout: float, *, phase: str, is_starting: bool, is_busy: bool, longest_step: float) -> float:
    """Return the seconds without progress in a phase that are suspicious. The run's timeout ends it much later.

    Args:
        timeout: timeout of the phase.
        is_starting: the step may compile.
        is_busy: the process works: it compiles, reads or writes.
        longest_step: seconds of the longest recent step; 0 before there is one.
    """
    floor = max(timeout * SUSPICIOUS_SHARE, LEAST_SECONDS)
    if is_busy and phase in ENDLESS_PHASES:
        return math.inf
    if is_busy and (is_starting or phase in PATIENT_PHASES):
        return timeout * PATIENT_SHARE
    usual = min(USUAL_TIMES * longest_step, max(timeout * PATIENT_SHARE, 2 * longest_step))
    return max(floor, usual)


def find_culprits(beats: Mapping[int, Beat], silent: Sequence[int]) -> list[int]:
    """Return the ranks that the others wait for; none if all are in the same collective.

    A rank waits for those that have started fewer collectives in a group of both. The culprits are ranks that are
    waited for and wait for none. Ranks that did the same and are in no collective are culprits themselves.

    Args:
        beats: newest heartbeat of each rank.
        silent: ranks without a heartbeat.
    """
    if silent:
        return sorted(silent)
    most: dict[str, int] = {}
    for beat in beats.values():
        for group, count in beat.collectives.items():
            most[group] = max(count, most.get(group, 0))
    behind, ahead = set(), set()
    for group, highest in most.items():
        counts = {rank: beat.collectives[group] for rank, beat in beats.items() if group in beat.collectives}
        lowest = min(counts.values())
        if lowest < highest:
            behind |= {rank for rank, count in counts.items() if count < highest}
            ahead |= {rank for rank, count in counts.items() if count > lowest}
    if behind:
        return sorted(behind - ahead or behind)
    alone = [rank for rank, beat in beats.items() if beat.kind != COLLECTIVE]
    if len(alone) == len(beats) > 1 and all(beat.on_gpu and beat.kind == "code" for beat in beats.values()):
        return []  # the host waits for the GPU, which waits in a collective
    return sorted(alone)


def may_report(beats: Mapping[int, Beat], culprits: Sequence[int], silent: Sequence[int], mine: Beat) -> bool:
    """Return whether a hang is reported now: the ranks that others wait for are over their limits, too.

    A rank whose heartbeat has no reason yet gives one soon, or becomes silent. The last heartbeat of a silent rank may
    be of an earlier step, which could have compiled: its limit no longer counts.

    Args:
        mine: heartbeat of the rank that reports.
    """
    suspects = [beats[rank] for rank in culprits if rank in beats]
    if any(beat.kind == DEBUGGER or (not beat.kind and beat.rank not in silent) for beat in suspects):
        return False
    limits = [beat.limit for beat in suspects if beat.rank not in silent or beat.step >= mine.step]
    return mine.waited >= max(limits, default=0)


def explain(
    beats: Mapping[int, Beat], culprits: Sequence[int], silent: Sequence[int], states: Mapping[int, str], *, ranks: int
) -> str:
    """Return which ranks did not arrive, and why, as a sentence.

    Args:
        silent: ranks without a heartbeat.
        states: states of the processes of silent ranks, as far as they are on this host.
        ranks: number of all ranks.
    """
    if not culprits:
        hosts = sorted({beat.host for beat in beats.values()})
        where = f"the network between {', '.join(hosts)}" if len(hosts) > 1 else f"the network of {hosts[0]}"
        return f"all {ranks} ranks are in the same collective, which does not end: look at {where}"
    clauses = []
    for (reason, host), members in groupby(
        culprits, lambda rank: _reason(beats.get(rank), rank in silent, states, rank)
    ):
        several = [*members]
        process = f" (process {beats[several[0]].pid})" if len(several) == 1 and several[0] in beats else ""
        if len(several) > 1:
            verb, _, rest = reason.partition(" ")
            reason = f"{PLURALS.get(verb, verb)} {rest}"
        clauses.append(
            f"{ranks_text(several)} on {host}{process} {reason}" if host else f"{ranks_text(several)} {reason}"
        )
    waiting = sorted(set(range(ranks)) - set(culprits))
    others = f"; {ranks_text(waiting)} wait{'s'[: len(waiting) == 1]} for {'it' if len(culprits) == 1 else 'them'}"
    return "; ".join(clauses) + (others if waiting else "")


def _reason(beat: Beat | None, is_silent: bool, states: Mapping[int, str], rank: int) -> tuple[str, str]:
    """Return a predicate for a rank that did not arrive, and its host."""
    if beat is None:
        return "has never sent a heartbeat", ""
    if not is_silent:
        since = f" since {beat.waited:.0f} s"
        return f"{beat.text}{since}", beat.host
    state = states.get(rank)
    if state is None:
        return "sends no heartbeat: the process is stopped, or the host is dead or unreachable", beat.host
    if state in STATES:
        hint = f": `kill -CONT {beat.pid}` resumes it" if state == "T" else ""
        return f"sends no heartbeat: the process {STATES[state]} (state {state}){hint}", beat.host
    if not state:
        return "sends no heartbeat: the process is gone", beat.host
    return "sends no heartbeat, though the process runs: a call outside of Python does not return", beat.host
