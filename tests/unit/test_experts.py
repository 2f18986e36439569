"""`titanlite checkpoint import --experts`: a student with the experts that its teacher uses most."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.foreign import assert_same, logits, oracle_of
from titanlite.checkpoint.state import model_state
from titanlite.schema import Data
from titanlite.tools import cli
from titanlite.tools.convert.compress import Student
from titanlite.tools.convert.experts import Sample, most_used, read_sample
from titanlite.tools.convert.source import load_model, open_source

UNUSED = {0: [1, 4], 1: [0, 3]}
"""Experts that the router of the test's teacher never picks, of each layer."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder with a teacher whose routers never pick some experts, and a text."""
    monkeypatch.chdir(tmp_path)
    oracle = teacher()
    oracle.save_pretrained(tmp_path / "hf")
    (tmp_path / "text.txt").write_text(Path(cli.__file__).read_text()[:6000])
    return tmp_path


def teacher() -> Any:
    """Return transformers' Qwen3-MoE with 5 experts, 2 a token, in 2 layers."""
    oracle = oracle_of("qwen3_moe", vocab_size=2048)
    for index, experts in UNUSED.items():
        layer: Any = oracle.model.layers[index]
        with torch.no_grad():
            layer.post_attention_layernorm.weight.fill_(1.0)
            # A constant feature of every token, which only the router reads, against the experts that must not be used.
            hidden = oracle.config.hidden_size
            layer.self_attn.o_proj.weight[hidden - 1] = 0.0
            layer.mlp.experts.down_proj[:, hidden - 1] = 0.0
            layer.mlp.gate.weight[:, hidden - 1] = 0.0
            layer.mlp.gate.weight[experts, hidden - 1] = -50.0
    with torch.no_grad():
        oracle.model.embed_tokens.weight[:, -1] = 2.0
    return oracle


def run(folder: Path, out: str, *options: str, path: str = "hf") -> int:
    sample = ["--sample", str(folder / "text.txt"), "--sample-tokens", "512"]
    return cli.run(["checkpoint", "import", str(folder / path), "--out", str(folder / out), *sample, *options])


def without(oracle: Any, kept: dict[int, list[int]], layers: list[int]) -> Any:
    """Return transformers' model with these experts and layers alone, cut by hand."""
    small = copy.deepcopy(oracle)
    for index, experts in kept.items():
        mlp: Any = small.model.layers[index].mlp
        mlp.gate.weight = nn.Parameter(mlp.gate.weight[experts].clone())
        for name in ("gate_up_proj", "down_proj"):
            setattr(mlp.experts, name, nn.Parameter(getattr(mlp.experts, name)[experts].clone()))
        mlp.experts.num_experts = mlp.gate.num_experts = len(experts)
    small.model.layers = nn.ModuleList([small.model.layers[index] for index in layers])
    for index in range(len(layers)):
        layer: Any = small.model.layers[index]
        layer.self_attn.layer_idx = index
    small.config.num_hidden_layers = len(layers)
    return small


@pytest.mark.long
def test_experts_that_no_token_uses_are_left_out(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    kept = {layer: [expert for expert in range(5) if expert not in unused] for layer, unused in UNUSED.items()}
    assert run(folder, "student", "--experts", "keep=3") == 0
    text = capfd.readouterr().out
    assert f"wrote {folder}/student/router_statistics.json, from 512 tokens" in text
    assert "layers.1.feed_forward: the kept experts had 100.0% of the tokens" in text
    found = json.loads((folder / "student" / "router_statistics.json").read_text())
    assert found["tokens"] == 512
    for layer, unused in UNUSED.items():
        counts = found["counts"][f"layers.{layer}.feed_forward"]
        assert sum(counts) == 2 * 512
        assert [expert for expert, count in enumerate(counts) if not count] == unused

    source = open_source(str(folder / "student"))
    assert source.config is not None
    assert source.config.model.args["n_experts"] == source.spec.args.n_experts == 3  # type: ignore[attr-defined]
    student, tokens = load_model(source), torch.randint(0, 2048, (2, 40), generator=torch.Generator().manual_seed(3))
    assert (logits(student, tokens) - logits(without(teacher(), kept, [0, 1]), tokens)).abs().max() < 1e-4
    assert (logits(student, tokens) - logits(teacher(), tokens)).abs().max() < 1e-4, "the others were not used"

    # With layers, and of a checkpoint of ours.
    assert cli.run(["checkpoint", "import", str(folder / "hf"), "--out", str(folder / "all")]) == 0
    assert run(folder, "small", "--experts", "keep=3", "--layers", "1", path="all") == 0
    small = load_model(open_source(str(folder / "small")))
    assert (logits(small, tokens) - logits(without(teacher(), kept, [1]), tokens)).abs().max() < 1e-4


@pytest.mark.long
def test_all_experts_are_the_teacher_bit_for_bit(folder: Path) -> None:
    assert run(folder, "student", "--experts", "keep=5") == 0
    assert cli.run(["checkpoint", "import", str(folder / "hf"), "--out", str(folder / "all")]) == 0
    student, whole = (model_state(load_model(open_source(str(folder / name)))) for name in ("student", "all"))
    assert_same({n: t.detach() for n, t in student.items()}, {n: t.detach() for n, t in whole.items()})


def test_most_used_are_those_with_most_tokens_of_each_layer() -> None:
    counts = {"a": [1, 5, 3, 5, 9], "b": [2, 2, 2, 2, 2], "c": [9, 0, 0, 1, 8]}
    assert most_used(counts, 3) == {"a": [1, 3, 4], "b": [0, 1, 2], "c": [0, 3, 4]}, "of equal ones the first"


def test_the_bias_of_an_expert_goes_with_it() -> None:
    kept = {"layers.0.feed_forward.bias_E": [0, 1, 2], "layers.1.feed_forward.bias_E": [1, 2, 4]}
    student = Student([1], kept)
    name = student.teacher_name("layers.0.feed_forward.bias_E")
    assert name == "layers.1.feed_forward.bias_E"
    assert student.part_of(name, torch.tensor([0.5, -1.0, 2.0, 3.0, 7.0])).tolist() == [-1.0, 2.0, 7.0]


@pytest.mark.long
def test_tokens_are_counted_as_transformers_chooses_experts(folder: Path) -> None:
    oracle = oracle_of("qwen3_moe", vocab_size=2048)
    oracle.save_pretrained(folder / "plain")
    assert run(folder, "student", "--experts", "keep=3", path="plain") == 0
    found = json.loads((folder / "student" / "router_statistics.json").read_text())["counts"]
    spec = open_source(str(folder / "plain")).spec
    tokens_BL = read_sample(
        Sample(str(folder / "text.txt"), 512), spec, Data().tokenizer, cache_folder=folder / "cache"
    )
    with torch.no_grad():
        chosen = oracle(tokens_BL, output_router_logits=True).router_logits
    for layer, logits_TE in enumerate(chosen):
        picked = logits_TE.topk(2, dim=-1).indices.flatten().bincount(minlength=5).tolist()
        assert found[f"layers.{layer}.feed_forward"] == picked


def test_mistakes_are_one_line(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    oracle_of("llama3").save_pretrained(folder / "dense")
    capfd.readouterr()
    for options, path, message in (
        (["--experts", "64"], "hf", "--experts: expected keep=NUMBER"),
        (["--experts", "keep=6"], "hf", "--experts: keep=6 is not possible"),
        (["--experts", "keep=1"], "hf", "--experts: keep=1 is not possible"),
        (["--experts", "keep=2"], "dense", "--experts: Llama3 has no experts"),
        (["--experts", "keep=3", "--sample-tokens", "99999"], "hf", f"--sample: {folder}/text.txt has "),
        ([], "hf", "--sample: is for --experts keep=K"),
    ):
        assert run(folder, "out", *options, path=path) == 2, options
        [line] = capfd.readouterr().err.splitlines()
        assert line.startswith(f"error: {message}"), line
        assert not (folder / "out").exists()
