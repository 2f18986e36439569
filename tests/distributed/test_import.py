"""Foreign weights on several ranks: the same bits on every layout, and each rank reads what its shards need."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch.distributed.checkpoint as dcp

from tests.support.foreign import assert_same, expected_tensors, options_of, oracle_of, save_torchtitan, spec_of
from tests.support.helpers import TinyRun, mentions, run_in_turn
from tests.support.layouts import built, degrees, whole
from titanlite.models.base import Model
from titanlite.models.llama3 import Llama3
from titanlite.models.registry import ModelSpec
from titanlite.runtime.private_torch.tensors import local_tensor
from titanlite.schema import Config
from titanlite.state import model_state
from titanlite.tools.convert.source import load_model, open_source
from titanlite.tools.convert.weights import open_weights

SOURCES = ("hugging-face", "experts", "torchtitan", "float8", "mxfp4")


def loaded(rank: int, world_size: int, config: Config) -> tuple[dict[str, Any], int, int, int]:
    """Return the weights that a run begins with, and bytes: that a rank reads for them, of its shards, and of all."""
    run = built(rank, world_size, config)
    tensors = {name: tensor for name, tensor in model_state(run.model).items() if not name.endswith("bias_E")}
    found = {name: whole(tensor) for name, tensor in tensors.items()}
    args: Any = run.model.args
    reader = open_weights(str(config.checkpoint.initial_load_path), ModelSpec(type(run.model), args), [])
    assert reader is not None
    for tensor in tensors.values():
        local_tensor(tensor).zero_()
    dcp.load({f"model.{name}": tensor for name, tensor in tensors.items()}, storage_reader=reader)
    assert_same({name: whole(tensor) for name, tensor in tensors.items()}, found)
    shards = sum(local_tensor(tensor).nbytes for tensor in tensors.values())
    return found, reader.bytes_read, shards, sum(tensor.nbytes for tensor in found.values())


Layout = tuple[int, ...]
ROWS: list[tuple[str, Layout]] = [(source, (1, 4)) for source in ("torchtitan", "float8", "mxfp4")]
"""Four ranks share the rows so that heads are cut, which interleaved rows do not mind. Names of float8 weights are
those of others of Hugging Face, and mxfp4 is of experts."""
FURTHER: list[tuple[str, Layout]] = [
    ("hugging-face", (1, 4)), ("experts", (1, 4)),
    ("hugging-face", (1, 2, 1, 2)), ("torchtitan", (1, 1, 2, 2)),
    ("experts", (1, 4, 1, 1, 4)), ("hugging-face", (1, 2, 2)), ("hugging-face", (2, 2)),
    ("experts", (1, 2, 2, 1, 2)), ("float8", (1, 2, 1, 2)), ("float8", (1, 2, 2)), ("mxfp4", (1, 4, 1, 1, 4)),
]  # fmt: skip


def write_quantized(folder: Path, llama: Any) -> Model:
    """Write a folder of quantized weights, and return the model that one process reads from it."""
    from tests.support.families import built, oracle
    from tests.support.quantized import quantize_folder

    small = {"vocab_size": 260, "hidden_dim": 64, "n_experts": 8}
    theirs = llama if folder.name == "float8" else oracle(built("gpt_oss", **small))
    theirs.save_pretrained(folder)
    quantize_folder(folder, (7, 5) if folder.name == "float8" else None)
    return load_model(open_source(str(folder)))


@pytest.mark.parametrize(
    "places", [pytest.param(ROWS, marks=pytest.mark.slow), pytest.param(FURTHER, marks=pytest.mark.nightly)]
)
def test_every_layout_begins_with_the_same_bits(tiny: TinyRun, places: list[tuple[str, Layout]]) -> None:
    """Bytes that a rank reads are counted where it reads rows: where columns are shared, it reads whole rows."""
    llama, moe = oracle_of("llama3", vocab_size=260), oracle_of("qwen3_moe", vocab_size=260, num_experts=4)
    llama.save_pretrained(tiny.folder / "hugging-face", max_shard_size="20KB")
    moe.save_pretrained(tiny.folder / "experts")
    save_torchtitan("llama3", llama, tiny.folder / "torchtitan")
    expected = dict.fromkeys(SOURCES, expected_tensors(llama)) | {"experts": expected_tensors(moe)}
    specs = dict.fromkeys(SOURCES, spec_of("llama3", llama)) | {"experts": spec_of("qwen3_moe", moe)}
    for source in ("float8", "mxfp4"):
        model = write_quantized(tiny.folder / source, llama)
        specs[source] = ModelSpec(type(model), model.args)
        expected[source] = {name: tensor for name, tensor in model_state(model).items() if not name.endswith("bias_E")}
    configs = []
    for number, (source, layout) in enumerate(places):
        place = [f"--checkpoint.initial_load_path={tiny.folder / source}", f"--job.name={number}"]
        configs.append(tiny.config(*options_of(specs[source]), *degrees(*layout), *place, world_size=4))
    for (source, layout), ranks in zip(places, run_in_turn(loaded, 4, configs), strict=True):
        for found, read, shards, everything in ranks:
            assert_same(found, expected[source])
            assert read < everything
            if len(layout) == 2 and source != "mxfp4":  # both of the tensors that share columns are read for either
                slack = (
                    1.0 if source in ("hugging-face", "experts", "float8") else 1.1
                )  # a cut head costs a few more rows
                assert shards <= read <= shards * slack
        if len(layout) == 2:
            assert sum(shards for _, _, shards, _ in ranks) == ranks[0][3] * 4 // layout[1]


def test_mistakes_end_every_rank_alike(tiny: TinyRun) -> None:
    form = Llama3.formats.hugging_face
    assert form
    (tiny.folder / "model").mkdir()
    described = form.to_config(Llama3.flavors["debug"])
    (tiny.folder / "model" / "config.json").write_text(json.dumps(described))
    config = tiny.config(f"--checkpoint.initial_load_path={tiny.folder}/model", *degrees(1, 2), world_size=2)
    for message in run_in_turn(refused, 2, [config])[0]:
        assert mentions(
            message, f"checkpoint.initial_load_path: {tiny.folder}/model", f"dim = {described['hidden_size']}"
        )


def refused(rank: int, world_size: int, config: Config) -> str:
    try:
        built(rank, world_size, config)
    except ValueError as error:
        return str(error)
    return ""
