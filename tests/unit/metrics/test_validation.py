"""Validation: by source, by hand, and by bytes of text."""

import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.support.helpers import world
from titanlite.batch import IGNORE
from titanlite.data.packing import TokenSequence
from titanlite.data.samples import Source
from titanlite.models.llama3 import Llama3, Llama3Args
from titanlite.ops.cpu import CpuKernels
from titanlite.schema import Validation
from titanlite.validation import Validator

VOCAB, SEQ_LEN = 50, 8
TOKEN_BYTES = np.array([0] * 5 + [1] * 25 + [3] * 20)
FIRST_BYTES = np.maximum(TOKEN_BYTES - 1, 0)
"""Those of a token after a special one, which has a space that is not in the text."""


class RandomSequences:
    def __init__(self, sequences: int, seed: int, masked: float = 0.0) -> None:
        random = np.random.default_rng(seed)
        tokens = random.integers(0, VOCAB, size=(sequences, SEQ_LEN + 1))
        self.tokens, self.labels = tokens[:, :-1], tokens[:, 1:].copy()
        self.labels[random.random(self.labels.shape) < masked] = IGNORE

    def __len__(self) -> int:
        return len(self.tokens)

    def read(self, index: int) -> TokenSequence:
        return TokenSequence(self.tokens[index], self.labels[index], np.array([0, 3]))


@pytest.fixture
def model() -> Llama3:
    torch.manual_seed(0)
    args = Llama3Args(dim=12, n_layers=1, n_heads=2, n_kv_heads=1, hidden_dim=16, vocab_size=VOCAB, max_seq_len=SEQ_LEN)
    model = Llama3(args)
    model.init_buffers()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


def validate(
    model: Llama3, *sequences: RandomSequences, batch_size: int = 3, mask: bool = False, **options: Any
) -> dict[str, Any]:
    group = world()
    validator = Validator(
        Validation(enable=True, path="x", **options),
        [Source(f"s{i}", part, f"f{i}", marks_documents=mask) for i, part in enumerate(sequences)],
        seq_len=SEQ_LEN,
        batch_size=batch_size,
        token_bytes=np.stack([TOKEN_BYTES, FIRST_BYTES]),
        kernels=CpuKernels(),
        device=torch.device("cpu"),
        rank=0,
        ranks=1,
        group=group,
    )
    values = validator.run(model)
    assert values is not None
    return values


def by_hand(model: Llama3, sequences: RandomSequences) -> tuple[float, int, int]:
    """Nats, tokens, bytes."""
    labels = torch.from_numpy(sequences.labels)
    with torch.no_grad():
        logits = model(torch.from_numpy(sequences.tokens)).double()
    nats = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum", ignore_index=IGNORE)
    kept = sequences.labels[sequences.labels != IGNORE]
    first = TOKEN_BYTES[sequences.tokens[sequences.labels != IGNORE]] == 0
    return float(nats), len(kept), int(np.where(first, FIRST_BYTES[kept], TOKEN_BYTES[kept]).sum())


@pytest.mark.usefixtures("single_process_group")
def test_metrics_are_those_computed_by_hand(model: Llama3) -> None:
    sequences = [RandomSequences(7, 0), RandomSequences(10, 1, masked=0.4)]
    record = validate(model, *sequences, sequences=0)
    totals = np.zeros(2)
    for part, metrics in zip(sequences, record["sources"].values(), strict=True):
        nats, tokens, text_bytes = by_hand(model, part)
        assert metrics["loss"] == pytest.approx(nats / tokens, rel=1e-6)
        assert metrics["bits_per_byte"] == pytest.approx(nats / math.log(2) / text_bytes, rel=1e-6)
        assert (metrics["tokens"], metrics["sequences"]) == (tokens, len(part))
        totals += nats, tokens
    assert record["loss"] == pytest.approx(totals[0] / totals[1], rel=1e-6)
    assert list(record["sources"]) == ["s0", "s1"]


@pytest.mark.usefixtures("single_process_group")
def test_a_part_is_the_same_part_each_time_whatever_the_batch(model: Llama3) -> None:
    sequences = RandomSequences(20, 0)
    first = validate(model, sequences, sequences=7, batch_size=7)
    assert first["sources"]["s0"]["sequences"] == 7
    assert first["sources"]["s0"]["tokens"] == 7 * SEQ_LEN
    for batch_size in (1, 2, 5, 16):
        again = validate(model, sequences, sequences=7, batch_size=batch_size)
        assert again["loss"] == pytest.approx(first["loss"], rel=1e-6)
    assert validate(model, sequences, sequences=0)["loss"] != pytest.approx(first["loss"], rel=1e-6)
    assert validate(model, sequences, sequences=1000)["sources"]["s0"]["sequences"] == 20


@pytest.mark.usefixtures("single_process_group")
def test_validation_leaves_no_trace(model: Llama3) -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    record = validate(model, RandomSequences(5, 0, masked=1.0))
    assert torch.equal(torch.get_rng_state(), before)
    assert model.training
    assert all(parameter.grad is None for parameter in model.parameters())
    assert math.isnan(record["loss"])
    assert record["sources"]["s0"]["bits_per_byte"] is None
