"""Memory runs out in a real run: what is told, how it ends, and that no child process is left."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import TinyRun, run_ranks
from titanlite.config.schema import Config

PARAMETERS = 62_622
CODE = """
import torch
from torch._subclasses.fake_tensor import FakeTensor
from titanlite.loss import token_loss

calls = [0]

def is_second(tensor):
    if isinstance(getattr(tensor, "_local_tensor", tensor), FakeTensor):
        return False
    calls[0] += 1
    return calls[0] == 2

def fail():
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. If reserved but unallocated memory")

def in_forward(hidden, weight, *, labels_BL):
    if is_second(hidden):
        fail()
    return token_loss(hidden, weight, labels_BL=labels_BL)

class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden):
        ctx.fails = is_second(hidden)
        return hidden.clone()

    @staticmethod
    def backward(ctx, gradient):
        if ctx.fails:
            fail()
        return gradient

def in_backward(hidden, weight, *, labels_BL):
    return token_loss(Fails.apply(hidden), weight, labels_BL=labels_BL)

class Failing(torch.optim.SGD):
    def step(self, closure=None):
        parameters = self.param_groups[0]["params"]
        if len(parameters) > 1 and is_second(parameters[0].grad):
            fail()
        return super().step()

def unplannable(hidden, weight, *, labels_BL):
    if isinstance(hidden, FakeTensor):
        raise LookupError("no values to look at")
    return token_loss(hidden, weight, labels_BL=labels_BL)

def unplannable_in_forward(hidden, weight, *, labels_BL):
    if not isinstance(hidden, FakeTensor) and is_second(hidden):
        fail()
    return unplannable(hidden, weight, labels_BL=labels_BL)
"""


@pytest.fixture
def code(tiny: TinyRun) -> Path:
    """A file of the user's own."""
    path = tiny.folder / "own_code.py"
    path.write_text(CODE)
    return path


def planners(folder: Path) -> list[int]:
    """Processes that plan, of runs that were started in this folder."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes().split(b"\0")
            if b"titanlite.plan.forecast" in words and (process / "cwd").resolve() == folder.resolve():
                found.append(int(process.name))
        except OSError:
            continue
    return found


def train(tiny: TinyRun, *options: str, processes: int = 1) -> tuple[int, list[str]]:
    """Exit code, and lines of standard error without their `error: `. No planner is left."""
    script = Path(__file__).parents[2] / "run_train.sh"
    result = subprocess.run(
        [str(script), "--config", str(tiny.toml), *options],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        cwd=tiny.folder,
        env=os.environ | {"OMP_NUM_THREADS": "1", "NPROC": str(processes)},
    )
    assert planners(tiny.folder) == []
    return result.returncode, [line.removeprefix("error: ") for line in result.stderr.splitlines() if "error: " in line]


def plan_of(tiny: TinyRun) -> dict[str, Any]:
    return json.loads((tiny.folder / "outputs" / "tiny" / "plan.json").read_text())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("option", "name", "phase", "states", "gradients"),
    [
        ("training.loss", "in_backward", "backward", 2, None),
        ("optimizer.name", "Failing", "update (optimizer)", 0, 1),
    ],
)
def test_the_error_tells_where_and_what_was_planned_and_what_would_fit(
    tiny: TinyRun, code: Path, option: str, name: str, phase: str, states: int, gradients: int | None
) -> None:
    """Which is not sharded: 4 bytes for each parameter, and as many for each of AdamW's moments (SGD has none)."""
    exit_code, lines = train(tiny, f"--{option}={code}:{name}")
    assert exit_code == 1
    assert lines[0].startswith(f"step 2: out of memory on rank 0, {phase}, own_code.py:")
    assert lines[0].endswith(": CUDA out of memory. Tried to allocate 2.00 GiB.")
    plan = plan_of(tiny)
    assert lines[1] == f"GiB at the highest moment that the plan has ({plan['phase']}), and as measured now:"
    assert plan["breakdown"]["parameters"] == 4 * PARAMETERS
    gib = f"{4 * PARAMETERS / 2**30:.3g}"
    rows = {line[:27].strip(): line[27:].split() for line in lines[3:12]}
    assert rows["parameters"] == [gib, gib]
    # The step numbers of AdamW, 4 bytes for each of 30 tensors, are not seen in three digits.
    assert rows["optimizer"] == [f"{states * 4 * PARAMETERS / 2**30:.3g}"] * 2
    if gradients is not None:
        assert rows["gradients"][1] == f"{gradients * 4 * PARAMETERS / 2**30:.3g}"
    assert rows["total"] == [f"{plan['peak'] / 2**30:.3g}", "-"]
    assert sum(plan["breakdown"].values()) == plan["peak"]

    assert [way["options"] for way in plan["ways_out"]] == [
        "--training.local_batch_size=4",
        "--activation_checkpoint.mode=selective",
        "--activation_checkpoint.mode=full",
    ]
    assert all(way["peak"] < plan["peak"] for way in plan["ways_out"])
    assert lines[12] == "what takes less, cheapest first:"
    for line, way in zip(lines[13:], plan["ways_out"], strict=True):
        assert line.split()[:2] == [way["options"], f"{way['peak'] / 2**30:.3g}"]


@pytest.mark.slow
def test_of_two_ranks_one_explains(tiny: TinyRun, code: Path) -> None:
    exit_code, lines = train(tiny, f"--training.loss={code}:in_forward", processes=2)
    assert exit_code == 1
    assert len([line for line in lines if line.startswith("step 2: out of memory on rank ")]) == 1
    assert lines.count("what takes less, cheapest first:") == 1
    assert plan_of(tiny)["breakdown"]["parameters"] < 0.6 * 4 * PARAMETERS


@pytest.mark.slow
def test_without_a_plan_the_error_is_the_same(tiny: TinyRun, code: Path) -> None:
    exit_code, lines = train(tiny, f"--training.loss={code}:unplannable_in_forward")
    assert exit_code == 1
    assert lines[0].startswith("step 2: out of memory on rank 0, loss, own_code.py:")
    assert (
        lines[1]
        == "there is no plan of memory to compare with (LookupError: no values to look at); GiB as measured now:"
    )
    assert lines[3].split() == ["parameters", "-", f"{4 * PARAMETERS / 2**30:.3g}"]


def train_beside_a_forecast(rank: int, world_size: int, config: Config, memory: int, folder: Path) -> list[int]:
    """Planners that are there while it trains, and after."""
    import torch

    from titanlite.job import Ranks
    from titanlite.plan.forecast import Forecast
    from titanlite.preflight import preflight
    from titanlite.train import build, finish, train

    os.chdir(folder)
    ranks, device = Ranks(rank, world_size, rank, world_size), torch.device("cpu")
    run = build(config, preflight(config, ranks, device), ranks=ranks, device=device)
    forecast = Forecast(config, ranks, device, memory=memory)
    forecast.start()
    child = forecast._child
    assert child
    counts = [int(child.poll() is None)]
    if "at once" not in str(config.job.name):
        child.wait(100)
    train(run, forecast)
    finish(run)
    forecast.close()
    assert child.returncode is not None
    return [*counts, len(planners(folder))]


def log_of(tiny: TinyRun, name: str) -> list[str]:
    lines = (tiny.folder / "outputs" / name / "logs" / "rank-0.log").read_text().splitlines()
    return [line.partition(" WARNING ")[2] for line in lines if " WARNING memory: " in line]


@pytest.mark.slow
def test_a_run_is_warned_once_of_a_device_that_is_too_small(tiny: TinyRun, code: Path) -> None:
    small, large = 2_400_000, 2**30
    results = {
        name: run_ranks(train_beside_a_forecast, 1, tiny.config(f"--job.name={name}", *options), memory, tiny.folder)
        for name, memory, options in (
            ("small", small, []),
            ("large", large, []),
            ("fails", small, [f"--training.loss={code}:unplannable"]),
            ("at once", small, []),
        )
    }
    assert list(results.values()) == [[[1, 0]]] * 4
    assert [len(tiny.losses(name)) for name in results] == [6] * 4
    assert tiny.losses("small") == tiny.losses("large") == tiny.losses("fails"), "a forecast changes nothing"
    plan = json.loads((tiny.folder / "outputs" / "small" / "plan.json").read_text())
    assert plan["peak"] > small
    assert plan["ways_out"][0]["fits"]
    [warning] = log_of(tiny, "small")
    first = plan["ways_out"][0]
    assert warning.startswith(
        f"memory: this config is predicted to need {plan['peak'] / 2**30:.3g} GiB at its peak ({plan['phase']}), the "
        f"GPU has {small / 2**30:.3g}, of which {plan['usable'] / 2**30:.3g} can be counted on: try "
        f"{first['options']} ({first['peak'] / 2**30:.3g} GiB), or "
    )
    assert log_of(tiny, "large") == log_of(tiny, "fails") == log_of(tiny, "at once") == []
    failed = json.loads((tiny.folder / "outputs" / "fails" / "plan.json").read_text())
    assert failed["failed"] == "LookupError: no values to look at"


def test_a_planner_ends_with_a_process_that_is_killed(tiny: TinyRun) -> None:
    text = f"""
import os, signal, sys, torch
from pathlib import Path
from titanlite.config.load import load
from titanlite.job import Ranks
from titanlite.plan.forecast import Forecast
forecast = Forecast(load({str(tiny.toml)!r}), Ranks(0, 1, 0, 1), torch.device("cpu"), memory=10**6)
forecast.folder.mkdir(parents=True)
forecast.start()
assert forecast._child.poll() is None
print(forecast._child.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    result = subprocess.run(
        [sys.executable, "-c", text], cwd=tiny.folder, stdout=subprocess.PIPE, text=True, timeout=100, check=False
    )
    assert result.returncode == -signal.SIGKILL
    assert int(result.stdout) > 0
    end = time.monotonic() + 60
    while planners(tiny.folder) and time.monotonic() < end:
        time.sleep(0.1)
    assert planners(tiny.folder) == []
    assert not (tiny.folder / "outputs" / "tiny" / "plan.json").exists(), "it was not just done"
