"""The debug model, made smaller, learns Python as well as it should; what is wrong with training shows in that."""

import json
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.support.helpers import train_on_this_rank
from titanlite.batch import IGNORE, Batch
from titanlite.config.load import load
from titanlite.data.samples import as_batch
from titanlite.models.initial import InitialValues, Normal
from titanlite.models.llama3 import Llama3
from titanlite.ops import cpu

LEAST, BAR = 5.25, 5.45
"""Nats a token after 80 steps, on 32 held-out sequences. With PyTorch 2.13 and the library of Python 3.11: 5.374;
rounding moves it by 0.001. The nearest of the mutations is at 5.623, without a warm-up. Less than the lower limit is
better than it can be: then the model sees what it predicts."""

OPTIONS = [
    *(f"model.args.{size}" for size in ("dim=128", "n_layers=2", "n_heads=4", "n_kv_heads=2", "hidden_dim=352")),
    *("training.steps=80", "training.global_batch_size=8", "optimizer.lr=2e-2", "lr_scheduler.warmup_steps=20"),
    "debug.seed=2",
    *("validation.freq=80", "validation.sequences=32", "metrics.loggers=[]", "checkpoint.enable=false"),
]


def no_mutation(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    return []


def mask_that_lets_one_token_too_many_through(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    right = cpu.attend_in_tiles

    def wrong(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
        later = torch.full((q.shape[2], q.shape[2]), -torch.inf, dtype=q.dtype).triu(2)
        return right(q, k, v, later[None, None], scale)

    monkeypatch.setattr(cpu, "attend_in_tiles", wrong)
    return []


def labels_shifted_by_one_more(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    def wrong(rows: Sequence[Any], *, mark_documents: bool) -> Batch:
        batch = as_batch(rows, mark_documents=mark_documents)
        batch["labels"] = F.pad(batch["labels"][:, 1:], (0, 1), value=IGNORE)
        return batch

    monkeypatch.setattr("titanlite.data.samples.as_batch", wrong)
    monkeypatch.setattr("titanlite.validation.as_batch", wrong)
    return []


def no_warmup(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    return ["lr_scheduler.warmup_steps=0"]


def matrices_drawn_at_unit_scale(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    right = Llama3.init_weight

    def wrong(self: Llama3, name: str, shape: torch.Size) -> InitialValues:
        return Normal(std=1.0) if len(shape) == 2 else right(self, name, shape)

    monkeypatch.setattr(Llama3, "init_weight", wrong)
    return []


@pytest.mark.usefixtures("single_process_group")
@pytest.mark.parametrize(
    "mutation",
    [
        pytest.param(no_mutation, marks=pytest.mark.slow),
        pytest.param(labels_shifted_by_one_more, marks=pytest.mark.nightly),
        pytest.param(mask_that_lets_one_token_too_many_through, marks=pytest.mark.nightly),
        pytest.param(no_warmup, marks=pytest.mark.nightly),
        pytest.param(matrices_drawn_at_unit_scale, marks=pytest.mark.nightly),
    ],
)
def test_only_the_right_training_reaches_the_bar(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, mutation: Any
) -> None:
    folder = tmp_path_factory.mktemp("run")
    cache = tmp_path_factory.getbasetemp() / "standard library"  # prepared once
    places = [f"job.dump_folder={folder}", f"data.cache_folder={cache}"]
    overrides = [f"--{option}" for option in [*OPTIONS, *places, *mutation(monkeypatch)]]
    train_on_this_rank(load("train_configs/debug.toml", overrides), 0, 1)
    loss = json.loads((folder / "debug" / "validation.jsonl").read_text())["loss"]
    assert (LEAST < loss < BAR) == (mutation is no_mutation), loss
