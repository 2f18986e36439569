"""What is generated from the schema is complete and current."""

from pathlib import Path

import pytest
import tomli
from jsonschema import Draft202012Validator, ValidationError

from tests.support.helpers import mentions
from titanlite.config.load import load
from titanlite.models.registry import MODELS, TRANSFORMERS
from titanlite.schema import ModelSelection, dump
from titanlite.tools.describe import (
    file_schema,
    first_sentence,
    json_schema_text,
    show,
)

ROOT = Path(__file__).parents[3]
CONFIGS = sorted((ROOT / "train_configs").glob("*.toml"))
WORLD_SIZES = {"llama3_70b": 64, "llama3_405b": 512, "debug": 2}


def test_the_schema_for_editors_is_current() -> None:
    command = "python -m titanlite config schema > train_configs/schema.json"
    assert (ROOT / "train_configs/schema.json").read_text() == json_schema_text(), f"run: {command}"


def test_the_description_of_a_model_names_all_families() -> None:
    description = ModelSelection.model_json_schema()["properties"]["name"]["description"]
    assert mentions(first_sentence(description), *MODELS, TRANSFORMERS)


# JSON schema


def complaints(text: str) -> list[ValidationError]:
    return [*Draft202012Validator(file_schema()).iter_errors(tomli.loads(text))]


@pytest.mark.parametrize(
    ("text", "path", "rule", "value"),
    [
        ("[training]\nstepss = 1", "$.training", "additionalProperties", False),
        ("[training]\nsteps = 0", "$.training.steps", "minimum", 1),
        ("[training]\nsteps = 'x'", "$.training.steps", "type", "integer"),
        ("[guard]\nnonfinite = 'stopp'", "$.guard.nonfinite", "enum", ["stop", "skip"]),
        ("[[data.sources]]\nweight = 2", "$.data.sources[0]", "required", ["path"]),
    ],
)
def test_mistakes_do_not_agree_with_the_json_schema(text: str, path: str, rule: str, value: object) -> None:
    [found] = complaints(text)
    assert (found.json_path, found.validator, found.validator_value) == (path, rule, value)
    assert complaints("base = 'debug.toml'\n[model.args]\nanything = 3") == []


# config show


RICH = [
    "--data.sources.0.path=stdlib://",
    "--data.sources.1={path = ['stdlib://train'], name = 'a \"b\"\\n', weight = 2.0}",
    "--model.args.dim=512",
    "--model.args.deep={a = 1, b = [{\"c d\" = 2}], when = 2024-01-02}",
    "--quantize.linear.float8.filter_fqns=['#1', 'wo']",
    "--checkpoint.initial_load=[]",
    "--optimizer.eps=1e-20",
    "--parallelism.fsdp_reshard_after_forward=4",
    "--optimizer.groups.0={match = ['*.wq'], args = {momentum = 0.5}}",
]  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("only_changes", [False, True], ids=["all", "diff"])
def test_what_is_shown_loads_to_the_same_config(only_changes: bool, tmp_path: Path) -> None:
    (tmp_path / "empty.toml").write_text("")
    configs = [
        *(load(path, world_size=WORLD_SIZES.get(path.stem, 8)) for path in CONFIGS),
        load(tmp_path / "empty.toml", RICH),
        load(tmp_path / "empty.toml"),
    ]
    for config in configs:
        for text in (show(config, only_changes=only_changes), dump(config)):
            (tmp_path / "another.toml").write_text(text)
            assert load(tmp_path / "another.toml") == config


def test_the_diff_is_what_differs_and_from_what(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(
        "[training]\nsteps = 700\nseq_len = 2048\nlocal_batch_size = 2\n[model.args]\ndim = 8\n"
        "[[data.sources]]\npath = 'stdlib://'\nweight = 2.0\n[quantize.linear.float8]\nemulate = true\n"
    )
    shown = show(load(tmp_path / "run.toml"), only_changes=True)
    assert tomli.loads(shown) == {
        "job": {"name": "run"},
        "model": {"args": {"dim": 8}},
        "data": {"sources": [{"path": "stdlib://", "weight": 2.0}]},
        "training": {"steps": 700, "local_batch_size": 2},
        "quantize": {"linear": {"float8": {"emulate": True}}},
    }
    assert [line.partition("# default")[2] for line in shown.splitlines() if line.startswith("steps")] == [" 1000"]
