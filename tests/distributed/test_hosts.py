"""Two hosts with a network between them that fails: what the user sees on each, and that nothing is lost."""

import json
import re
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.helpers import TinyRun, mentions
from tests.support.hosts import Network, network
from tests.support.processes import SCRIPT, Job, kill_all, newest, rank_of, started, unhurried
from titanlite.tools import cli

HSDP = "--parallelism.data_parallel_replicate_degree=2", "--parallelism.data_parallel_shard_degree=2"
SAVING = "--checkpoint.interval=10", "--checkpoint.keep_latest_k=0"
STEPS = 45
LONG = "--training.steps=1000000"
SECONDS = 400
"""Longest wait for a start, on a machine that is busy with other tests."""


@pytest.fixture
def hosts() -> Iterator[Network]:
    with network("node0", "node1") as made:
        yield made


def ranks_of(network: Network, jobs: list[Job]) -> dict[str, list[int | None]]:
    """Return {host: its ranks}, as the processes are."""
    found: dict[str, list[int | None]] = {}
    for host, job in zip(network.hosts, jobs, strict=True):
        commands = job.pids()
        found[host.name] = [rank_of(pid, commands[pid]) for pid in job.ranks() if host.has(pid)]
    return found


def wait_for_steps(job: Job, steps: int) -> None:
    job.wait_for_step(max(job.steps(), default=0) + steps)


def ends(jobs: list[Job], seconds: float) -> list[tuple[int, float]]:
    """Return (exit code, seconds from now until it ended) of each job. No process is left of any."""
    began = time.monotonic()
    ended = []
    for job in jobs:
        code = job.end(max(1, began + seconds - time.monotonic()))
        ended.append((code, time.monotonic() - began))
    assert [job.left() for job in jobs] == [{} for _ in jobs]
    return ended


def error_lines(job: Job) -> list[str]:
    return [line for line in job.text().splitlines() if line.startswith("error: ")]


INTERFACE = """
from titanlite.tools.launch import use_interface_of
environ = {}
use_interface_of(environ, "node0:29500")
print(environ.get("GLOO_SOCKET_IFNAME"))
"""


def test_names_that_lead_to_the_machine_itself_do_not_reach_gloo(tmp_path: Path, hosts: Network) -> None:
    """Installers write `127.0.1.1 node0` into /etc/hosts, and gloo would give that address to the other hosts."""
    command = sys.executable, "-c", INTERFACE
    assert [host.run(*command) for host in hosts.hosts] == ["None\n", "None\n"], "their names are right"
    for number, (host, other) in enumerate(zip(hosts.hosts, hosts.hosts[::-1], strict=True)):
        file = tmp_path / host.name
        file.write_text(f"127.0.0.1 localhost\n127.0.1.1 {host.name}\n10.77.0.{2 - number} {other.name}\n")
        host.run("umount", "/etc/hosts")
        host.run("mount", "--bind", str(file), "/etc/hosts")
    first, second = hosts.hosts
    assert second.run(*command) == "eth0\n", "the way to node0"
    assert first.run(*command) == "None\n"
    first.run("ip", "route", "add", "default", "via", "10.77.0.2")
    assert first.run(*command) == "eth0\n", "the default route"


@pytest.mark.slow
def test_nothing_is_lost_when_the_network_fails_and_when_a_host_dies(tiny: TinyRun, hosts: Network) -> None:
    options = f"--config={tiny.toml}", *SAVING, LONG, unhurried(tiny), "--comm.train_timeout_seconds=150"
    with hosts.job(tiny.folder, *options, NPROC="1") as jobs:
        first, second = jobs
        first.wait_for_step(4)
        assert ranks_of(hosts, jobs) == {"node0": [0], "node1": [1]}
        start = json.loads((tiny.folder / "outputs" / "tiny" / "run.json").read_text())["starts"][-1]
        assert start["mesh"] == {"replicate": 1, "shard": 2}
        assert start["host"] == "node0"
        began = time.monotonic()
        hosts.tell("cut")
        first.wait_until(lambda: "hang: " in first.text(), SECONDS)
        reported = time.monotonic() - began
        [line] = [line for line in first.text().splitlines() if "hang: " in line]
        assert mentions(line, "rank 1 on node1", "no heartbeat", "host")
        hosts.tell("restore")
        wait_for_steps(first, 2)
        assert first.steps() == list(range(1, max(first.steps()) + 1))
        first.wait_until(lambda: "hang is over: training continues" in first.text(), SECONDS)
        hosts.tell("delay", 0.02)
        hosts.tell("loss", 0.02)
        wait_for_steps(first, 4)
        hosts.tell("delay", 0)
        hosts.tell("loss", 0)
        first.wait_until(lambda: newest(tiny, killed=True) >= 10, SECONDS)
        saved = newest(tiny, killed=True)
        hosts.hosts[1].kill()
        (code, seconds), _ = ends(jobs, 120)
        assert code == 1
        [line] = error_lines(first)
        assert "on node0 failed at step " in line
        assert "peer" in line, "the connection to the other host is what failed"
        assert not error_lines(second)
        assert newest(tiny, killed=True) >= saved
    print(f"cut reported: {reported:.1f} s; host killed: {seconds:.1f} s")
    last = newest(tiny, killed=True) + 2
    assert cli.run(["train", f"--config={tiny.toml}", f"--training.steps={last}"]) == 0
    assert_as_one_process(tiny, last)


@pytest.mark.slow
def test_a_machine_is_replaced_by_an_empty_one(tiny: TinyRun, hosts: Network) -> None:
    """Each host has memory of its own for local copies. No shared checkpoint was saved yet."""
    copies = "--checkpoint.local_interval=4", "--checkpoint.interval=100000", unhurried(tiny)
    options = f"--config={tiny.toml}", *copies
    for host in hosts.hosts:
        host.run("mount", "-t", "tmpfs", "tmpfs", "/dev/shm")
    with hosts.job(tiny.folder, *options, LONG, NPROC="1") as jobs:
        jobs[0].wait_for_step(14)
        kill_all(jobs[1].pids())
        assert [code for code, _ in ends(jobs, 120)] == [1, -signal.SIGKILL]
        done = max(jobs[0].steps())
    hosts.hosts[1].run("mount", "-t", "tmpfs", "tmpfs", "/dev/shm")
    last = done + 3
    with hosts.job(tiny.folder, *options, f"--training.steps={last}", NPROC="1") as jobs:
        assert [code for code, _ in ends(jobs, SECONDS)] == [0, 0]
        resumed_at = int(re.findall(r"^resuming after step (\d+)", jobs[0].text(), re.M)[0])
    assert resumed_at % 4 == 0
    assert 0 < done - resumed_at < 8, "the last copy, or the one before if that was still being made"
    print(f"killed after step {done}, resumed at {resumed_at}")
    assert_as_one_process(tiny, last)


@pytest.mark.nightly
def test_a_link_that_stays_cut_ends_both_hosts(tiny: TinyRun, hosts: Network) -> None:
    with hosts.job(
        tiny.folder, f"--config={tiny.toml}", *HSDP, LONG, "--comm.train_timeout_seconds=8", NPROC="2"
    ) as jobs:
        jobs[0].wait_for_step(4)
        hosts.tell("cut")
        ended = ends(jobs, 100)
        assert [code for code, _ in ended] == [1, 1]
        assert all(seconds > 7 for _, seconds in ended), "the timeout of steps"
        errors = [error_lines(job) for job in jobs]
        assert [len(lines) for lines in errors] == [1, 1], errors
        for number, [line] in enumerate(errors):
            assert f"on node{number} failed at step " in line
        assert any("Timed out waiting 8000ms" in line for [line] in errors)
    print(f"link cut: {ended}")


@pytest.mark.nightly
@pytest.mark.parametrize("number", [0, 1])
def test_a_rank_that_stays_stopped_ends_with_the_other_host(tiny: TinyRun, hosts: Network, number: int) -> None:
    """Nothing but SIGKILL ends such a process, and only its own launcher can send that."""
    options = f"--config={tiny.toml}", "--comm.train_timeout_seconds=8", LONG
    with hosts.job(tiny.folder, *options, NPROC="1") as jobs:
        jobs[0].wait_for_step(4)
        [rank] = [pid for pid in jobs[number].ranks() if hosts.hosts[number].has(pid)]
        jobs[number].signal(rank, signal.SIGSTOP)
        assert [code for code, _ in ends(jobs, 100)] == [1, 1]


@pytest.mark.nightly
def test_a_host_that_is_left_resumes_alone(tiny: TinyRun, hosts: Network) -> None:
    environ = {"NNODES": "1:2", "NPROC": "2", "MAX_RESTARTS": "2", "RDZV_CONF": "last_call_timeout=5"}
    degrees = "--parallelism.data_parallel_replicate_degree=2", "--parallelism.data_parallel_shard_degree=-1"
    with hosts.job(
        tiny.folder, f"--config={tiny.toml}", *degrees, *SAVING, f"--training.steps={STEPS}", **environ
    ) as jobs:
        first, _ = jobs
        first.wait_until(lambda: newest(tiny, killed=True) >= 10, SECONDS)
        hosts.hosts[1].kill()
        began = time.monotonic()
        first.wait_until(lambda: "replicate 2 x shard 1" in first.text(), SECONDS)
        seconds = time.monotonic() - began
        assert first.end(SECONDS) == 0, first.text()
        assert first.left() == {}
        assert "replicate 2 x shard 2" in first.text()
    print(f"the host that is left trains alone after {seconds:.1f} s")
    assert_as_one_process(tiny, STEPS)


def assert_as_one_process(tiny: TinyRun, steps: int) -> None:
    """Compare the losses of a run that two hosts began with those of one process that nothing happened to."""
    assert cli.run(["train", f"--config={tiny.toml}", "--job.name=alone", f"--training.steps={steps}"]) == 0
    records = tiny.records()
    assert [record["step"] for record in records] == list(range(1, steps + 1))
    assert tiny.losses() == pytest.approx(tiny.losses("alone"), rel=1e-5)


@pytest.mark.nightly
def test_the_example_of_two_hosts(tiny: TinyRun, hosts: Network) -> None:
    script = SCRIPT.parent / "examples" / "two_hosts.sh"
    settings = f"FIRST=node0 FOLDER={tiny.folder}/outputs CONFIG={tiny.toml} NPROC=1".split()
    commands = [host.inside("env", *settings, f"--chdir={tiny.folder}", str(script)) for host in hosts.hosts]
    with (
        started(tiny.folder, "--training.steps=3", command=commands[0]) as first,
        started(tiny.folder, "--training.steps=3", command=commands[1]) as second,
    ):
        assert [code for code, _ in ends([first, second], SECONDS)] == [0, 0], [first.text(), second.text()]
        assert "replicate 2 x shard 1" in first.text()
    assert [record["step"] for record in tiny.records()] == [1, 2, 3]
