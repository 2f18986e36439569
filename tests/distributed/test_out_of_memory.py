"""Memory runs out in a real run: what is told, how it ends, and that no child process is left."""

import json
import math
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
def test_the_error_tells_where_and_what_was_planned_and_what_would_fit(tiny: TinyRun, code: Path) -> None:
    """On two ranks, of which one explains. Each has half: 4 bytes for a parameter, and as many for each moment."""
    exit_code, lines = train(tiny, f"--training.loss={code}:in_backward", processes=2)
    assert exit_code == 1
    assert len([line for line in lines if line.startswith("step 2: out of memory on rank ")]) == 1
    start = next(place for place, line in enumerate(lines) if line.startswith("step 2: out of memory on rank "))
    head, title, _, *rest = lines[start:]
    assert "backward, own_code.py:" in head
    assert head.endswith(": CUDA out of memory. Tried to allocate 2.00 GiB.")
    plan = plan_of(tiny)
    assert title == f"GiB at the highest moment that the plan has ({plan['phase']}), and as measured now:"
    shapes = [(259, 42), *[(42,), (42, 42), (14, 42), (14, 42), (42, 42), (42,), (70, 42), (42, 70), (70, 42)] * 3]
    shapes += [(42,), (259, 42)]
    assert sum(math.prod(shape) for shape in shapes) == PARAMETERS
    first_rank = sum(4 * -(-shape[0] // 2) * math.prod(shape[1:]) for shape in shapes)
    assert plan["breakdown"]["parameters"] == first_rank
    rows = {line[:27].strip(): line[27:].split() for line in rest[:9]}
    for cause, times in (("parameters", 1), ("optimizer", 2)):
        planned, measured = (float(cell) * 2**30 for cell in rows[cause])
        assert planned == pytest.approx(times * first_rank, rel=0.01)
        assert measured == pytest.approx(times * 4 * PARAMETERS / 2, rel=0.01)
    assert rows["total"] == [f"{plan['peak'] / 2**30:.3g}", "-"]
    assert sum(plan["breakdown"].values()) == plan["peak"]

    assert [way["options"] for way in plan["ways_out"]] == [
        "--training.local_batch_size=2",
        "--activation_checkpoint.mode=selective",
        "--activation_checkpoint.mode=full",
    ]
    assert all(way["peak"] < plan["peak"] for way in plan["ways_out"])
    assert rest[9] == "what takes less, cheapest first:"
    for line, way in zip(rest[10:13], plan["ways_out"], strict=True):
        assert line.split()[:2] == [way["options"], f"{way['peak'] / 2**30:.3g}"]


def train_beside_a_forecast(rank: int, world_size: int, config: Config, memory: int, folder: Path) -> list[int]:
    """Planners that are there while it trains, and after."""
    import torch

    from titanlite.plan.forecast import Forecast
    from titanlite.preflight import preflight
    from titanlite.runtime.process_group import Ranks
    from titanlite.train import build, finish, train

    os.chdir(folder)
    ranks, device = Ranks(rank, world_size, rank, world_size), torch.device("cpu")
    run = build(config, preflight(config, ranks, device), ranks=ranks, device=device)
    forecast = Forecast(config, ranks, device, memory=memory)
    forecast.start()
    child = forecast._child
    assert child
    counts = [int(child.poll() is None)]
    child.wait(250)  # of low priority, and other tests run beside it
    train(run, forecast)
    finish(run)
    forecast.close()
    assert child.returncode is not None
    return [*counts, len(planners(folder))]


def log_of(tiny: TinyRun, name: str) -> list[str]:
    lines = (tiny.folder / "outputs" / name / "logs" / "rank-0.log").read_text().splitlines()
    return [line.partition(" WARNING ")[2] for line in lines if " WARNING memory: " in line]


@pytest.mark.nightly
def test_a_run_is_warned_once_of_a_device_that_is_too_small(tiny: TinyRun, code: Path) -> None:
    small = 2_400_000
    results = {}
    for name, options in (("small", []), ("fails", [f"--training.loss={code}:unplannable"])):
        config = tiny.config(f"--job.name={name}", *options)
        results[name] = run_ranks(train_beside_a_forecast, 1, config, small, tiny.folder, timeout=300)
    assert list(results.values()) == [[[1, 0]]] * 2
    assert [len(tiny.losses(name)) for name in results] == [6] * 2
    assert tiny.losses("small") == tiny.losses("fails"), "a forecast changes nothing"
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
    assert log_of(tiny, "fails") == []
    failed = json.loads((tiny.folder / "outputs" / "fails" / "plan.json").read_text())
    assert failed["failed"] == "LookupError: no values to look at"


def test_a_planner_ends_with_a_process_that_is_killed(tiny: TinyRun) -> None:
    text = f"""
import os, signal, sys, torch
from pathlib import Path
from titanlite.config.load import load
from titanlite.runtime.job import Ranks
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
