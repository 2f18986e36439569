"""The Python interface: what a notebook calls."""

import ast
import inspect
import json
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import titanlite
from tests.support.helpers import TinyRun
from titanlite.after_step import EndedStep
from titanlite.tools import cli
from titanlite.train import finish, train


def test_each_public_name_is_there_with_its_types() -> None:
    """py.typed promises them: a checker of a user's code reads the annotations."""
    assert {*titanlite.PUBLIC, "__version__"} == {*titanlite.__all__}
    for name in titanlite.PUBLIC:
        found = getattr(titanlite, name)
        functions = (
            [found]
            if inspect.isfunction(found)
            else [function for function in vars(found).values() if inspect.isfunction(function)]
        )
        for function in functions:
            if not function.__name__.startswith("_"):
                missing = {*inspect.signature(function).parameters} - {"self", *function.__annotations__}
                assert not missing, (name, function.__name__)
                assert "return" in function.__annotations__, (name, function.__name__)


@pytest.mark.long
def test_a_notebook_trains_as_the_command_does(tiny: TinyRun) -> None:
    steps = {"training.steps": 2}
    records = titanlite.run_training(titanlite.load_config(tiny.toml, {"job.name": "notebook"} | steps))
    options = "--job.name=command", "--training.steps=2"
    assert cli.run(["train", "--config", str(tiny.toml), *options]) == 0
    assert records.steps == [1, 2]
    assert records.column("loss") == tiny.losses("command")
    assert not dist.is_initialized()
    further = titanlite.run_training(titanlite.load_config(tiny.toml, {"job.name": "notebook", "training.steps": 3}))
    assert further.steps == [1, 2, 3], "it resumes"
    assert further.run_id == records.run_id


@pytest.mark.long
def test_parts_of_a_run_are_there_for_a_loop_of_ones_own(tiny: TinyRun) -> None:
    config = titanlite.load_config(tiny.toml, {"model.args.dim": 24, "checkpoint.enable": False})
    with titanlite.build_run(config) as run:
        assert isinstance(run.model, titanlite.Model)
        batch = next(run.batches)
        loss = torch.nn.functional.cross_entropy(
            run.model(batch["tokens"]).flatten(0, 1).float(), batch["labels"].flatten()
        )
        assert 4 < float(loss) < 8
        with pytest.raises(titanlite.UserError), titanlite.build_run(config):
            pass
    with pytest.raises(ZeroDivisionError), titanlite.build_run(config):
        raise ZeroDivisionError
    with titanlite.build_run(config) as run:
        assert run.position.progress.step == 0
    config = titanlite.load_config(tiny.toml, {"model.args.dim": 25})
    with pytest.raises(titanlite.ConfigError, match=r"model\.args: .*\b25\b"):
        titanlite.run_training(config)


@pytest.mark.long
def test_a_task_of_ones_own_runs_after_the_steps_at_which_it_is_due(tiny: TinyRun) -> None:
    seen: list[tuple[int, bool, int]] = []

    class Every2:
        def is_due(self, step: int, *, last: bool) -> bool:
            return step % 2 == 0 or last

        def run(self, step: EndedStep) -> None:
            seen.append((step.number, step.is_last, step.progress().samples_seen))

    config = titanlite.load_config(tiny.toml, {"training.steps": 5, "training.global_batch_size": 4})
    with titanlite.build_run(config) as run:
        run.after_step.append(Every2())
        finish(run, train(run))
    assert seen == [(2, False, 8), (4, False, 16), (5, True, 20)]


@pytest.mark.long
def test_a_rule_that_stops_the_run_is_an_error_that_can_be_caught(tiny: TinyRun) -> None:
    config = titanlite.load_config(tiny.toml, {"optimizer.lr": 1e38, "lr_scheduler.warmup_steps": 0})
    with pytest.raises(titanlite.RunStopped) as stopped:
        titanlite.run_training(config)
    assert (stopped.value.exit_code, stopped.value.taken) == (3, 1)
    assert not dist.is_initialized()


def test_options_are_values_of_python(tmp_path: Path) -> None:
    options = {
        "training.steps": 20,
        "optimizer.lr": 1e-3,
        "compile.enable": True,
        "job.name": "2026",
        "job.dump_folder": tmp_path,
        "model.args": {"dim": 128, "n_heads": 4},
        "metrics.loggers": ["tensorboard"],
    }
    config = titanlite.load_config("debug", options)
    assert (config.training.steps, config.optimizer.lr, config.compile.enable) == (20, 1e-3, True)
    assert (config.job.name, config.job.dump_folder) == ("2026", str(tmp_path))
    assert config.model.args == {"dim": 128, "n_heads": 4}
    assert config.metrics.loggers == ["tensorboard"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"training.stepss": 3}, r"training\.stepss: .*training\.steps\b"),
        ({"training.steps": None}, r"training\.steps: None .*TOML"),
        ({"model.args": {"dim": object}}, r"model\.args: .*TOML"),
    ],
)
def test_mistakes_are_named(options: dict[str, object], message: str) -> None:
    with pytest.raises(titanlite.ConfigError, match=message):
        titanlite.load_config("debug", options)


def test_a_config_is_looked_at_and_written_without_a_run(tiny: TinyRun) -> None:
    """The model has the shape of the run's, with its adapters, and no memory; the text loads to the same config."""
    config = titanlite.load_config(tiny.toml, {"model.args.dim": 24, "lora.rank": 2})
    model = titanlite.build_model(config)
    assert model.args.max_seq_len == config.training.seq_len
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained
    assert len(trained) < len(dict(model.named_parameters())), "the adapters are there"
    (tiny.folder / "written.toml").write_text(titanlite.dump(config))
    assert titanlite.load_config(tiny.folder / "written.toml") == config
    assert not (tiny.folder / "outputs").exists()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> TinyRun:
    """A finished run with validations."""
    tiny = TinyRun(tmp_path_factory.mktemp("trained"))
    options = {"validation.enable": True, "validation.freq": 2, "validation.path": str(tiny.text), "training.steps": 4}
    titanlite.run_training(
        titanlite.load_config(tiny.toml, {"job.dump_folder": str(tiny.folder / "outputs"), **options})
    )
    return tiny


@pytest.mark.long
def test_records_are_a_table_a_plot_and_a_data_frame(trained: TinyRun) -> None:
    pyplot, _ = pytest.importorskip("matplotlib.pyplot"), pytest.importorskip("pandas")
    pyplot.switch_backend("agg")
    records = titanlite.read_run(trained.folder / "outputs" / "tiny")
    losses, validated = trained.losses(), [(one["step"], one["loss"]) for one in records.validation]
    facts = {"step": "4", "loss": f"{losses[-1]:.4f}", "validation loss": f"{validated[-1][1]:.4f}"}
    for name, value in facts.items():
        assert f"{name} {value}" in repr(records)
        assert f"<tr><th>{name}</th><td>{value}</td></tr>" in records._repr_html_()
    assert len(repr(records)) < 150

    frame = records.to_pandas()
    assert ([*frame.index], [*frame["loss"]]) == ([1, 2, 3, 4], losses)
    assert [*frame["phase_seconds/compute"]] == [one["phase_seconds"]["compute"] for one in records.metrics]
    assert [*records.to_pandas("validation")["loss"].items()] == validated
    assert len(records.to_pandas("skipped")) == 0
    ax = records.plot()
    line, dots = ax.get_lines()
    assert ([*line.get_xdata()], [*line.get_ydata()]) == ([1, 2, 3, 4], losses)
    assert [*zip(dots.get_xdata(), dots.get_ydata(), strict=True)] == validated
    assert records.plot("lr", ax=ax) is ax
    assert [*ax.get_lines()[2].get_ydata()] == records.column("lr")
    for wrong in (lambda: records.plot("los"), lambda: records.plot("mfu"), lambda: records.to_pandas("metric")):
        with pytest.raises(titanlite.UserError):
            wrong()
    pyplot.close("all")


def test_what_is_not_installed_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"schema": 2, "step": 1, "loss": null}\n')
    records = titanlite.read_run(tmp_path)
    assert "loss" not in repr(records)
    for package, show in {"pandas": records.to_pandas, "matplotlib": records.plot}.items():
        monkeypatch.setitem(sys.modules, package, None)
        monkeypatch.setitem(sys.modules, f"{package}.pyplot", None)
        with pytest.raises(titanlite.UserError, match=f"^{package} .*install {package}$"):
            show()


@pytest.mark.long
def test_weights_and_texts_are_those_of_the_command(trained: TinyRun, capsys: pytest.CaptureFixture[str]) -> None:
    run = trained.folder / "outputs" / "tiny"
    model = titanlite.load_model(run)
    assert not model.training
    assert next(model.parameters()).dtype == torch.float32
    assert {weight.dtype for weight in titanlite.load_model(run, dtype="bfloat16").parameters()} == {torch.bfloat16}
    options: dict[str, Any] = {"max_new_tokens": 12, "temperature": 0.8, "top_p": 0.9, "seed": 3}
    words = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    assert cli.run(["generate", str(run), "--prompt", "def ", *words]) == 0
    text = capsys.readouterr().out.removesuffix("\n")
    assert text
    assert titanlite.generate(run, "def ", **options) == titanlite.generate(run, "def ", model=model, **options) == text
    wrongs: list[dict[str, Any]] = [{"max_new_tokens": 0}, {"temperature": -1.0}, {"top_p": 0.0}, {"seed": -1}]
    for wrong in wrongs:
        with pytest.raises(titanlite.UserError):
            titanlite.generate(run, "def ", model=model, **wrong)
    with pytest.raises(titanlite.UserError):
        titanlite.load_model(trained.folder / "nothing")


def test_a_config_shows_what_was_changed(tmp_path: Path) -> None:
    config = titanlite.load_config("debug", {"model.args.dim": 96, "optimizer.lr": 0.5})
    shown = tomllib.loads(repr(config))
    assert (shown["model"]["args"], shown["optimizer"]) == ({"dim": 96}, {"lr": 0.5})
    assert "comm" not in shown
    (tmp_path / "again.toml").write_text(str(config))
    assert titanlite.load_config(tmp_path / "again.toml") == config, "it is a config"


def notebook() -> list[dict[str, Any]]:
    return json.loads((Path(__file__).parents[2] / "examples" / "notebook.ipynb").read_text())["cells"]


def test_the_notebook_keeps_no_output() -> None:
    assert all(not cell.get("outputs") and cell.get("execution_count") is None for cell in notebook())


@pytest.mark.nightly
@pytest.mark.usefixtures("own_process_group")
def test_the_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib.pyplot").switch_backend("agg")
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for cell in notebook():
        if cell["cell_type"] == "code":
            capsys.readouterr()
            *before, last = ast.parse("".join(cell["source"])).body
            exec(compile(ast.Module(before, []), "notebook", "exec"), names)
            if isinstance(last, ast.Expr):
                names["_"] = eval(compile(ast.Expression(last.value), "notebook", "eval"), names)
            else:
                exec(compile(ast.Module([last], []), "notebook", "exec"), names)
    assert names["records"].steps[-1] == 40
    assert names["records"].column("loss")[-1] < names["records"].column("loss")[0] - 0.5
    assert len(capsys.readouterr().out) > 20
