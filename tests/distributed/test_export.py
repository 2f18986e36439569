"""Exports of checkpoints that several ranks have saved."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.support.helpers import TinyRun, mentions, run_in_turn
from tests.support.layouts import trained
from tests.support.weights import SMALL
from titanlite.tools.convert.export import OutputFolder, export_folder
from titanlite.tools.convert.source import load_model, open_source


@pytest.mark.slow
def test_sharded_checkpoints_are_exported_in_one_process(tiny: TinyRun, tmp_path: Path) -> None:
    """The files have what `dcp.load` reads, as transformers does."""
    options = [f"--model.args.{name}={value}" for name, value in {**SMALL, "vocab_size": 387, "hidden_dim": 42}.items()]
    run_in_turn(trained, 2, [tiny.config(*options, "--training.steps=2", world_size=2)])
    source = open_source(str(tiny.folder / "outputs" / "tiny"))
    assert len({chunk.relative_path for chunk in source.metadata.storage_data.values()}) >= 2
    weights = dict(load_model(source).named_parameters())
    out = tmp_path / "hf"
    done = export_folder(source, OutputFolder(str(out)), max_shard_bytes=10**9, check=True)
    assert mentions(done.report, "transformers", "128 tokens")
    found = load_file(out / "model.safetensors")
    assert torch.equal(found["model.embed_tokens.weight"], weights["tok_embeddings.weight"])
    assert torch.equal(found["model.layers.1.mlp.down_proj.weight"], weights["layers.1.feed_forward.w2.weight"])
