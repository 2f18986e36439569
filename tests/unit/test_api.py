"""The Python interface: what a notebook calls."""

import inspect
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import titanlite
from tests.support.helpers import TinyRun
from titanlite.tools import cli


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
        assert run.progress.step == 0
    config = titanlite.load_config(tiny.toml, {"model.args.dim": 25})
    with pytest.raises(titanlite.ConfigError, match=r"model\.args: .*\b25\b"):
        titanlite.run_training(config)


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
