"""Training loss by source of the data: sums of tokens, over the steps of a record."""

import json
import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F

import titanlite
from tests.helpers import TinyRun, train_on_two_sources
from titanlite.batch import IGNORE
from titanlite.loss import TokenLoss, token_loss
from titanlite.metrics.source_losses import LossBySource, SourceLosses
from titanlite.runtime.errors import UserError
from titanlite.tools import cli


def test_sums_are_those_of_plain_cross_entropy() -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(4, 6, 8, generator=generator, requires_grad=True)
    weight = torch.randn(16, 8, generator=generator, requires_grad=True)
    labels = torch.randint(16, (4, 6), generator=generator)
    labels[0, :2] = labels[3] = IGNORE
    sources = torch.tensor([1, 0, 1, 2])
    plain = token_loss(hidden, weight, labels_BL=labels, z_loss=1e-3)
    found = LossBySource(partial(token_loss, z_loss=1e-3), ["a", "b", "c", "d"])(
        hidden, weight, labels_BL=labels, sources_B=sources
    )
    assert torch.equal(found.total, plain.total)
    assert torch.equal(found.cross_entropy, plain.cross_entropy)
    nats = F.cross_entropy((hidden @ weight.t()).flatten(0, 1), labels.flatten(), reduction="none").view(4, 6)
    expected = {"a": nats[1].sum(), "b": nats[[0, 2]].sum(), "c": 0.0, "d": 0.0}
    for name, value in expected.items():
        assert float(found.metrics[f"source_nats/{name}"]) == pytest.approx(float(value), rel=1e-6)
    assert [float(found.metrics[f"source_tokens/{name}"]) for name in "abcd"] == [6, 10, 0, 0]
    assert not any(value.requires_grad for value in found.metrics.values())


def test_records_are_means_over_the_steps_that_were_taken() -> None:
    losses = SourceLosses()
    yes, no = torch.tensor(True), torch.tensor(False)

    def sums(nats: float, tokens: float) -> dict[str, torch.Tensor]:
        return {
            "source_nats/a": torch.tensor(nats),
            "source_nats/b": torch.tensor(0.0),
            "source_tokens/a": torch.tensor(tokens),
            "source_tokens/b": torch.tensor(0.0),
            "other": torch.tensor(7.0),
        }

    assert losses.take() == {}
    assert losses.add(sums(3.0, 0.5), is_taken=yes) == {"other": torch.tensor(7.0)}
    losses.add(sums(math.nan, 0.5), is_taken=no)
    losses.add(sums(1.0, 0.3), is_taken=yes)
    assert losses.take() == {"source_losses": {"a": pytest.approx(5.0)}}, "(3 + 1) / (0.5 + 0.3)"
    assert losses.take() == {}
    losses.add(sums(1.0, 0.25), is_taken=yes)
    assert losses.take() == {"source_losses": {"a": 4.0}}


@pytest.mark.long
def test_a_run_records_them(tiny: TinyRun) -> None:
    train_on_two_sources(tiny)
    options = [
        "--training.global_batch_size=8",
        "--training.local_batch_size=4",
        "--lr_scheduler.warmup_steps=0",
        "--training.steps=3",
    ]
    config = tiny.config(*options, "--job.name=by_hand")
    with titanlite.build_run(config) as run:
        nats: dict[str, list[float]] = {"digits": [], "words": []}
        for _ in range(2):
            batch = next(run.batches)
            logits = run.model(batch["tokens"]).flatten(0, 1).float()
            lost = F.cross_entropy(logits, batch["labels"].flatten(), reduction="none").view_as(batch["labels"])
            for number, values in zip(batch["sources"].tolist(), lost, strict=True):
                nats[["digits", "words"][number]] += values[values != 0].tolist()
    assert cli.run(["train", "--config", str(tiny.toml), *options, "--metrics.log_freq=2"]) == 0
    first, second, last = tiny.records()
    assert first["source_losses"] == {name: pytest.approx(sum(of) / len(of), rel=1e-5) for name, of in nats.items()}
    assert first["loss"] == pytest.approx(sum(map(sum, nats.values())) / sum(map(len, nats.values())), rel=1e-5)
    assert set(second["source_losses"]) == set(last["source_losses"]) == {"digits", "words"}
    logged = json.loads((tiny.folder / "outputs/tiny/metrics.jsonl").read_text().splitlines()[1])
    assert logged["source_losses"]["digits"] < first["source_losses"]["digits"], "ten digits are learnt first"


def test_a_run_without_it_has_no_such_record(tiny: TinyRun) -> None:
    with titanlite.build_run(tiny.config()) as run:
        assert "sources" not in next(run.batches)
        assert not isinstance(run.loss_function, LossBySource)


def test_a_loss_of_ones_own_has_to_give_the_loss_of_each_token() -> None:
    def own(hidden: torch.Tensor, weight: torch.Tensor, *, labels_BL: torch.Tensor) -> TokenLoss:
        return TokenLoss(hidden.sum(), hidden.sum().detach())

    with pytest.raises(UserError, match=r"loss_by_source: training\.loss returns no cross_entropy_T"):
        LossBySource(own, ["a"])(
            torch.ones(1, 2, 4), torch.ones(8, 4), labels_BL=torch.ones(1, 2), sources_B=torch.zeros(1)
        )
