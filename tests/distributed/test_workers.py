"""Replicas as workers of the outer optimizer: each trains weights of its own, and they exchange once in a round."""

from collections.abc import Sequence
from itertools import islice
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.helpers import TinyRun, built, one_process, run_in_turn
from tests.support.layouts import degrees, whole, with_loss
from tests.support.whole_runs import assert_equal
from titanlite.loss import TokenLoss
from titanlite.optim import set_learning_rate
from titanlite.runtime.dtensor import own_part
from titanlite.runtime.errors import UserError
from titanlite.runtime.private_torch.process_groups import count_collectives
from titanlite.schedule import learning_rate
from titanlite.schema import Config
from titanlite.state import flat
from titanlite.train import Run, finish, train

WORKERS, STEPS, EVERY = 2, 6, 3
ROUNDS = [f"--outer.every={EVERY}", "--outer.over_replicas", "--training.max_norm=0.5", "--validation.enable=false"]
SGD = ["--optimizer.name=SGD", "--optimizer.lr=0.1", "--training.max_norm=0", f"--training.steps={STEPS}"]
"""Without clipping, which would be by the norm of each worker."""
TWO, TWO_OF_TWO = degrees(2, 1), degrees(2, 2)

State = dict[str, Tensor]


class Killed(Exception):
    """Stands for the end of the process."""


def state_of(run: Run) -> State:
    """Return the tensors of a checkpoint that this rank has a part of, whole."""
    return {name: whole(tensor) for name, tensor in flat(run.checkpoints.state.tensors()).items()}


def trained(rank: int, world_size: int, given: tuple[Config, int]) -> tuple[State, int]:
    """Train, and return the state, and how often the ranks of different workers have exchanged something.

    Args:
        given: config, and the step whose record ends the process; 0: none.
    """
    config, killed = given
    run = built(rank, world_size, config)
    before = exchanges()
    if killed:
        right = run.metrics.end_step

        def end_step(step: int, *args: Any, **options: Any) -> None:
            if step == killed:
                raise Killed
            right(step, *args, **options)

        run.metrics.end_step = end_step
        with pytest.raises(Killed):
            train(run)
        run.batches.close()
        run.metrics.close()
        run.checkpoints.finish()
    else:
        finish(run, train(run))
    if run.folder.lock is not None:
        run.folder.lock.close()
    return state_of(run), exchanges() - before


def exchanges() -> int:
    """Return the collectives over the axis of replicas so far."""
    return sum(count for name, count in count_collectives().items() if "replicate" in name)


def plain_loop(rank: int, world_size: int, configs: Sequence[Config]) -> tuple[list[float], State]:
    """Train two models of one process each, and let PyTorch's SGD make a step with the mean of their weights."""
    runs = [built(rank, world_size, config) for config in configs]
    weights = [[own_part(parameter) for parameter in run.model.parameters()] for run in runs]
    around = [weight.clone() for weight in weights[0]]
    sgd = torch.optim.SGD(around, lr=0.7, momentum=0.9, nesterov=True)
    losses = []
    for step in range(1, STEPS + 1):
        each = []
        for worker, run in enumerate(runs):
            config = run.config
            set_learning_rate(
                run.optimizer,
                learning_rate(step, peak=config.optimizer.lr, end=STEPS, config=config.lr_scheduler),
            )
            batches = list(islice(run.batches, run.position.micro_batches.count(step)))
            assert len(batches) == WORKERS
            each.append(float(run.train_step(batches[worker : worker + 1]).loss))
        losses.append(sum(each) / WORKERS)
        if step % EVERY == 0:
            for outer, *its in zip(around, *weights, strict=True):
                outer.grad = outer - sum(its) / WORKERS
            sgd.step()
            for outer, *its in zip(around, *weights, strict=True):
                for weight in its:
                    weight.copy_(outer)
    found = state_of(runs[0]) | {f"worker1.{name}": value for name, value in state_of(runs[1]).items()}
    for run in runs:
        run.batches.close()
    return losses, found


def near(ours: State, expected: State) -> None:
    for name, value in expected.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-4, atol=2e-6)


def all_of(results: Sequence[tuple[State, int]]) -> State:
    """Return the tensors of all ranks. Those that several ranks have are equal."""
    found: State = {}
    for state, _ in results:
        for name, tensor in state.items():
            assert torch.equal(found.setdefault(name, tensor), tensor), name
    return found


def starts(tiny: TinyRun, world_size: int, **named: Sequence[str]) -> dict[str, tuple[Config, int]]:
    """Return what `trained` is given, by the name of the run; one that begins with "killed" is killed in its step 5."""
    layout = {2: TWO, 4: TWO_OF_TWO}[world_size]
    return {
        name: (
            tiny.config(*layout, f"--training.steps={STEPS}", *words, world_size=world_size),
            5 if name.startswith("killed") else 0,
        )
        for name, words in named.items()
    }


def results_of(tiny: TinyRun, world_size: int, **named: Sequence[str]) -> dict[str, list[tuple[State, int]]]:
    given = starts(tiny, world_size, **named)
    return dict(zip(given, run_in_turn(trained, world_size, [*given.values()]), strict=True))


@pytest.mark.slow
def test_two_workers_are_a_loop_around_two_plain_runs(tiny: TinyRun) -> None:
    """With the loss of both, moments and clipping of each, and weights that are the same at the end of a round. They
    exchange once in a round. A round of one step of SGD is data parallel training."""
    averaged = [*SGD, "--outer.every=1", "--outer.over_replicas", "--outer.lr=1", "--outer.momentum=0"]
    found = results_of(
        tiny, 2, alone=[*ROUNDS, "--job.name=alone"], averaged=[*averaged, "--job.name=averaged"],
        added=[*SGD, "--job.name=added"],
    )  # fmt: skip
    found |= results_of(tiny, 4, sharded=[*ROUNDS, "--job.name=sharded"])
    common = ["--training.max_norm=0.5", "--validation.enable=false", f"--training.steps={STEPS}"]
    size = tiny.config(*common).training.global_batch_size // WORKERS
    common.append(f"--training.local_batch_size={size}")
    configs = [tiny.config(*common, f"--job.name=plain-{worker}") for worker in range(WORKERS)]
    [[(losses, expected)]] = run_in_turn(plain_loop, 1, [configs])
    for name in ("alone", "sharded"):
        state = all_of(found[name])
        assert tiny.losses(name) == pytest.approx(losses, rel=1e-6)
        near(state, expected)
        for key in (key for key in state if key.startswith("model.")):
            assert torch.equal(state[key], state[f"worker1.{key}"])
        moments = [key for key in state if key.startswith("optimizer.") and key.endswith("exp_avg")]
        assert moments
        assert not any(torch.equal(state[key], state[f"worker1.{key}"]) for key in moments)

    state, count = found["sharded"][0]
    assert count == len([name for name in state if name.startswith("outer.weights.")]) * (STEPS // EVERY)

    assert tiny.losses("averaged") == pytest.approx(tiny.losses("added"), rel=2e-7)
    plain, state = (all_of(found[name]) for name in ("added", "averaged"))
    near(state, {name: value for name, value in plain.items() if name.startswith("model.")})


@pytest.mark.slow
def test_workers_that_were_killed_within_a_round_end_with_the_same_bits(
    tiny: TinyRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also on another number of shards, up to rounding. Another number of workers is refused, but it may begin from a
    checkpoint at the end of a round, with the moments of the first worker."""
    saved, copied = [*ROUNDS, "--checkpoint.interval=2"], [*ROUNDS, "--checkpoint.local_interval=1"]
    found = results_of(
        tiny, 2, whole=[*ROUNDS, "--job.name=whole"],
        killed=[*saved, "--job.name=saved"],  # after the checkpoint of step 4, within the second round
        resumed=[*saved, "--job.name=saved"],
        killed_beside_copies=[*copied, "--job.name=copied"], copied=[*copied, "--job.name=copied"],
        killed_2=[*saved, "--job.name=sharded"],
    )  # fmt: skip
    found |= results_of(tiny, 4, sharded=[*saved, "--job.name=sharded"])
    ended = all_of(found["whole"])
    for name, run in {"resumed": "saved", "copied": "copied"}.items():
        assert_equal(all_of(found[name]), ended)
        assert tiny.losses(run) == tiny.losses("whole")
    near(all_of(found["sharded"]), ended)
    assert tiny.losses("sharded") == pytest.approx(tiny.losses("whole"), rel=1e-6)

    monkeypatch.setattr("titanlite.run.run_folder._lock", lambda path: None)  # a refused run holds its folder
    more = f"--training.steps={STEPS + EVERY}"
    checkpoint = tiny.folder / "outputs/whole/checkpoints" / f"step-{STEPS:08d}"
    words = [more, "--job.name=one", '--checkpoint.initial_load=["model", "optimizer", "outer"]']
    with one_process():
        with pytest.raises(UserError, match=r"outer\.workers was 2, is 1"):
            built(0, 1, tiny.config(*ROUNDS, more, "--job.name=whole"))
        run = built(0, 1, tiny.config(*ROUNDS, *words, f"--checkpoint.initial_load_path={checkpoint}"))
        assert_equal(state_of(run), {name: value for name, value in ended.items() if not name.startswith("worker1.")})
        run.batches.close()


def half_bad(rank: int, world_size: int, config: Config) -> tuple[State, State]:
    """Return the state before and after a step in which the loss of the second worker is not finite."""
    run = built(rank, world_size, config)
    right = run.train_step.loss_function

    def wrong(*args: Any, **options: Any) -> TokenLoss:
        loss = right(*args, **options)
        return TokenLoss(loss.total * float("nan"), loss.cross_entropy * float("nan")) if rank else loss

    before = state_of(run)
    finish(run, train(with_loss(run, wrong)))
    return before, state_of(run)


@pytest.mark.slow
def test_workers_skip_a_step_together(tiny: TinyRun) -> None:
    words = ["--outer.every=1", "--outer.over_replicas", "--validation.enable=false", "--training.steps=1", *TWO]
    words += ["--guard.nonfinite=skip", "--checkpoint.enable=false"]
    [both] = run_in_turn(half_bad, 2, [tiny.config(*words, world_size=2)])
    for before, after in both:
        weights = [name for name in before if ".model." in f".{name}"]
        assert weights
        assert_equal(*({name: state[name] for name in weights} for state in (before, after)))
