"""The watchdog: what is suspicious, who did not arrive and why, and what is reported."""

import logging
import math
import os
import platform
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist

from titanlite.config.schema import Comm
from titanlite.runtime.proc import blocked_call, descendants, state_of, work_done
from titanlite.runtime.process_group import Ranks
from titanlite.runtime.ranks import ranks_text
from titanlite.runtime.timeouts import PhaseTimeouts
from titanlite.runtime.watchdog import Watchdog
from titanlite.runtime.watchdog_board import Answer, Aside, Board
from titanlite.runtime.watchdog_report import (
    Beat,
    explain,
    find_culprits,
    may_report,
    suspicious_after,
)
from titanlite.runtime.watchdog_waiting import Waiting, main_thread_waits_for

IN_COLLECTIVE = Waiting("collective", "is in a collective")
ASLEEP = Waiting("code", "is in its own code (mine.py:3, loss)")
NO_DATA = Waiting("data", "waits for a data worker (process 12, which is stopped)")


def suspicious(phase: str = "forward", *, timeout: float = 300, starting: bool = False, busy: bool = False,
               longest: float = 0.5) -> float:  # fmt: skip
    return suspicious_after(timeout, phase=phase, is_starting=starting, is_busy=busy, longest_step=longest)


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (suspicious(), 20),
        (suspicious(longest=4), 40),
        (suspicious(longest=60), 150),  # long before the timeout
        (suspicious(longest=200), 400),  # but never a usual step
        (suspicious(busy=True), 20),  # a loop without end
        (suspicious(timeout=6), 3),
        (suspicious(timeout=6, longest=0), 1),
        (suspicious("forward", timeout=1800, starting=True), 120),
        (suspicious("forward", timeout=1800, starting=True, busy=True), 900),  # it compiles
        (suspicious("validation", timeout=1800), 120),
        (suspicious("validation", timeout=1800, busy=True), 900),
        (suspicious("checkpoint", timeout=3600, busy=True), 1800),
        (suspicious("data preparation", timeout=1800, busy=True), math.inf),  # text: hours
        (suspicious("data preparation", timeout=1800), 120),
    ],
)
def test_what_is_suspicious(seconds: float, expected: float) -> None:
    assert seconds == pytest.approx(expected)


def beat(rank: int, *, kind: str = "collective", host: str = "host-a", text: str = "", **counts: int) -> Beat:
    text = text or ("is in a collective" if kind == "collective" else "is in its own code (mine.py:3, loss)")
    return Beat(rank, host, 4700 + rank, 8, 12, "backward", 24.0, 20.0, counts, kind, text)


def beats(*each: Beat) -> dict[int, Beat]:
    return {it.rank: it for it in each}


def test_the_rank_that_started_fewer_collectives_is_the_culprit() -> None:
    assert find_culprits(beats(beat(0, world=7), beat(1, world=6, kind="code"), beat(2, world=7)), []) == [1]


def test_a_rank_that_waits_itself_is_no_culprit() -> None:
    """HSDP: rank 3 is asleep, rank 2 waits for it in their shard group, rank 0 waits for rank 2 over replicas."""
    found = find_culprits(
        beats(
            beat(0, shard_01=5, replica_02=9),
            beat(1, shard_01=5, replica_13=9),
            beat(2, shard_23=5, replica_02=8),
            beat(3, shard_23=4, replica_13=8, kind="code"),
        ),
        [],
    )
    assert found == [3]


def test_a_rank_without_a_heartbeat_is_the_culprit() -> None:
    assert find_culprits(beats(beat(0, world=7), beat(1, world=6)), [1]) == [1]
    assert find_culprits(beats(beat(0, world=7)), [1]) == [1]


def test_ranks_that_did_the_same_outside_of_collectives_are_culprits() -> None:
    both = beats(beat(0, world=7, kind="data"), beat(1, world=7, kind="data"))
    assert find_culprits(both, []) == [0, 1]


def test_all_in_one_collective_have_no_culprit() -> None:
    assert find_culprits(beats(beat(0, world=7), beat(1, world=7)), []) == []


def test_hosts_that_wait_for_gpus_have_no_culprit() -> None:
    both = [replace(beat(rank, world=7, kind="code"), on_gpu=True) for rank in range(2)]
    assert find_culprits(beats(*both), []) == []
    assert find_culprits(beats(both[0], replace(both[1], kind="files")), []) == [0, 1]


def test_a_culprit_that_works_has_its_time() -> None:
    both = beats(beat(0, world=7), replace(beat(1, world=6, kind="code"), limit=900.0))
    assert not may_report(both, [1], [], replace(both[0], waited=24.0))
    assert may_report(both, [1], [], replace(both[0], waited=900.0))
    assert may_report(both, [0], [], replace(both[0], waited=20.0))


def test_a_rank_without_a_reason_is_silent_or_has_its_time() -> None:
    both = beats(beat(0, world=7), beat(1, world=6, kind=""))
    assert not may_report(both, [1], [], replace(both[0], waited=24.0))
    assert may_report(both, [1], [1], replace(both[0], waited=24.0))


def test_the_limit_of_an_earlier_step_does_not_count_for_a_silent_rank() -> None:
    compiling = replace(beat(1, world=6), limit=900.0)
    both = beats(beat(0, world=7), compiling)
    mine = replace(both[0], waited=24.0, step=compiling.step + 1)
    assert may_report(both, [1], [1], mine)
    assert not may_report(both, [1], [], mine), "it has a heartbeat, and compiles"
    assert not may_report(both, [1], [1], replace(mine, step=compiling.step))


def test_a_debugger_is_no_hang() -> None:
    both = beats(beat(0, world=7), beat(1, world=6, kind="debugger"))
    assert not may_report(both, [1], [], replace(both[0], waited=1e6))


@pytest.mark.parametrize(
    ("ranks", "text"), [([1], "rank 1"), ([2, 0], "ranks 0, 2"), ([0, 2, 3, 4, 7], "ranks 0, 2-4, 7")]
)
def test_ranks_in_words(ranks: list[int], text: str) -> None:
    assert ranks_text(ranks) == text


def test_a_late_rank_in_words() -> None:
    three = beats(beat(0, world=7), beat(1, world=6, kind="data", host="host-b", text=NO_DATA.text), beat(2, world=7))
    assert explain(three, [1], [], {}, ranks=4) == (
        "rank 1 on host-b (process 4701) waits for a data worker (process 12, which is stopped) since 24 s; "
        "ranks 0, 2-3 wait for it"
    )


@pytest.mark.parametrize(
    ("states", "text"),
    [
        ({1: "T"}, "the process is stopped (state T): `kill -CONT 4701` resumes it"),
        ({1: "t"}, "the process is in a debugger (state t)"),
        ({1: "D"}, "the process waits for a disk (state D)"),
        ({1: ""}, "the process is gone"),
        ({}, "the process is stopped, or the host is dead or unreachable"),
    ],
)
def test_a_silent_rank_in_words(states: dict[int, str], text: str) -> None:
    both = beats(beat(0, world=7), beat(1, world=6))
    expected = f"rank 1 on host-a (process 4701) sends no heartbeat: {text}; rank 0 waits for it"
    assert explain(both, [1], [1], states, ranks=2) == expected


def test_a_silent_process_that_runs_in_words() -> None:
    both = beats(beat(0, world=7), beat(1, world=6))
    text = explain(both, [1], [1], {1: "R"}, ranks=2)
    assert "sends no heartbeat, though the process runs: a call outside of Python does not return" in text


def test_a_dead_host_in_words() -> None:
    four = beats(*(beat(rank, world=7, host="host-a" if rank < 2 else "host-b") for rank in range(4)))
    assert explain(four, [2, 3], [2, 3], {}, ranks=4) == (
        "ranks 2-3 on host-b send no heartbeat: the process is stopped, or the host is dead or unreachable; "
        "ranks 0-1 wait for them"
    )


def test_a_stuck_collective_in_words() -> None:
    both = beats(beat(0, world=7), beat(1, world=7, host="host-b"))
    assert explain(both, [], [], {}, ranks=2) == (
        "all 2 ranks are in the same collective, which does not end: look at the network between host-a, host-b"
    )


# A rank


class Rank:
    """A rank with its watchdog, on a clock and in a phase that the test sets."""

    def __init__(self, job: "TwoRanks", rank: int) -> None:
        self.phase = PhaseTimeouts(job.comm, set_seconds=lambda seconds: None, wait_for_all=lambda: None)
        self.collectives = 1
        self.waits = IN_COLLECTIVE
        self.busy = False
        self.ended: list[tuple[str, int]] = []
        self.board = Board(lambda: job.connect(), rank, 2)
        self.watchdog = Watchdog(
            self.phase,
            self.board,
            Ranks(rank, 2, rank, 2),
            logs=job.folder,
            end=lambda message, code: self.ended.append((message, code)),
            clock=lambda: job.now,
            count=lambda: {"world": self.collectives},
            waits_for=lambda: self.waits,
            is_busy=lambda now: self.busy,
        )
        self.stopped = False


class TwoRanks:
    """Two ranks of a job that have trained some steps."""

    def __init__(self, folder: Path) -> None:
        self.comm = Comm(train_timeout_seconds=300)
        self.folder = folder
        store = dist.HashStore()
        self.connect: Callable[[], dist.Store] = lambda: store
        self.now = 1000.0
        for rank in range(2):
            (folder / f"rank-{rank}.log").touch()
        self.ranks = [Rank(self, rank) for rank in range(2)]
        for step in range(1, 8):
            for rank in self.ranks:
                rank.phase.begin_step(step)
                rank.collectives += 10
            self.run(2)

    def run(self, seconds: float) -> None:
        """Let time go by, with the looks of the watchdogs in it."""
        for _ in range(round(seconds / 2)):
            self.now += 2
            for rank in self.ranks:
                if not rank.stopped:
                    rank.watchdog.tick()

    def close(self) -> None:
        for rank in self.ranks:
            rank.watchdog.close()


@pytest.fixture
def job(tmp_path: Path) -> Iterator[TwoRanks]:
    job = TwoRanks(tmp_path)
    assert [rank.watchdog.interval for rank in job.ranks] == [2.0, 2.0]
    yield job
    job.close()


def hang(lines: pytest.LogCaptureFixture, count: int) -> list[str]:
    """Return the lines of the watchdogs, which other threads write."""
    deadline = time.monotonic() + 20
    while len(lines.messages) < count and time.monotonic() < deadline:
        time.sleep(0.01)
    return lines.messages


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    logging.getLogger("titanlite").propagate = True
    return caplog


@pytest.mark.long
def test_one_rank_reports_once_and_also_the_end(job: TwoRanks, lines: pytest.LogCaptureFixture) -> None:
    job.ranks[0].phase.phase("backward")
    job.ranks[0].collectives += 1
    job.ranks[1].waits = ASLEEP
    job.run(12)
    assert lines.messages == []
    job.run(60)
    [line] = hang(lines, 1)
    assert f"rank 1 on {platform.node()} (process {os.getpid()}) is in its own code (mine.py:3, loss) since 2" in line
    assert line.startswith("hang: no step for 2")
    assert "; rank 0 waits for it. Stacks of all ranks: " in line
    assert line.endswith(" s (comm.train_timeout_seconds)")
    assert [bool(rank.watchdog.report) for rank in job.ranks] == [True, True]
    for rank in range(2):
        wait_for_text(job.folder / f"rank-{rank}.log", "test_one_rank_reports_once")
    for rank in job.ranks:
        rank.phase.begin_step(8)
    job.run(2)
    assert hang(lines, 2)[1].startswith("hang is over: training continues (step 8, data), 7")
    assert [rank.watchdog.report for rank in job.ranks] == ["", ""]
    job.run(60)  # the next hang is another one, and steps are expected to take as long as before
    assert hang(lines, 3)[2].startswith("hang: ")


def wait_for_text(path: Path, text: str) -> None:
    deadline = time.monotonic() + 20
    while text not in path.read_text():
        assert time.monotonic() < deadline, path.read_text()
        time.sleep(0.01)


def test_a_rank_that_stops_is_named(job: TwoRanks, lines: pytest.LogCaptureFixture) -> None:
    job.ranks[1].stopped = True
    job.ranks[0].collectives += 1
    job.run(40)
    [line] = hang(lines, 1)
    # This process has both ranks, and it runs.
    assert "rank 1 on " in line
    assert "sends no heartbeat, though the process runs" in line
    job.now += 300  # the stopped rank runs again, long after its last look
    job.ranks[1].stopped = False
    job.run(2)
    assert job.ranks[1].watchdog.report == ""


@pytest.mark.long
def test_training_is_quiet(job: TwoRanks, lines: pytest.LogCaptureFixture) -> None:
    for step in range(8, 40):  # each step takes 10 s
        for rank in job.ranks:
            rank.phase.begin_step(step)
            rank.collectives += 10
        job.run(10)
    for phase in ("validation", "checkpoint"):  # long and busy
        for rank in job.ranks:
            rank.phase.phase(phase)
            rank.busy = True
        job.run(600)
    for rank in job.ranks:
        rank.phase.phase("data preparation")
    job.run(5000)
    assert lines.messages == []


def test_a_machine_that_sleeps_is_no_hang(job: TwoRanks, lines: pytest.LogCaptureFixture) -> None:
    job.now += 10_000
    job.run(4)
    assert lines.messages == []
    assert [rank.ended for rank in job.ranks] == [[], []]


@pytest.mark.long
def test_a_debugger_is_quiet_and_is_not_ended(job: TwoRanks, lines: pytest.LogCaptureFixture) -> None:
    job.ranks[0].collectives += 1
    job.ranks[1].waits = Waiting("debugger", "is in a debugger")
    job.run(500)
    assert lines.messages == []
    assert [rank.ended for rank in job.ranks] == [[], []]


@pytest.mark.long
def test_a_wait_that_no_collective_ends_is_ended_after_the_timeout(job: TwoRanks) -> None:
    job.ranks[0].collectives += 1
    job.ranks[1].waits = NO_DATA
    job.run(300)
    assert job.ranks[1].ended == []
    job.run(60)
    message, code = job.ranks[1].ended[0]
    assert code == 1
    assert message.startswith("error: rank 1 on ")
    assert f"{NO_DATA.text} since 33" in message
    assert f"longer than comm.train_timeout_seconds = 300: ended. Stacks: {job.folder}/rank-1.log" in message
    assert job.ranks[0].ended == []  # its collective ends it


@pytest.mark.long
def test_a_process_that_works_is_not_ended(job: TwoRanks) -> None:
    for rank in job.ranks:
        rank.waits, rank.busy = ASLEEP, True
    job.run(1000)
    assert [rank.ended for rank in job.ranks] == [[], []]


def test_a_rank_without_the_store_reports_that(job: TwoRanks, lines: pytest.LogCaptureFixture) -> None:
    def unreachable() -> dist.Store:
        raise ConnectionError("no route to host")

    job.connect = unreachable
    for rank in job.ranks:
        rank.board.reconnect()
    job.run(40)
    [line] = hang(lines, 1)  # of the first rank of the machine
    assert line.startswith("hang: no step for ")
    assert "the store of torchrun does not answer since " in line
    assert "look at the network of " in line
    assert "Rank 0 (process " in line


# The store


def test_a_report_is_made_by_the_first_rank_that_asks() -> None:
    store = dist.HashStore()
    boards = [Board(lambda: store, rank, 2) for rank in range(2)]
    boards[1].beat(beat(1))
    first = boards[0].ask(beat(0), attempt=0, read=False)
    assert first.claimed
    assert first.beats == {0: beat(0), 1: beat(1)}
    assert boards[1].ask(beat(1), attempt=0, read=False) == Answer(0)
    assert boards[1].ask(beat(1), attempt=1, read=False).claimed
    assert boards[0].report(0, "why")
    assert not boards[1].report(0, "why else")
    assert boards[1].ask(beat(1), attempt=1, read=False) == Answer(0, "why")
    for board in boards:
        board.close(0)
        board.beat(beat(board.rank))
    assert boards[1].ask(beat(1), attempt=0, read=False).episode == 1


def test_a_call_that_blocks_holds_up_nobody() -> None:
    aside = Aside[int]("test")
    unblocked = threading.Event()
    assert aside.call(lambda: 1, 20) == 1
    assert aside.call(lambda: int(unblocked.wait(20)) + 1, 0.01) is None
    assert aside.call(lambda: 3, 0.01) is None
    unblocked.set()
    deadline = time.monotonic() + 20
    while (result := aside.call(lambda: 4, 20)) is None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert result == 4
    assert isinstance(aside.call(lambda: 1 // 0, 20), ZeroDivisionError)
    aside.close()


# Processes

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")


def blocked(thread: threading.Thread) -> str:
    """Return the call on a file in which a thread is, when it is in one."""
    deadline = time.monotonic() + 20
    while not (call := blocked_call(os.getpid(), thread.native_id or 0)):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return str(call)


@LINUX
def test_the_file_that_a_thread_waits_for_is_named(tmp_path: Path) -> None:
    pipe = tmp_path / "blocks"
    os.mkfifo(pipe)

    def read() -> None:
        with open(pipe, "rb") as file:
            file.read()

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    assert blocked(thread) == f"open of {pipe}"
    with open(pipe, "wb"):
        deadline = time.monotonic() + 20
        while blocked(thread) != f"read of {pipe}":
            assert time.monotonic() < deadline
    thread.join()
    assert blocked_call(os.getpid(), threading.main_thread().native_id or 0) is None


@LINUX
def test_processes_their_states_and_their_work() -> None:
    sleeper = subprocess.Popen(["sleep", "60"])
    try:
        deadline = time.monotonic() + 30
        while not descendants(os.getpid())[sleeper.pid]:  # its memory is replaced just now
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert descendants(os.getpid())[sleeper.pid] == "sleep 60 "
        sleeper.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, sleeper.pid, os.WSTOPPED)
        assert state_of(sleeper.pid) == "T"
    finally:
        sleeper.kill()
        sleeper.wait()
    assert state_of(sleeper.pid) == ""
    before = work_done(os.getpid())
    while work_done(os.getpid())[0] < before[0] + 0.05:
        sum(range(10000))
    Path(os.devnull).write_bytes(bytes(2**20))
    assert work_done(os.getpid())[1] >= before[1] + 2**20


def test_the_main_thread_is_in_its_own_code() -> None:
    waiting = main_thread_waits_for()
    assert waiting.kind == "code"
    assert "test_watchdog.py" in waiting.text or "watchdog_waiting.py" in waiting.text
