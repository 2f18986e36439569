"""Steps with a teacher: gradients of accumulated micro-batches, frozen parameters, and resume on another layout."""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.distillation import KINDS, Given, plain
from tests.helpers import TinyRun, built, train_on_this_rank
from tests.layouts import one_step, whole
from titanlite.batch import IGNORE
from titanlite.checkpoint.state import model_state
from titanlite.models.base import unique_parameters
from titanlite.observer import StepObserver
from titanlite.step import Gradients, accumulate, count_valid_tokens
from titanlite.tools.convert.source import load_model, open_source

NARROW = ["--model.args.dim=36", "--model.args.n_layers=2"]
DISTILL = ["--distill.ratio=0.6", "--distill.temperature=2.0"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TinyRun]:
    """The folder of a teacher and of a narrower student, in a process group of this process alone."""
    tiny = TinyRun(tmp_path_factory.mktemp("steps"))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        for name, options in (("teacher", []), ("student", NARROW)):
            train_on_this_rank(tiny.config(*options, f"--job.name={name}", "--training.steps=2"), 0, 1)
        yield tiny
    finally:
        dist.destroy_process_group()


def of(tiny: TinyRun, name: str) -> Path:
    return tiny.folder / "outputs" / name


@pytest.mark.parametrize("kind", [KINDS[0], *(pytest.param(kind, marks=pytest.mark.nightly) for kind in KINDS[1:])])
def test_accumulated_gradients_are_those_of_the_plain_loss_of_the_whole_batch(runs: TinyRun, kind: str) -> None:
    """Micro-batches with different numbers of labels that count weigh by tokens."""
    begin = f"--checkpoint.initial_load_path={of(runs, 'student')}"
    options = [*NARROW, *DISTILL, f"--teacher.path={of(runs, 'teacher')}", f"--distill.kind={kind}", begin]
    config = runs.config(*options, "--training.local_batch_size=4", f"--job.name={kind}")
    run = built(0, 1, config)
    assert run.accumulation == 2
    batches = list(islice(run.batches, 2))
    run.batches.close()
    batches[0]["labels"][:3, 5:] = IGNORE
    accumulate(
        run.model, batches, group=run.group, loss_function=run.loss_function, targets=run.targets,
        gradients=Gradients(), reduce_once=False, observer=StepObserver(),
    )  # fmt: skip
    student, teacher = (load_model(open_source(str(of(runs, name)))) for name in ("student", "teacher"))
    tokens, labels = (torch.cat([batch[key] for batch in batches]) for key in ("tokens", "labels"))
    with torch.no_grad():
        theirs = teacher(tokens)
    one = torch.eye(theirs.shape[-1])
    loss, _ = plain(student(tokens), one, labels, Given(theirs, one), config.distill, 0.0)
    names, parameters = zip(*unique_parameters(student), strict=True)
    expected = torch.autograd.grad(loss / count_valid_tokens(batches, run.group), parameters)
    found = dict(unique_parameters(run.model))
    assert found.keys() == set(names)
    for name, gradient in zip(names, expected, strict=True):
        mine = found[name].grad
        assert mine is not None
        assert (whole(mine) - gradient).norm() < 1e-6 * gradient.norm(), name


def test_neither_frozen_nor_the_teachers_bits_change(runs: TinyRun) -> None:
    frozen = '--freeze.parameters=["tok_embeddings.*", "layers.0.*", "layers.1.attention.wq.weight"]'
    options = [*NARROW, *DISTILL, f"--teacher.path={of(runs, 'teacher')}", frozen, "--lr_scheduler.warmup_steps=0"]
    run = built(0, 1, runs.config(*options, "--job.name=frozen", "--training.local_batch_size=4"))
    before = {name: whole(p) for name, p in unique_parameters(run.model)}
    for _ in range(2):
        assert float(one_step(run).added_loss) != 0
    run.batches.close()
    still = {name for name, p in unique_parameters(run.model) if torch.equal(whole(p), before[name])}
    first = {name for name in before if name.startswith("layers.0.")}
    assert still == first | {"tok_embeddings.weight", "layers.1.attention.wq.weight"}
    assert run.targets.model is not None
    stored = model_state(load_model(open_source(str(of(runs, "teacher")))))
    for name, tensor in model_state(run.targets.model).items():
        assert np.array_equal(whole(tensor).float().numpy(), stored[name].float().numpy()), name
