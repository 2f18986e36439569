"""The config: every problem at once, in words, with the place; and what is right arrives exactly."""

from pathlib import Path

import pytest
from pydantic import BaseModel

from titanlite.config.load import dotted_keys, dump, load
from titanlite.config.schema import Config, Parallelism, Training
from titanlite.errors import ConfigError

CONFIGS = sorted(Path("train_configs").glob("*.toml"))
WORLD_SIZES = {"llama3_70b": 64, "llama3_405b": 512, "debug": 2}


def problems(tmp_path: Path, text: str, *overrides: str, world_size: int | None = None) -> list[str]:
    path = tmp_path / "run.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as error:
        load(path, overrides, world_size=world_size)
    return str(error.value).splitlines()


def good(tmp_path: Path, text: str, *overrides: str) -> Config:
    path = tmp_path / "run.toml"
    path.write_text(text)
    return load(path, overrides)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_shipped_config_loads_and_round_trips(path: Path, tmp_path: Path) -> None:
    config = load(path, world_size=WORLD_SIZES.get(path.stem, 8))
    assert config.job.name == path.stem
    again = tmp_path / "other_name.toml"
    again.write_text(dump(config))
    assert load(again) == config


def test_there_is_a_config_for_each_flavor() -> None:
    assert {load(path).model.flavor for path in CONFIGS} == {"debug", "1B", "3B", "8B", "70B", "405B"}


def test_all_problems_are_reported_together(tmp_path: Path) -> None:
    text = """\
[training]
stepss = 10
seq_len = "long"
global_batch_size = 6
[trainning]
steps = 1
[data]
path = "nowhere/"
tokenizer = "no.model"
[parallelism]
fsdp_reshard_after_forward = "sometimes"
[optimizer]
lr = true
"""
    found = problems(tmp_path, text, "--metrics.log_freq=0", "--compile.enabel", world_size=4)
    assert sorted(found) == [
        "compile.enabel: unknown key, did you mean compile.enable? (command line)",
        "data.path: no file or folder nowhere/ (run.toml:8)",
        "data.tokenizer: no file no.model (a tiktoken rank file, a tokenizer.json, or one of the names bytes, "
        "python-2k) (run.toml:9)",
        "metrics.log_freq: expected a number of at least 1, got 0 (command line)",
        "optimizer.lr: expected a number, got true (run.toml:13)",
        "parallelism.fsdp_reshard_after_forward: expected 'default', 'always' or 'never' or an integer, "
        'got "sometimes" (run.toml:11)',
        'training.seq_len: expected an integer, got "long" (run.toml:3)',
        "training.stepss: unknown key, did you mean training.steps? (run.toml:2)",
        "trainning: unknown key, did you mean training? (run.toml:5)",
    ]


def test_a_key_in_the_wrong_section_is_found(tmp_path: Path) -> None:
    assert problems(tmp_path, "[training]\nlr = 0.1\n") == [
        "training.lr: unknown key, did you mean optimizer.lr? (run.toml:2)"
    ]


def test_a_name_like_no_other_gets_no_suggestion(tmp_path: Path) -> None:
    assert problems(tmp_path, "[training]\nxyzzy = 0.1\n") == ["training.xyzzy: unknown key (run.toml:2)"]


@pytest.mark.parametrize(
    ("options", "world_size", "expected"),
    [
        (
            ["--parallelism.data_parallel_replicate_degree=3"],
            4,
            "parallelism.data_parallel_replicate_degree: 4 processes cannot be split into 3 copies (command line)",
        ),
        (
            ["--parallelism.data_parallel_replicate_degree=2", "--parallelism.data_parallel_shard_degree=4"],
            4,
            "parallelism.data_parallel_shard_degree: replicate 2 x shard 4 = 8 processes, there are 4 (command line)",
        ),
        (
            ["--parallelism.data_parallel_shard_degree=0"],
            4,
            "parallelism.data_parallel_shard_degree: must be -1 or at least 1, got 0 (command line)",
        ),
        (
            ["--parallelism.data_parallel_replicate_degree=8"],
            4,
            "parallelism.data_parallel_replicate_degree: 4 processes cannot be split into 8 copies (command line)",
        ),
        (
            ["--parallelism.fsdp_reshard_after_forward=3"],
            4,
            "parallelism.fsdp_reshard_after_forward: 3 does not divide the shard degree 4 (command line)",
        ),
        (
            ["--parallelism.fsdp_reshard_after_forward=2", "--compile.enable", "--quantize.linear.float8.enable"],
            4,
            "parallelism.fsdp_reshard_after_forward: FSDP2 cannot combine 2 with "
            "quantize.linear.float8.enable_fsdp_float8_all_gather (command line)",
        ),
        (
            ["--training.global_batch_size=6"],
            4,
            "training.global_batch_size: 6 is not a multiple of the 4 processes (command line)",
        ),
        (
            ["--training.global_batch_size=48", "--training.local_batch_size=8"],
            4,
            "training.local_batch_size: 8 does not divide the 12 sequences of each process; use a divisor of 12 "
            "(command line)",
        ),
    ],
)
def test_impossible_layouts(tmp_path: Path, options: list[str], world_size: int, expected: str) -> None:
    assert problems(tmp_path, "", *options, world_size=world_size) == [expected]


def test_unreadable_files_are_one_line(tmp_path: Path) -> None:
    assert problems(tmp_path, "[training\n") == [
        "run.toml is not valid TOML: Expected ']' at the end of a table declaration (at line 1, column 10)"
    ]
    with pytest.raises(ConfigError, match=r"no config file .*debgu.toml, did you mean train_configs/debug.toml\?"):
        load("train_configs/debgu.toml")


def test_overrides_are_read_as_toml(tmp_path: Path) -> None:
    config = good(
        tmp_path,
        "[compile]\nenable = true\n",
        "--compile.enable=false",
        "--optimizer.lr",
        "1e-2",
        "--training.enable_cpu_offload",
        "--model.args.dim=512",
        "--data.path=train_configs/",
        "--job.name=2026",
        "--quantize.linear.float8.filter_fqns=['layers.0', 'wo']",
    )
    assert config.compile.enable is False
    assert config.optimizer.lr == 0.01
    assert config.training.enable_cpu_offload is True
    assert config.model.args == {"dim": 512}
    assert config.data.path == "train_configs/"
    assert config.job.name == "2026"
    assert config.quantize.linear.float8.filter_fqns == ["layers.0", "wo"]


def test_words_that_are_no_option_are_refused(tmp_path: Path) -> None:
    assert problems(tmp_path, "", "steps=3") == [
        "unexpected argument 'steps=3': options are --section.key=value (command line)"
    ]
    assert problems(tmp_path, "", "--training.steps.x=3") == [
        "training.steps: expected an integer, got a section (command line)"
    ]


def test_base_is_inherited_and_problems_name_the_right_file(tmp_path: Path) -> None:
    (tmp_path / "top.toml").write_text("[training]\nsteps = 7\nseq_len = 64\n[optimizer]\nlr = 'x'\n")
    (tmp_path / "middle.toml").write_text("base = 'top.toml'\n[training]\nsteps = 8\n")
    assert problems(tmp_path, "base = 'middle.toml'\n") == ['optimizer.lr: expected a number, got "x" (top.toml:5)']
    config = good(tmp_path, "base = 'middle.toml'\n[optimizer]\nlr = 1.0\n")
    assert (config.training.steps, config.training.seq_len, config.optimizer.lr) == (8, 64, 1.0)


def test_circles_of_bases_are_reported(tmp_path: Path) -> None:
    (tmp_path / "other.toml").write_text("base = 'run.toml'\n")
    assert problems(tmp_path, "base = 'other.toml'\n") == [
        "base: files inherit from each other in a circle: run.toml -> other.toml -> run.toml"
    ]


def test_batch_split() -> None:
    training = Training(global_batch_size=48, local_batch_size=4)
    assert [training.batch_split(ranks) for ranks in (1, 4, 12, 24, 48)] == [(4, 12), (4, 3), (4, 1), (2, 1), (1, 1)]
    assert Training(global_batch_size=48).batch_split(4) == (12, 1)


def test_degrees() -> None:
    assert Parallelism().degrees(8) == (1, 8)
    assert Parallelism(data_parallel_replicate_degree=2).degrees(8) == (2, 4)
    assert Parallelism(data_parallel_replicate_degree=8, data_parallel_shard_degree=1).degrees(8) == (8, 1)


def sections(model: type[BaseModel]) -> list[type[BaseModel]]:
    nested = [field.annotation for field in model.model_fields.values()]
    found = [section for section in nested if isinstance(section, type) and issubclass(section, BaseModel)]
    return found + [inner for section in found for inner in sections(section)]


def test_every_option_is_described_and_can_be_left_out() -> None:
    for section in sections(Config):
        for name, field in section.model_fields.items():
            assert not field.is_required(), name
            is_section = isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)
            assert is_section or field.description, name
            # TOML has no null: an option that may be None must be None when it is left out, or dump loses it.
            if type(None) in getattr(field.annotation, "__args__", ()):
                assert field.default is None, name
    assert "training.steps" in set(dotted_keys())


def test_sources_are_a_list_of_tables(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    text = f"""\
[[data.sources]]
path = "{tmp_path}/a"
weight = 0.7
[[data.sources]]
path = "stdlib://"
weight = 0.3
epochs = 2
"""
    config = good(tmp_path, text, "--data.sources.1.weight=0.5")
    assert [(source.title, source.weight, source.epochs) for source in config.data.all_sources()] == [
        ("a", 0.7, None),
        ("stdlib", 0.5, 2),
    ]
    (tmp_path / "again.toml").write_text(dump(config))
    assert load(tmp_path / "again.toml").data == config.data
    assert [source.path for source in good(tmp_path, "").data.all_sources()] == ["stdlib://"]


def test_problems_in_a_list_of_tables_are_reported_with_their_place(tmp_path: Path) -> None:
    text = """\
[data]
path = "stdlib://"
[[data.sources]]
weight = 1
[[data.sources]]
path = "nowhere/a"
weigth = 2
[[data.sources]]
path = "somewhere/a"
weight = 0
epochs = 1.5
[validation]
enable = true
"""
    assert sorted(problems(tmp_path, text, "--data.sources.7.weight=1")) == [
        "data.sources.7.weight: there is no number 7 in the list (command line)"
    ]
    assert sorted(problems(tmp_path, text)) == [
        "data.sources.0: path is missing (run.toml:3)",
        "data.sources.1.weigth: unknown key, did you mean data.sources.weight? (run.toml:7)",
        "data.sources.2.epochs: expected an integer, got 1.5 (run.toml:11)",
        "data.sources.2.weight: expected a number above 0, got 0 (run.toml:10)",
        "validation.path: names nothing",
    ]
    text = """\
[data]
path = "stdlib://"
[[data.sources]]
path = "nowhere/a"
[[data.sources]]
path = ["s9://a"]
[validation]
enable = true
path = "missing.jsonl"
"""
    assert sorted(problems(tmp_path, text)) == [
        "data.sources.0.path: no file or folder nowhere/a (run.toml:4)",
        "data.sources.1.name: another source is called 'a' as well: give them names (run.toml:5)",
        "data.sources.1.path: Protocol not known: s9 (run.toml:6)",
        "data.sources: take the place of data.path: give one of the two (run.toml:3)",
        "validation.path: no file or folder missing.jsonl (run.toml:9)",
    ]
