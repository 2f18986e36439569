"""One fault of a soak: make it, wait for its end, start the same command again, and check what was lost."""

import os
import random
import re
import signal
import time
from dataclasses import asdict, dataclass

from soak_faults import Fault, Kind, Scene
from soak_job import Ended, Job, one_line

LIMIT = 300.0
"""Seconds until a job must have ended after a fault, or must train. Only a busy machine needs so many."""
FURTHER_STEPS = 3
"""Steps after which a run that was not ended has survived."""


@dataclass
class Outcome:
    """Record of one fault."""

    fault: int
    kind: str
    title: str
    planned: int
    """Step at which the fault was planned; at_step is the one after which it came."""
    at_step: int
    ranks: int
    start: str
    printed: str = ""
    codes: tuple[int | None, ...] = ()
    noticed_seconds: float | None = None
    """Time until the run printed something, or ended. None: it did neither, since it did not have to."""
    ended_seconds: float | None = None
    """Time until run_train.sh ended. None: it did not."""
    training_seconds: float = 0.0
    """Time until the next step was done."""
    last_step: int = 0
    """Last step that was done before the end."""
    committed: int = 0
    """Newest checkpoint that counts after the fault."""
    resumed: int = 0
    lost: int = 0
    left: int = 0
    """Processes that were alive 15 s after the end."""


class Moment:
    """State of a job when a fault comes: what it prints and does from here on is its answer."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.time = time.monotonic()
        self.before = job.printed()
        self.attempts = len(job.attempts())
        self.step = job.last_step()

    def printed(self) -> list[str]:
        return self.job.notable(self.before)

    def seconds(self) -> float:
        return time.monotonic() - self.time


def await_moment(job: Job, scene: Scene, fault: Fault, kind: Kind, *, validation: int) -> None:
    """Wait until a job does what the fault is aimed at.

    Raises:
        Ended: the job ends before that.
    """
    job.wait_until(lambda: job.trains() and job.last_step() >= fault.step, LIMIT)
    if kind.moment == "validation":
        first = job.last_step()
        job.wait_until(lambda: job.last_step() % validation == 0 or job.last_step() > first + validation, LIMIT)
    if kind.moment == "save":
        job.wait_until(lambda: is_saving(scene), LIMIT, pause=0.001)
    if kind.moment == "checkpoint":
        job.wait_until(lambda: len(scene.committed()) > 1, LIMIT)


def is_saving(scene: Scene) -> bool:
    return any(name.startswith(".staging-") for name in os.listdir(scene.checkpoints))


def strike(scene: Scene, fault: Fault, kind: Kind) -> tuple[Outcome, Moment]:
    """Make a fault, and wait until it has ended the job, or until the run has continued by itself.

    Raises:
        Ended: it did neither.
    """
    job = scene.job
    moment = Moment(job)
    outcome = Outcome(fault.number, fault.kind, kind.title, fault.step, moment.step, job.layout.ranks, job.name)
    kind.strike(scene)
    if kind.codes:
        _wait_for_end(outcome, moment)
        outcome.left = len(job.left())
    else:
        _wait_for_steps(outcome, moment, kind, scene)
    outcome.printed = one_line(moment.printed())
    outcome.last_step = job.attempts()[moment.attempts - 1].last
    outcome.committed = [0, 0, *scene.committed()][-2 if kind.damages else -1]
    return outcome, moment


def _wait_for_end(outcome: Outcome, moment: Moment) -> None:
    def look() -> None:
        if outcome.noticed_seconds is None and moment.printed():
            outcome.noticed_seconds = moment.seconds()

    moment.job.wait_for_end(LIMIT, look)
    outcome.ended_seconds = moment.seconds()
    outcome.noticed_seconds = outcome.noticed_seconds or outcome.ended_seconds
    outcome.codes = tuple(moment.job.codes())


def _wait_for_steps(outcome: Outcome, moment: Moment, kind: Kind, scene: Scene) -> None:
    job = moment.job
    if kind.repair:
        job.wait_until(lambda: bool(moment.printed()), LIMIT)
        outcome.noticed_seconds = moment.seconds()
        seen = job.last_step()
        job.wait_until(lambda: job.last_step() >= seen + FURTHER_STEPS, LIMIT)
        kind.repair(scene)
        job.wait_until(lambda: "written again" in job.text(moment.before), LIMIT)
    if kind.max_restarts:
        job.wait_until(lambda: bool(moment.printed()) or len(job.attempts()) > moment.attempts, LIMIT)
        outcome.noticed_seconds = moment.seconds()
        job.wait_until(lambda: len(job.attempts()) > moment.attempts and job.trains(), LIMIT)
    seen = job.attempts()[-1].last
    job.wait_until(lambda: job.attempts()[-1].last >= seen + FURTHER_STEPS, LIMIT)


def conclude(outcome: Outcome, moment: Moment, job: Job) -> None:
    """Add to an outcome how the run trains again.

    Args:
        job: it trains: the next start, or the same job if that has continued by itself.

    Raises:
        Ended: the run was over before it could train again.
    """
    attempts = job.attempts()
    is_same = job is moment.job and len(attempts) == moment.attempts
    later = [when for _, when in attempts[-1].steps if when > moment.time]
    if not later:
        raise Ended(f"{outcome.title}: no step came after it, so the run was over")
    outcome.training_seconds = later[0] - moment.time
    outcome.resumed = outcome.last_step if is_same else attempts[-1].resumed
    outcome.lost = outcome.last_step - outcome.resumed
    if job is not moment.job and (damage := [line for line in job.notable() if re.search(r"damaged|manifest", line)]):
        outcome.printed = damage[0].strip()
        outcome.noticed_seconds = attempts[-1].began - moment.time


def problems(outcome: Outcome, kind: Kind, *, continued: bool) -> list[str]:
    """Return what was not survived as promised."""
    found = []
    several = (1, 75, -signal.SIGKILL) if len(outcome.codes) > 1 else ()  # the other host may see another reason
    if any(code not in (*kind.codes, *several) for code in outcome.codes):
        found.append(f"exit codes {outcome.codes}, expected {kind.codes}")
    if outcome.left:
        found.append(f"{outcome.left} processes were left")
    if not continued and outcome.resumed != outcome.committed:
        found.append(f"resumed after step {outcome.resumed}, and step {outcome.committed} was committed")
    if kind.most_lost is not None and outcome.lost > kind.most_lost:
        found.append(f"{outcome.lost} steps were lost, at most {kind.most_lost} may be")
    return found


def as_record(outcome: Outcome) -> dict[str, object]:
    """Return an outcome with rounded times, for a JSON line."""
    record = asdict(outcome)
    return {name: round(value, 2) if isinstance(value, float) else value for name, value in record.items()}


def randomness(seed: int, fault: Fault) -> random.Random:
    """Return the random numbers of a fault: which rank, which bits."""
    return random.Random(f"{seed} {fault.number}")
