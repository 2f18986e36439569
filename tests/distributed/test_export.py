"""Exports of checkpoints that several ranks have saved."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.helpers import TinyRun, run_in_turn, train_on_this_rank
from tests.layouts import degrees, trained
from tests.weights import SMALL
from titanlite.schema import Config
from titanlite.tools import cli
from titanlite.tools.convert.export import export_folder
from titanlite.tools.convert.source import load_model, open_source
from titanlite.tools.convert.target import open_target


def train(rank: int, world_size: int, config: Config) -> None:
    train_on_this_rank(config, rank, world_size)


@pytest.mark.slow
def test_sharded_checkpoints_are_exported_in_one_process(tiny: TinyRun, tmp_path: Path) -> None:
    """Shards of 2 x 2 ranks: the files have what `dcp.load` reads, as transformers does."""
    options = [f"--model.args.{name}={value}" for name, value in {**SMALL, "vocab_size": 387, "hidden_dim": 42}.items()]
    layout = ["--parallelism.data_parallel_replicate_degree=2", "--parallelism.data_parallel_shard_degree=2"]
    run_in_turn(train, 4, [tiny.config(*options, *layout, "--training.steps=2", world_size=4)])
    source = open_source(str(tiny.folder / "outputs" / "tiny"))
    assert len({chunk.relative_path for chunk in source.metadata.storage_data.values()}) >= 2
    weights = dict(load_model(source).named_parameters())
    out = tmp_path / "hf"
    done = export_folder(source, open_target(str(out)), max_shard_bytes=10**9, check=True)
    assert "transformers computes the same on 128 tokens" in done.report
    found = load_file(out / "model.safetensors")
    assert torch.equal(found["model.embed_tokens.weight"], weights["tok_embeddings.weight"])
    assert torch.equal(found["model.layers.1.mlp.down_proj.weight"], weights["layers.1.feed_forward.w2.weight"])


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("model", "layout"),
    [
        ("name='llama3', args={dim=48, n_layers=2, n_heads=4, n_kv_heads=2, hidden_dim=42, vocab_size=260}",
         (1, 1, 1, 2)),
        ("name='llama3', args={dim=48, n_layers=2, n_heads=4, n_kv_heads=2, hidden_dim=42, vocab_size=260}",
         (1, 1, 2)),
        ("name='qwen3_moe', flavor='debug', args={dim=32, n_layers=2, vocab_size=259, balance_rate=0.0}",
         (1, 2, 1, 1, 2)),
    ],
    ids=["tensor", "context", "expert"],
)  # fmt: skip
def test_checkpoints_of_each_axis_serve_as_those_of_one_process(
    tiny: TinyRun, tmp_path: Path, capfd: pytest.CaptureFixture[str], model: str, layout: tuple[int, ...]
) -> None:
    """Validation, text and logits of an export; the weights are the bits of training."""
    options = [f"--model={{{model}}}", "--validation.enable", f"--validation.path={tiny.text}", "--optimizer.lr=3e-3"]
    one = tiny.config(*options, "--job.name=one")
    two = tiny.config(*options, *degrees(*layout), "--job.name=two", world_size=2)
    run_in_turn(train, 1, [one])
    [[weights, _]] = run_in_turn(trained, 2, [two])
    losses, texts = [], []
    for name in ("one", "two"):
        run = str(tiny.folder / "outputs" / name)
        assert cli.run(["evaluate", run, "--json", "--dtype", "float32"]) == 0
        losses.append(json.loads(capfd.readouterr().out)["loss"])
        assert cli.run(["generate", run, "--prompt", "one two", "--max-new-tokens", "20"]) == 0
        texts.append(capfd.readouterr().out)
        out = tmp_path / name
        words = ["--out", str(out), "--check", "--no-tokenizer"]
        assert cli.run(["checkpoint", "export", run, *words]) == 0
        assert "transformers computes the same" in capfd.readouterr().out
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert texts[1] == texts[0]
    source = open_source(str(tiny.folder / "outputs" / "two"))
    for name, parameter in load_model(source).named_parameters():
        assert torch.equal(parameter, torch.from_numpy(weights[name])), name
    found, expected = (load_file(tmp_path / name / "model.safetensors") for name in ("two", "one"))
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-4)
