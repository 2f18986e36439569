"""Export to a Hugging Face folder: what transformers loads computes what our model does."""

import json
import multiprocessing
import os
import signal
from pathlib import Path

import fsspec
import pytest
import torch
import transformers
from safetensors.torch import load_file

from tests.support.helpers import LONGEST, mentions, wait_until
from tests.support.manifests import flip
from tests.support.object_stores import Flaky
from tests.support.weights import one_process, random_model, save_model, save_random, small_toml, state
from titanlite.tools import cli
from titanlite.tools.convert.export import OutputFolder
from titanlite.tools.convert.source import load_model, open_source

TOKENS = torch.arange(64).view(2, 32) * 5 % 384


def export(*words: object) -> int:
    return cli.run(["checkpoint", "export", *map(str, words)])


def logits_of(folder: Path) -> torch.Tensor:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        return model(TOKENS).logits


@pytest.mark.long
def test_logits_are_those_of_transformers(tmp_path: Path) -> None:
    """Of the other families, and tied: tests/unit/tools/convert/test_export_check.py and test_import_command.py."""
    checkpoint, model = save_random(tmp_path, "qwen3_moe")
    out = tmp_path / "hf"
    assert export(checkpoint, "--out", out) == 0
    with torch.no_grad():
        ours = model.eval()(TOKENS)
    assert ours.std() > 0.5
    assert (logits_of(out) - ours).abs().max() < 1e-4
    tensors = load_file(out / "model.safetensors")
    expert = tensors["model.layers.1.mlp.experts.3.down_proj.weight"]
    assert torch.equal(expert, state(model)["layers.1.feed_forward.w2"][3].T)
    assert json.loads((out / "config.json").read_text())["torch_dtype"] == "float32"

    half = tmp_path / "half"
    assert export(checkpoint, "--out", half, "--dtype", "bfloat16", "--max-shard-size", "40KB") == 0
    rounded = load_model(open_source(str(checkpoint)))
    for parameter in rounded.parameters():
        parameter.data = parameter.data.bfloat16().float()
    with torch.no_grad():
        assert (logits_of(half) - rounded(TOKENS)).abs().max() < 1e-4
    loaded = transformers.AutoModelForCausalLM.from_pretrained(half)
    assert loaded.dtype == torch.bfloat16
    index = json.loads((half / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in half.glob("*.safetensors"))
    assert files == [f"model-{i:05}-of-{len(files):05}.safetensors" for i in range(1, len(files) + 1)]
    assert set(index["weight_map"].values()) == set(files)
    assert len(files) >= 3
    assert {path.stat().st_mode for path in half.iterdir()} == {(out / "config.json").stat().st_mode}
    assert all((half / name).stat().st_size < 44_000 for name in files)
    assert index["metadata"]["total_size"] == 2 * sum(p.numel() for p in rounded.parameters())
    for name in files:
        assert all(tensor.dtype == torch.bfloat16 for tensor in load_file(half / name).values())


def test_a_bias_that_transformers_lacks_is_not_dropped_silently(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    toml = tmp_path / "small.toml"
    toml.write_text(small_toml("qwen3_moe"))
    model = random_model(toml)
    model.get_buffer("layers.1.feed_forward.bias_E")[2] = 0.25
    with one_process():
        checkpoint = save_model(tmp_path, model, toml)
    out = tmp_path / "hf"
    assert export(checkpoint, "--out", out) == 2
    assert mentions(capsys.readouterr().err, "layers.1.feed_forward.bias_E", "--drop 'layers.*.feed_forward.bias_E'")
    assert not out.exists()
    assert export(checkpoint, "--out", out, "--drop", "layers.*.feed_forward.bias_E") == 0
    assert len(load_file(out / "model.safetensors")) == 3 + 2 * (2 + 4 + 2 + 1 + 3 * 4)


def test_what_config_json_needs_cannot_be_dropped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint, _ = save_random(tmp_path, "qwen3_moe")
    for glob in ("layers.*", "head.norm.weight", "*", "layers.1.feed_forward.w2"):
        assert export(checkpoint, "--out", tmp_path / "hf", "--drop", glob) == 2
        assert capsys.readouterr().err.startswith("error: --drop: ")
        assert not (tmp_path / "hf").exists()
        assert not (tmp_path / ".hf.staging").exists()


@pytest.mark.long
def test_what_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint, _ = save_random(tmp_path, "llama3")
    out = tmp_path / "hf"
    out.mkdir()
    (out / "mine.txt").write_text("mine")

    def refusal(*words: object) -> str:
        assert export(*words) == 2
        return capsys.readouterr().err

    assert mentions(refusal(checkpoint, "--out", out), out, "--out")
    assert [path.name for path in out.iterdir()] == ["mine.txt"]
    assert not (tmp_path / ".hf.staging").exists()
    wrong = refusal(checkpoint, "--out", tmp_path / "b", "--max-shard-size", "5 apples")
    assert mentions(wrong, "--max-shard-size", "5GB", "'5 apples'")
    assert str(tmp_path / "nothing") in refusal(tmp_path / "nothing", "--out", tmp_path / "b")
    assert mentions(refusal(checkpoint, "--out", "memory://b/hf"), "--out", "memory://b/hf")
    (tmp_path / "file").write_text("")
    assert str(tmp_path / "file") in refusal(checkpoint, "--out", tmp_path / "file" / "b")
    larger = refusal(checkpoint, "--out", tmp_path / "b", "--tokenizer", "python-2k")
    assert mentions(larger, "python-2k", "2,048 tokens", "--no-tokenizer")
    assert {path.name for path in tmp_path.iterdir()} == {"small.toml", "checkpoints", "hf", "file"}


@pytest.mark.long
def test_a_model_of_the_users_own_needs_a_table_of_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One with a table is exported: tests/unit/tools/convert/test_foreign.py."""
    (tmp_path / "without_table.py").write_text(
        "from titanlite.models.formats import Formats\nfrom titanlite.models.llama3 import Llama3\n"
        "class Mine(Llama3):\n    draws_random = False\n    formats = Formats()\n"
    )
    toml = tmp_path / "own.toml"
    toml.write_text(small_toml("llama3").replace('name = "llama3"', 'file = "without_table.py"', 1))
    with one_process():
        checkpoint = save_model(tmp_path, random_model(toml), toml)
    assert export(checkpoint, "--out", tmp_path / "hf", "--model-file", tmp_path / "without_table.py") == 2
    error = capsys.readouterr().err
    assert mentions(error, "Mine")
    assert "docs/add_a_model.md" in error


def test_a_changed_byte_of_the_checkpoint_ends_the_export(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint, model = save_random(tmp_path, "qwen3_moe")
    shard = checkpoint / "__0_0.distcp"
    row = state(model)["tok_embeddings.weight"][200].numpy().tobytes()
    flip(shard, shard.read_bytes().index(row) + 5)
    assert export(checkpoint, "--out", tmp_path / "hf") == 2
    assert mentions(capsys.readouterr().err, shard, "tok_embeddings.weight")
    assert not (tmp_path / "hf").exists()


@pytest.mark.slow
def test_a_killed_export_leaves_nothing_and_is_written_again(tmp_path: Path) -> None:
    checkpoint, model = save_random(tmp_path, "qwen3_moe", n_layers=6, n_experts=16)
    out, staging = tmp_path / "hf", tmp_path / ".hf.staging"
    words = ["checkpoint", "export", str(checkpoint), "--out", str(out), "--max-shard-size", "8KB"]
    process = multiprocessing.get_context("forkserver").Process(target=cli.run, args=(words,))
    process.start()
    wait_until(lambda: any(staging.glob("model-00009*.safetensors")) or not process.is_alive(), LONGEST)
    process.kill()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert not out.exists()
    assert cli.run([*words[:-1], "60KB"]) == 0
    assert not staging.exists()
    counts = {path.stem.rpartition("-")[2] for path in out.glob("model-*.safetensors")}
    assert len(counts) == 1, "files of the killed export, with another number of files, are gone"
    assert (logits_of(out) - model.eval()(TOKENS)).abs().max() < 1e-4


def test_two_exports_to_one_place(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint, _ = save_random(tmp_path, "llama3")
    target = OutputFolder(str(tmp_path / "hf"))
    target.begin()
    assert export(checkpoint, "--out", tmp_path / "hf") == 2
    assert mentions(capsys.readouterr().err, tmp_path / "hf", os.getpid())


@pytest.mark.long
def test_from_a_store(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The store fails now and then."""
    _, model = save_random(tmp_path, "llama3")
    Flaky.register()
    Flaky.chance = 0.0
    Flaky._force = False
    fsspec.filesystem("flaky").put(str(tmp_path / "checkpoints"), "/bucket/run", recursive=True)
    Flaky.register()
    assert export("flaky://bucket/run", "--out", tmp_path / "hf") == 0, capsys.readouterr().err
    Flaky.chance = 0.0
    assert (logits_of(tmp_path / "hf") - model.eval()(TOKENS)).abs().max() < 1e-4
    Flaky.store.clear()
