"""Restarts of real jobs: by torchrun after a crash, with fewer machines, and the end of a loop of crashes."""

import os
import re
import signal
import socket
import struct
from pathlib import Path
from typing import Any

import pytest

from tests.support.helpers import TinyRun, free_port, mentions, needs_forks
from tests.support.processes import Job, newest, started, unhurried
from titanlite.tools import cli


def listening(pids: list[int]) -> set[str]:
    """Return the addresses on which processes listen."""
    sockets = set()
    for pid in pids:
        for file in Path(f"/proc/{pid}/fd").iterdir():
            try:
                target = str(file.readlink())
            except OSError:  # closed meanwhile
                continue
            if target.startswith("socket:["):
                sockets.add(target[8:-1])
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in sockets:
                raw = bytes.fromhex(fields[1].partition(":")[0])
                words = struct.pack(f">{len(raw) // 4}I", *struct.unpack(f"<{len(raw) // 4}I", raw))
                found.add(socket.inet_ntop(socket.AF_INET if len(raw) == 4 else socket.AF_INET6, words))
    return found


def are_forks(job: Job) -> list[bool]:
    """Return for each rank whether it is a fork, which shows its rank in its command line."""
    commands = job.pids()
    return ["(rank " in commands[pid] for pid in job.ranks()]


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


@pytest.mark.slow
@needs_forks
def test_a_killed_rank_restarts_the_job_and_a_signal_ends_it(tiny: TinyRun) -> None:
    """The restart resumes exactly. A stop by a signal is final, though torchrun has restarts left."""
    options = "--checkpoint.interval=5", "--checkpoint.keep_latest_k=0", "--training.steps=1000000", unhurried(tiny)
    options = *options, "--data.num_workers=1"
    with started(tiny.folder, f"--config={tiny.toml}", *options, NPROC="2", MAX_RESTARTS="3") as job:
        job.wait_for_step(7)
        assert sum("-m multiprocessing.forkserver" in command for command in job.pids().values()) == 4
        addresses = listening([*job.pids()])
        launcher, first = job.process.pid, job.ranks()
        assert sum("fork_server" in command for command in job.pids().values()) == 1
        job.signal(job.ranks()[1], signal.SIGKILL)
        job.wait_until(lambda: "resumes from its newest checkpoint" in job.text())
        reached = max(job.steps())
        job.wait_until(lambda: len(job.steps()) > len({*job.steps()}))  # a step for the second time
        job.wait_for_step(reached + 2)
        second = job.ranks()
        assert {*first}.isdisjoint(second)
        assert [parent(pid) for pid in second] == [launcher, launcher]
        assert are_forks(job) == [True, True]
        job.signal(job.ranks()[1], signal.SIGTERM)
        assert job.end() == 75, job.text()
        assert job.left() == {}
    assert addresses == {"127.0.0.1"}
    [line] = [line for line in job.text().splitlines() if line.startswith("restart ")]
    assert mentions(line, "1 of 3", "rank-1")
    saved = newest(tiny)
    assert saved > reached
    assert [record["step"] for record in tiny.records()] == [*range(1, saved + 1)]
    steps = f"--training.steps={saved}"
    assert cli.run(["train", f"--config={tiny.toml}", "--job.name=uninterrupted", steps]) == 0
    assert tiny.losses() == pytest.approx(tiny.losses("uninterrupted"), rel=1e-4)


@pytest.mark.slow
@needs_forks
def test_local_copies_carry_a_job_over_every_death(tiny: TinyRun) -> None:
    """A rank is killed, then the launcher, whose end lets the ranks save a checkpoint, then all processes at once."""
    copies = tiny.folder / "copies"
    options = "--checkpoint.local_interval=4", f"--checkpoint.local_folder={copies}", "--checkpoint.interval=100000"
    words, environ = [f"--config={tiny.toml}", *options, unhurried(tiny)], {"NPROC": "2", "MAX_RESTARTS": "2"}
    endless = [*words, "--training.steps=1000000"]
    with started(tiny.folder, *endless, **environ) as job:
        job.wait_for_step(10)
        job.wait_until(lambda: newest_copy(copies) > 0)
        whole = newest_copy(copies)
        job.signal(job.ranks()[1], signal.SIGKILL)
        job.wait_until(lambda: bool(resumptions(job)))
        reached = max(job.steps())
        assert whole <= resumptions(job)[0] <= reached, job.text()
        job.wait_for_step(reached + 6)
        job.signal(job.process.pid, signal.SIGKILL)
        assert job.left() == {}
    saved = newest(tiny)
    assert saved > reached, "a checkpoint of the ranks that lost their launcher"
    assert not [*copies.glob("*/step-*")]
    with started(tiny.folder, *endless, **environ) as job:
        job.wait_for_step(saved + 10)
        job.wait_until(lambda: newest_copy(copies) > saved)
        whole = newest_copy(copies)
        for pid in job.pids():
            job.signal(pid, signal.SIGKILL)
        assert job.left() == {}
    assert resumptions(job) == [saved]
    last = max(job.steps()) + 3
    with started(tiny.folder, *words, f"--training.steps={last}", **environ) as job:
        assert job.end() == 0, job.text()
    assert whole <= resumptions(job)[0] < last, job.text()
    assert cli.run(["train", f"--config={tiny.toml}", "--job.name=uninterrupted", f"--training.steps={last}"]) == 0
    assert [record["step"] for record in tiny.records()] == [*range(1, last + 1)]
    assert tiny.losses() == pytest.approx(tiny.losses("uninterrupted"), rel=1e-4)


def newest_copy(copies: Path) -> int:
    """Return the step of the newest whole local copy; 0 if there is none."""
    return max((int(path.parent.name[5:]) for path in copies.glob("*/step-*/manifest.json")), default=0)


def resumptions(job: Job) -> list[int]:
    """Return the steps after which starts of a job resume."""
    return [int(step) for step in re.findall(r"^resuming after step (\d+)", job.text(), re.M)]


@pytest.mark.slow
@needs_forks
def test_without_forks_the_job_is_the_same(tiny: TinyRun) -> None:
    """A thread that the environment starts in each Python process could hold a lock in a fork."""
    (tiny.folder / "site").mkdir()
    planted = "import threading, time\nthreading.Thread(target=time.sleep, args=[1000], daemon=True).start()\n"
    (tiny.folder / "site" / "sitecustomize.py").write_text(planted)
    words = f"--config={tiny.toml}", "--training.steps=1000000", unhurried(tiny)
    path = os.pathsep.join([str(tiny.folder / "site"), os.environ.get("PYTHONPATH", "")])
    with started(tiny.folder, *words, NPROC="2", PYTHONPATH=path) as job:
        job.wait_for_step(3)
        assert [parent(pid) for pid in job.ranks()] == [job.process.pid] * 2
        assert are_forks(job) == [False] * 2
        job.signal(job.process.pid, signal.SIGTERM)
        assert job.end() == 75, job.text()
        assert job.left() == {}
    [line] = [line for line in job.text().splitlines() if "no forks" in line]
    assert "threads" in line
    assert cli.run(["train", f"--config={tiny.toml}", "--job.name=here", "--training.steps=3"]) == 0
    assert tiny.losses()[:3] == pytest.approx(tiny.losses("here"), rel=1e-5)


@pytest.mark.nightly
def test_a_machine_is_lost_and_another_joins(tiny: TinyRun) -> None:
    """Each launcher stands for a machine. The run continues exactly with fewer ranks, then with more."""
    endpoint = f"127.0.0.1:{free_port()}"
    config, never_ends = f"--config={tiny.toml}", "--training.steps=1000000"
    options = config, never_ends, "--checkpoint.interval=5", "--checkpoint.keep_latest_k=0"
    environ: dict[str, Any] = {
        "NNODES": "1:2", "NPROC": "1", "MAX_RESTARTS": "3", "RDZV_ENDPOINT": endpoint, "GLOO_SOCKET_IFNAME": "lo",
        "RDZV_CONF": "last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=3",
    }  # fmt: skip
    with (
        started(tiny.folder, *options, **environ, LOCAL_ADDR="127.0.0.1") as first,
        started(tiny.folder, *options, **environ, LOCAL_ADDR="127.0.0.2") as lost,
    ):
        first.wait_until(lambda: "saved checkpoint of step 5" in first.text())
        for pid in lost.pids():
            lost.signal(pid, signal.SIGKILL)
        first.wait_until(lambda: "shard 1 on cpu" in first.text())
        with started(tiny.folder, *options, **environ, LOCAL_ADDR="127.0.0.3") as joined:
            first.wait_until(lambda: first.text().count("shard 2 on cpu") == 2)
            first.wait_until(lambda: first.text().count("resuming after step") == 2)
            first.wait_for_step(max(first.steps()) + 2)
            joined.signal(joined.process.pid, signal.SIGTERM)
            assert (joined.end(), first.end()) == (75, 75), first.text() + joined.text()
        assert first.left() | lost.left() == {}
    assert "restart 1 of 3: " in first.text()
    assert re.search("machines.*newest checkpoint", first.text())
    saved = newest(tiny)
    assert [record["step"] for record in tiny.records()] == [*range(1, saved + 1)]
    assert cli.run(["train", config, "--job.name=uninterrupted", "--training.steps=15"]) == 0
    assert tiny.losses()[:15] == pytest.approx(tiny.losses("uninterrupted"), rel=1e-4)
