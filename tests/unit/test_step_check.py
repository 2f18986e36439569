"""What `titanlite check` finds by opening the data and tracing one step: what training would die of."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.helpers import TinyRun
from titanlite.tools import cli

OWN = """
import sys
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn
from torch.nn import functional as F

from titanlite.models.base import Model, ModelArgs
from titanlite.models.initial import Normal


@dataclass(frozen=True, kw_only=True)
class Args(ModelArgs):
    dim: int
    n_layers: int


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.up = nn.Linear(dim, 2 * dim, bias=False)
        self.down = nn.Linear({down}, dim, bias=False)

    def forward(self, x):
        {block}
        return x + self.down(self.up(x))


class Head(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(args.vocab_size, args.dim))

    def forward(self, x, loss):
        return F.linear(x, self.weight) if loss is None else loss(x, self.weight)


class Own(Model):
    flavors: ClassVar = {{"debug": Args(dim=16, n_layers=3, vocab_size=512, max_seq_len=64)}}

    def __init__(self, args):
        super().__init__(args)
        self.embedding = nn.Embedding(args.vocab_size, args.dim)
        self.layers = nn.ModuleList(Block(args.dim) for _ in range(args.n_layers))
        self.head = Head(args)

    def forward(self, tokens, loss=None):
        x = self.embedding(tokens)
        for number, block in enumerate(self.layers):
            x = block(x)
            {between}
        {end}

    def init_weight(self, name, shape):
        return Normal(self.args.dim**-0.5)

    def flops_per_token(self, seq_len, *, causal=False):
        return 1.0
"""
RIGHT = {
    "down": "2 * dim",
    "block": "",
    "between": "",
    "end": "return self.head(x, loss)",
}


def own_config(tiny: TinyRun, **parts: str) -> str:
    """Write a model of the user's own, with these faults, and return the path of a config that names it."""
    (tiny.folder / "own.py").write_text(OWN.format(**RIGHT | parts))
    text = tiny.toml.read_text()
    start, end = text.index("[model.args]"), text.index("[training]")
    tiny.toml.write_text(f'{text[:start]}[model]\nfile = "{tiny.folder}/own.py"\n{text[end:]}')
    return str(tiny.toml)


@pytest.fixture
def fresh_import(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each test import its own file own.py."""
    import sys

    monkeypatch.delitem(sys.modules, "own", raising=False)


@pytest.mark.long
@pytest.mark.usefixtures("fresh_import")
@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"block": "x = x.unsqeeze(0)"}, "own.py:27: AttributeError: "),
        ({"between": "if number == 2: raise KeyError('third')"}, "own.py:53: KeyError: 'third'"),
        ({"between": "sys.exit(0)"}, "own.py:53: SystemExit: 0"),
        ({"end": "return loss(x, self.head.weight)"}, "own.py:54: RuntimeError: aten.mm"),
        ({"end": "return self.head(x, None)"}, "error: the model's forward must return what loss(hidden, weight) "),
    ],
    ids=["typo", "one block only", "exit", "outside of the head", "no loss"],
)  # fmt: skip
def test_a_model_that_would_fail_in_the_first_step_is_refused(
    parts: dict[str, str], message: str, tiny: TinyRun, capfd: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["check", own_config(tiny, **parts)]) == 2
    [line] = capfd.readouterr().err.splitlines()
    assert line.startswith(message if message.startswith("error") else f"error: model.file: one step fails: {message}")
    assert not (tiny.folder / "outputs").exists()


@pytest.mark.long
@pytest.mark.usefixtures("fresh_import")
@pytest.mark.parametrize(
    ("parts", "found"),
    [
        ({}, "one step was traced, text and URLs are not read here, export to Hugging Face would need `formats` "),
        ({"between": "assert x.abs().max().item() < 1e9"}, "the step cannot be traced: own.py:53 asks for values"),
        ({"block": "x.detach().numpy()"}, "one step could not be traced (own.py:27: "),
    ],
    ids=["right", "values", "numpy"],
)  # fmt: skip
def test_a_model_that_trains_passes_also_where_it_cannot_be_traced(
    parts: dict[str, str], found: str, tiny: TinyRun, capfd: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["check", own_config(tiny, **parts)]) == 0
    out, err = capfd.readouterr()
    assert out.startswith(f"tiny is right: {found}")
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
    expected = (
        f"tiny is right: one step was traced, {count:,} tokens opened. Memory of this machine is judged with --here"
    )
    assert capfd.readouterr().out.splitlines() == [expected]
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
    ("change", "message"),
    [
        (without("dtype"), "index.json is damaged (KeyError: 'dtype'). Restore it, or delete the folder and prepare "),
        (truncated("index.json"), " is not a folder of prepared tokens: "),
        (truncated("*.tokens"), ".tokens is missing or does not have the size that index.json states"),
        (other_ids, " has the token id 65,535 at 0, beyond the 258 of its tokenizer: its files have changed. "),
    ],
)
def test_damaged_data_is_refused(
    change: Callable[[Path], None], message: str, tiny: TinyRun, capfd: pytest.CaptureFixture[str]
) -> None:
    change(prepared(tiny))
    capfd.readouterr()
    assert cli.run(["check", str(tiny.toml)]) == 2
    [line] = capfd.readouterr().err.splitlines()
    assert line.startswith(f"error: data.path: {tiny.folder}/tokens")
    assert message in line


@pytest.mark.long
def test_memory_of_this_machine_is_judged_only_when_asked(tiny: TinyRun, capfd: pytest.CaptureFixture[str]) -> None:
    tiny.toml.write_text('[model]\nflavor = "405B"\nargs.vocab_size = 128256\n')
    assert cli.run(["check", str(tiny.toml)]) == 0
    assert capfd.readouterr().out.startswith("tiny is right: one step was traced, ")
    assert cli.run(["check", str(tiny.toml), "--here"]) == 2
    assert "405,853,388,800 parameters take 6,047.7 GiB" in capfd.readouterr().err
