"""Memory runs out in a real run: what is printed, and what the printed command suggests."""

import json
import re
import shlex
from pathlib import Path

import pytest

from tests.support.helpers import THREE_BLOCKS, TinyRun, mentions, run_train
from titanlite.tools import cli

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


@pytest.mark.nightly
def test_one_rank_prints_the_command_that_suggests_options(
    tiny: TinyRun, code: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Two ranks run out of memory at once."""
    loss = f"--training.loss={code}:in_backward"
    result = run_train("--config", str(tiny.toml), THREE_BLOCKS, loss, cwd=tiny.folder, NPROC="2", OMP_NUM_THREADS="1")
    assert result.returncode == 1
    head, last = errors(result.stderr)
    assert re.search(r"rank [01]\b", head)
    assert mentions(head, "step 2", "backward", "2.00 GiB")
    name, command, *words = shlex.split(last.partition(": ")[2])
    assert (name, command) == ("titanlite", "plan")
    assert cli.run([command, *words, "--json"]) == 0
    record = json.loads(capfd.readouterr().out)
    assert [suggestion["options"] for suggestion in record["suggestions"]] == [
        {"training.local_batch_size": 2},
        {"activation_checkpoint.mode": "selective"},
        {"activation_checkpoint.mode": "full"},
    ]
    assert all(
        suggestion["fits"] and suggestion["peak"] < record["memory"]["peak"] for suggestion in record["suggestions"]
    )


@pytest.mark.long
@pytest.mark.usefixtures("own_process_group")
def test_an_error_of_one_process_names_its_phase(tiny: TinyRun, code: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["train", "--config", str(tiny.toml), f"--training.loss={code}:in_forward"]) == 1
    [head, last] = errors(capfd.readouterr().err)
    assert mentions(head, "rank 0", "step 2", "forward", "2.00 GiB")
    assert mentions(last, "outputs/tiny/config.toml", "--world-size 1", "--gpus-per-node 1", "--gpu cpu", "--suggest")
