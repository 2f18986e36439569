"""This process's Slurm job, as Slurm itself knows it. Imports no torch.

Variables of Slurm outlive their job: those of a shell are passed on to jobs that it submits, and stay in a shell that
another job has left. Slurm 22.05 does not set SLURM_JOB_END_TIME at all.
"""

import math
import os
import re
import subprocess
from collections.abc import Callable, Mapping, MutableMapping

ANSWER_SECONDS = 10
"""Longest wait for scontrol."""
OF_A_JOB = ("SLURM_JOB_END_TIME", "SLURM_RESTART_COUNT")
"""Variables that are believed only with the job that they belong to."""


def ask_slurm(job: str) -> str | None:
    """Return what scontrol prints of a job, with times in seconds since 1970; "" if Slurm does not know the job.

    None: there is no scontrol here, or the controller does not answer.
    """
    environ = {**os.environ, "SLURM_TIME_FORMAT": "%s"}
    command = ["scontrol", "--oneliner", "show", "job", job]
    try:
        asked = subprocess.run(
            command, env=environ, capture_output=True, text=True, timeout=ANSWER_SECONDS, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    if asked.returncode:
        return "" if "Invalid job id" in asked.stderr else None
    return asked.stdout


def use_own_job(
    environ: MutableMapping[str, str], *, now: float, ask: Callable[[str], str | None] = ask_slurm
) -> str | None:
    """Set the end and the restarts of this process's job in the environment, or remove those of another job.

    Args:
        now: time of day, in seconds since 1970.
        ask: `ask_slurm`.

    Returns:
        why variables were removed; None if none were.
    """
    if not any(name in environ for name in ("SLURM_JOB_ID", *OF_A_JOB)):
        return None
    reason, values = _own_job(environ, now, ask)
    removed = [name for name in OF_A_JOB if name in environ and name not in values]
    for name in removed:
        del environ[name]
    environ.update(values)
    return f"{', '.join(removed)} of the environment: ignored, since {reason}" if removed else None


def _own_job(environ: Mapping[str, str], now: float, ask: Callable[[str], str | None]) -> tuple[str, dict[str, str]]:
    """Return why there is no job, or its variables."""
    if not (job := environ.get("SLURM_JOB_ID")):
        return "there is no SLURM_JOB_ID", {}
    answer = ask(job)
    if answer is None:  # in a container, for example
        given = {name: environ[name] for name in OF_A_JOB if name in environ}
        start, end = (
            _time(environ.get(f"SLURM_JOB_{name}_TIME", ""), unknown)
            for name, unknown in (("START", -math.inf), ("END", math.inf))
        )
        return f"it is not the time of job {job}", given if start <= now < end else {}
    # For the last task of an array, which has the array's number, Slurm prints all tasks.
    own = re.search(rf"^JobId={job} .*$", answer, re.MULTILINE)
    fields = dict(re.findall(r" (\w+)=(\S*)", own.group() if own else ""))
    start, end = _time(fields.get("StartTime", ""), math.inf), _time(fields.get("EndTime", ""), math.inf)
    if not start <= now < end:
        return f"job {job} does not run", {}
    found = {"SLURM_RESTART_COUNT": fields.get("Restarts", "0")}
    return "the job has no end", found | ({"SLURM_JOB_END_TIME": str(int(end))} if end < math.inf else {})


def _time(text: str, unknown: float) -> float:
    return float(text) if text.isdecimal() else unknown
