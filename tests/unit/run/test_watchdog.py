"""The watchdog: what is suspicious, who did not arrive and why, and what is reported."""

import os
import platform
import re
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

from tests.support.helpers import mentions, wait_until
from titanlite.observer import Phase
from titanlite.parallelize.reductions import InFlight
from titanlite.run.proc import Waiting, blocked_file, descendants, main_thread_waits_for, state_of, work_done
from titanlite.run.timeouts import PhaseTimeouts
from titanlite.run.watchdog import Beat, Watchdog, explain, find_culprits, may_report, suspicious_after
from titanlite.runtime.process_group import Ranks
from titanlite.schema import Comm
from titanlite.storage.retry import retry

IN_COLLECTIVE = Waiting("collective", "is in a collective")
ASLEEP = Waiting("code", "is in its own code (mine.py:3, loss)")
NO_DATA = Waiting("data", "waits for a data worker (process 12, which is stopped)")


def suspicious(phase: str = "forward", *, timeout: float = 300, busy: bool = False, usual: float = 0.5) -> float:
    return suspicious_after(timeout, Phase(phase), is_starting=False, is_busy=busy, usual=usual)


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (suspicious(), 20),
        (suspicious(usual=12), 36),
        (suspicious(usual=60), 150),  # long before the timeout
        (suspicious(usual=200), 400),  # but never a usual time between two signs of life
        (suspicious(busy=True), 20),  # a loop without end
        (suspicious(timeout=6), 2),
        (suspicious("validation", timeout=1800), 20),
        (suspicious("checkpoint", timeout=3600, busy=True), 1800),
        (suspicious("data preparation", timeout=1800), 20),
    ],
)
def test_what_is_suspicious(seconds: float, expected: float) -> None:
    assert seconds == pytest.approx(expected)


def beat(rank: int, started: int, *, kind: str = "collective") -> Beat:
    return Beat(rank, "host-a", 4700 + rank, 8, 12, "backward", 24.0, 20.0, started, kind)


def beats(*each: Beat) -> dict[int, Beat]:
    return {beat.rank: beat for beat in each}


CODE, DATA, FILES = "code", "data", "files"


@pytest.mark.parametrize(
    ("of_ranks", "silent", "on_gpu", "found"),
    [
        ([(7, ""), (6, CODE), (7, "")], [], False, [1]),
        # HSDP: rank 3 is asleep, rank 2 waits for it in their shard group, rank 0 waits for rank 2 over replicas.
        ([(14, ""), (14, ""), (13, ""), (12, CODE)], [], False, [3]),
        ([(7, ""), (6, "")], [1], False, [1]),
        ([(7, "")], [1], False, [1]),
        ([(7, DATA), (7, DATA)], [], False, [0, 1]),
        ([(7, "")], [], False, [0]),  # a rank alone waits for no network
        ([(7, ""), (7, "")], [], False, []),
        ([(7, CODE), (7, CODE)], [], True, []),  # hosts wait for their GPUs
        ([(7, CODE), (7, FILES)], [], True, [0, 1]),
    ],
)
def test_the_culprit_has_started_fewer_collectives_and_is_in_none(
    of_ranks: list[tuple[int, str]], silent: list[int], on_gpu: bool, found: list[int]
) -> None:
    each = [beat(rank, started, kind=kind or "collective") for rank, (started, kind) in enumerate(of_ranks)]
    assert find_culprits(beats(*each), silent, on_gpu=on_gpu) == found


def test_the_process_of_another_machine_of_the_same_name_is_not_looked_for() -> None:
    mine = replace(beat(0, 7), machine="a")
    for other, named in (("a", "gone"), ("b", "unreachable")):
        both = beats(mine, replace(beat(1, 6), machine=other, pid=2**22 + 1))
        assert mentions(explain(both, [1], [1], ranks=2, here="a"), named)


def test_several_ranks_of_one_reason_are_one_clause() -> None:
    each = [replace(beat(rank, 7, kind=CODE), text="is in its own code (mine.py:3, loss)") for rank in range(3)]
    text = explain(beats(*each), [1, 2], [], ranks=3, here="")
    assert text == "each of ranks 1-2 on host-a is in its own code (mine.py:3, loss) since 24 s; rank 0 waits for them"


def test_a_rank_without_a_reason_is_silent_or_has_its_time() -> None:
    both = beats(beat(0, 7), beat(1, 6, kind=""))
    assert not may_report(both, [1], [], replace(both[0], quiet=24.0))
    assert may_report(both, [1], [1], replace(both[0], quiet=24.0))


def test_the_limit_of_an_earlier_step_does_not_count_for_a_silent_rank() -> None:
    compiling = replace(beat(1, 6), limit=900.0)
    both = beats(beat(0, 7), compiling)
    mine = replace(both[0], quiet=24.0, step=compiling.step + 1)
    assert may_report(both, [1], [1], mine)
    assert not may_report(both, [1], [], mine), "it has a heartbeat, and compiles"
    assert not may_report(both, [1], [1], replace(mine, step=compiling.step))


# A rank


class Rank:
    """A rank with its watchdog, on a clock and in a phase that the test sets."""

    def __init__(self, job: "TwoRanks", rank: int) -> None:
        self.phase = PhaseTimeouts(job.comm, set_seconds=lambda seconds: None, wait_for_all=lambda: None)
        self.collectives = 1
        self.waits = IN_COLLECTIVE
        self.busy = False
        self.starved = 0.0
        self.ended: list[tuple[str, int]] = []
        self.watchdog = Watchdog(
            self.phase,
            Ranks(rank, 2, rank, 2),
            connect=lambda: job.connect(),
            logs=job.folder,
            end=lambda message, code: self.ended.append((message, code)),
            clock=lambda: job.now,
            count=lambda: {"world": self.collectives},
            waits_for=lambda: self.waits,
            is_busy=lambda now: self.busy,
            starved=lambda: self.starved,
        )
        self.stopped = False


class TwoRanks:
    """Two ranks of a job that have trained some steps."""

    def __init__(self, folder: Path, steps: int = 7, comm: Comm | None = None) -> None:
        self.comm = comm or Comm(train_timeout_seconds=300)
        self.folder = folder
        store = dist.HashStore()
        self.connect: Callable[[], dist.Store] = lambda: store
        self.now = 1000.0
        for rank in range(2):
            (folder / f"rank-{rank}.log").touch()
        self.ranks = [Rank(self, rank) for rank in range(2)]
        for step in range(1, steps + 1):
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
                    rank.watchdog.look()
                    rank.watchdog.talk()

    def close(self) -> None:
        for rank in self.ranks:
            rank.watchdog.close()


@pytest.fixture
def job(tmp_path: Path) -> Iterator[TwoRanks]:
    job = TwoRanks(tmp_path)
    assert [rank.watchdog.interval for rank in job.ranks] == [2.0, 2.0]
    yield job
    job.close()


def hang(caplog: pytest.LogCaptureFixture, count: int) -> list[str]:
    """Return the lines of the watchdogs, which other threads write."""
    wait_until(lambda: len(caplog.messages) >= count)
    return caplog.messages


@pytest.mark.long
def test_one_rank_reports_once_and_also_the_end(job: TwoRanks, caplog: pytest.LogCaptureFixture) -> None:
    job.ranks[0].phase.enter(Phase.BACKWARD)
    job.ranks[0].collectives += 1
    job.ranks[1].waits = ASLEEP
    job.run(12)
    assert caplog.messages == []
    job.run(60)
    [line] = hang(caplog, 1)
    assert mentions(line, "rank 1", platform.node(), f"process {os.getpid()}", "mine.py:3, loss")
    assert re.search(r"loss\).*\b2\d s\b.*\b2\d\d s\b", line)
    assert line.startswith("hang: no step for 2")
    assert mentions(
        line, "rank 0 waits", "comm.train_timeout_seconds", "rank 0 in step 7, backward", "rank 1 in step 7, data"
    )
    assert [bool(rank.watchdog.report) for rank in job.ranks] == [True, True]
    for rank in range(2):
        wait_for_text(job.folder / f"collectives-rank-{rank}.json", "version")
    for rank in job.ranks:
        rank.phase.begin_step(8)
    job.run(2)
    assert re.search(r"over.*step 8, data.*\b7\d s\b", hang(caplog, 2)[1])
    assert [rank.watchdog.report for rank in job.ranks] == ["", ""]
    job.run(60)  # the next hang is another one, and steps are expected to take as long as before
    assert hang(caplog, 3)[2].startswith("hang: ")


def wait_for_text(path: Path, text: str) -> None:
    wait_until(lambda: path.exists() and text in path.read_text())


@pytest.mark.parametrize("number", [0, 1])
def test_a_rank_that_stops_is_named_by_the_other(job: TwoRanks, caplog: pytest.LogCaptureFixture, number: int) -> None:
    stopped, other = job.ranks[number], job.ranks[1 - number]
    stopped.stopped = True
    other.collectives += 1
    job.run(40)
    [line] = hang(caplog, 1)
    assert f"rank {number} on " in line
    assert "heartbeat" in line
    assert f"; rank {1 - number} waits for it" in line
    job.now += 300  # the stopped rank runs again, long after its last look
    stopped.stopped = False
    job.run(2)
    assert stopped.watchdog.report == ""


@pytest.mark.parametrize("steps", [0, 2])
def test_a_hang_in_the_first_steps_is_named_within_30_seconds(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, steps: int
) -> None:
    """Though they have `comm.init_timeout_seconds`, and a rank that compiles is left alone, also if another waits."""
    job = TwoRanks(tmp_path, steps)
    for rank in job.ranks:
        rank.phase.enter(Phase.FORWARD if steps else Phase.MODEL)
        rank.collectives += 1
        rank.waits, rank.busy = ASLEEP, True
    job.run(100)
    job.ranks[0].phase.enter(Phase.BACKWARD)
    job.ranks[0].waits, job.ranks[0].collectives = IN_COLLECTIVE, job.ranks[0].collectives + 1
    job.run(100)
    assert caplog.messages == []
    job.ranks[1].busy = False
    job.run(30)
    [line] = hang(caplog, 1)
    assert mentions(line, "rank 1", platform.node(), f"process {os.getpid()}", "mine.py:3, loss")
    assert re.search(r"mine\.py:3, loss\).*\b2\d\d s\b", line)
    assert [rank.ended for rank in job.ranks] == [[], []], "a line, and no end"
    job.close()


def test_stacks_are_written_while_python_may_not_run(tmp_path: Path) -> None:
    """By faulthandler's own thread, from one look on."""
    job = TwoRanks(tmp_path, 0, Comm(init_timeout_seconds=2))
    for rank in job.ranks:
        rank.watchdog.look()
    wait_for_text(tmp_path / "rank-1.log", "the main thread is 0x")
    wait_for_text(tmp_path / "rank-1.log", "in wait_until")
    job.close()


@pytest.mark.long
def test_training_is_quiet(job: TwoRanks, caplog: pytest.LogCaptureFixture) -> None:
    for step in range(8, 18):  # each step takes 10 s
        for rank in job.ranks:
            rank.phase.begin_step(step)
            rank.collectives += 10
        job.run(10)
    for phase in (Phase.VALIDATION, Phase.CHECKPOINT):  # long and busy
        for rank in job.ranks:
            rank.phase.enter(phase)
            rank.busy = True
        job.run(100)
    for rank in job.ranks:
        rank.phase.enter(Phase.DATA_PREPARATION)
    job.run(1000)  # longer than half of the timeout
    assert caplog.messages == []


def test_a_rank_that_gets_no_core_is_no_hang(job: TwoRanks, caplog: pytest.LogCaptureFixture) -> None:
    """It has a 70th of one, and the other rank waits for it in a collective."""
    job.ranks[0].collectives += 1
    job.ranks[1].waits, job.ranks[1].starved = ASLEEP, 2 * 69 / 70
    job.run(600)
    assert caplog.messages == []
    assert [rank.ended for rank in job.ranks] == [[], []]
    job.ranks[1].starved = 0.0
    job.run(30)
    [line] = hang(caplog, 1)
    assert mentions(line, "rank 1", "mine.py:3, loss")


def test_a_machine_that_sleeps_is_no_hang(job: TwoRanks, caplog: pytest.LogCaptureFixture) -> None:
    job.now += 10_000
    job.run(4)
    assert caplog.messages == []
    assert [rank.ended for rank in job.ranks] == [[], []]


@pytest.mark.long
def test_a_debugger_is_quiet_and_is_not_ended(job: TwoRanks, caplog: pytest.LogCaptureFixture) -> None:
    job.ranks[0].collectives += 1
    job.ranks[1].waits = Waiting("debugger", "is in a debugger")
    job.run(360)
    assert caplog.messages == []
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
    assert mentions(message, "comm.train_timeout_seconds = 300", f"{job.folder}/rank-1.log")
    assert job.ranks[0].ended == []  # its collective ends it


@pytest.mark.long
def test_a_process_that_works_is_not_ended(job: TwoRanks) -> None:
    for rank in job.ranks:
        rank.waits, rank.busy = ASLEEP, True
    job.run(360)
    assert [rank.ended for rank in job.ranks] == [[], []]


def test_a_rank_without_the_store_reports_that(job: TwoRanks, caplog: pytest.LogCaptureFixture) -> None:
    def unreachable() -> dist.Store:
        raise ConnectionError("no route to host")

    job.connect = unreachable
    for rank in job.ranks:
        rank.watchdog._store = None
    job.run(40)
    [line] = hang(caplog, 1)  # of the first rank of the machine
    assert line.startswith("hang: no step for ")
    assert mentions(line, "store of torchrun", "network")
    assert "Rank 0 (process " in line


# Processes

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")


@LINUX
def test_the_file_that_a_thread_waits_for_is_named(tmp_path: Path) -> None:
    pipe = tmp_path / "blocks"
    os.mkfifo(pipe)
    began = threading.Event()

    def read() -> None:
        with open(pipe, "rb") as file:
            began.set()
            file.read()

    def waits_for_file() -> bool:
        return blocked_file(os.getpid(), thread.native_id or 0) == str(pipe)

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    with open(pipe, "wb"):
        assert began.wait(20)
        wait_until(waits_for_file)
    thread.join()
    assert blocked_file(os.getpid(), threading.main_thread().native_id or 0) == ""
    sleeper = threading.Thread(target=time.sleep, args=[1], daemon=True)
    sleeper.start()
    time.sleep(0.1)
    assert blocked_file(os.getpid(), sleeper.native_id or 0) == "", "a sleep has the number of a clock there"


@LINUX
def test_processes_their_states_and_their_work() -> None:
    sleeper = subprocess.Popen(["sleep", "60"])
    try:
        wait_until(lambda: descendants(os.getpid())[sleeper.pid] == "sleep 60 ")  # its memory is replaced just now
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


@pytest.mark.long
@LINUX
def test_the_wait_for_a_core_is_known() -> None:
    """A process with the least share of a core waits for another process almost always."""
    script = (
        "import os, sys, time; from titanlite.run.proc import Starvation; os.sched_setaffinity(0, {int(sys.argv[1])})\n"
        "if len(sys.argv) > 2:\n    while True: pass\n"
        "os.nice(19); starvation = Starvation(); starvation.since_last(); began = time.monotonic()\n"
        "while time.monotonic() < began + 2: pass\n"
        "print(starvation.since_last())"
    )
    core = str(min(os.sched_getaffinity(0)))
    other = subprocess.Popen([sys.executable, "-c", script, core, "spin"])
    try:
        time.sleep(1)
        output = subprocess.run([sys.executable, "-c", script, core], capture_output=True, text=True, check=True).stdout
    finally:
        other.kill()
        other.wait()
    assert float(output) > 1


def test_the_main_thread_is_in_its_own_code() -> None:
    waiting = main_thread_waits_for()
    assert waiting.kind == "code"
    assert "test_watchdog.py" in waiting.text or "proc.py" in waiting.text


def test_a_call_to_an_object_store_is_a_wait_for_files() -> None:
    ended, seen = threading.Lock(), list[Waiting]()
    ended.acquire()
    thread = threading.Timer(0.2, lambda: (seen.append(main_thread_waits_for()), ended.release()))
    thread.start()
    assert retry(ended.acquire, name="a file")  # C code that waits, as a socket
    thread.join()
    assert [waiting.kind for waiting in seen] == ["files"]


def test_a_wait_for_a_reduce_scatter_of_cpus_is_a_collective(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = threading.Lock()
    ended.acquire()
    in_flight, seen = InFlight(), []

    def look() -> None:
        seen.append(main_thread_waits_for())
        ended.release()

    monkeypatch.setattr(in_flight, "_finish", ended.acquire)  # C code that waits, as gloo's
    thread = threading.Timer(0.2, look)
    thread.start()
    in_flight.wait()
    thread.join()
    assert seen == [IN_COLLECTIVE]
