"""Opening weights without a process group: the model of a checkpoint, its config, its tokenizer, tensor by tensor."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader

from tests.support.chat_tokenizer import write_chat_tokenizer
from tests.support.manifests import flip, forge
from tests.support.weights import one_process, random_model, save_model, small_toml, state
from titanlite.checkpoint import manifest as manifests
from titanlite.config.load import load
from titanlite.models.base import Model
from titanlite.runtime.errors import UserError
from titanlite.schema import dump
from titanlite.storage.storage import LocalStorage
from titanlite.tools.convert.source import load_model, open_source, read_tensor


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Model]:
    """The run folder of a small model, and the model. Its config is only in the checkpoint."""
    folder = tmp_path_factory.mktemp("run")
    toml = folder / "small.toml"
    toml.write_text(small_toml("qwen3_moe", tied_head=True))
    model = random_model(toml)
    with one_process():
        save_model(folder, model, toml, step=9)
        for parameter in model.parameters():
            parameter.data.add_(0.5)
        model.get_buffer("layers.0.feed_forward.bias_E").add_(2.0)
        save_model(folder, model, toml, step=10)
    return folder, model


@pytest.mark.long
def test_a_checkpoint_knows_its_model(saved: tuple[Path, Model], tmp_path: Path) -> None:
    folder, model = saved
    newest = folder / "checkpoints" / "step-00000010"
    config = load(folder / "small.toml")
    manifest = manifests.read_manifest(LocalStorage(str(newest.parent), ""), newest.name)
    assert (newest / "config.toml").read_text() == dump(config)
    assert manifest.files["config.toml"].size == len(dump(config))
    for place in (newest, folder, folder / "checkpoints"):
        source = open_source(str(place))
        assert source.where == str(newest)
        assert source.config is not None
        assert (source.config.model, source.config.data) == (config.model, config.data)
        assert source.tokenizer is not None
        assert source.tokenizer.name == "bytes"
    loaded = load_model(source)
    theirs, ours = state(model), state(loaded)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert loaded.get_parameter("head.output.weight") is loaded.get_parameter("tok_embeddings.weight")
    tokens = torch.arange(60).view(2, 30)
    assert torch.equal(loaded(tokens), model.eval()(tokens))
    older = open_source(str(newest.with_name("step-00000009")))
    name = "layers.1.feed_forward.w1"
    assert torch.equal(read_tensor(older, name) + 0.5, theirs[name])
    assert read_tensor(older, "layers.0.feed_forward.bias_E").tolist() == [0.0] * 4
    assert older.identity != source.identity


def test_older_checkpoints_take_the_config_of_the_run(saved: tuple[Path, Model], tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(saved[0], folder)
    checkpoint = folder / "checkpoints" / "step-00000010"
    forge(checkpoint, {"config.toml": None})  # one of a version that kept no config
    with pytest.raises(UserError, match="--config"):
        open_source(str(checkpoint))
    named = open_source(str(checkpoint), config=folder / "small.toml")
    shutil.move(folder / "small.toml", folder / "config.toml")
    beside = open_source(str(checkpoint))
    assert named.spec == beside.spec == open_source(str(saved[0])).spec


def test_wrong_sources_are_one_line(saved: tuple[Path, Model], tmp_path: Path) -> None:
    with pytest.raises(UserError, match=str(tmp_path)):
        open_source(str(tmp_path))
    with pytest.raises(UserError, match=r"^nonsense://there: .*nonsense"):
        open_source("nonsense://there")
    with pytest.raises(UserError, match=r"^--tokenizer: .*\bnone\b"):
        open_source(str(saved[0]), tokenizer="none")
    folder = tmp_path / "copy"
    shutil.copytree(saved[0], folder)
    checkpoint = folder / "checkpoints" / "step-00000010"
    forge(
        checkpoint, {"config.toml": small_toml("qwen3_moe", tied_head=False, tokenizer="/gone/tokenizer.json").encode()}
    )
    lost = open_source(str(checkpoint))
    assert lost.tokenizer is None
    assert lost.spec == open_source(str(saved[0])).spec, "the shape is that of the manifest"
    forge(checkpoint, {"config.toml": b'[model]\nname = "llama3"\n'})
    with pytest.raises(UserError, match=r"step-00000010(.|\n)*head_dim(.|\n)*--config"):
        open_source(str(checkpoint))
    forge(checkpoint, {"config.toml": b"[model]\nnaem = 3\n[gone]\noption = 1\n"})
    with pytest.raises(UserError, match=r"\nmodel.naem: .*\n(?!.*gone).*--config"):
        open_source(str(checkpoint))
    shard = checkpoint / "__0_0.distcp"
    flip(shard, shard.stat().st_size // 2)
    forge(checkpoint, {"config.toml": small_toml("qwen3_moe", tied_head=True).encode()})
    with pytest.raises(UserError, match=shard.name):
        load_model(open_source(str(checkpoint)))
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(UserError, match=str(checkpoint)):
        open_source(str(checkpoint))


def test_plain_dcp_reads_the_model(saved: tuple[Path, Model]) -> None:
    """The plain library reads names and values of model states, as docs/checkpoints.md shows."""
    folder, model = saved
    reader = FileSystemReader(folder / "checkpoints" / "step-00000010")
    entries: dict[str, Any] = dict(reader.read_metadata().state_dict_metadata)
    tensors = {
        name.removeprefix("model."): torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in entries.items()
        if name.startswith("model.")
    }
    dcp.load({"model": tensors}, storage_reader=reader, no_dist=True)
    wanted = state(model)
    assert tensors.keys() == wanted.keys()
    assert all(torch.equal(tensors[name], wanted[name]) for name in wanted)


def test_a_run_has_its_tokenizer_where_its_checkpoints_are_elsewhere(saved: tuple[Path, Model], tmp_path: Path) -> None:
    """As with checkpoint.folder on an object store: the copy of the tokenizer is in the folder of the run."""
    run, place = tmp_path / "run", tmp_path / "elsewhere"
    (run / "tokenizer").mkdir(parents=True)
    shutil.copytree(saved[0] / "checkpoints", place)
    text = small_toml("qwen3_moe", tied_head=True, tokenizer="/gone/tokenizer")
    forge(place / "step-00000010", {"config.toml": text.encode()})
    write_chat_tokenizer(run / "tokenizer", None)
    (run / "config.toml").write_text(f'[checkpoint]\nfolder = "{place}"\n')
    found = open_source(str(run))
    assert found.where == str(place / "step-00000010")
    assert found.tokenizer is not None
    assert found.tokenizer.vocab_size == 260
    assert open_source(str(place)).tokenizer is None, "nobody knows the run from there"
