"""Code of the user's, named in a TOML: found or explained, and used."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.helpers import TinyRun, mentions
from titanlite.checks.preflight import preflight
from titanlite.config.load import load
from titanlite.data.custom import CustomSequences
from titanlite.models.registry import resolve_model, vocab_size_for
from titanlite.runtime.errors import ConfigError, UserError
from titanlite.runtime.process_group import Ranks
from titanlite.runtime.user_code import find_object
from titanlite.tools import cli
from titanlite.tools.plan.estimate import model_of, with_vocab_size

MODEL = """
from dataclasses import dataclass
from titanlite.models.base import Model, ModelArgs

@dataclass(frozen=True, kw_only=True)
class Args(ModelArgs):
    width: int = 4

class {name}(Model):
    flavors = {{"small": Args(vocab_size=300, max_seq_len=64)}}
"""


def test_names_of_objects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_package").mkdir()
    (tmp_path / "own_package" / "parts.py").write_text("from own_package.other import seven\nclass Part: pass\n")
    (tmp_path / "own_package" / "other.py").write_text("seven = 7\n")
    monkeypatch.chdir(tmp_path)
    assert find_object("own_package.parts:Part") is find_object("own_package.parts.Part")
    assert find_object("own_package.parts:seven") == 7
    (tmp_path / "beside.py").write_text("eight = 8\n")
    (tmp_path / "single.py").write_text("from beside import eight\n")
    assert find_object(f"{tmp_path}/single.py:eight") == 8
    assert find_object("os.path:join") is os.path.join


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("nowhere", ["package.module:Name", "file.py:Name", "'nowhere'"]),
        ("missing.py:thing", ["missing.py"]),
        ("single.py:thong", ["single.py", "thong", "thing"]),
        ("broken.py:thing", ["broken.py", "line 2", "SyntaxError"]),
        ("raising.py:thing", ["raising.py:3", "ZeroDivisionError", "division by zero"]),
    ],
)
def test_what_cannot_be_found_is_explained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, words: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "single.py").write_text("thing = 1\n")
    (tmp_path / "broken.py").write_text("thing = 1\nthing = = 2\n")
    (tmp_path / "raising.py").write_text("thing = 1\n\nthing = 1 / 0\n")
    with pytest.raises(UserError) as error:
        find_object(name)
    assert mentions(str(error.value), *words)


def test_a_model_is_found_in_a_file_and_in_a_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_model.py").write_text(MODEL.format(name="Mine"))
    for file in ("own_model.py", "own_model"):
        model, args = resolve_model(None, None, {"width": 5}, file)
        assert (model.__name__, args.vocab_size, args.width) == ("Mine", 300, 5)  # pyright: ignore
    cases: list[tuple[Any, dict[str, Any], str, list[str]]] = [
        ("Min", {}, "model.name", ["'Min'", "Mine?"]),
        (None, {"width": "5"}, "model.args.width", ["int", "'5'"]),
    ]
    for name, overrides, key, words in cases:
        with pytest.raises(ConfigError) as error:
            resolve_model(name, None, overrides, "own_model.py")
        assert error.value.problems[0].key == key
        assert mentions(error.value.problems[0].message, *words)


def test_files_without_one_model_are_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "two_models.py").write_text(MODEL.format(name="One") + MODEL.format(name="Two"))
    (tmp_path / "no_model.py").write_text("from titanlite.models.llama3 import Llama3\n")
    for file, key, words in (
        ("two_models.py", "model.name", ["One", "Two"]),
        ("no_model.py", "model.file", ["no_model.py", "titanlite.models.base.Model"]),
        ("absent.py", "model.file", ["absent.py"]),
    ):
        with pytest.raises(ConfigError) as error:
            resolve_model(None, None, {}, file)
        [problem] = error.value.problems
        assert problem.key == key
        assert mentions(problem.message, *words)
    assert resolve_model("Two", None, {}, "two_models.py")[0].__name__ == "Two"


@pytest.mark.parametrize(
    ("tokenizer_size", "flavor_size", "expected"),
    [
        (151669, 151936, 151936),  # Qwen3 and its tokenizer
        (258, 2048, 384),  # bytes
        (128256, 2048, 128256),
        (50258, 50257, 50304),
    ],
)
def test_the_vocabulary_follows_the_tokenizer(tokenizer_size: int, flavor_size: int, expected: int) -> None:
    assert vocab_size_for(tokenizer_size, flavor_size) == expected


def test_training_and_planning_resolve_the_same_vocabulary(tiny: TinyRun) -> None:
    tiny.toml.write_text(f'[data]\npath = "{tiny.text}"\n[job]\ndump_folder = "{tiny.folder}/outputs"\n')
    for options, size in (
        ([], 384),
        (["--data.tokenizer=python-2k"], 2048),
        (["--model.args.vocab_size=300"], 300),
        (["--model.flavor=8B", "--model.args.dim=64", "--model.args.n_layers=1", "--model.args.hidden_dim=8"], 384),
    ):
        config = tiny.config(*options)
        inputs = preflight(config, Ranks(0, 1, 0, 1), torch.device("cpu"))
        assert inputs.model.args.vocab_size == model_of(config).args.vocab_size == size
        assert model_of(with_vocab_size(config)) == model_of(config) == inputs.model


OWN_MODEL = """
import torch
from torch import nn
from titanlite.models.base import Model, ModelArgs
from titanlite.models.initial import Constant, InitialValues, Normal

class Halves(InitialValues):
    def values(self, bits, indices): return indices / 2

class OneValue(InitialValues):
    def values(self, bits, indices): return torch.zeros(1)

class Mine(Model):
    flavors = {"small": ModelArgs(vocab_size=258, max_seq_len=4096)}

    def __init__(self, args):
        super().__init__(args)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.head = nn.Linear(4, args.vocab_size)
        self.wide = nn.Parameter(torch.empty(2**12, 2**11))

    def forward(self, tokens, loss=None, *, documents=None): ...
    def flops_per_token(self, seq_len, *, causal=False): return 1.0
"""


ADVICE = ["Normal(std=0.02)", "docs/add_a_model.md"]


@pytest.mark.parametrize(
    ("method", "words"),
    [
        ("", ["Mine", "init_weight", "docs/add_a_model.md"]),
        ("return 0.02", ["Mine.init_weight", "0.02", "wide", *ADVICE]),
        (
            "if 'bias' not in name: return Normal(std=1 / shape[1])",
            ["Mine.init_weight", "None", "layers.0.bias", *ADVICE],
        ),
        ("return Halves()", []),
        ("return OneValue()", ["OneValue.values", "wide"]),
    ],
)
def test_initial_values_of_an_own_model_are_checked(
    method: str, words: list[str], tiny: TinyRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tiny.folder)
    body = f"    def init_weight(self, name, shape):\n        {method}\n" if method else ""
    (tiny.folder / "own_weights.py").write_text(OWN_MODEL + body)
    tiny.toml.write_text(f'[model]\nfile = "own_weights.py"\n[data]\npath = "{tiny.text}"\n')
    if not words:
        preflight(tiny.config(), Ranks(0, 1, 0, 1), torch.device("cpu"))
        return
    with pytest.raises(ConfigError) as error:
        preflight(tiny.config(), Ranks(0, 1, 0, 1), torch.device("cpu"))
    [problem] = error.value.problems
    assert problem.key == "model.file"
    assert mentions(problem.message, *words)


@pytest.mark.parametrize(
    ("command", "line", "words"),
    [
        (
            ["plan", "--world-size=2", "--gpu=H100"],
            "self.layers = nn.ModuleList([nn.Linear(4, args.width)])",
            ["own_init.py:18", "AttributeError"],
        ),
        (["config", "check"], "self.blocks = nn.ModuleList()", ["layers"]),
    ],
)
def test_an_own_model_whose_init_fails_is_one_line(
    command: list[str],
    line: str,
    words: list[str],
    tiny: TinyRun,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tiny.folder)
    text = OWN_MODEL.replace("self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))", line)
    (tiny.folder / "own_init.py").write_text(text)
    tiny.toml.write_text(f'[model]\nfile = "own_init.py"\n[data]\npath = "{tiny.text}"\n')
    assert cli.run([*command, str(tiny.toml)]) == 2
    [error] = [line for line in capfd.readouterr().err.splitlines() if line.startswith("error")]
    assert mentions(error, "model.file", "Mine.__init__", *words)


def test_files_are_relative_to_the_toml_that_names_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "base.toml").write_text(
        '[model]\nfile = "model.py"\n[data]\nsources = [{path = "python://data.py:One"}, {path = "text.py"}, '
        '{path = "reader://data.py:read?b/*.py:x"}]\n'
        '[training]\nloss = "/absolute/loss.py:f"\n'
    )
    outer = tmp_path / "outer.toml"
    outer.write_text('base = "inner/base.toml"\n[metrics]\nloggers = ["log.py:A", "package.module:B"]\n')
    (tmp_path / "text.py").write_text("text to train on\n")
    monkeypatch.chdir(tmp_path)
    config = load(outer, ["--optimizer.name=opt.py:Mine"])
    assert config.model.file == f"{tmp_path}/inner/model.py"
    code = f"{tmp_path}/inner/data.py"
    paths = [f"python://{code}:One", "text.py", f"reader://{code}:read?b/*.py:x"]
    assert [source.path for source in config.data.sources] == paths
    assert config.training.loss == "/absolute/loss.py:f"
    assert config.metrics.loggers == [f"{tmp_path}/log.py:A", "package.module:B"]
    assert config.optimizer.name == f"{tmp_path}/opt.py:Mine", "of the command line: relative to the current folder"


def test_sequences_of_the_users_own(tmp_path: Path) -> None:
    file = tmp_path / "own_rows.py"
    file.write_text(
        "class Mine:\n"
        "    def __init__(self, seq_len): self.seq_len = seq_len\n"
        "    def __len__(self): return 10\n"
        "    def __getitem__(self, i): return [i + j for j in range(self.seq_len + 1)]\n"
        "class Short(Mine):\n"
        "    def __getitem__(self, i): return [1] * self.seq_len\n"
        "class Negative(Mine):\n"
        "    def __getitem__(self, i): return [-1] * (self.seq_len + 1)\n"
        "class Large(Mine):\n"
        "    def __getitem__(self, i): return [20] * (self.seq_len + 1)\n"
        "class Other(Mine):\n"
        "    def __getitem__(self, i): return [i + j + (i == 5) for j in range(self.seq_len + 1)]\n"
    )
    sequences = CustomSequences(f"python://{file}:Mine", seq_len=4, vocab_size=20)
    assert (len(sequences), sequences.read(3).tokens.tolist(), sequences.read(3).labels.tolist()) == (
        10,
        [3, 4, 5, 6],
        [4, 5, 6, 7],
    )
    assert sequences.fingerprint == CustomSequences(f"python://{file}:Mine", seq_len=4, vocab_size=20).fingerprint
    other = CustomSequences(f"python://{file}:Other", seq_len=4, vocab_size=20)
    assert other.fingerprint != sequences.fingerprint
    for name, message in (
        ("Short", r"\b5\b.*\bseq_len\b.*\(4,\).*\bint64\b"),
        ("Negative", r" -1\b.* -1\b.*\b20\b"),
        ("Large", r"\b20\b.*\b20\b.*\b20\b"),
    ):
        with pytest.raises(UserError, match=message):
            CustomSequences(f"python://{file}:{name}", seq_len=4, vocab_size=20).read(0)
