"""Generation from models in memory: against transformers, against no cache, and against probabilities by hand."""

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.support import models
from tests.support.families import oracle
from titanlite.data.tokenizer import ByteTokenizer, load_tokenizer
from titanlite.models.base import Model
from titanlite.ops.cpu import CpuKernels
from titanlite.ops.kernels import set_kernels
from titanlite.runtime.errors import RunError, UserError
from titanlite.tools.convert.generation import (
    NOT_FINITE,
    Generator,
    Sampler,
    stream_text,
    token_probabilities,
)

FAMILIES = {
    "llama3": replace(models.SMALL, rope_scaling_factor=8.0),
    "qwen3": models.DENSE,
    "qwen3_moe": models.MOE,
}
PROMPT = (5, 17, 80, 3, 3, 9)
PROMPTS = [tuple(random.Random(i).choices(range(101), k=1 + 3 * (i // 2))) for i in range(4)]
"""Some share their length, and none another's beginning."""


def generator(model: Model, *, max_seq_len: int = 64) -> Generator:
    return Generator(model, kernels=CpuKernels(), vocab_size=101, max_seq_len=max_seq_len)


def greedy(source: Generator, prompt: Sequence[int] = PROMPT, tokens: int = 40, **options: Any) -> list[int]:
    return list(source.stream(prompt, max_new_tokens=tokens, sampler=Sampler(), **options))


@pytest.mark.long
@pytest.mark.parametrize("family", ["llama3", "qwen3_moe"])
def test_greedy_tokens_are_those_of_transformers(family: str) -> None:
    """Tokens are the same with a cache that held another sequence."""
    model = models.built(FAMILIES[family])
    theirs = oracle(model)
    theirs.generation_config.eos_token_id = None
    expected = {}
    for prompt in PROMPTS:
        inputs = torch.tensor([prompt])
        whole = theirs.generate(inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=20, do_sample=False)
        expected[prompt] = whole[0, len(prompt) :].tolist()
    assert len(set().union(*expected.values())) > 10, "a model that repeats one token shows little"
    cached = generator(model)
    for prompt, tokens in expected.items():
        assert greedy(cached, prompt, 20) == tokens
        assert greedy(cached, (*prompt, *tokens[:12]), 8) == tokens[12:]


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_with_a_cache_are_those_of_the_whole_sequence(family: str) -> None:
    model = models.built(FAMILIES[family])
    tokens = torch.randint(0, 101, (60,), generator=torch.Generator().manual_seed(1)).tolist()
    whole = model(torch.tensor([tokens]))[0]
    cached = generator(model)
    for end in range(7, 61):
        assert torch.allclose(cached.next_logits(tokens[:end]), whole[end - 1], rtol=1e-4, atol=1e-4), end


def test_only_new_tokens_are_computed() -> None:
    model = models.built(models.SMALL)
    computed = []
    model.tok_embeddings.register_forward_hook(lambda _, inputs, __: computed.append(inputs[0].shape[1]))
    found = generator(model)
    greedy(found, tokens=3)
    greedy(found, [*PROMPT[:4], 7, 8, 9, 10], tokens=2)
    assert computed == [6, 1, 1, 8, 1]


class OwnDecoder(models.Llama3):
    draws_random = False

    def forward(self, tokens: Tensor, loss: Any = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return super().forward(tokens, loss)


def test_a_model_of_ones_own_computes_the_whole_sequence() -> None:
    known = models.built(models.SMALL)
    model = OwnDecoder(models.SMALL)
    model.load_state_dict(known.state_dict())
    model.init_buffers()
    set_kernels(model, CpuKernels())
    assert greedy(generator(model)) == greedy(generator(known))


def test_sequences_end_at_a_stop_token_and_at_max_seq_len() -> None:
    model = models.built(models.SMALL)
    expected = greedy(generator(model))
    found = generator(model)
    stop = next(token for token in expected if token != expected[0])
    assert greedy(found, stop_ids={stop}) == expected[: expected.index(stop)]
    assert greedy(generator(model, max_seq_len=20)) == expected[:14]
    with pytest.raises(UserError, match=r"\b20\b.*max_seq_len\b.*\b20\b"):
        greedy(generator(model, max_seq_len=20), [1] * 20)
    with pytest.raises(UserError):
        greedy(found, [])
    with torch.no_grad():
        model.head.norm.weight.fill_(math.nan)
    with pytest.raises(RunError, match=NOT_FINITE):
        greedy(generator(model))


def by_hand(logits: list[float], temperature: float, top_p: float) -> list[float]:
    """Probabilities in exact order, in Python floats."""
    weights = [math.exp(logit / temperature) for logit in logits]
    shares = [weight / sum(weights) for weight in weights]
    kept: dict[int, float] = {}
    for index in sorted(range(len(shares)), key=lambda token: (-shares[token], token)):
        if sum(kept.values()) >= top_p:
            break
        kept[index] = shares[index]
    return [kept.get(index, 0.0) / sum(kept.values()) for index in range(len(shares))]


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
@pytest.mark.parametrize("top_p", [1.0, 0.9, 0.55, 0.01])
def test_probabilities_of_temperature_and_top_p(temperature: float, top_p: float) -> None:
    logits = torch.randn(30, generator=torch.Generator().manual_seed(3)) * 2
    logits[4] = logits[9]
    found = token_probabilities(logits, temperature=temperature, top_p=top_p)
    assert found.tolist() == pytest.approx(by_hand(logits.tolist(), temperature, top_p), abs=1e-6)


@pytest.mark.long
def test_draws_have_the_probabilities_and_repeat_with_the_seed() -> None:
    logits = torch.tensor([1.0, -2.0, 0.5, 3.0, 0.0])
    expected = np.array(by_hand(logits.tolist(), 1.5, 0.95))
    sampler = Sampler(temperature=1.5, top_p=0.95, seed=7)
    draws = [sampler.draw(logits) for _ in range(3000)]
    shares = np.bincount(draws, minlength=5) / len(draws)
    assert expected[1] == 0
    assert shares[1] == 0
    assert np.abs(shares - expected).max() < 4 * math.sqrt(0.25 / len(draws))
    again = Sampler(temperature=1.5, top_p=0.95, seed=7)
    assert [again.draw(logits) for _ in range(100)] == draws[:100]
    other = Sampler(temperature=1.5, top_p=0.95, seed=8)
    assert [other.draw(logits) for _ in range(100)] != draws[:100]
    assert Sampler().draw(torch.tensor([1.0, 2.0, 2.0])) == 1


TEXT = "naïve 日本語 🙂🙂 ok\n  end"


def test_text_comes_in_whole_characters() -> None:
    tokenizer = ByteTokenizer()
    pieces = list(stream_text(tokenizer, iter(tokenizer.encode(TEXT).tolist())))
    assert pieces == list(TEXT), "a byte a token: a piece for each character"
    broken = [*b"a", 0xE6, 0x97, *b"b", 0xF0, 0x9F]
    pieces = list(stream_text(tokenizer, iter(broken)))
    assert pieces == ["a", "\ufffdb", "\ufffd"], "what is no character is shown when it is sure, or at the end"
    assert list(stream_text(tokenizer, iter([]), context=[1, 2])) == []


def test_text_of_tokenizers_whose_tokens_are_no_characters(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    spaced = tokenizers.Tokenizer(tokenizers.models.BPE({"▁a": 0, "▁b": 1, "c": 2}, []))
    spaced.decoder = tokenizers.decoders.Metaspace()
    spaced.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    spaced.save(str(tmp_path / "tokenizer.json"))
    found = load_tokenizer(str(tmp_path))
    assert found.decode(np.array([1, 2])) == "bc", "the space at the start is dropped"
    assert "".join(stream_text(found, iter([1, 2, 1]), context=[0, 2])) == " bc b"
    shipped = load_tokenizer("python-2k")
    ids = shipped.encode(TEXT).tolist()
    for cut in (0, 6):

        def rest(cut: int = cut) -> Iterator[int]:
            yield from ids[cut:]

        begun = shipped.decode(np.array(ids[:cut]))
        assert begun + "".join(stream_text(shipped, rest(), context=ids[:cut])) == TEXT
