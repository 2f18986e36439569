"""What is generated from the schema is complete and current."""

import json
from pathlib import Path
from typing import Any

import pytest
import tomli
from jsonschema import Draft202012Validator

from scripts.reference import option_page
from titanlite.config.keys import dotted_keys
from titanlite.config.load import dump, load
from titanlite.schema import Config
from titanlite.tools.describe import (
    file_schema,
    first_sentence,
    json_schema_text,
    options_help,
    show,
    tables,
)

ROOT = Path(__file__).parents[2]
CONFIGS = sorted((ROOT / "train_configs").glob("*.toml"))


def test_the_schema_for_editors_is_current() -> None:
    command = "python -m titanlite config schema > train_configs/schema.json"
    assert (ROOT / "train_configs/schema.json").read_text() == json_schema_text(), f"run: {command}"


def test_every_option_is_in_the_reference_and_in_the_help() -> None:
    known = {option.key.replace(".N.", ".") for table in tables() for option in table.options}
    assert known == {*dotted_keys(inside_lists=True)}
    in_help, in_reference = options_help(), option_page()
    for option in [option for table in tables() if table.header for option in table.options]:
        assert f"  --{option.key}  {option.type}; {option.default}\n" in in_help
        assert f"- **`{option.name}`** (`{option.type}`;" in in_reference


def test_options_are_described_in_words() -> None:
    described = {option.key: (option.type, option.default) for table in tables() for option in table.options}
    assert described["training.steps"] == ("integer >= 1", "default 1000")
    assert described["training.local_batch_size"] == ("integer >= 1", "default: no limit")
    assert described["guard.nonfinite"] == ('"stop" | "skip"', 'default "stop"')
    assert described["optimizer.beta1"] == ("number >= 0 and < 1", "default 0.9")
    assert described["compile.enable"] == ("true | false", "default false")
    assert described["data.path"] == ("text | list of text", "not set by default")
    assert described["data.sources"] == ("list of tables", "default []")
    assert described["data.sources.N.path"] == ("text | list of text", "required")
    assert described["data.sources.N.weight"] == ("number > 0", "default 1.0")
    assert described["model.args"] == ("table", "default {}")
    assert described["checkpoint.initial_load"] == ("list of text", 'default ["model"]')
    assert described["parallelism.fsdp_reshard_after_forward"] == (
        '"default" | "always" | "never" | integer >= 1', 'default "default"',
    )  # fmt: skip


def test_first_sentences() -> None:
    assert (
        first_sentence("Files (.txt, .jsonl,\n...; one), see a.b. Default: none.")
        == "Files (.txt, .jsonl, ...; one), see a.b."
    )
    assert first_sentence("Only one") == "Only one"


# JSON schema


def complaints(text: str) -> list[str]:
    validator = Draft202012Validator(file_schema())
    return [f"{error.json_path}: {error.message}" for error in validator.iter_errors(tomli.loads(text))]


def test_the_json_schema_is_one() -> None:
    Draft202012Validator.check_schema(file_schema())
    assert file_schema()["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert file_schema()["$defs"]["Training"]["properties"]["seq_len"]["description"] == "Tokens in a sequence."


def objects(node: Any) -> list[dict[str, Any]]:
    """All tables with keys that the schema names."""
    found = [node] if isinstance(node, dict) and "properties" in node else []
    inner = list(node.values()) if isinstance(node, dict) else node if isinstance(node, list) else []
    return found + [table for part in inner for table in objects(part)]


def test_the_json_schema_knows_every_key_and_no_other() -> None:
    found = objects(file_schema())
    assert len(found) > 15
    assert all(node["additionalProperties"] is False for node in found)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_shipped_config_names_the_schema_and_is_valid(path: Path) -> None:
    text = path.read_text()
    assert text.splitlines()[0] == "#:schema ./schema.json"
    assert complaints(text) == []
    assert complaints(show(load(path))) == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[training]\nstepss = 1", "$.training: Additional properties are not allowed ('stepss' was unexpected)"),
        ("[trainning]\nsteps = 1", "$: Additional properties are not allowed ('trainning' was unexpected)"),
        ("[training]\nsteps = 0", "$.training.steps: 0 is less than the minimum of 1"),
        ("[training]\nsteps = 'x'", "$.training.steps: 'x' is not of type 'integer'"),
        ("[guard]\nnonfinite = 'stopp'", "$.guard.nonfinite: 'stopp' is not one of ['stop', 'skip']"),
        ("[[data.sources]]\nweight = 2", "$.data.sources[0]: 'path' is a required property"),
        ("base = 3", "$.base: 3 is not of type 'string'"),
    ],
)
def test_mistakes_do_not_agree_with_the_json_schema(text: str, expected: str) -> None:
    assert complaints(text) == [expected]
    assert complaints("base = 'debug.toml'\n[model.args]\nanything = 3") == []


# config show


RICH = [
    "--data.sources.0.path=stdlib://",
    "--data.sources.1={path = ['stdlib://train'], name = 'a \"b\"\\n', epochs = 2}",
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
        *(load(path) for path in CONFIGS),
        load(tmp_path / "empty.toml", RICH),
        load(tmp_path / "empty.toml"),
    ]
    for config in configs:
        for text in (show(config, only_changes=only_changes), dump(config)):
            (tmp_path / "another.toml").write_text(text)
            assert load(tmp_path / "another.toml") == config


def test_every_option_is_shown_with_what_it_is_for(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("[training]\nsteps = 700\n")
    text = show(load(tmp_path / "run.toml"))
    assert "[training]\n# Optimizer steps of the whole run.\nsteps = 700\n" in text
    assert "# Largest number of sequences in one forward pass of one process.\n# local_batch_size is not set\n" in text
    assert "# Fields of the flavor to change, for example dim = 512.\n[model.args]\n" in text
    shown = {line.split(" ")[0] for line in text.replace("\n# ", "\n").splitlines()}
    leaves = {key.rpartition(".")[2] for key in dotted_keys()} - {"args"}
    assert leaves <= shown
    assert max(map(len, text.splitlines())) <= 120


def test_the_diff_is_what_differs_and_from_what(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(
        "[training]\nsteps = 700\nseq_len = 2048\nlocal_batch_size = 2\n[model.args]\ndim = 8\n"
        "[[data.sources]]\npath = 'stdlib://'\nweight = 1.0\nepochs = 2\n[quantize.linear.float8]\nemulate = true\n"
    )
    assert show(load(tmp_path / "run.toml"), only_changes=True) == """\
[job]
name = "run"  # default: the config file's name without .toml

[model.args]  # default {}
dim = 8

[[data.sources]]
path = "stdlib://"
epochs = 2  # default: no limit

[training]
steps = 700  # default 1000
local_batch_size = 2  # default: no limit

[quantize.linear.float8]
emulate = true  # default false
"""  # fmt: skip


def test_nothing_differs_from_the_defaults_in_an_empty_config() -> None:
    assert show(Config(), only_changes=True) == "\n"


def test_the_json_schema_file_is_json() -> None:
    assert json.loads((ROOT / "train_configs" / "schema.json").read_text()) == file_schema()
