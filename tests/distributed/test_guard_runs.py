"""A loss that is not finite, from one rank: what all ranks do, what is kept, and what is reported."""

import math
import re
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.helpers import TinyRun, built, mentions, run_in_turn
from tests.support.layouts import degrees, whole, with_loss
from titanlite.checkpoint.manifest import Manifest
from titanlite.guard import REASONS, SkipReason
from titanlite.loss import TokenLoss
from titanlite.runtime.private_torch.tensors import local_tensor
from titanlite.schema import Config
from titanlite.train import Run, finish, train

BAD_STEP, BAD_SAMPLE = 3, 21
"""Sample 21 is of rank 2 of 4, in its second micro-batch of one: 16 + 2 x 2 + 1."""
NONFINITE = REASONS[SkipReason.NONFINITE]

Snapshot = dict[str, torch.Tensor]


def snapshot(run: Run, part: Callable[[torch.Tensor], torch.Tensor]) -> Snapshot:
    """Weights and all that the optimizer keeps: of each tensor a part."""
    named = dict(run.model.named_parameters())
    state = {
        f"{name}.{key}": value
        for name, parameter in named.items()
        for key, value in run.optimizer.state[parameter].items()
    }
    return {name: part(tensor).detach().clone() for name, tensor in (named | state).items()}


def poisoned(rank: int, world_size: int, config: Config) -> dict[str, Any]:
    """Train; the loss of one micro-batch of one rank is NaN in step 3, and later if the run's name asks for it."""
    run = built(rank, world_size, config)
    before: list[Snapshot] = []
    calls = [0]
    micro_batches, right = run.accumulation, run.train_step.loss_function

    def loss_of(*args: Any, **kwargs: Any) -> TokenLoss:
        found = right(*args, **kwargs)
        number, calls[0] = calls[0], calls[0] + 1
        step = run.position.progress.step + number // micro_batches + 1
        bad = step == BAD_STEP or (step > BAD_STEP and "forever" in str(config.job.name))
        if bad and rank == min(2, world_size - 1) and number % micro_batches == micro_batches - 1:
            return TokenLoss(found.total * math.nan, found.cross_entropy * math.nan)
        return found

    if "failing" in str(config.job.name):
        fail_first_save(run)
    run.optimizer.register_step_pre_hook(lambda *_: before.append(snapshot(run, local_tensor)))
    run.optimizer.register_step_post_hook(lambda *_: before.append(snapshot(run, local_tensor)))
    stopped = train(with_loss(run, loss_of))
    finish(run, stopped)
    changed = [
        sorted(name for name in new if not torch.equal(old.get(name, torch.tensor(math.inf)), new[name]))
        for old, new in zip(before[::2], before[1::2], strict=True)
    ]
    final = {name: tensor.float().numpy() for name, tensor in snapshot(run, whole).items()}
    if run.folder.lock is not None:
        run.folder.lock.close()
    return {"changed": changed, "stopped": stopped and (str(stopped), stopped.taken), "final": final}


def fail_first_save(run: Run) -> None:
    """Some time after it has begun, so that the run stops meanwhile."""
    saver = run.checkpoints._saver
    right = saver.start

    def start(*args: Any, **kwargs: Any) -> Future[Any]:
        saver.start = right
        future: Future[Any] = Future()
        threading.Timer(1.0, lambda: future.set_exception(OSError("disk full"))).start()
        return future

    saver.start = start


def manifest(folder: Path, name: str, step: int) -> Manifest:
    path = folder / "outputs" / name / "checkpoints" / f"step-{step:08d}" / "manifest.json"
    return Manifest.from_json(path.read_bytes())


@pytest.mark.slow
def test_all_ranks_do_the_same(tiny: TinyRun) -> None:
    layout = [*degrees(2, 2), "--training.local_batch_size=1"]
    names = {
        "skip": ["--guard.nonfinite=skip", "--metrics.log_freq=4"],
        "stop": ["--metrics.log_freq=4"],
        "forever": ["--guard.nonfinite=skip", "--guard.max_consecutive_skips=2", "--metrics.log_freq=6"],
    }
    configs = [tiny.config(*layout, f"--job.name={name}", *options, world_size=4) for name, options in names.items()]
    results = dict(zip(names, run_in_turn(poisoned, 4, configs), strict=True))

    for rank in results["skip"]:
        assert rank["stopped"] is None
        assert [bool(changed) for changed in rank["changed"]] == [True, True, False, True, True, True]
    [record] = tiny.records("skip", file="skipped.jsonl")
    assert (record["step"], record["samples"]) == (BAD_STEP, [BAD_SAMPLE])
    assert record["reason"] == NONFINITE
    assert [[loss is None for loss in losses] for losses in record["micro_losses"]] == [
        [False, False], [False, False], [False, True], [False, False],
    ]  # fmt: skip
    assert record["shard_grad_norms"] == [None] * 4, "NaN has reached every shard"
    [[source, epoch, sequence]] = record["sequences"]
    assert (source, epoch) == ("text", 0)
    assert 0 <= sequence < 400
    assert manifest(tiny.folder, "skip", 6).samples == 48
    for final in results["skip"]:
        assert all((final["final"][key] == value).all() for key, value in results["skip"][0]["final"].items())

    for rank in results["stop"]:
        message, taken = rank["stopped"]
        assert message.startswith(f"step 3: {NONFINITE} (loss nan, grad_norm nan)")
        assert taken == 2
        assert [bool(changed) for changed in rank["changed"]] == [True, True, False, False], "until the host looks"
    assert [record["step"] for record in tiny.records("stop", file="skipped.jsonl")] == [3]
    saved = manifest(tiny.folder, "stop", 2)
    assert (saved.samples, saved.guard) == (16, {})

    for rank in results["forever"]:
        assert mentions(rank["stopped"][0], "2 steps", "guard.max_consecutive_skips")
        assert rank["stopped"][1] == 2
        assert [bool(changed) for changed in rank["changed"]] == [True, True, False, False, False, False]
    assert [record["step"] for record in tiny.records("forever", file="skipped.jsonl")] == [3, 4]
    assert (tiny.folder / "outputs" / "forever" / "checkpoints" / "step-00000002").is_dir()


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("layout", "model", "samples"),
    [
        ((1, 2, 2), [], [23]),
        ((1, 2, 1, 2), ["--model.args={dim=48,n_heads=4,n_kv_heads=2,vocab_size=260}"], [23]),
        ((1, 4, 1, 1, 4), ["--model={name='qwen3_moe', flavor='debug', args={vocab_size=259}}"], [21]),
    ],
    ids=["context", "tensor", "expert"],
)
def test_ranks_of_each_axis_do_the_same(
    tiny: TinyRun, layout: tuple[int, ...], model: list[str], samples: list[int]
) -> None:
    """Losses of the ranks of one layer are the same, so that a wrong one is of one rank alone."""
    options = [*model, *degrees(*layout), "--training.local_batch_size=1"]
    names = {"skip": ["--guard.nonfinite=skip"], "stop": ["--metrics.log_freq=4"]}
    configs = [tiny.config(*options, f"--job.name={name}", *more, world_size=4) for name, more in names.items()]
    skip, stop = run_in_turn(poisoned, 4, configs)
    for rank in skip:
        assert rank["stopped"] is None
        assert [bool(changed) for changed in rank["changed"]] == [True, True, False, True, True, True]
        for key, value in skip[0]["final"].items():
            assert (rank["final"][key] == value).all(), key
    for rank in stop:
        assert rank["stopped"] == stop[0]["stopped"]
        assert rank["stopped"][0].startswith(f"step 3: {NONFINITE}")
        assert rank["stopped"][1] == 2
    for name in names:
        [record] = tiny.records(name, file="skipped.jsonl")
        assert (record["step"], record["samples"]) == (BAD_STEP, samples)


def test_a_stop_waits_for_a_save_in_flight_and_repeats_one_that_fails(tiny: TinyRun) -> None:
    names = "whole", "failing"
    configs = [tiny.config(f"--job.name={name}", "--checkpoint.interval=2") for name in names]
    for name, [result] in zip(names, run_in_turn(poisoned, 1, configs), strict=True):
        assert result["stopped"][1] == 2
        assert manifest(tiny.folder, name, 2).samples == 16
        assert [record["step"] for record in tiny.records(name, file="checkpoints.jsonl")] == [2]
    log = (tiny.folder / "outputs" / "failing" / "logs" / "rank-0.log").read_text()
    assert re.search(r"step 2\b.*disk full", log)


def test_a_stopped_run_resumes_from_the_last_step_taken(tiny: TinyRun) -> None:
    """The resumed run has `skip`, and ends like one that has it from the start."""
    skip = "--guard.nonfinite=skip"
    runs = ["--job.name=whole", skip], ["--job.name=halves", "--metrics.log_freq=2"], ["--job.name=halves", skip]
    [whole_result], [stopped], [result] = run_in_turn(poisoned, 1, [tiny.config(*options) for options in runs])
    assert stopped["stopped"][1] == 2
    assert result["stopped"] is None
    assert [record["step"] for record in tiny.records("halves", file="skipped.jsonl")] == [3, 3], (
        "evidence of both starts"
    )
    for name, value in whole_result["final"].items():
        assert (result["final"][name] == value).all(), name
