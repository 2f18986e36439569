"""`titanlite inspect CONFIG`: what parallelize did, on fake ranks."""

import json
import math
import re
from pathlib import Path

import pytest

from tests.support.helpers import TinyRun, mentions
from tests.support.layouts import degrees
from titanlite.config.load import load
from titanlite.tools.cli import run
from titanlite.tools.report.parameters import Row, inspect_ranks

SIZES = ("parameter_bytes", "gradient_bytes", "optimizer_bytes")
SMALL = ["--model.args.dim=64", "--model.args.n_layers=2", "--model.args.n_heads=4", "--model.args.n_kv_heads=2",
         "--model.args.hidden_dim=160", "--model.args.vocab_size=512"]  # fmt: skip
Ends = pytest.CaptureFixture[str]


def layouts(*overrides: str, world_size: int = 1, path: str | Path = "debug", rank: int = 0) -> dict[str, Row]:
    file = f"train_configs/{path}.toml" if isinstance(path, str) else path
    config = load(file, [*(SMALL if isinstance(path, str) else []), *overrides], world_size=world_size)
    return {
        parameter["name"]: parameter
        for parameter in inspect_ranks(config, world_size=world_size, rank=rank)["parameters"]
    }


@pytest.mark.long
def test_debug_on_one_process(capsys: Ends) -> None:
    assert run(["inspect", "debug", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    by_name = {parameter["name"]: parameter for parameter in record["parameters"]}
    assert (record["name"], record["rank"], record["mesh"]) == ("debug", 0, {"replicate": 1, "shard": 1})
    assert list(record["units"]) == ["tok_embeddings", *(f"layers.{n}" for n in range(6)), "head"]
    assert by_name["layers.5.feed_forward.w2.weight"] == {
        "name": "layers.5.feed_forward.w2.weight", "unit": "layers.5", "shape": [384, 1024],
        "local_shape": [384, 1024], "placements": {"replicate": "R", "shard": "S(0)"}, "dtype": "float32",
        "compute_dtype": "float32", "reduce_dtype": "float32", "recompute": "none", "compiled": False,
        "float8": None, "float8_all_gather": False, "frozen": False, "lora": False, "optimizer": "AdamW",
        "group": "matrices", "lr": 0.003, "weight_decay": 0.1, "parameter_bytes": 4 * 384 * 1024,
        "gradient_bytes": 4 * 384 * 1024, "optimizer_bytes": 8 * 384 * 1024 + 4,
        "role": None, "initial_std": None, "eps": None,
    }  # fmt: skip
    assert by_name["head.norm.weight"]["weight_decay"] == 0
    assert by_name["tok_embeddings.weight"]["recompute"] is None
    elements, tensors = 11_309_952, 57
    assert record["total"] == dict(zip(SIZES, (4 * elements, 4 * elements, 8 * elements + 4 * tensors), strict=True))
    for name in SIZES:
        assert sum(unit[name] for unit in record["units"].values()) == record["total"][name]


@pytest.mark.long
def test_hybrid_sharding_halves_what_a_rank_holds_and_keeps_the_dtypes() -> None:
    found = layouts("--training.mixed_precision_param=bfloat16", *degrees(2, 2), world_size=4)
    for record in found.values():
        assert record["placements"] == {"replicate": "R", "shard": "S(0)"}
        assert record["local_shape"] == [record["shape"][0] // 2, *record["shape"][1:]]
        assert (record["dtype"], record["compute_dtype"], record["reduce_dtype"]) == ("float32", "bfloat16", "float32")


@pytest.mark.long
def test_uneven_shards_sum_to_the_whole(tiny: TinyRun) -> None:
    """No dim divides by 4. torch.chunk gives the last rank what is left."""
    first, last = (layouts(world_size=4, path=tiny.toml, rank=rank) for rank in (0, 3))
    assert [records["layers.0.attention.wq.weight"]["local_shape"] for records in (first, last)] == [[11, 42], [9, 42]]
    assert [records["layers.0.attention.wk.weight"]["local_shape"] for records in (first, last)] == [[4, 42], [2, 42]]
    for name, record in first.items():
        assert 3 * record["local_shape"][0] + last[name]["local_shape"][0] == record["shape"][0], name
        assert record["parameter_bytes"] == 4 * math.prod(record["local_shape"]), name


def float8_of(row: Row) -> tuple[str | None, bool]:
    return row["float8"], row["float8_all_gather"]


@pytest.mark.long
def test_frozen_float8_muon_op_and_compile_are_shown() -> None:
    found = layouts(
        '--freeze.parameters=["tok_embeddings.*"]', "--freeze.dtype=bfloat16", "--optimizer.name=Muon",
        *(f"--quantize.linear.float8.{option}" for option in ("enable", "emulate", "skip_small=false")),
        '--quantize.linear.float8.filter_fqns=["wo"]', "--activation_checkpoint.mode=selective", "--compile.enable",
        world_size=2,
    )  # fmt: skip
    table, wq, wo = (
        found["tok_embeddings.weight"],
        *(found[f"layers.1.attention.{layer}.weight"] for layer in ("wq", "wo")),
    )
    frozen = {
        "frozen": True,
        "optimizer": None,
        "lr": None,
        "weight_decay": None,
        "dtype": "bfloat16",
        "compiled": False,
    }
    assert table == table | frozen | dict(zip(SIZES, (2 * 256 * 64, 0, 0), strict=True))
    assert (*float8_of(wq), wq["frozen"]) == ("tensorwise", True, False)
    assert float8_of(wo) == (None, False)
    muon = {"optimizer": "Muon", "group": "matrices in layers", "optimizer_bytes": wq["parameter_bytes"]}
    assert wq == wq | muon | {"recompute": "op", "compiled": True}
    assert found["head.output.weight"]["optimizer"] == "AdamW"
    assert not found["head.output.weight"]["compiled"]


@pytest.mark.long
def test_adapters_and_policies_of_blocks_are_shown() -> None:
    every_2nd = ["--activation_checkpoint.mode=selective", "--activation_checkpoint.selective_ac_option=2"]
    found = layouts("--lora.rank=4", *every_2nd, world_size=2)
    trained = {name: record for name, record in found.items() if record["lora"]}
    assert len(trained) == 2 * 2 * 7
    assert {record["frozen"] for record in trained.values()} == {False}
    assert {record["frozen"] for name, record in found.items() if name not in trained} == {True}
    assert found["layers.0.attention.wq.lora_a"]["local_shape"] == [2, 64]
    assert [found[f"layers.{block}.attention.wq.weight"]["recompute"] for block in range(2)] == ["full", "none"]


def test_children_that_share_a_parameter_are_one_unit() -> None:
    found = layouts("--model.name=qwen3", "--model.flavor=debug", "--model.args.tied_head=true")
    assert found["tok_embeddings.weight"]["unit"] == "tok_embeddings + head"
    assert "head.output.weight" not in found


def test_gradients_that_live_in_backward_only_take_no_bytes() -> None:
    found = layouts("--optimizer.in_backward", "--training.max_norm=0")
    assert {record["gradient_bytes"] for record in found.values()} == {0}
    assert found["head.output.weight"]["optimizer_bytes"] == 8 * 512 * 64 + 4


@pytest.mark.long
def test_the_table_has_one_set_of_rows_for_blocks_that_are_alike(capsys: Ends) -> None:
    every_2nd = ["--activation_checkpoint.mode=selective", "--activation_checkpoint.selective_ac_option=2"]
    words = ["inspect", "debug", *SMALL, "--model.args.n_layers=4", "--world-size", "4", *every_2nd]
    assert run(words) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = {line.split()[0]: line for line in lines}
    size = 64 * 64 // 4
    words = "[64, 64] [16, 64] R S(0) float32 AdamW matrices {} {}{:,} B {:,} B {:,} B".format
    for blocks, notes in (("layers.0,2", "recompute full "), ("layers.1,3", "")):
        row = " ".join(rows[f"{blocks}.attention.wq.weight"].split())
        assert row.partition(" ")[2] == words(blocks, notes, 4 * size, 4 * size, 8 * size + 4)
    assert len([name for name in rows if name.endswith("attention_norm.weight")]) == 2
    assert lines[-1].split() == ["together", f"{16 * 59_536 + 39 * 4:,}", "B"]


@pytest.mark.long
def test_the_notes_have_what_is_not_usual(capsys: Ends) -> None:
    assert run(["inspect", "debug", *SMALL, "--lora.rank=4", "--lora.targets=['*.wq']", "--compile.enable"]) == 0
    rows = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    notes = {"tok_embeddings.weight": "frozen", "layers.0-1.attention.wq.lora_a": "compiled, lora"}
    notes |= {"layers.0-1.attention.wk.weight": "compiled, frozen"}
    for name, words in notes.items():
        assert re.split(r"  +", rows[name])[-4] == words


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("inspect", ["titanlite inspect --help"]),
        ("inspect debug --world-size 4 --rank 4", ["--rank 4", 0, 3, "--world-size"]),
        ("inspect debug --rank 1", ["--rank 1", 0, "--world-size"]),
        ("inspect tests", []),
    ],
)
def test_mistakes_are_one_line(words: str, named: list[object], capfd: Ends) -> None:
    assert run(words.split()) == 2
    out, errors = capfd.readouterr()
    assert (out, len(errors.splitlines())) == ("", 1)
    assert mentions(errors, "error", *named)
