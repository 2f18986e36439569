"""Record of starts and their ends in run.json, and the stop of restarts that make no progress."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.support.helpers import TinyRun, mentions
from titanlite.run.restarts import CrashLoop, RunEnd, are_starts, begin_start, check_progress, end_last
from titanlite.tools import cli

RESTARTED = {"SLURM_RESTART_COUNT": "2"}


def failed(step: int | None, reason: str = "", *, code: int = 1, automatic: bool = True) -> dict[str, Any]:
    start = begin_start(RESTARTED if automatic else {}) | {"step": step}
    return start | ({"end": {"code": code, "reason": reason, "step": step}} if reason else {})


def check(
    starts: list[dict[str, Any]], *, newest: int = 40, limit: int = 3, environ: dict[str, str] = RESTARTED
) -> None:
    check_progress(starts, environ=environ, limit=limit, newest_step=lambda: newest, logs=Path("outputs/x/logs"))


@pytest.mark.parametrize(
    ("starts", "right"),
    [
        ([], True),
        (
            [{}, {"step": None}, {"step": 4, "end": {"code": 1, "reason": "x", "step": 4}}, {"end": {"code": None}}],
            True,
        ),
        *((odd, False) for odd in (None, {}, ["x"], [None], [1], [[]], [{"end": None}], [{"end": 3}], [{"step": "a"}])),
        ([{"end": {"code": "1"}}], False),
    ],
)
def test_odd_starts_are_damage(starts: Any, right: bool) -> None:
    """What passes needs no further check after a restart by Slurm."""
    assert are_starts(starts) == right
    if right:
        end_last(starts, {"TITANLITE_LAST_END": "x"})
        check(starts, environ={"SLURM_RESTART_COUNT": "2"})


@pytest.mark.parametrize(
    ("why", "starts", "options"),
    [
        ("a checkpoint was saved", [failed(40, "x")] * 5, {"newest": 50}),
        ("a stop saved step 50", [failed(40, "x"), failed(40, "SIGTERM", code=75), failed(50), failed(50)], {}),
        ("each resumed from newer local copies", [failed(step, "x") for step in (40, 50, 60, 70)], {}),
        ("one was by hand", [failed(40), failed(40), failed(40, automatic=False), failed(40), failed(40)], {}),
        ("this one is by hand", [failed(40, "x")] * 5, {"environ": {}}),
        ("older versions recorded no ends", [{"time": "2026-01-01", "host": "node0"}] * 5, {}),
    ],
)  # fmt: skip
def test_a_restart_may_train(why: str, starts: list[dict[str, Any]], options: dict[str, Any]) -> None:
    check(starts, **options)


def test_stops_by_signals_without_a_newer_checkpoint_are_a_loop_too() -> None:
    """As with a time limit that ends before the first step, or a run without checkpoints."""
    with pytest.raises(CrashLoop) as caught:
        check([failed(40, "stopped by SIGUSR1", code=code) for code in (128 + signal.SIGUSR1, 75, 75)])
    assert mentions(str(caught.value), "step 40", "SIGUSR1 (3 times)", "job.max_failed_restarts")


def test_the_first_failure_is_the_reason() -> None:
    starts = [failed(40, "Connection closed by peer")]
    end_last(starts, {"TITANLITE_LAST_END": "rank-1 was killed"})
    assert starts[0]["end"] == {"code": 1, "reason": "rank-1 was killed", "step": 40}


@pytest.mark.parametrize("changed", [{"process": os.getppid()}, {"machine": "of the same name"}])
def test_only_the_own_start_is_ended(changed: dict[str, Any], tmp_path: Path) -> None:
    other = {**begin_start({}), **changed}
    (tmp_path / "run.json").write_text(json.dumps({"id": "x", "starts": [other]}))
    with RunEnd().recorded(tmp_path, rank=0, step=lambda: 50):
        pass
    assert "end" not in json.loads((tmp_path / "run.json").read_text())["starts"][0]


def fail(command: list[str]) -> int:
    """Run a command that fails in training. Its process group stays."""
    try:
        return cli.run(command)
    finally:
        dist.destroy_process_group()


@pytest.mark.long
def test_a_loop_of_crashes_ends(
    tiny: TinyRun, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tiny.folder / "crashing.py").write_text("def loss(*args, **options):\n    raise RuntimeError('planted')\n")
    command = ["train", f"--config={tiny.toml}", "--job.max_failed_restarts=2", "--checkpoint.interval=2"]
    fails = f"--training.loss={tiny.folder / 'crashing.py'}:loss"
    assert cli.run([*command, "--training.steps=2"]) == 0
    command.append("--training.steps=4")
    assert fail([*command, fails]) == 1
    monkeypatch.setenv("JOBSET_RESTART_ATTEMPT", "1")
    assert [fail([*command, fails]) for _ in range(2)] == [1, 1]
    capfd.readouterr()
    assert fail([*command, fails]) == 3
    [line] = [line for line in capfd.readouterr().err.splitlines() if line.startswith("error: ")]
    assert mentions(line, "2 restarts", "step 2", "job.max_failed_restarts")
    assert mentions(line, "RuntimeError: planted", "step 3, forward", "2 times")
    monkeypatch.delenv("JOBSET_RESTART_ATTEMPT")
    assert cli.run([*command, "--training.steps=oops"]) == 2
    assert cli.run(command) == 0
    starts = json.loads((tiny.folder / "outputs" / "tiny" / "run.json").read_text())["starts"]
    assert [(start["automatic"], start["step"], start["end"]["code"], start["end"]["step"]) for start in starts] == [
        (False, 0, 0, 2), (False, 2, 1, 3), (True, 2, 1, 3), (True, 2, 1, 3), (False, 2, 0, 4),
    ]  # fmt: skip
