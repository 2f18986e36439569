"""What `titanlite check` finds by opening the data and tracing one step: what training would die of."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.decoders import FAMILIES, config_of
from tests.support.helpers import TinyRun, mentions
from titanlite.models.decoder import Block
from titanlite.tools import cli

OWN = """
import sys

import torch
from torch import nn
from torch.nn import functional as F

from titanlite.models.base import Model, ModelArgs
from titanlite.models.initial import Normal


class Head(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(args.vocab_size, 16))

    def forward(self, x, loss):
        return F.linear(x, self.weight) if loss is None else loss(x, self.weight)


class Own(Model):
    flavors = {{"debug": ModelArgs(vocab_size=512, max_seq_len=64)}}

    def __init__(self, args):
        super().__init__(args)
        self.embedding = nn.Embedding(args.vocab_size, 16)
        self.layers = nn.ModuleList(nn.Linear(16, 16, bias=False) for _ in range(2))
        self.head = Head(args)

    def forward(self, tokens, loss=None):
        x = self.embedding(tokens)
        for number, block in enumerate(self.layers):
            x = x + block(x)
            {between}
        {end}

    def init_weight(self, name, shape):
        return Normal(0.25)

    def flops_per_token(self, seq_len, *, causal=False):
        return 1.0
"""


def own_config(tiny: TinyRun, between: str = "", end: str = "return self.head(x, loss)") -> str:
    """Write a model of the user's own, with these faults, and return the path of a config that names it."""
    (tiny.folder / "own.py").write_text(OWN.format(between=between, end=end))
    text = tiny.toml.read_text()
    first, last = text.index("[model.args]"), text.index("[training]")
    tiny.toml.write_text(f'{text[:first]}[model]\nfile = "{tiny.folder}/own.py"\n{text[last:]}')
    return str(tiny.toml)


@pytest.mark.long
@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ({"between": "if number == 1: raise KeyError('second')"}, ["model.file", "own.py:34: KeyError: 'second'"]),
        ({"between": "sys.exit(0)"}, ["model.file", "own.py:34: SystemExit: 0"]),
        ({"end": "return loss(x, self.head.weight)"}, ["model.file", "own.py:35: RuntimeError: aten.mm"]),
        ({"end": "return self.head(x, None)"}, ["forward", "loss(hidden, weight)"]),
    ],
    ids=["one block only", "exit", "outside of the head", "no loss"],
)
def test_a_model_that_would_fail_in_the_first_step_is_refused(
    parts: dict[str, str], words: list[str], tiny: TinyRun, refused: Callable[..., str]
) -> None:
    assert mentions(refused("check", own_config(tiny, **parts)), "error", *words)
    assert not (tiny.folder / "outputs").exists()


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("olmo2", {"num_key_value_heads": 3}),
        ("olmo2", {"hidden_size": 30}),
        ("olmo2", {"num_attention_heads": 3}),
        ("gpt_oss", {"head_dim": 7}),
        ("glm4_moe", {"num_experts_per_tok": 5}),
        ("qwen3_next", {"linear_num_key_heads": 3}),
    ],
)
def test_a_decoder_of_transformers_whose_sizes_do_not_fit_is_refused(
    name: str, sizes: dict[str, int], tiny: TinyRun, refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(FAMILIES, name, {**FAMILIES[name], **sizes})
    config_of(tiny, name)
    message = refused("check", str(tiny.toml))
    assert message.startswith("error: model.")
    assert len(message.splitlines()) == 1


@pytest.mark.long
@pytest.mark.parametrize("name", ["gemma3_text", "gpt_oss"])
def test_a_decoder_of_transformers_that_trains_passes(
    name: str, tiny: TinyRun, capfd: pytest.CaptureFixture[str]
) -> None:
    """Grouped matmuls in float32 need values."""
    config_of(tiny, name)
    assert cli.run(["check", str(tiny.toml)]) == 0
    assert mentions(capfd.readouterr().out, "tiny is right")


def test_a_step_of_a_model_of_ours_that_fails_is_a_mistake_too(
    tiny: TinyRun, refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*arguments: object, **options: object) -> None:
        raise RuntimeError("sizes do not fit")

    monkeypatch.setattr(Block, "forward", fails)
    assert mentions(refused("check", str(tiny.toml)), "model.args", "sizes do not fit")


@pytest.mark.long
@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ({}, ["one step was traced", "`formats`"]),
        ({"between": "assert x.abs().max().item() < 1e9"}, ["own.py:34"]),
        ({"between": "x.detach().numpy()"}, ["own.py:34"]),
    ],
    ids=["right", "values", "numpy"],
)
def test_a_model_that_trains_passes_also_where_it_cannot_be_traced(
    parts: dict[str, str], words: list[str], tiny: TinyRun, capfd: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["check", own_config(tiny, **parts)]) == 0
    out, err = capfd.readouterr()
    assert mentions(out, "tiny is right", *words)
    assert len(out.splitlines()) == 1
    assert err == ""


def prepared(tiny: TinyRun) -> Path:
    """Prepare the text of the tiny run, and let its config name the tokens."""
    tokens = tiny.folder / "tokens"
    assert cli.run(["data", "prepare", str(tiny.text), "--out", str(tokens), "--tokenizer", "bytes"]) == 0
    tiny.toml.write_text(tiny.toml.read_text().replace(f'path = "{tiny.text}"', f'path = "{tokens}"'))
    return tokens


def test_a_check_opens_the_data(tiny: TinyRun, capfd: pytest.CaptureFixture[str]) -> None:
    tokens = prepared(tiny)
    capfd.readouterr()
    assert cli.run(["check", str(tiny.toml)]) == 0
    count = sum(shard["tokens"] for shard in json.loads((tokens / "index.json").read_text())["shards"])
    [line] = capfd.readouterr().out.splitlines()
    assert mentions(line, "tiny", f"{count:,} tokens", "--here")
    assert not (tiny.folder / "outputs").exists()


def without(key: str) -> Callable[[Path], None]:
    def change(tokens: Path) -> None:
        index = json.loads((tokens / "index.json").read_text())
        del index[key]
        (tokens / "index.json").write_text(json.dumps(index))

    return change


def truncated(name: str) -> Callable[[Path], None]:
    def change(tokens: Path) -> None:
        [path, *_] = sorted(tokens.glob(name))
        path.write_bytes(path.read_bytes()[:-3])

    return change


def other_ids(tokens: Path) -> None:
    path = next(tokens.glob("*.tokens"))
    path.write_bytes(b"\xff" * path.stat().st_size)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (without("dtype"), ["index.json", "'dtype'"]),
        (truncated("index.json"), ["prepared tokens"]),
        (truncated("*.tokens"), ["00000.tokens", "index.json"]),
        (other_ids, ["65,535", 0, 258]),
    ],
)
def test_damaged_data_is_refused(
    change: Callable[[Path], None], words: list[object], tiny: TinyRun, refused: Callable[..., str]
) -> None:
    change(prepared(tiny))
    line = refused("check", tiny.toml)
    assert line.startswith(f"error: data.path: {tiny.folder}/tokens")
    assert mentions(line, *words)


@pytest.mark.long
def test_memory_of_this_machine_is_judged_only_when_asked(tiny: TinyRun, capfd: pytest.CaptureFixture[str]) -> None:
    args = "{n_layers = 2, dim = 65536, hidden_dim = 2097152, vocab_size = 128256}"
    tiny.toml.write_text(f'[model]\nflavor = "405B"\nargs = {args}\n')
    assert cli.run(["check", str(tiny.toml)]) == 0
    assert mentions(capfd.readouterr().out, "tiny is right", "one step was traced")
    assert cli.run(["check", str(tiny.toml), "--here"]) == 2
    assert mentions(capfd.readouterr().err, "859,698,429,952 parameters", "12,810.5 GiB")
