"""Memory runs out in a real run: what is printed, and how the run ends."""

import math
import time
from pathlib import Path

import pytest

from tests.helpers import TinyRun, run_train
from titanlite import cli
from titanlite.config.schema import Config
from titanlite.plan.estimate import Layout, Plan, plan
from titanlite.plan.out_of_memory import gib
from titanlite.runtime.hardware import find_hardware

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
    if isinstance(hidden, FakeTensor):
        raise LookupError("no values to look at")
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
"""


@pytest.fixture
def code(tiny: TinyRun) -> Path:
    """A file of the user's own, with a name that no other test has loaded in this process."""
    path = tiny.folder / f"{tiny.folder.name}.py"
    path.write_text(CODE)
    return path


def errors(standard_error: str) -> list[str]:
    """Lines of standard error that are errors, without their `error: `."""
    return [line.removeprefix("error: ") for line in standard_error.splitlines() if "error: " in line]


def planned(config: Config, world_size: int) -> Plan:
    """The plan for processes of this machine, with memory enough."""
    layout = Layout(world_size, find_hardware("cpu"), world_size)
    return plan(config, layout)


@pytest.mark.nightly
def test_one_rank_prints_the_plan_and_what_would_fit(tiny: TinyRun, code: Path) -> None:
    """Two ranks run out of memory at once."""
    loss = f"--training.loss={code}:in_backward"
    result = run_train("--config", str(tiny.toml), loss, cwd=tiny.folder, NPROC="2", OMP_NUM_THREADS="1")
    assert result.returncode == 1
    lines = errors(result.stderr)
    heads = [place for place, line in enumerate(lines) if line.startswith("out of memory on rank ")]
    assert len(heads) == 1
    head, title, *rest = lines[heads[0] :]
    assert ", step 2" in head
    assert head.endswith(": CUDA out of memory. Tried to allocate 2.00 GiB.")
    config = tiny.config(loss, world_size=2)
    expected = planned(config, 2)
    assert title == f"The plan's peak is {gib(expected.peak)}, at {expected.peak_phase}:"
    shapes = [(259, 42), *[(42,), (42, 42), (14, 42), (14, 42), (42, 42), (42,), (70, 42), (42, 70), (70, 42)] * 3]
    shapes += [(42,), (259, 42)]
    assert sum(math.prod(shape) for shape in shapes) == PARAMETERS
    first_rank = sum(4 * -(-shape[0] // 2) * math.prod(shape[1:]) for shape in shapes)
    assert expected.breakdown["parameters"] == first_rank
    sizes = {line.split()[0]: line.split(maxsplit=1)[1] for line in rest[: rest.index("Suggestions, cheapest first:")]}
    assert sizes == {name: gib(size) for name, size in expected.breakdown.items() if size}
    suggestions = [line.split()[:2] for line in rest[rest.index("Suggestions, cheapest first:") + 1 :][:3]]
    for (option, size), name in zip(
        suggestions,
        ("training.local_batch_size=2", "activation_checkpoint.mode=selective", "activation_checkpoint.mode=full"),
        strict=True,
    ):
        assert option == f"--{name}"
        assert size == gib(planned(tiny.config(loss, option, world_size=2), 2).peak).split()[0]


@pytest.mark.nightly
@pytest.mark.usefixtures("own_process_group")
def test_a_config_that_cannot_be_planned_ends_the_run_all_the_same(
    tiny: TinyRun, code: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    began = time.monotonic()
    assert cli.run(["train", "--config", str(tiny.toml), f"--training.loss={code}:in_forward"]) == 1
    [head, reason] = errors(capfd.readouterr().err)
    assert head.startswith("out of memory on rank 0, step 2")
    assert head.endswith(": CUDA out of memory. Tried to allocate 2.00 GiB.")
    assert reason == (
        "No plan to compare with (LookupError: no values to look at). What needs less memory: docs/memory.md"
    )
    assert time.monotonic() - began < 100
