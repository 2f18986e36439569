"""examples/shakespeare: the split, the tokenizer, and the loss of the records by plain PyTorch, of exported weights."""

import json
import random
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

import titanlite
from tests.support.helpers import titanlite as command
from titanlite.data.tokenizer import load_tokenizer

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "examples" / "shakespeare"
LETTERS = "abcdefghij \n.,:'"


@pytest.fixture
def texts(tmp_path: Path) -> dict[str, Any]:
    """Options of a config that reads a short text, and its parts."""
    draws = random.Random(0)
    train, validation = ("".join(draws.choices(LETTERS, k=length)) for length in (3000, 1003))
    prepare = runpy.run_path(str(EXAMPLE / "prepare.py"))
    for name, text in {"train.txt": train, "validation.txt": validation}.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "tokenizer.json").write_text(prepare["tokenizer_of"](train))
    return {
        "data.path": str(tmp_path / "train.txt"),
        "data.tokenizer": str(tmp_path / "tokenizer.json"),
        "validation.path": str(tmp_path / "validation.txt"),
        "job.dump_folder": str(tmp_path / "outputs"),
    }


def test_another_text_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "input.txt").write_text("First Citizen:\n")
    monkeypatch.setattr(sys, "argv", ["prepare.py", str(tmp_path / "input.txt"), str(tmp_path / "split")])
    with pytest.raises(SystemExit, match="sha256"):
        runpy.run_path(str(EXAMPLE / "prepare.py"), run_name="__main__")
    assert not (tmp_path / "split").exists()


def test_each_character_is_a_token(texts: dict[str, Any]) -> None:
    tokenizer = load_tokenizer(texts["data.tokenizer"])
    text = Path(texts["validation.path"]).read_text()
    ids = tokenizer.encode(text)
    assert ids.tolist() == [sorted(LETTERS).index(letter) for letter in text]
    assert (tokenizer.decode(ids), tokenizer.vocab_size, tokenizer.bos_id) == (text, len(LETTERS), None)


@pytest.mark.long
@pytest.mark.parametrize("name", ["a", "b", "c"])
def test_the_loss_is_that_of_plain_pytorch_over_the_whole_text(
    name: str, tmp_path: Path, texts: dict[str, Any]
) -> None:
    """Of weights that are exported, as transformers reads them; the text's last sequence is shorter than the others."""
    small = {"training.steps": 3, "lr_scheduler.warmup_steps": 1, "checkpoint.interval": 3, "model.args.n_layers": 2}
    records = titanlite.run_training(titanlite.load_config(EXAMPLE / f"{name}.toml", texts | small))
    code, _, errors = command("checkpoint", "export", str(records.path), "--out", str(tmp_path / "exported"))
    assert code == 0, errors
    weights = load_file(tmp_path / "exported" / "model.safetensors")
    shape = json.loads((tmp_path / "exported" / "config.json").read_text())
    text = torch.from_numpy(load_tokenizer(texts["data.tokenizer"]).encode(Path(texts["validation.path"]).read_text()))
    length = records.config["training"]["seq_len"]
    nats = 0.0
    for begin in range(0, len(text) - 1, length):
        part = text[begin : begin + length + 1].long()
        nats += F.cross_entropy(logits(weights, shape, part[:-1]), part[1:], reduction="sum").item()
    [of_text] = records.validation[-1]["sources"].values()
    assert of_text["tokens"] == len(text) - 1 == 1002
    assert (len(text) - 1) % length
    assert records.validation[-1]["loss"] == pytest.approx(nats / (len(text) - 1), rel=1e-6)


def logits(weights: dict[str, Tensor], shape: dict[str, Any], ids_L: Tensor) -> Tensor:
    """Llama's forward pass of one sequence -> [L, V]; with norms of queries and keys where there are any."""
    heads, kv_heads = shape["num_attention_heads"], shape["num_key_value_heads"]
    size = weights["model.layers.0.self_attn.q_proj.weight"].shape[0] // heads
    theta = shape.get("rope_theta") or shape["rope_parameters"]["rope_theta"]
    angles_LH = torch.arange(len(ids_L))[:, None] * theta ** (-torch.arange(0, size, 2) / size)
    angles_LH = torch.cat([angles_LH, angles_LH], dim=-1)

    def norm(x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], weights[f"{name}.weight"], shape["rms_norm_eps"])

    def heads_of(x_LD: Tensor, name: str, count: int, norm_name: str = "") -> Tensor:
        x_NLH = F.linear(x_LD, weights[f"{name}.weight"]).unflatten(-1, (count, size)).transpose(0, 1)
        if not norm_name:
            return x_NLH
        x_NLH = norm(x_NLH, norm_name) if f"{norm_name}.weight" in weights else x_NLH
        first, second = x_NLH.chunk(2, dim=-1)
        return x_NLH * angles_LH.cos() + torch.cat([-second, first], dim=-1) * angles_LH.sin()

    x_LD = weights["model.embed_tokens.weight"][ids_L]
    for layer in range(shape["num_hidden_layers"]):
        block = f"model.layers.{layer}"
        inner_LD = norm(x_LD, f"{block}.input_layernorm")
        q, k = (
            heads_of(inner_LD, f"{block}.self_attn.{kind}_proj", count, f"{block}.self_attn.{kind}_norm")
            for kind, count in (("q", heads), ("k", kv_heads))
        )
        v = heads_of(inner_LD, f"{block}.self_attn.v_proj", kv_heads)
        k, v = (of_heads.repeat_interleave(heads // kv_heads, dim=0) for of_heads in (k, v))
        scores = (q @ k.transpose(1, 2) / size**0.5).masked_fill(
            torch.ones(len(ids_L), len(ids_L)).triu(1) > 0, -torch.inf
        )
        out_LD = (scores.softmax(dim=-1) @ v).transpose(0, 1).flatten(1)
        x_LD = x_LD + F.linear(out_LD, weights[f"{block}.self_attn.o_proj.weight"])
        inner_LD = norm(x_LD, f"{block}.post_attention_layernorm")
        gate, up = (F.linear(inner_LD, weights[f"{block}.mlp.{kind}_proj.weight"]) for kind in ("gate", "up"))
        x_LD = x_LD + F.linear(F.silu(gate) * up, weights[f"{block}.mlp.down_proj.weight"])
    head = weights.get("lm_head.weight", weights["model.embed_tokens.weight"])
    return F.linear(norm(x_LD, "model.norm"), head)


def test_a_record_holds_only_by_its_rules() -> None:
    """scripts/record.py."""
    names = runpy.run_path(str(ROOT / "scripts" / "record.py"))
    row, run = names["ROWS"]["A"], names["Run"]
    right = {"loss": 1.5, "characters": 1_536_000, "parameters": 800_000, "seconds": 1.0, "predicted": 111_539}
    assert run(**right).broken(row) == []
    for name, wrong in {"loss": 1.6, "characters": 1_536_001, "parameters": 810_001, "predicted": 111_488}.items():
        assert len(run(**right | {name: wrong}).broken(row)) == 1, name
