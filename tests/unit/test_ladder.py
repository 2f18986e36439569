"""`titanlite ladder`: sizes, the law with its intervals, runs that resume, and what is printed for others to run."""

import json
import math
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers import TinyRun, mentions, titanlite
from titanlite.config.load import load
from titanlite.config.shipped import find_config
from titanlite.schema import dump
from titanlite.tools import cli
from titanlite.tools.ladder.law import Law, student_t
from titanlite.tools.ladder.sizes import Rung, plan

SIZES = [2**power * 1e6 for power in range(10)]


def law_of(size: float) -> float:
    return 1.7 + 2000 / size**0.4


def test_the_fit_recovers_a_planted_law() -> None:
    law = Law(SIZES[:4], [law_of(size) for size in SIZES[:4]])
    assert law.alpha.value == pytest.approx(0.4, rel=1e-3)
    assert law.amplitude == pytest.approx(2000, rel=1e-2)
    assert law.predict(math.inf).value == pytest.approx(1.7, rel=1e-3)
    for size in SIZES:
        loss, low, high = law.predict(size)
        assert loss == pytest.approx(law_of(size), rel=1e-3)
        assert (low, high) == pytest.approx((loss, loss), rel=1e-3), "there is no noise"
    power = Law(SIZES[:4], [50 / size**0.2 for size in SIZES[:4]])
    assert power.predict(math.inf).value == pytest.approx(0, abs=5e-3)
    assert power.predict(SIZES[9]).value == pytest.approx(50 / SIZES[9] ** 0.2, rel=2e-3)
    straight = Law(SIZES[:3], [3.0, 2.9, 2.8])  # falls faster than any law with a floor of at least 0
    assert straight.predict(math.inf).value == 0
    assert straight.predict(1e6)[1:] == (None, None), "three runs have no spare one"


@pytest.mark.parametrize("sizes", [4, 6])
def test_intervals_cover_what_a_further_run_has(sizes: int) -> None:
    """In 19 of 20 ladders the next size's loss is in the interval; more of them is no fault, fewer is one."""
    draws, inside, widths = np.random.default_rng(0), 0, []
    own = SIZES[:sizes]
    for _ in range(100):
        law = Law(own, [law_of(size) * (1 + 0.003 * draws.standard_normal()) for size in own])
        _, low, high = law.predict(SIZES[sizes])
        assert low is not None
        assert high is not None
        inside += low <= law_of(SIZES[sizes]) * (1 + 0.003 * draws.standard_normal()) <= high
        widths.append((high - low) / law_of(SIZES[sizes]))
    assert inside >= 0.9 * 100
    assert np.median(widths) < (0.25 if len(own) == 4 else 0.05), "it says something"


def test_quantiles_are_those_of_student() -> None:
    """Each is the value beyond which a twentieth of the density lies, on both sides together."""
    for degrees in (1, 2, 5, 10, 11, 20, 60):
        x = np.tan(np.linspace(0, np.arctan(student_t(degrees)), 200_001))
        logs = math.lgamma((degrees + 1) / 2) - math.lgamma(degrees / 2) - 0.5 * math.log(degrees * math.pi)
        density = np.exp(logs) * (1 + x**2 / degrees) ** (-(degrees + 1) / 2)
        assert 2 * np.trapezoid(density, x) == pytest.approx(0.95, abs=1e-3), degrees


# Sizes


def rungs_of(config: Path, *overrides: str, **options: Any) -> list[Rung]:
    defaults = {"sizes": 4, "factor": 2.0, "seeds": 1, "tokens_per_parameter": 20.0, "standard": False}
    return plan(config, overrides, **(defaults | options))


def block(width: int, hidden: int) -> int:
    """Parameters of a block with as many key heads as heads."""
    return 4 * width**2 + 3 * width * hidden + 2 * width


def test_sizes_and_what_stays_in_proportion(tmp_path: Path) -> None:
    path = tmp_path / "my.toml"
    path.write_text(
        f"base = '{find_config('ladder_example')}'\n[job]\ndump_folder = '{tmp_path}'\n"
        "[lr_scheduler]\ndecay_steps = 200\n"
        "[training]\nbatch_ramp = [{until_tokens = 512000, global_batch_size = 4}]\n"
    )
    rungs = rungs_of(path, "--optimizer.lr=0.001")
    assert [(it.name, it.width, it.depth) for it in rungs] == [
        ("rung-0", 24, 2), ("rung-1", 32, 2), ("rung-2", 40, 3), ("rung-3", 56, 3), ("target", 64, 4)
    ]  # fmt: skip
    hidden = [66, 88, 110, 154, 176]
    for rung, size in zip(rungs, hidden, strict=True):
        assert rung.parameters == rung.depth * block(rung.width, size)
        assert rung.tokens == rung.config.training.tokens == 20 * rung.parameters
        assert rung.flops == pytest.approx(
            rung.tokens
            * (
                6 * (rung.parameters - 2 * rung.depth * rung.width + 384 * rung.width)
                + 12 * rung.depth * rung.width * 128
            )
        )
    whole = 1000 * 4 * 128 + (2000 - 1000) * 8 * 128  # tokens of the config's own 2000 steps
    share = rungs[0].tokens / whole
    config = rungs[0].config
    assert config.training.batch_ramp[0].until_tokens == round(512000 * share)
    assert config.lr_scheduler.warmup_steps == round(100 * share)
    assert config.lr_scheduler.decay_steps == round(200 * share)
    assert config.validation.freq == round(500 * share)
    options = config.optimizer
    assert (options.parametrization, options.base_width, options.base_depth) == ("completep", 64, 4)
    assert rungs[-1].config.model.args == load(path).model.args, "the target is the model of the config"
    for rung in rungs:
        assert rung.config.optimizer.lr == 0.001
        rung.toml.parent.mkdir(exist_ok=True)
        rung.toml.write_text(dump(rung.config))
        assert load(rung.toml) == rung.config, "the file that it writes is the config that it plans"
    assert rungs_of(path, sizes=3, standard=True)[0].config.optimizer.parametrization == "standard"
    own = rungs_of(path, "--optimizer.parametrization=mup", "--optimizer.base_width=32", sizes=3)[0].config.optimizer
    assert (own.parametrization, own.base_width, own.base_depth) == ("mup", 32, None)
    seeds = rungs_of(path, seeds=2, sizes=3, factor=1.5)
    assert [(it.name, it.config.debug.seed) for it in seeds[:3]] == [("rung-0", 0), ("rung-0-seed-1", 1), ("rung-1", 0)]
    assert [it.name for it in seeds].count("target") == 1


# Runs

SHAPE = ["dim=32", "n_layers=4", "n_heads=4", "n_kv_heads=4", "hidden_dim=96"]
OPTIONS = [*(f"--model.args.{it}" for it in SHAPE), "--training.global_batch_size=2", "--checkpoint.interval=2"]
LADDER = [*OPTIONS, "--sizes", "3", "--factor", "2", "--tokens-per-parameter", "0.02"]


def words_of(tiny: TinyRun, *more: str) -> list[str]:
    validation = ["--validation.enable", f"--validation.path={tiny.text}", "--validation.sequences=8"]
    return ["ladder", str(tiny.toml), *LADDER, *validation, *more]


def without_times(record: dict[str, Any]) -> dict[str, Any]:
    return json.loads(json.dumps(record), object_hook=lambda it: {k: v for k, v in it.items() if k != "seconds"})


@pytest.mark.slow
def test_a_ladder_trains_its_sizes_and_predicts(tiny: TinyRun) -> None:
    code, _, errors = titanlite(*words_of(tiny))
    assert code == 0, errors
    record = json.loads((tiny.folder / "outputs" / "tiny-ladder" / "ladder.json").read_text())
    for run in record["runs"]:
        folder = tiny.folder / "outputs" / "tiny-ladder" / run["name"]
        last = json.loads((folder / "validation.jsonl").read_text().splitlines()[-1])
        assert (last["step"], last["loss"]) == (run["steps"], run["loss"])
    law, target = record["law"], record["target"]
    assert target["predicted"] == pytest.approx(law["E"] + law["A"] / target["parameters"] ** law["alpha"])
    assert target["loss"] is None


@pytest.mark.nightly
def test_a_ladder_resumes_predicts_and_is_the_same_twice(tiny: TinyRun, capsys: pytest.CaptureFixture[str]) -> None:
    """Trained in processes of their own, a run that was removed and one that was stopped end as before."""
    folder = tiny.folder / "outputs" / "tiny-ladder"
    assert cli.run(words_of(tiny, "--print")) == 0
    commands = capsys.readouterr().out.splitlines()
    subprocess.run(commands[0], shell=True, cwd=tiny.folder, capture_output=True, check=True)
    assert cli.run(words_of(tiny, "--print")) == 0
    assert capsys.readouterr().out.splitlines() == commands[1:]
    assert cli.run(words_of(tiny, "--print", "--optimizer.lr=0.5")) == 2, "a finished run has other options"
    assert mentions(capsys.readouterr().err, "rung-0", "optimizer.lr", "--job.name")

    code, _, errors = titanlite(*words_of(tiny, "--train-target"))
    assert code == 0, errors
    record = json.loads((folder / "ladder.json").read_text())
    runs = [*record["runs"], record["target"]]
    for run in runs:
        last = json.loads((folder / run["name"] / "validation.jsonl").read_text().splitlines()[-1])
        assert (last["step"], last["loss"]) == (run["steps"], run["loss"])
        assert run["error"] == pytest.approx(run["predicted"] / run["loss"] - 1)
    law, target = record["law"], record["target"]
    assert target["predicted"] == pytest.approx(law["E"] + law["A"] / target["parameters"] ** law["alpha"])
    page = (folder / "ladder.html").read_text()
    report = json.loads(page.split('id="report">')[-1].partition("</script>")[0])
    [chart] = [chart for chart in report["charts"] if chart["name"] == "ladder"]
    drawn = {trace["name"]: trace["y"] for trace in chart["traces"]}
    assert drawn["runs"] == [run["loss"] for run in record["runs"]]
    assert (drawn["prediction"], drawn["truth"]) == ([target["predicted"]], [target["loss"]])

    code, output, errors = titanlite(*words_of(tiny))
    assert (code, errors) == (0, [])
    assert len(output) < len(runs) + 8, "nothing is trained again"
    assert json.loads((folder / "ladder.json").read_text()) == record, "the target's truth is known"
    shutil.rmtree(folder / "rung-0")
    for file in ("metrics.jsonl", "run.json"):
        (folder / "rung-1" / file).unlink()
    shutil.rmtree(folder / "rung-1" / "checkpoints" / f"step-{runs[1]['steps']:08}")
    code, output, errors = titanlite(*words_of(tiny))
    assert code == 0, errors
    assert without_times(json.loads((folder / "ladder.json").read_text())) == without_times(record)
    assert any("resum" in line for line in output), "rung-1 does not begin anew"


def test_commands_and_slurm_jobs_run_as_written(
    tiny: TinyRun, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folder = tiny.folder / "outputs" / "tiny-ladder"
    assert cli.run(words_of(tiny, "--print", "--train-target", "--processes", "4")) == 0
    commands = capsys.readouterr().out.splitlines()
    configs = [str(folder / f"{name}.toml") for name in ("rung-0", "rung-1", "rung-2", "target")]
    assert [line.split()[-1] for line in commands] == configs
    assert mentions(commands[0], "titanlite.tools.launch 1 4", configs[0])
    script = tmp_path / "jobs.sh"
    assert cli.run(words_of(tiny, "--slurm", str(script))) == 0
    assert mentions(capsys.readouterr().out, "sbatch", script)
    assert "#SBATCH --array=0-2" in script.read_text()
    assert "#SBATCH --signal=USR1@300" in script.read_text(), "options of scripts/slurm.sh"
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "slurm.sh").write_text('#!/bin/bash\nprintf "%s\\n" "$@"\n')
    (tmp_path / "scripts" / "slurm.sh").chmod(0o755)
    environ = os.environ | {"TITANLITE_ROOT": str(tmp_path), "SLURM_ARRAY_TASK_ID": "1"}
    done = subprocess.run(["bash", str(script), "--x.y=1"], env=environ, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["--config", configs[1], "--x.y=1"]


OWN_MODEL = """
from dataclasses import dataclass
from titanlite.models.base import Model, ModelArgs
@dataclass(frozen=True, kw_only=True)
class Args(ModelArgs):
    depth: int = 2
class Own(Model):
    flavors = {"debug": Args(vocab_size=259, max_seq_len=64)}
    def __init__(self, args):
        import torch
        super().__init__(args)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(args.depth))
"""


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--sizes", "2"], ["--sizes", 3]),
        (["--sizes", "7", "--tokens-per-parameter", "1"], ["parameters", "--sizes", "--factor"]),
        (["--tokens-per-parameter", "0.001"], ["rung-0", "--tokens-per-parameter"]),
        (["--training.epochs=2"], ["training.epochs"]),
        (["--checkpoint.initial_load_path=weights"], ["checkpoint.initial_load_path"]),
        (["--model.args.tied_head"], ["optimizer.parametrization", "tied_head", "--standard"]),
        (["--model.file=own_ladder.py"], ["Args", "dim"]),
        (["--training.stepss=2"], ["training.steps"]),
    ],
)
def test_what_has_no_ladder(
    tiny: TinyRun, capsys: pytest.CaptureFixture[str], words: list[str], expected: list[object]
) -> None:
    if "--model.file=own_ladder.py" in words:
        (tiny.folder / "own_ladder.py").write_text(OWN_MODEL)
        tiny.toml.write_text(f'[data]\npath = "{tiny.text}"\n')
        words, shape = [f"--model.file={tiny.folder}/own_ladder.py", f"--job.dump_folder={tiny.folder}/outputs"], []
    else:
        shape = LADDER
    assert cli.run(["ladder", str(tiny.toml), *shape, *words]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert mentions(line, *expected)
    assert not (tiny.folder / "outputs").exists()
