"""The config: every problem is reported at once, in words, with its place; right values arrive unchanged."""

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import tomli
from pydantic import BaseModel

from tests.support.helpers import mentions
from titanlite.config import source
from titanlite.config.keys import REMOVED, dotted_keys
from titanlite.config.load import TORCHTITAN_KEYS, load, read
from titanlite.config.warnings import find_warnings
from titanlite.runtime.errors import SUGGESTED, ConfigError, Problem
from titanlite.schema import Config
from titanlite.tools.migrate.rules import RULES

CONFIGS = sorted(Path("train_configs").glob("*.toml"))


def problems(tmp_path: Path, text: str, *overrides: str, world_size: int | None = None) -> list[Problem]:
    path = tmp_path / "run.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as error:
        load(path, overrides, world_size=world_size)
    assert str(error.value).splitlines() == list(map(str, error.value.problems))
    return error.value.problems


def check(found: list[Problem], *expected: tuple[object, ...]) -> None:
    """Compare problems with (key, place, words that the message must have)."""
    assert [(problem.key, str(problem.where)) for problem in found] == [row[:2] for row in expected]
    for problem, (_, _, *words) in zip(found, expected, strict=True):
        assert mentions(problem.message, *words)


def good(tmp_path: Path, text: str, *overrides: str) -> Config:
    path = tmp_path / "run.toml"
    path.write_text(text)
    return load(path, overrides)


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
    check(
        problems(tmp_path, text, "--metrics.log_freq=0", "--compile.enabel", world_size=4),
        ("training.stepss", "run.toml:2", "training.steps"),
        ("training.seq_len", "run.toml:3", "integer", '"long"'),
        ("trainning", "run.toml:5", "training"),
        ("data.path", "run.toml:8", "nowhere/"),
        ("parallelism.fsdp_reshard_after_forward", "run.toml:11", "default", "always", "never", "integer", "sometimes"),
        ("optimizer.lr", "run.toml:13", "number", "true"),
        ("metrics.log_freq", "command line", 1, 0),
        ("compile.enabel", "command line", "compile.enable"),
    )


def test_nearest_names_are_looked_for_a_few_times(tmp_path: Path) -> None:
    """It takes milliseconds each. All keys are reported, with the number of the others."""
    count, others = 60, 60 - SUGGESTED
    keys = [f"stepss{number}" for number in range(count)]
    *unknown, rest = problems(tmp_path, "[training]\n" + "".join(f"{key} = 1\n" for key in keys))
    assert [problem.key for problem in unknown] == [f"training.{key}" for key in keys]
    assert [mentions(problem.message, "training.steps") for problem in unknown] == [True] * SUGGESTED + [False] * others
    assert (rest.key, mentions(rest.message, others)) == ("", True)
    sources = "".join(f"[[data.sources]]\nname = 'wiki{key}'\npath = 'x'\nweight = 1\n" for key in keys)
    stage = "[[data.stages]]\nuntil_tokens = 9\nweights = {" + ", ".join(f"wik{key} = 1" for key in keys) + "}\n"
    found = [problem for problem in problems(tmp_path, sources + stage) if problem.key.startswith("data.stages")]
    assert [mentions(problem.message, f"wiki{key}") for problem, key in zip(found, keys, strict=False)] == (
        [True] * SUGGESTED + [False]
    )
    assert mentions(found[-1].message, others)


def test_unreadable_files_are_one_line(tmp_path: Path) -> None:
    check(problems(tmp_path, "[training\n"), ("", "run.toml:1", "run.toml", "TOML", "]", "[training"))
    with pytest.raises(ConfigError, match=r"train_configs/debgu.toml.* train_configs/debug.toml"):
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


def test_base_is_inherited_and_problems_name_the_right_file(tmp_path: Path) -> None:
    (tmp_path / "top.toml").write_text("[training]\nsteps = 700\nseq_len = 64\n[optimizer]\nlr = 'x'\n")
    (tmp_path / "middle.toml").write_text("base = 'top.toml'\n[training]\nsteps = 800\n")
    check(problems(tmp_path, "base = 'middle.toml'\n"), ("optimizer.lr", "top.toml:5", '"x"'))
    config = good(tmp_path, "base = 'middle.toml'\n[optimizer]\nlr = 1.0\n")
    assert (config.training.steps, config.training.seq_len, config.optimizer.lr) == (800, 64, 1.0)


def test_circles_of_bases_are_reported(tmp_path: Path) -> None:
    (tmp_path / "other.toml").write_text("base = 'run.toml'\n[training]\nstepss = 1\n")
    check(
        problems(tmp_path, "base = 'other.toml'\n"),
        ("base", "other.toml:1", "run.toml -> other.toml -> run.toml"),
        ("training.stepss", "other.toml:3"),
    )


@pytest.mark.parametrize(
    ("base", "expected"),
    [
        ("3", ("base", "run.toml:3", "3")),
        ("'sub/tpo.toml'", ("base", "run.toml:3", "sub/tpo.toml", "sub/top.toml")),
        ("'sub/bad.toml'", ("", "sub/bad.toml:3", "sub/bad.toml", "steps = 2")),
    ],
)
def test_a_base_that_cannot_be_read_is_reported_with_everything_else(
    tmp_path: Path, base: str, expected: tuple[str, ...]
) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "top.toml").write_text("")
    (tmp_path / "sub" / "bad.toml").write_text("[training]\nsteps = 1\nsteps = 2\n")
    found = problems(tmp_path, f"# A run\n\nbase = {base}\n[training]\nstepss = 1\n[data]\npath = '/no/such'\n", "x")
    found.sort(key=lambda problem: problem.key != expected[0] or str(problem.where) != expected[1])
    check(found, expected, ("training.stepss", "run.toml:5"), ("", "command line", "'x'", "--section.key=value"))


def test_a_value_of_the_base_is_replaced_whole(tmp_path: Path) -> None:
    (tmp_path / "top.toml").write_text(
        "[[data.sources]]\npath = 1\n[[data.sources]]\npath = 2\n[model.args]\na.b = 1\n"
    )
    text = "base = 'top.toml'\n[data]\nsources = [\n  {path = 'stdlib://', weigth = 1},\n]\n[model]\nargs.a = 3\n"
    (tmp_path / "run.toml").write_text(text)
    draft = read(tmp_path / "run.toml")
    check(draft.problems, ("data.sources.0.weigth", "run.toml:3", "data.sources.0.weight"))
    assert ("data", "sources", "1", "path") not in draft.places
    assert draft.config.model.args == {"a": 3}
    assert str(draft.place(("model", "args", "a"))) == "run.toml:7"


STATEMENTS = (
    r'''a = 1 # ] " [
"quoted # ]" = "x # [ \" y" # "
b.'c'."d" = [ # ['
  "]", 'it"s', """ ] \
    "" \""" [""", # ]]
  [1, [2]], { x = [1], "y" = "}" }, 1979-05-27T07:32:00Z,
]
text = """
[not.a.table]
it's = "
""""'''
    + """
literal = '''
\\ ''[''
'''''
[t."u.v"] # [
x = {}
[[list]]
y = [[], [[]]]

[[list]]
  [list.z]
  w = ''"""
)


def test_lines_of_statements_are_those_that_tomli_finds() -> None:
    def statements(text: str) -> Iterator[tuple[int, str]]:
        """Add line after line until it is TOML: slow, and plain."""
        lines = enumerate(text.split("\n"), start=1)
        for number, statement in lines:
            while True:
                try:
                    tomli.loads(statement)
                    break
                except tomli.TOMLDecodeError:
                    statement += f"\n{next(lines)[1]}"
            yield number, statement

    assert len(tomli.loads(STATEMENTS)) == 7
    assert [(line, text.rstrip("\n")) for line, text in source._statements(STATEMENTS)] == [*statements(STATEMENTS)]


def test_long_lists_are_read_in_linear_time() -> None:
    times = []
    for count in (2_000, 20_000):
        text = "[validation]\ntasks = [\n" + "".join(f"  'a{i}',\n" for i in range(count)) + "]\n"
        began = time.process_time()
        assert len(source.key_lines(text)) == count + 2
        times.append(time.process_time() - began)
    assert times[1] < 50 * times[0]
    assert times[1] < 20


def test_entries_of_lists_are_made_on_the_command_line(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    options = [f"--data.sources.0.path={tmp_path}/a", "--data.sources.1.path=stdlib://", "--data.sources.1.weight=3"]
    more = ["--data.sources.2={path = 'stdlib://train', name = 'x'}", "--quantize.linear.float8.filter_fqns.0=wo"]
    config = good(tmp_path, "", *options, *more)
    assert [(source.title, source.weight) for source in config.data.sources] == [
        ("a", 1.0),
        ("stdlib", 3.0),
        ("x", 1.0),
    ]
    assert config.quantize.linear.float8.filter_fqns == ["wo"]
    text = "[[data.sources]]\npath = 'stdlib://'\n"
    config = good(tmp_path, text, "--data.sources.0.weight=2", "--data.sources.1.path=stdlib://train")
    assert [(source.title, source.weight) for source in config.data.sources] == [("stdlib", 2.0), ("train", 1.0)]
    assert good(tmp_path, "", "--model.args.x.0=1").model.args == {"x": {"0": 1}}, "the user's own keys are no numbers"


def test_entries_that_cannot_be_made_change_nothing(tmp_path: Path) -> None:
    check(
        problems(tmp_path, "", "--data.sources.1.path=a", "--data.sources.x.path=a", "--data.path=stdlib://"),
        ("data.sources.1.path", "command line", 1, 0),
        ("data.sources.x.path", "command line", 0),
    )
    check(problems(tmp_path, "[data]\npath = 'stdlib://'\n", "--data.path.0=a"), ("data.path.0", "command line"))
    check(problems(tmp_path, "", "--data.sources.0.weight=2"), ("data.sources.0", "command line", "path"))


def test_a_word_is_read_whole_or_as_text(tmp_path: Path) -> None:
    """TOML would read `3 # 5` as 3, and what comes after a line break as another key."""
    for word in ("3#5", "3 # 5", "3\nseed = 5", "3\n[model]\nname = 5"):
        check(problems(tmp_path, "", f"--training.steps={word}"), ("training.steps", "command line", "integer", '"3'))
    assert good(tmp_path, "", "--job.name=a#b").job.name == "a#b"
    assert good(tmp_path, "", '--job.name="a#b"').job.name == "a#b"


def test_base_is_no_option(tmp_path: Path) -> None:
    check(
        problems(tmp_path, "", "--base=x.toml", "--=3", "--a..b=3"),
        ("base", "command line", "file"),
        ("", "command line", "'--=3'", "--section.key=value"),
        ("", "command line", "'--a..b=3'", "--section.key=value"),
    )


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
weight = -1
[validation]
enable = true
"""
    check(
        problems(tmp_path, text, "--data.sources.7.weight=1"),
        ("data.sources.0", "run.toml:3", "path"),
        ("data.sources.1.weigth", "run.toml:7", "data.sources.1.weight"),
        ("data.sources.2.weight", "run.toml:10", -1),
        ("validation.path", "run.toml:11", "validation.enable = false"),
        ("data.sources.7.weight", "command line", 7, 3),
    )
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
    check(
        problems(tmp_path, text),
        ("data.sources", "run.toml:3", "data.path"),
        ("data.sources.0.path", "run.toml:4", "nowhere/a"),
        ("data.sources.1.name", "run.toml:5", "'a'"),
        ("data.sources.1.path", "run.toml:6", "s9"),
        ("validation.path", "run.toml:9", "missing.jsonl"),
    )


@pytest.mark.parametrize("key", [key for key, (default, _) in REMOVED.items() if default is not None])
def test_an_option_that_is_gone_is_ignored_at_its_default_and_else_explained(tmp_path: Path, key: str) -> None:
    """The config in the folder of an older run names every option."""
    section, name = key.split(".")
    default, instead = REMOVED[key]
    other = json.dumps(["another"])
    assert good(tmp_path, f"[{section}]\n{name} = {json.dumps(default)}\n") == good(tmp_path, "")
    [problem] = problems(tmp_path, f"[{section}]\n{name} = {other}\n")
    assert (problem.key, str(problem.where)) == (key, "run.toml:2")
    assert instead in problem.message
    assert problems(tmp_path, "", f"--{key}={other}")[0].message == problem.message


def test_an_option_that_is_gone_and_was_not_set_by_default_is_explained(tmp_path: Path) -> None:
    text = "[checkpoint]\nexport_every = 5\n[[data.sources]]\npath = 'stdlib://'\nepochs = 2\n"
    check(
        problems(tmp_path, text),
        ("checkpoint.export_every", "run.toml:2", "checkpoint export"),
        ("data.sources.0.epochs", "run.toml:5", "training.epochs"),
    )


def test_the_name_of_a_run_is_never_inherited(tmp_path: Path) -> None:
    (tmp_path / "top.toml").write_text("[job]\nname = 'first'\ndump_folder = 'runs'\n")
    config = good(tmp_path, "base = 'top.toml'\n")
    assert (config.job.name, config.job.dump_folder) == ("run", "runs")
    assert good(tmp_path, "base = 'top.toml'\n[job]\nname = 'mine'\n").job.name == "mine"
    assert all("name" not in tomli.loads(path.read_text()).get("job", {}) for path in CONFIGS)


@pytest.mark.parametrize("name", ["a/b", ".hidden", "a\\b", "..", "", "a\x00b", "a\nb"])
def test_the_name_of_a_run_is_a_folder_name(name: str, tmp_path: Path) -> None:
    check(problems(tmp_path, "", f"--job.name={name}"), ("job.name", "command line", *(["/", "\\"] if name else [])))


def test_validation_of_own_data_on_the_standard_library_is_a_warning(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    text = "[validation]\nenable = true\npath = 'stdlib://validation'\n[lr_scheduler]\nwarmup_steps = 1\n"

    def warnings(*options: str) -> list[str]:
        return [*find_warnings(good(tmp_path, text, *options), steps=100)]

    [warning] = warnings(f"--data.path={tmp_path}/a")
    assert mentions(warning, "validation.path", "--validation.path=", "--validation.enable=false")
    assert warnings("--data.path=stdlib://train") == []
    assert warnings(f"--data.sources=[{{path = '{tmp_path}/a'}}, {{path = 'stdlib://train'}}]") == []
    assert warnings(f"--data.path={tmp_path}/a", "--validation.enable=false") == []
    assert warnings(f"--data.path={tmp_path}/a", f"--validation.path={tmp_path}/a") == []


def test_options_without_an_effect_are_warnings(tmp_path: Path) -> None:
    idle = {
        "parallelism.pipeline_parallel_schedule": "'GPipe'",
        "parallelism.pipeline_parallel_layers_per_stage": 2,
        "parallelism.module_fqns_per_model_part": "[['nothing']]",
        "training.tokens": 1000,
        "training.steps": 7,
        "checkpoint.initial_load": "['progress']",
        "checkpoint.allow_missing": "['head.*']",
        "guard.on_spike": "'rollback'",
        "lr_scheduler.warmup_steps": 1,
    }
    text = "".join(f"{key} = {value}\n" for key, value in idle.items())
    warnings = [*find_warnings(good(tmp_path, text), steps=100)]
    effects = [key for key in idle if key not in ("training.tokens", "lr_scheduler.warmup_steps")]
    assert len(warnings) == len(effects)
    for key, line in zip(effects, warnings, strict=True):
        assert mentions(line, key)
    assert [*find_warnings(good(tmp_path, "lr_scheduler.warmup_steps = 1\n"), steps=100)] == []


def test_code_of_the_command_line_is_named_from_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The config of the run is in another folder, and its commands read it."""
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")
    config = good(tmp_path, "", "--model.file=own.py", "--training.loss=../loss.py:mine")
    assert config.model.file == str(tmp_path / "cwd" / "own.py")
    assert config.training.loss == f"{tmp_path}/loss.py:mine"


@pytest.mark.parametrize("path", sorted(Path("tests/data/torchtitan").glob("*.toml")), ids=lambda path: path.stem)
def test_a_config_of_torchtitan_is_recognised(path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        load(path)
    command = f"titanlite config migrate {path} --out {path.stem}_titanlite.toml --world-size N"
    assert mentions(str(error.value), "torchtitan", command)


def test_keys_of_torchtitan_are_no_keys_of_titanlite(tmp_path: Path) -> None:
    ours = set(dotted_keys())
    theirs = {f"{section}.{key}" for section, keys in TORCHTITAN_KEYS.items() for key in keys.split()}
    assert not theirs & ours
    assert theirs <= RULES.keys()
    # one such key alone is a mistake like any other
    check(problems(tmp_path, "[training]\ndataset = 'c4'\n"), ("training.dataset", "run.toml:2"))
