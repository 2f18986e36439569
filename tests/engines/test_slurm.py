"""scripts/slurm.sh on a real Slurm, with a stand-in for training (slurm/stub). README.md says how to install it."""

import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.support.helpers import wait_until

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent / "slurm"
SCRIPT = str(ROOT / "scripts" / "slurm.sh")
GRACE = 24
"""Seconds between the two SIGTERM of a preemption."""

pytestmark = [
    pytest.mark.engines,
    pytest.mark.skipif(
        shutil.which("slurmctld") is None or os.geteuid() != 0, reason="needs Slurm's packages, and root"
    ),
]


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A cluster of two nodes. One that runs already is used, if SLURM_CONF names its configuration."""
    if "SLURM_CONF" in os.environ:
        yield
        return
    folder = tmp_path_factory.mktemp("slurm")
    with open(folder / "up.log", "w") as log:
        subprocess.run(
            ["bash", HERE / "up.sh", folder],
            check=True,
            stdout=log,
            stderr=log,
            env={**os.environ, "GRACE": str(GRACE)},
        )
    os.environ["SLURM_CONF"] = str(folder / "slurm.conf")
    try:
        yield
    finally:
        del os.environ["SLURM_CONF"]
        for pid in map(int, (folder / "pids").read_text().split()[::-1]):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        for node in ("tlc1", "tlc2"):
            subprocess.run(["ip", "netns", "del", node], check=False)
        subprocess.run(["ip", "link", "del", "br-tlc"], check=False)


class Job:
    """A job of the stand-in, whose arguments are the seconds that it trains, and the exit code of each start."""

    def __init__(self, folder: Path, name: str, options: str, arguments: str, **environ: str) -> None:
        self.folder, self.name = folder, name
        command = [
            "sbatch",
            "--parsable",
            f"--job-name={name}",
            f"--output={folder}/%x-%j.log",
            "--nodes=1",
            "--time=30",
        ]
        submitted = subprocess.run(
            [*command, *options.split(), SCRIPT, *arguments.split()],
            env={**os.environ, "TITANLITE_ROOT": str(HERE / "stub"), **environ},
            cwd=folder, capture_output=True, text=True, check=True,
        )  # fmt: skip
        self.number = submitted.stdout.strip()

    def text(self) -> str:
        return "".join(path.read_text() for path in sorted(self.folder.glob(f"{self.name}-*.log")))

    def wait_for(self, text: str, times: int = 1, seconds: float = 120) -> None:
        wait_until(lambda: self.text().count(text) >= times, seconds)

    def accounted(self) -> dict[str, tuple[str, str]]:
        """Return the state and exit code that sacct shows, by job and step."""
        command = ["sacct", "--duplicates", "-nP", "-j", self.number, "-o", "JobID,State,ExitCode"]
        lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
        return {job: (state.split()[0], code) for job, state, code in (line.split("|") for line in lines)}


StartJob = Callable[..., Job]


@pytest.fixture
def start(slurm: None, tmp_path: Path) -> Iterator[StartJob]:
    """Starts a job, which is cancelled at the end of the test."""
    jobs: list[Job] = []

    def submit(name: str, options: str, arguments: str, **environ: str) -> Job:
        jobs.append(Job(tmp_path, name, options, arguments, **environ))
        return jobs[-1]

    yield submit
    subprocess.run(["scancel", *(job.number for job in jobs)], check=False)


def test_each_task_of_an_array_is_requeued_by_itself(start: StartJob) -> None:
    """Slurm waits two minutes before it starts a requeued job again. The shell has variables of other jobs."""
    stale = {"SLURM_RESTART_COUNT": "26", "SLURM_ARRAY_TASK_ID": "7", "SLURM_ARRAY_JOB_ID": "1"}
    job = start("array", "--array=0-1", "2 75 0 %a", **stale)
    job.wait_for("requeued", 2)
    wait_until(lambda: job.text().count("\ndone") == 2, 300)
    for task in (0, 1):
        assert f"job {job.number}_{task}, start 1:" in job.text()
        assert re.search(rf"start 2 task {task}$", job.text(), re.MULTILINE)
    assert "start 27" not in job.text()


def test_a_time_limit_that_is_too_short_ends_the_job_and_is_named(start: StartJob) -> None:
    """Slurm sends the script's own --signal=USR1@300 at once."""
    job = start("short", "--time=1", "30 0 x", STARTUP="20")
    job.wait_for("not requeued")
    assert "TimeLimit=00:01:00 is too short" in job.text()
    wait_until(lambda: job.accounted().get(job.number) == ("FAILED", "1:0"), 30)
    assert job.accounted()[f"{job.number}.0"] == ("FAILED", "10:0"), "138 less 128"


def test_a_preemption_with_a_grace_time_leaves_time_to_save(start: StartJob) -> None:
    """Slurm sends SIGTERM at its beginning and twice at its end, and SIGKILL after KillWait.

    If a busy Slurm is late, the job ends before it, and requeues itself.
    """
    subprocess.run(["scontrol", "update", "partition=main", f"GraceTime={GRACE}"], check=True)
    job = start("preempted", "--gpus-per-node=1", "600 0 x", SAVE=str(GRACE + 18))
    job.wait_for("start 1 task")
    other = start("other", "--partition=high --nodes=2", "1 0 x")
    job.wait_for("saved after SIGTERM", seconds=180)
    job.wait_for("requeued")
    other.wait_for("done", seconds=180)
    command = ["squeue", "-hj", job.number, "-o", "%T"]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "PENDING\n"
    assert "start 2" not in job.text()


def test_a_cancelled_job_is_not_requeued(start: StartJob) -> None:
    job = start("cancelled", "", "600 0 x")
    job.wait_for("start 1 task")
    subprocess.run(["scancel", job.number], check=True)
    job.wait_for("not requeued: Slurm has ended the job")
    assert "saved after SIGTERM" in job.text()


@pytest.mark.parametrize(("code", "shown"), [(3, "3:0"), (137, "1:0")])
def test_codes_in_sacct(start: StartJob, code: int, shown: str) -> None:
    job = start("code", "", f"1 {code} x")
    job.wait_for("not requeued")
    wait_until(lambda: job.accounted().get(job.number) == ("FAILED", shown), 30)


@pytest.mark.parametrize("launcher", ["srun --export=ALL,CUDA_VISIBLE_DEVICES=", "mpirun --allow-run-as-root -n 2"])
def test_srun_and_mpirun_start_one_run(slurm: None, tmp_path: Path, launcher: str) -> None:
    if launcher.startswith("mpirun") and shutil.which("mpirun") is None:
        pytest.skip("needs Open MPI")
    text = tmp_path / "text"
    text.mkdir()
    (text / "one.txt").write_text(" ".join(map(str, range(20_000))))
    options = f"--config debug --job.dump_folder={tmp_path} --job.name=run --training.steps=3 --metrics.log_freq=1 "
    options += f"--model.args.dim=48 --training.seq_len=32 --data.path={text} --validation.enable=false"
    nodes = "-N2 --ntasks-per-node=1" if launcher.startswith("srun") else "-N1"
    command = ["sbatch", "--wait", "-n2", *nodes.split(), "-t5", f"--output={tmp_path}/out.log"]
    began = time.time()
    ended = subprocess.run([*command, f"--wrap={launcher} python -m titanlite train {options}"], check=False)
    printed = (tmp_path / "out.log").read_text()
    assert ended.returncode == 0, printed
    assert " = 2 processes x " in printed
    [planned] = re.findall(
        r"^planned  a stop at ([\d -]+:[\d:]+), for the end of the Slurm job$", printed, re.MULTILINE
    )
    end = time.mktime(time.strptime(planned, "%Y-%m-%d %H:%M:%S"))
    assert began + 0.9 * 300 - 5 < end < time.time() + 0.9 * 300, "a tenth of the job before its end"
    assert (tmp_path / "run" / "metrics.jsonl").read_text().count("\n") == 3
