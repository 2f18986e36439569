"""Requests to stop a run: what a signal means when, and planned ends. Signals to real jobs: tests/distributed."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.helpers import TinyRun, built, mentions, wait_until
from tests.support.processes import unhurried
from titanlite.runtime.signals import SAME_SECONDS, STOP_SIGNALS, StoppedBySignal, StopRequests
from titanlite.tools import cli
from titanlite.train import finish, train
from titanlite.validation import Validator


class Ended(list[tuple[str, int]]):
    """Receiver of the ends of a process."""

    def __call__(self, message: str, code: int) -> None:
        self.append((message, code))


def never() -> bool:
    return False


def test_before_a_step_is_complete_a_signal_ends_the_process() -> None:
    ended, requests = Ended(), StopRequests()
    requests.receive(signal.SIGUSR1, ended, never)
    [(line, code)] = ended
    assert (mentions(line, "SIGUSR1"), code) == (True, 128 + signal.SIGUSR1)
    assert not requests.requested()


def test_signals_of_a_scheduler_are_one_request_and_a_second_ctrl_c_ends_the_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Slurm sends USR1 and then TERM at a time limit, and TERM at the beginning and the end of a grace time."""
    ended, requests, now = Ended(), StopRequests(), time.monotonic()
    requests.begin_training()
    requests.receive(signal.SIGUSR1, ended, never)
    assert requests.requested()
    assert requests.reason == "SIGUSR1"
    requests.receive(signal.SIGINT, ended, never)  # a terminal signals all processes, and the launcher passes it on
    monkeypatch.setattr(time, "monotonic", lambda: now + SAME_SECONDS + 24)
    for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        requests.receive(number, ended, never)
    assert ended == []
    requests.receive(signal.SIGINT, ended, never)
    [(line, code)] = ended
    assert (mentions(line, "SIGINT"), code) == (True, 130)


def test_torchrun_ends_the_others_of_a_failed_process() -> None:
    ended, requests = Ended(), StopRequests()
    requests.begin_training()
    requests.receive(signal.SIGTERM, ended, lambda: True)
    assert ended == [("", 1)]


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGUSR2])
def test_signals_of_this_process_arrive(number: signal.Signals) -> None:
    requests = StopRequests()
    before = [signal.getsignal(number) for number in STOP_SIGNALS]
    with requests.listening(Ended(), never):
        requests.begin_training()
        os.kill(os.getpid(), number)
        wait_until(requests.requested)
    assert requests.reason == number.name
    assert [signal.getsignal(number) for number in STOP_SIGNALS] == before


STARTS_A_WORKER = """
import multiprocessing, os, signal, threading, time
from titanlite.run.endings import end_now
from titanlite.run.proc import descendants
from titanlite.runtime.signals import StopRequests, shielding_children

def signal_at_the_start():
    while not any("spawn_main" in line for line in descendants(os.getpid()).values()):
        time.sleep(0.001)
    os.kill(os.getpid(), signal.SIGTERM)

if __name__ == "__main__":
    with StopRequests().listening(end_now, lambda: False):
        threading.Thread(target=signal_at_the_start, daemon=True).start()
        with shielding_children():
            multiprocessing.get_context("spawn").Process(target=len, args=(bytes(10_000_000),)).start()
        time.sleep(60)
"""


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="finds the worker in /proc")
def test_a_worker_that_begins_prints_nothing_when_a_signal_ends_its_process(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(STARTS_A_WORKER)
    ended = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=50, check=False)
    assert (ended.returncode, ended.stdout) == (128 + signal.SIGTERM, "")
    [line] = ended.stderr.splitlines()
    assert mentions(line, "SIGTERM")


@pytest.mark.parametrize(
    ("limit", "slurm_end", "end", "reason"),
    [
        (None, None, float("inf"), ""),
        (60, None, 1060, "training.max_duration"),
        (None, 11_000, 10_700, "the end of the Slurm job"),
        (None, 1_100, 1_090, "the end of the Slurm job"),  # a tenth of a short job
    ],
)
def test_planned_ends(limit: int | None, slurm_end: int | None, end: float, reason: str) -> None:
    requests = StopRequests()
    environ = {} if slurm_end is None else {"SLURM_JOB_END_TIME": str(slurm_end)}
    requests.plan(limit, environ, started=1000 - 700, since_1970=700)
    assert (requests.end, requests.planned) == (end - 700, reason)


def test_a_clock_that_is_set_ends_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    requests, began, day = StopRequests(), time.monotonic(), time.time()
    requests.plan(3600, {"SLURM_JOB_END_TIME": str(int(day) + 7200)}, started=began, since_1970=day - began)
    for jump in (-7200, 7200):
        monkeypatch.setattr(time, "time", lambda jump=jump: day + jump)
        assert not requests.requested()
    monkeypatch.setattr(time, "monotonic", lambda: began + 3601)
    assert requests.requested()
    assert requests.reason == "training.max_duration"


class AfterCalls(StopRequests):
    """Requests that begin after some questions."""

    def __init__(self, calls: int) -> None:
        super().__init__()
        self.calls = calls

    def requested(self) -> bool:
        self.calls -= 1
        return self.calls < 0


def start(tiny: TinyRun, requests: StopRequests | None, *options: str) -> tuple[object, list[int]]:
    """Train, and return why the run stopped and the steps of its checkpoints."""
    run = built(0, 1, tiny.config(*options))
    stopped = train(run, requests)
    finish(run, stopped)
    assert run.folder.lock is not None
    run.folder.lock.close()
    return stopped, sorted(int(path.name[5:]) for path in (run.folder.path / "checkpoints").glob("step-*"))


@pytest.mark.usefixtures("single_process_group")
def test_a_requested_stop_saves_that_step_and_resumes_exactly(tiny: TinyRun) -> None:
    steps = "--training.steps=4"
    stopped, saved = start(tiny, AfterCalls(1), steps)
    assert isinstance(stopped, StoppedBySignal)
    assert (stopped.taken, saved, stopped.exit_code) == (2, [2], 75)
    assert start(tiny, None, steps) == (None, [2, 4])
    assert start(tiny, None, steps, "--job.name=whole") == (None, [4])
    assert tiny.losses() == tiny.losses("whole")


@pytest.mark.long
@pytest.mark.usefixtures("single_process_group")
@pytest.mark.parametrize("steps", [6, 2])
def test_a_stop_beside_other_saves(tiny: TinyRun, steps: int) -> None:
    """Requested while a save runs in the background, and in the last step, which is the end anyway."""
    stopped, saved = start(tiny, AfterCalls(1), "--checkpoint.interval=1", f"--training.steps={steps}")
    assert saved == [1, 2]
    assert (stopped is None) == (steps == 2)


@pytest.mark.usefixtures("single_process_group")
def test_without_checkpoints_a_stop_saves_nothing(tiny: TinyRun) -> None:
    assert start(tiny, AfterCalls(0), "--checkpoint.enable=false")[1] == []


@pytest.mark.long
@pytest.mark.usefixtures("own_process_group")
def test_planned_ends_of_a_run(
    tiny: TinyRun, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    endless = "--training.steps=1000000", "--checkpoint.interval=1000000", unhurried(tiny)
    command = ["train", f"--config={tiny.toml}", *endless]
    assert cli.run([*command, "--training.max_duration=1s"]) == 75
    assert re.search(rf"training\.max_duration.* step {len(tiny.losses())}\b", capfd.readouterr().out)
    now, scontrol = int(time.time()), tiny.folder / "scontrol"
    end = "$(($(date +%s) + 2))"  # a busy machine may ask late
    scontrol.write_text(f"#!/bin/sh\necho JobId=$4 Restarts=0 StartTime={now - 1} EndTime={end}\n")
    scontrol.chmod(0o755)
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(now - 100))  # of another job
    monkeypatch.setenv("PATH", f"{tiny.folder}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    assert cli.run([*command, "--job.name=slurm"]) == 75
    assert re.search(rf"Slurm.* step {len(tiny.losses('slurm'))}\b", capfd.readouterr().out)


@pytest.mark.usefixtures("own_process_group")
def test_a_signal_during_validation_is_not_lost(
    tiny: TinyRun, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    validate = Validator.run

    def signalled(*arguments: Any, **options: Any) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        return validate(*arguments, **options)

    monkeypatch.setattr(Validator, "run", signalled)
    options = "--validation.enable", f"--validation.path={tiny.text}", "--validation.freq=2"
    assert cli.run(["train", f"--config={tiny.toml}", *options]) == 75
    last = len(tiny.losses())
    assert last in (2, 3), "that step, or the next one"
    start = json.loads((tiny.folder / "outputs" / "tiny" / "run.json").read_text())["starts"][-1]
    assert start["end"] == {"code": 75, "reason": f"stopped after step {last} by SIGTERM", "step": last}
