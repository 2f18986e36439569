"""Schedule, loss, step, optimizer groups, seeds, metrics and the commit protocol, each alone."""

import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.helpers import world
from tests.support.models import plain_step
from tests.support.recorders import recorder, records, result_of
from titanlite.batch import IGNORE
from titanlite.loss import TokenLoss
from titanlite.models.llama3 import Llama3, Llama3Args
from titanlite.observer import CurrentPhase, Phase
from titanlite.optim import build_optimizer
from titanlite.parallelize.materialize import draw_weights
from titanlite.runtime.errors import UserError
from titanlite.runtime.hardware import peak_flops
from titanlite.schedule import BatchSizes, SequenceLengths, count_steps, known_steps, learning_rate
from titanlite.schema import LRScheduler, Optimizer, Training

ARGS = Llama3Args(dim=24, n_layers=2, n_heads=2, n_kv_heads=1, hidden_dim=20, vocab_size=31, max_seq_len=16)


def model_of(args: Llama3Args = ARGS) -> Llama3:
    model = Llama3(args)
    draw_weights(model, device=torch.device("cpu"), seed=0)
    model.init_buffers()
    return model


def batch_of(count: int, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 31, (count, 17), generator=generator)
    return {"tokens": tokens[:, :-1], "labels": tokens[:, 1:].clone()}


# Schedule


def rates(config: LRScheduler, steps: int) -> list[float]:
    return [learning_rate(step, peak=1.0, end=steps, config=config) for step in range(1, steps + 1)]


def test_warmup_stable_decay() -> None:
    found = rates(LRScheduler(warmup_steps=4, decay_ratio=0.4, decay_type="linear"), 10)
    assert found == pytest.approx([0.25, 0.5, 0.75, 1, 1, 1, 0.8, 0.6, 0.4, 0.2])


@pytest.mark.parametrize(
    ("decay_type", "middle"),
    [("linear", 0.5), ("cosine", 0.5), ("sqrt", 1 - math.sqrt(0.5))],
)
def test_forms_of_decay(decay_type: Any, middle: float) -> None:
    found = rates(LRScheduler(warmup_steps=0, decay_type=decay_type, min_lr_factor=0.1), 99)
    assert found[49] == pytest.approx(0.1 + 0.9 * middle)
    assert all(later < earlier for earlier, later in pairwise(found))
    assert 0.1 < found[-1] < 0.12


def test_decay_over_a_number_of_steps() -> None:
    found = rates(LRScheduler(warmup_steps=4, decay_steps=4), 10)
    assert found == rates(LRScheduler(warmup_steps=4, decay_ratio=0.4), 10)
    assert rates(LRScheduler(warmup_steps=1, decay_steps=99), 4) == pytest.approx([1, 0.75, 0.5, 0.25])


@pytest.mark.parametrize(("tokens", "expected"), [(1, 1), (64, 1), (65, 2), (640, 10), (641, 11)])
def test_steps_of_a_number_of_tokens(tokens: int, expected: int) -> None:
    training = Training(tokens=tokens, global_batch_size=4, seq_len=16, steps=5)
    assert known_steps(training) == expected
    assert count_steps(training, step=0, samples=0, limit=None) == expected
    # After 3 steps of 2 sequences, which were another batch size's.
    rest = max(0, tokens - 6 * 16)
    assert count_steps(training, step=3, samples=6, limit=None) == 3 + -(-rest // 64)


def test_batch_sizes_are_a_function_of_the_sequences_before() -> None:
    """Against counting step by step; also from the middle of a ramp."""
    stages = [{"until_tokens": 100, "global_batch_size": 2}, {"until_tokens": 400, "global_batch_size": 6}]
    training = Training.model_validate({"seq_len": 16, "global_batch_size": 8, "batch_ramp": stages, "steps": 3})
    sizes = BatchSizes.of(training)
    seen = [0]
    for _ in range(9):
        seen.append(seen[-1] + sizes.at(seen[-1]))
    assert seen == [0, 2, 4, 6, 8, 14, 20, 26, 34, 42]  # tokens 100 are in sequence 6, and 400 end sequence 24
    for step, before in enumerate(seen):
        assert [sizes.after(before, more) for more in range(10 - step)] == seen[step:]
        for limit in range(43):
            found = sizes.steps_to(limit, samples=before)
            assert sizes.after(before, found) >= limit
            assert found == 0 or sizes.after(before, found - 1) < limit
    assert known_steps(training) == 3
    assert known_steps(training.model_copy(update={"tokens": 16 * 27})) == 8
    assert [count_steps(training, step=0, samples=0, limit=limit) for limit in (2, 33, 34)] == [1, 7, 8]
    with pytest.raises(UserError, match=r"training\.epochs"):
        count_steps(training, step=0, samples=0, limit=1)


def test_lengths_are_a_function_of_the_samples_at_steps() -> None:
    """Stages end with whole steps: of 4 sequences at first, and of 8 from sample 12 on."""
    training = Training.model_validate(
        {
            "seq_len": 16,
            "global_batch_size": 8,
            "batch_ramp": [{"until_tokens": 12 * 16, "global_batch_size": 4}],
            "seq_len_ramp": [{"until_tokens": 5 * 16, "seq_len": 4}, {"until_tokens": 13 * 16 + 1, "seq_len": 8}],
        }
    )
    lengths = SequenceLengths.of(training)
    assert [lengths.at(sample) for sample in range(30)] == [4] * 8 + [8] * 12 + [16] * 10
    assert SequenceLengths.of(training, samples=8) == SequenceLengths.of(training, samples=4) == lengths
    assert [SequenceLengths.of(training, samples=20).at(sample) for sample in (20, 29)] == [16, 16]
    for first, end in ((0, 1), (0, 8), (5, 9), (3, 30), (25, 26)):
        expected = sum(lengths.at(sample) ** 2 for sample in range(first, end)) / (end - first)
        assert lengths.mean(first, end, lambda length: length**2) == pytest.approx(expected)


def test_the_rate_by_tokens() -> None:
    """With equal steps it is the rate by steps; with others, the closed form."""
    by_steps = LRScheduler(warmup_steps=3, decay_ratio=0.5, decay_type="cosine", min_lr_factor=0.1)
    by_tokens = by_steps.model_copy(update={"warmup_tokens": 3 * 64})
    for step in range(1, 21):
        expected = learning_rate(step, peak=2.0, end=20, config=by_steps)
        assert learning_rate(64 * step, peak=2.0, end=20 * 64, size=64, config=by_tokens) == pytest.approx(expected)
    scheduler = LRScheduler(warmup_tokens=100, decay_tokens=400)
    ends = [40, 80, 160, 240, 400, 560, 720, 880, 1000]  # steps of other sizes
    rates = [
        learning_rate(end, peak=1.0, end=1000, size=end - before, config=scheduler)
        for before, end in pairwise([0, *ends])
    ]
    assert rates == pytest.approx([0.4, 0.8, 1, 1, 1, 1, 1 - 120 / 560, 1 - 280 / 560, 1 - 400 / 520])


def test_no_decay() -> None:
    assert rates(LRScheduler(warmup_steps=0, decay_ratio=0.0), 3) == [1, 1, 1]


# Step


@pytest.mark.usefixtures("single_process_group")
def test_a_batch_without_valid_tokens_changes_nothing() -> None:
    batch, model = batch_of(2), model_of()
    batch["labels"][:] = IGNORE
    before = [parameter.detach().clone() for parameter in model.parameters()]
    world()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    assert float(plain_step(model, optimizer)([batch]).loss) == 0
    assert all(torch.equal(*pair) for pair in zip(model.parameters(), before, strict=True))


# Metrics


@pytest.mark.usefixtures("single_process_group")
def test_times_measure_what_their_names_promise(tmp_path: Path) -> None:
    now = [100.0]
    phase = CurrentPhase(clock=lambda: now[0])
    metrics = recorder(tmp_path, phase=phase)
    now[0] += 30  # of the start
    result = result_of(3.5, 0.25)
    for step in (1, 2, 3, 4):
        phase.begin_step(step)
        now[0] += 0.5
        metrics.begin_step(step, last=False)
        phase.enter(Phase.FORWARD)
        with metrics.paused():
            now[0] += 7
        now[0] += 1.5
        metrics.end_step(step, result, lr=0.1, samples=8 * step, shares=dict, last=False)
        with metrics.not_training(waits_for_device=True):
            phase.enter(Phase.CHECKPOINT)
            now[0] += 60
    first, second, third = records(tmp_path)
    assert [record["step"] for record in (first, second, third)] == [1, 2, 4]
    for record in (first, second, third):
        assert record["step_seconds"] == pytest.approx(2.0)
        assert record["data_wait_seconds"] == pytest.approx(0.5)
        assert record["tokens_per_second"] == pytest.approx(500)
        assert record["tflops_per_device"] == pytest.approx(500 * 5e6 / 1e12)
        assert (record["loss"], record["grad_norm"], record["lr"], record["mfu"]) == (3.5, 0.25, 0.1, None)
    assert third["samples"] == 32


def test_peak_flops_are_given_for_known_devices_only(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {"NVIDIA H100 80GB HBM3": 989e12, "NVIDIA A100-SXM4-80GB": 312e12, "NVIDIA H100 PCIe": 756e12}
    for name, peak in names.items():
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _, name=name: name)
        assert peak_flops(torch.device("cuda"), "bfloat16") == peak
        assert peak_flops(torch.device("cuda"), "float32") is None
    for name in ("NVIDIA GeForce RTX 9999", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "NVIDIA GeForce RTX 4090 Laptop GPU"):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _, name=name: name)
        assert peak_flops(torch.device("cuda"), "bfloat16") is None
    assert peak_flops(torch.device("cpu"), "bfloat16") is None


@pytest.mark.usefixtures("single_process_group")
def test_a_loss_that_forgets_to_detach_keeps_no_graph() -> None:
    """Results of steps are kept until they are read: with a graph each would keep all logits of its step."""
    model = model_of()
    batches = [{"tokens": torch.ones(2, 8, dtype=torch.int64), "labels": torch.ones(2, 8, dtype=torch.int64)}]

    def careless(hidden: torch.Tensor, weight: torch.Tensor, *, labels_BL: torch.Tensor) -> TokenLoss:
        nats = (hidden @ weight.T).logsumexp(-1).sum()
        return TokenLoss(2 * nats, nats)

    world()
    optimizer = build_optimizer(model, Optimizer(), seed=0)
    result = plain_step(model, optimizer, max_norm=1.0, loss_function=careless)(batches)
    for value in (result.loss, result.added_loss, result.grad_norm, result.micro_losses):
        assert not value.requires_grad
    assert result.added_loss == pytest.approx(float(result.loss), rel=1e-5)
