"""`titanlite config migrate`. In tests/data/torchtitan: its keys with their defaults, and the settings it ships."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import tomli

from tests.helpers import mentions
from titanlite.config.keys import dotted_keys
from titanlite.config.load import load
from titanlite.runtime.errors import ConfigError, UserError
from titanlite.tools import cli
from titanlite.tools.migrate.command import migrate
from titanlite.tools.migrate.rules import DROPS, LOSES, RULES, SHAPES

ROOT = Path(__file__).parents[2]
DATA = ROOT / "tests/data/torchtitan"
DEFAULTS: dict[str, Any] = json.loads((DATA / "defaults.json").read_text())
CONFIGS = sorted(DATA.glob("*.toml"))


def run(text: str, **options: Any) -> tuple[dict[str, Any], list[str], list[str]]:
    """(new settings, report, losses)."""
    migration = migrate(text, "old.toml", **options)
    return flat(tomli.loads(migration.text())), migration.report, migration.losses


def flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in tree.items():
        out |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return out


def toml(values: dict[str, Any]) -> str:
    return "".join(f"{key} = {json.dumps(value)}\n" for key, value in values.items())


def problems(text: str, folder: Path, world_size: int | None = None) -> dict[str, str]:
    (folder / "new.toml").write_text(text)
    try:
        load(folder / "new.toml", world_size=world_size)
    except ConfigError as error:
        return {problem.key: problem.message for problem in error.problems}
    return {}


# The table


def test_every_key_of_torchtitan_has_a_rule_with_its_default() -> None:
    assert DEFAULTS.keys() == RULES.keys()
    for key in DEFAULTS.keys() - {"job.dump_folder"}:  # the same with ./ before it
        rule = RULES[key]
        if rule.value_type is not None and rule.default is not None:
            assert (rule.default, type(rule.default)) == (DEFAULTS[key], rule.value_type), key
    listed = [name for keys in [DROPS, *(keys for _, keys in LOSES.values())] for name in keys.split()]
    assert len([name for name in listed if ":" not in name]) == sum(not rule.to for rule in RULES.values())


def test_the_table_knows_what_titanlite_has() -> None:
    """An option that titanlite gets under a name of torchtitan must move from "no counterpart"."""
    ours = set(dotted_keys())
    assert {rule.to for rule in RULES.values() if rule.to} <= ours
    assert {key for key, rule in RULES.items() if not rule.to} & ours == set()


@pytest.mark.parametrize(
    ("old", "expected"),
    [
        ("debugmodel_moe", (256, 8, 16, 8, 128, 768, 64, 8, 1e6, 2048, False)),
        ("30B-A3B", (2048, 48, 32, 4, 128, 768, 128, 8, 1e6, 151936, False)),
        ("235B-A22B", (4096, 94, 64, 4, 128, 1536, 128, 8, 5e6, 151936, False)),
    ],
)
def test_experts_of_qwen3_are_a_family_of_their_own(old: str, expected: tuple[float, ...]) -> None:
    from titanlite.models.qwen3_moe import Qwen3Moe
    from titanlite.models.registry import resolve_model

    text = f"model = {{name = 'qwen3', flavor = '{old}'}}"
    new, report, losses = run(text, world_size=1)
    assert losses == []
    args = {key.removeprefix("model.args."): value for key, value in new.items() if key.startswith("model.args.")}
    kind, resolved = resolve_model(new["model.name"], new["model.flavor"], args)
    names = (
        "dim n_layers n_heads n_kv_heads head_dim hidden_dim n_experts n_active_experts rope_theta vocab_size tied_head"
    )
    assert kind is Qwen3Moe
    assert tuple(vars(resolved)[name] for name in names.split()) == expected
    assert any(line.startswith("translated  model.name") and "experts" in line for line in report)


def resolved(text: str) -> tuple[dict[str, Any], list[str], dict[str, Any]]:
    """Return the new settings, what is lost, and the arguments of the model that they make."""
    from titanlite.models.registry import resolve_model

    new, _, losses = run(text, world_size=1)
    args = {key.removeprefix("model.args."): value for key, value in new.items() if key.startswith("model.args.")}
    return new, losses, vars(resolve_model(new["model.name"], new.get("model.flavor"), args).args)


@pytest.mark.parametrize(
    ("flavor", "seq_len", "expected", "parameters"),
    [
        ("debugmodel", 2048, (256, 6, 0, 8, 3, 1, True, 1.0, 2048, None), 0),
        ("debugmodel_flex_attn", 2048, (256, 6, 0, 8, 3, 1, True, 1.0, 2048, True), 0),
        ("16B", 4096, (2048, 27, 0, 64, 6, 1, True, 1.0, 102400, True), 15_706_484_224),
        ("671B", 4096, (7168, 61, 1536, 256, 8, 8, False, 1.0, 129280, True), 671_026_404_352),
        ("671B", 8192, (7168, 61, 1536, 256, 8, 8, False, 40.0, 129280, True), 671_026_404_352),
    ],
)
def test_deepseek_v3_is_a_family_here(flavor: str, seq_len: int, expected: tuple[Any, ...], parameters: int) -> None:
    """The parameters of 16B are those of DeepSeek-V2-Lite, and yarn begins beyond 4,096 tokens."""
    from titanlite.models.registry import resolve_model

    new, losses, args = resolved(
        f"model = {{name = 'deepseek_v3', flavor = '{flavor}'}}\ntraining.seq_len = {seq_len}\n"
    )
    assert losses == []
    names = "dim n_layers q_rank n_experts n_active_experts n_groups softmax_scores rope_scaling_factor vocab_size"
    assert (*(args[name] for name in names.split()), new.get("data.document_mask")) == expected
    assert args["norm_eps"] == 1e-5
    if parameters:
        model = resolve_model("deepseek_v3", None, args).build()
        assert sum(parameter.numel() for parameter in model.parameters()) == parameters


@pytest.mark.parametrize("flavor", ["16B", "debugmodel", "236B", "7B"])
def test_what_deepseek_v3_has_there_alone_is_lost(flavor: str) -> None:
    text = f"model = {{name = 'deepseek_v3', flavor = '{flavor}'}}\ntraining.seq_len = 8192\n"
    assert run(text, world_size=1)[2] == ["model.flavor"]


def test_gpt_oss_is_a_family_here() -> None:
    names = "dim n_layers n_heads n_kv_heads head_dim hidden_dim n_experts n_active_experts window vocab_size"
    for flavor, expected in {
        "debugmodel": (256, 4, 64, 8, 64, 2880, 8, 4, 128, 201088),
        "20b": (2880, 24, 64, 8, 64, 2880, 32, 4, 128, 201088),
        "120b": (2880, 36, 64, 8, 64, 2880, 128, 4, 128, 201088),
    }.items():
        _, losses, args = resolved(f"model = {{name = 'gpt_oss', flavor = '{flavor}'}}")
        assert losses == []
        assert tuple(args[name] for name in names.split()) == expected
        assert (args["rope_theta"], args["rope_scaling_factor"], args["norm_eps"]) == (150000.0, 32.0, 1e-5)


@pytest.mark.parametrize("flavor", ["debugmodel", "full"])
def test_decoders_of_transformers_are_so_here(flavor: str, tmp_path: Path) -> None:
    from transformers import Qwen3Config

    from titanlite.models.registry import resolve_model

    Qwen3Config(num_hidden_layers=36, max_window_layers=36).save_pretrained(tmp_path)
    text = f"model = {{name = 'transformers_modeling_backend', flavor = '{flavor}'}}\n"
    new, report, losses = run(f"{text}[hf_transformers]\nmodel = '{tmp_path}'\n", world_size=1)
    assert losses == []
    assert (new["model.name"], new["model.path"], "model.flavor" in new) == ("transformers", str(tmp_path), False)
    assert any(mentions(line, "hf_transformers.model", "model.args.vocab_size") for line in report)
    args = {key.removeprefix("model.args."): value for key, value in new.items() if key.startswith("model.args.")}
    form = resolve_model("transformers", None, args, path=str(tmp_path))
    assert form.model_cls.formats.hugging_face is not None
    config = form.model_cls.formats.hugging_face.to_config(form.args)
    sizes = tuple(config[key] for key in ("hidden_size", "num_hidden_layers", "head_dim", "intermediate_size"))
    assert sizes == {"debugmodel": (256, 2, 16, 768), "full": (4096, 32, 128, 11008)}[flavor]
    assert (config["rope_parameters"]["rope_theta"], config["rms_norm_eps"]) == (1e4, 1e-5)
    assert run(text, world_size=1)[2] == ["model.name"]
    unknown = run(f"{text}[hf_transformer]\nmode = 'x'\n", world_size=1)
    assert unknown[2] == ["model.name", "hf_transformer.mode"]


OLD_0_1 = """
job = {description = "d", print_args = false, use_for_integration_test = true}
model = {name = "llama3", flavor = "8B", converters = ["float8"]}
lr_scheduler.lr_min = 0.25
training = {compile = true, steps = 100, local_batch_size = 2}
checkpoint = {enable_checkpoint = true, interval = 50, last_save_model_weights_only = false}
float8 = {filter_fqns = ["output"], enable_fsdp_float8_all_gather = true}
"""


def test_configs_of_0_1_have_other_names() -> None:
    new, report, losses = run(OLD_0_1, world_size=1)
    assert losses == []
    expected = {
        "lr_scheduler.min_lr_factor": 0.25,
        "compile.enable": True,
        "checkpoint.enable": True,
        "quantize.linear.float8.enable": True,
        "quantize.linear.float8.enable_fsdp_float8_all_gather": True,
        "quantize.linear.float8.filter_fqns": ["output"],
        "model.args.rope_scaling_factor": 1.0,
        "data.tokenizer": "./torchtitan/datasets/tokenizer/tokenizer.model",
    }
    assert {key: new.get(key) for key in expected} == expected
    assert "model.args.vocab_size" not in new, "it is the tokenizer's"
    for key in flat(tomli.loads(OLD_0_1)):
        assert any(re.match(rf"\w+ +{re.escape(key)}(?![\w.])", line) for line in report), key


@pytest.mark.parametrize("shape", [shape for shape, (name, *_) in SHAPES.items() if name != "transformers"])
def test_the_vocabulary_is_the_flavors(shape: str) -> None:
    """The vocabulary follows the tokenizer here unless it is set. There it never did."""
    from titanlite.models.registry import resolve_model

    name, flavor, args = SHAPES[shape]
    old_name, _, old_flavor = shape.partition("/")
    text = f"model = {{name = '{old_name}', flavor = '{old_flavor}', hf_assets_path = 'x'}}"
    new, _, _ = run(text, world_size=1)
    assert new["model.args.vocab_size"] == resolve_model(name, flavor, args).args.vocab_size


# The configs that torchtitan ships


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_shipped_configs_load(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = path.read_text()
    migration = migrate(text, path.name, world_size=64)
    monkeypatch.chdir(tmp_path)
    files = [migration.settings["data.tokenizer"], migration.settings["data.path"]]
    for file in [Path(file) for file in files if "://" not in file]:
        (file if file.suffix else file / "tokenizer.json").parent.mkdir(parents=True, exist_ok=True)
        (file if file.suffix else file / "tokenizer.json").touch()
    wrong = problems(migration.text(), tmp_path, 64)
    assert wrong == {}
    assert migration.losses == []


# Keys one by one: old file, number of processes, what is in the new file, what is lost

OFF = "quantize.linear.float8.enable"
CASES: list[tuple[str, int | None, dict[str, Any], list[str]]] = [
    ("training.local_batch_size = 4", 8, {"training.global_batch_size": 32, "training.local_batch_size": 4}, []),
    ("training.local_batch_size = 4", None, {"training.global_batch_size": None}, ["training.global_batch_size"]),
    ("training.global_batch_size = -1", 2, {"training.global_batch_size": 16}, []),
    ("parallelism.tensor_parallel_degree = -1", 1, {"parallelism.tensor_parallel_degree": 1}, []),
    (
        "model = {name = 'qwen3', flavor = '30B-A3B'}\n"
        "parallelism = {expert_parallel_degree = 8, tensor_parallel_degree = 2, context_parallel_degree = 2}",
        32,
        {
            "model.name": "qwen3_moe",
            "training.global_batch_size": 64,
            "parallelism.context_parallel_degree": 2,
            "parallelism.expert_parallel_degree": 8,
            "parallelism.tensor_parallel_degree": 2,
        },
        [],
    ),
    (
        "training.local_batch_size = 8\n"
        "parallelism = {pipeline_parallel_degree = 4, pipeline_parallel_microbatch_size = 2, "
        "pipeline_parallel_schedule = 'Interleaved1F1B', pipeline_parallel_layers_per_stage = 4,"
        "module_fqns_per_model_part = [['layers.0']]}",
        8,
        {
            "parallelism.pipeline_parallel_degree": 4,
            "parallelism.pipeline_parallel_schedule": "Interleaved1F1B",
            "parallelism.pipeline_parallel_layers_per_stage": 4,
            "parallelism.module_fqns_per_model_part": [["layers.0"]],
            "training.local_batch_size": 2,
            "training.global_batch_size": 16,
        },
        [],
    ),
    ("parallelism.expert_tensor_parallel_degree = 4", 4, {}, ["parallelism.expert_tensor_parallel_degree"]),
    ("model.flavor = '8B_varlen'", 1, {"model.flavor": "8B", "data.document_mask": True}, []),
    ("model.flavor = 'debugmodel_flex_attn'", 1, {"model.args.dim": 256, "data.document_mask": True}, []),
    ("model = {name = 'qwen3', flavor = '0.6B'}", 1, {"model.name": "qwen3", "model.flavor": "0.6B"}, []),
    ("model = {name = 'llama4', flavor = '17bx16e'}", 1, {"model.name": "llama4"}, ["model.name"]),
    ("model.flavor = '9B'", 1, {"model.name": "llama3", "model.flavor": "9B"}, ["model.flavor"]),
    (
        "optimizer.weight_decay = 0.2  # last\n",
        1,
        {"optimizer.groups": [{"match": ["*"], "weight_decay": 0.2}]},
        [],
    ),
    ("optimizer.weight_decay = 0.0", 1, {"optimizer.weight_decay": 0.0, "optimizer.groups": None}, []),
    ("model.tokenizer_path = 't'\nmodel.hf_assets_path = 'h'", 1, {"data.tokenizer": "t"}, []),
    ("model.converters = ['quantize.linear.float8']", 1, {OFF: True, OFF + "_fsdp_float8_all_gather": False}, []),
    ("model.converters = []", 1, {OFF: False, OFF + "_fsdp_float8_all_gather": None}, []),
    (
        "model.converters = ['quantize.linear.mx']\nquantize.linear.mx.filter_fqns = ['wq']",
        1,
        {
            OFF: True,
            "quantize.linear.float8.recipe_name": "mxfp8",
            "quantize.linear.float8.skip_small": False,
            "quantize.linear.float8.filter_fqns": ["wq"],
        },
        [],
    ),
    ("model.converters = ['float8', 'quantize.linear.mx']", 1, {OFF: True}, ["model.converters"]),
    ("model.converters = ['quantize.grouped_mm.mx']", 1, {OFF: False}, ["model.converters"]),
    (
        "model.converters = ['quantize.linear.mx']\nquantize.linear.mx.recipe_name = 'mxfp4_cutlass'",
        1,
        {OFF: True},
        ["quantize.linear.mx.recipe_name"],
    ),
    (
        "model.converters = ['float8']\nquantize.linear.float8.filter_fqns = ['wq', 'auto_filter_small_kn']",
        1,
        {"quantize.linear.float8.filter_fqns": ["wq"], "quantize.linear.float8.skip_small": True},
        [],
    ),
    (
        "model.converters = ['float8']\nquantize.linear.float8.precompute_float8_dynamic_scale_for_fsdp = true",
        1,
        {
            "quantize.linear.float8.precompute_float8_dynamic_scale_for_fsdp": True,
            "quantize.linear.float8.skip_small": False,
        },
        [],
    ),
    ("optimizer.name = 'Lion'", 1, {"optimizer.name": "Lion", "optimizer.groups": None}, ["optimizer.name"]),
    ("lr_scheduler.warmup_steps = 50\ntraining.steps = 20", 1, {"lr_scheduler.warmup_steps": 20}, []),
    ("lr_scheduler.total_steps = 20\ntraining.steps = 20", 1, {}, []),
    ("lr_scheduler.total_steps = 40\ntraining.steps = 20", 1, {}, ["lr_scheduler.total_steps"]),
    ("training.dataset = 'C4'", 1, {"data.path": "hf://allenai/c4:en:train"}, []),
    ("training = {dataset = 'c4', dataset_path = 'me/my-c4'}", 1, {"data.path": "hf://me/my-c4:en:train"}, []),
    ("training = {dataset = 'c4', dataset_path = '/data/c4'}", 1, {"data.path": "/data/c4"}, []),
    ("training.dataset_path = '/data/test'", 1, {"data.path": "/data/test"}, []),
    ("training.dataset = 'mine'", 1, {"data.path": "mine"}, ["training.dataset"]),
    ("training.seed = 7\ndebug.seed = 8", 1, {"debug.seed": 7}, ["debug.seed"]),
    ("compile = {enable = true, components = ['loss']}", 1, {"compile.enable": False}, []),
    ("activation_checkpoint.mode = 'memory_budget'", 1, {"activation_checkpoint.mode": "selective"}, []),
    ("activation_checkpoint.selective_ac_option = 'op'", 1, {"activation_checkpoint.selective_ac_option": "op"}, []),
    (
        "activation_checkpoint = {mode = 'full', selective_ac_option = '2'}",
        1,
        {"activation_checkpoint.mode": "full", "activation_checkpoint.selective_ac_option": None},
        [],
    ),
    ("checkpoint.enable = true", 1, {"checkpoint.enable": True, "checkpoint.folder": None}, []),
    ("checkpoint.folder = 'ckpt'\njob.dump_folder = 'out'", 1, {"checkpoint.folder": "out/ckpt"}, []),
    ("checkpoint.folder = 's3://a/b'", 1, {"checkpoint.folder": "s3://a/b"}, []),
    ("checkpoint.load_step = -1", 1, {"checkpoint.load_step": None}, []),
    ("checkpoint.initial_load_model_only = false", 1, {"checkpoint.initial_load": None}, []),
    (
        "checkpoint = {initial_load_model_only = false, initial_load_path = 'old'}",
        1,
        {"checkpoint.initial_load": ["model"], "checkpoint.initial_load_path": "old"},
        ["checkpoint.initial_load_model_only"],
    ),
    (
        "checkpoint = {initial_load_in_hf = true, initial_load_path = 'old'}",
        1,
        {"checkpoint.initial_load_path": "old"},
        [],
    ),
    (
        "checkpoint.initial_load_in_hf = true\nmodel.hf_assets_path = 'hf'",
        1,
        {"checkpoint.initial_load_path": "hf", "data.tokenizer": "hf"},
        [],
    ),
    ("checkpoint.initial_load_in_hf = false", 1, {"checkpoint.initial_load_path": None}, []),
    ("validation = {enable = true, steps = -1}", None, {"validation.sequences": 0, "validation.freq": 10}, ["*"]),
    ("validation = {enable = true, steps = 5, local_batch_size = 2}", 4, {"validation.sequences": 40}, []),
    ("validation.enable = false", 1, {"validation.path": None, "validation.freq": None}, []),
    (
        "profiling = {enable_profiling = true, save_traces_folder = 't', profiler_active = 2}",
        1,
        {"profiling.enable_profiling": True, "profiling.profile_freq": 10, "profiling.profiler_active": 2},
        [],
    ),
    ("profiling = {enable_profiling = false, profile_freq = 50}", 1, {"profiling.profile_freq": None}, []),
    (
        "profiling = {enable_profiling = true, profile_freq = 50}\ntraining.steps = 20",
        1,
        {"profiling.enable_profiling": None, "profiling.profile_freq": None},
        [],
    ),
    (
        "metrics = {enable_tensorboard = true, enable_wandb = true}",
        2,
        {"metrics.loggers": ["tensorboard", "wandb"]},
        [],
    ),
    ("fault_tolerance = {enable = false, group_size = 2}", 1, {}, []),
    ("fault_tolerance.enable = true", 1, {}, ["fault_tolerance.enable"]),
]


@pytest.mark.parametrize(("text", "world_size", "expected", "lost"), CASES, ids=[case[0] for case in CASES])
def test_one_key(text: str, world_size: int | None, expected: dict[str, Any], lost: list[str]) -> None:
    new, _, losses = run(text, world_size=world_size)
    assert {key: new.get(key) for key in expected} == expected
    assert losses == [name if name != "*" else "training.global_batch_size" for name in lost]


def test_defaults_that_differ_are_written() -> None:
    new, report, _ = run("training.seq_len = 4096", world_size=2)
    expected = {
        "training.seq_len": 4096,
        "training.steps": 10000,
        "training.local_batch_size": 8,
        "training.global_batch_size": 16,
        "optimizer.lr": 8e-4,
        "optimizer.groups": [{"match": ["*"], "weight_decay": 0.1}],
        "metrics.loggers": [],
        "checkpoint.enable": False,
        "checkpoint.async_mode": "disabled",
        "activation_checkpoint.mode": "selective",
        "activation_checkpoint.selective_ac_option": 2,
        "data.path": "tests/assets/c4_test",
        "data.tokenizer": "./tests/assets/tokenizer",
        "data.shuffle": False,
    }
    assert {key: value for key, value in new.items() if not key.startswith("model.")} == expected
    defaults = [line for line in report if line.startswith("default ")]
    assert any(mentions(line, "optimizer.lr", 0.0008, 0.0003) for line in defaults)
    assert len(defaults) == len(new) - 1


def test_unknown_keys_are_losses_with_the_nearest_name() -> None:
    old = "model.name = 'llama3'\n[training]\nstepss = 5\n[mine]\nlocal_batch_sizes = 2\nxyz = [1]\n"
    new, report, losses = run(old, world_size=1)
    assert losses == ["training.stepss", "mine.local_batch_sizes", "mine.xyz"]
    for key, nearest in ("training.stepss", "training.steps"), ("mine.local_batch_sizes", "training.local_batch_size"):
        assert any(mentions(line, "UNKNOWN", key, nearest) for line in report)
    assert any(mentions(line, "UNKNOWN", "mine.xyz") for line in report)
    assert new["training.steps"] == 10000


# What is refused


@pytest.mark.parametrize("path", sorted((ROOT / "train_configs").glob("*.toml")), ids=lambda path: path.stem)
def test_our_own_configs_are_refused(path: Path) -> None:
    with pytest.raises(UserError, match=rf"^{path.name} .*\btitanlite\b"):
        migrate(path.read_text(), path.name)


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("", [["torchtitan"]]),
        ("[tool.ruff]\nline-length = 3\n", [["torchtitan"]]),
        ("[[training]]\nsteps = 3\n", [["torchtitan"]]),
        ("steps = = 3", [["TOML"]]),
        ("[training]\nsteps = 1\nsteps = 2", [["TOML"]]),
        (
            "[training]\nsteps = '5'\nstepss = 5\n\n[optimizer]\neps = 1\nlr = true",
            [["training.steps", "int", "'5'"], ["optimizer.lr", "float"], ["training.stepss", "training.steps"]],
        ),
        ("parallelism.tensor_parallel_degree = 3", [[3, 4]]),
    ],
)
def test_bad_files(text: str, lines: list[list[object]]) -> None:
    with pytest.raises(UserError) as caught:
        migrate(text, "old.toml", world_size=4)
    for line, words in zip(str(caught.value).splitlines(), lines, strict=True):
        assert mentions(line, *words)


# The command


def command(*arguments: str | Path) -> int:
    return cli.run(["config", "migrate", *map(str, arguments)])


GOOD = (
    "[training]\nglobal_batch_size = 8\ndataset = 'c4'\n[model]\nflavor = '8B'\n[profiling]\nenable_profiling = true\n"
)


def test_what_is_lost_has_an_exit_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "old.toml").write_text("[model]\nconverters = ['quantize.grouped_mm.mx']\n")
    assert command(tmp_path / "old.toml", "--world-size=128") == 1
    lines = capsys.readouterr().err.splitlines()
    assert mentions(lines[-1], "model.converters")
    [lost] = [line for line in lines if line.startswith("LOST")]
    assert mentions(lost, "quantize.grouped_mm.mx")


def test_without_out_the_toml_is_on_stdout(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "old.toml").write_text(GOOD)
    assert command(tmp_path / "old.toml") == 0
    captured = capsys.readouterr()
    assert tomli.loads(captured.out)["training"]["global_batch_size"] == 8
    assert ["carried", "training.global_batch_size"] in [line.split() for line in captured.err.splitlines()]
    assert "error" not in captured.err


def test_with_out_the_report_is_on_stdout(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old, new = tmp_path / "old.toml", tmp_path / "new.toml"
    old.write_text(GOOD + "[parallelism]\nexpert_tensor_parallel_degree = 2\n")
    assert command(old, "--out", new, "--world-size=2") == 1
    captured = capsys.readouterr()
    assert mentions(captured.out, "LOST", "parallelism.expert_tensor_parallel_degree = 2")
    [line] = captured.err.splitlines()
    assert mentions(line, "error", "parallelism.expert_tensor_parallel_degree")
    assert tomli.loads(new.read_text())["model"]["flavor"] == "8B"
    assert old.read_text().startswith(GOOD)


@pytest.mark.parametrize("target", ["old.toml", "other.toml"])
def test_nothing_is_overwritten(target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "old.toml").write_text(GOOD)
    (tmp_path / "other.toml").write_text("precious")
    before = (tmp_path / target).read_text()
    assert command(tmp_path / "old.toml", "--out", tmp_path / target) == 2
    assert str(tmp_path / target) in capsys.readouterr().err
    assert (tmp_path / target).read_text() == before


def test_all_keys_together_load_and_are_reported(tmp_path: Path) -> None:
    values = {key: value for key, value in DEFAULTS.items() if value is not None}
    assert len(values) > 100
    migration = migrate(toml(values), "old.toml", world_size=8)
    for key in values:
        assert [line for line in migration.report if re.match(rf"\w+ +{re.escape(key)}(?![\w.])", line)], key
    wrong = problems(migration.text(), tmp_path)
    assert wrong.keys() <= {"data.tokenizer", "data.path"}, "files that are not here"
    assert not any(re.search("unknown|should be", message) for message in wrong.values())


def test_keys_of_an_own_config_module_are_listed_as_its_own() -> None:
    text = "[job]\ncustom_config_module = 'mine.config'\n[my_section]\ndepth = 3\n[training]\nmy_own = true\n"
    migration = migrate(text, "own.toml", world_size=1)
    lines = [line for line in migration.report if "my_" in line]
    assert [line.split(":")[0].split() for line in lines] == [
        ["LOST", "my_section.depth", "=", "3"],
        ["LOST", "training.my_own", "=", "true"],
    ]
    assert all("mine.config" in line for line in lines)
    assert "# my_section.depth = 3" in migration.text()
    assert "UNKNOWN" not in str(migration.report)
