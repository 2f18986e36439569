"""Variables of Slurm are believed with the job that they belong to. The answers are those of Slurm 22.05.8."""

from pathlib import Path

import pytest

from titanlite.run.slurm import use_own_job

RECORDED = Path(__file__).parents[2] / "data" / "slurm"
START, END = 1795960615, 1795960795
"""Times of both tasks of the recorded array."""
STALE = {"SLURM_JOB_END_TIME": "1795950001", "SLURM_RESTART_COUNT": "26"}


def asked(environ: dict[str, str], answer: str | None, now: float) -> tuple[dict[str, str], str | None]:
    """Return the variables of the job, and why others were removed."""
    environ = dict(environ)
    removed = use_own_job(environ, now=now, ask=lambda job: answer)
    return {name: value for name, value in environ.items() if name in STALE}, removed


@pytest.mark.parametrize(("job", "restarts"), [("26", "1"), ("27", "0")])
@pytest.mark.parametrize("given", [{}, STALE])
def test_the_end_and_the_restarts_are_those_of_the_own_job(job: str, restarts: str, given: dict[str, str]) -> None:
    """Of an array, Slurm prints all tasks under the number of the last one. 22.05 sets no end."""
    answer = (RECORDED / "array-epoch.txt").read_text().replace(" Restarts=0 ", " Restarts=1 ", 1)
    right = {"SLURM_JOB_END_TIME": str(END), "SLURM_RESTART_COUNT": restarts}
    assert asked({"SLURM_JOB_ID": job} | given, answer, START + 1) == (right, None)


@pytest.mark.parametrize(
    ("environ", "answer", "now"),
    [
        (STALE, None, START),  # without a job
        ({"SLURM_JOB_ID": "26"} | STALE, "array-epoch", END + 1),  # the job has ended
        ({"SLURM_JOB_ID": "26"} | STALE, "array-epoch", START - 1),  # it waits to be started again
        ({"SLURM_JOB_ID": "999"} | STALE, "", START),  # Slurm has forgotten it
        ({"SLURM_JOB_ID": "26"} | STALE, None, START),  # no scontrol here: the end is over
        ({"SLURM_JOB_ID": "26", "SLURM_JOB_START_TIME": str(START)} | STALE, None, START - 1),
    ],
)
def test_variables_of_another_job_are_ignored(environ: dict[str, str], answer: str | None, now: float) -> None:
    text = (RECORDED / f"{answer}.txt").read_text() if answer else answer
    left, line = asked(environ, text, now)
    assert left == {}
    assert line is not None
    assert all(name in line for name in STALE)


def test_without_scontrol_variables_that_may_be_right_are_believed() -> None:
    given = {"SLURM_JOB_END_TIME": str(END), "SLURM_RESTART_COUNT": "2"}
    times = {"SLURM_JOB_ID": "26", "SLURM_JOB_START_TIME": str(START)}
    assert asked(times | given, None, START + 1) == (given, None)
    assert asked({}, None, START) == ({}, None)
