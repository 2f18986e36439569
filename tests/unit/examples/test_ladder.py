"""examples/ladder: sizes, the law with its intervals, the figures of docs/ladder.md, and runs that resume."""

import argparse
import json
import math
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import titanlite
from tests.support.helpers import TinyRun, mentions
from titanlite.config.shipped import find_config
from titanlite.tools import cli

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "examples" / "ladder" / "ladder.py"
SIZES = [2**power * 1e6 for power in range(10)]


@pytest.fixture
def ladder(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Names of the example."""
    monkeypatch.syspath_prepend(SCRIPT.parent)
    return {**runpy.run_path(str(SCRIPT.with_name("law.py"))), **runpy.run_path(str(SCRIPT))}


def law_of(size: float) -> float:
    return 1.7 + 2000 / size**0.4


def test_the_fit_recovers_a_planted_law(ladder: dict[str, Any]) -> None:
    law = ladder["fit"](SIZES[:4], [law_of(size) for size in SIZES[:4]], SIZES)
    assert law["alpha"][0] == pytest.approx(0.4, rel=1e-3)
    assert law["A"] == pytest.approx(2000, rel=1e-2)
    assert law["E"][0] == pytest.approx(1.7, rel=1e-3)
    for size, (loss, low, high) in zip(SIZES, law["losses"], strict=True):
        assert loss == pytest.approx(law_of(size), rel=1e-3)
        assert (low, high) == pytest.approx((loss, loss), rel=1e-3), "there is no noise"
    power = ladder["fit"](SIZES[:4], [50 / size**0.2 for size in SIZES[:4]], SIZES[9:])
    assert power["E"][0] == pytest.approx(0, abs=5e-3)
    assert power["losses"][0][0] == pytest.approx(50 / SIZES[9] ** 0.2, rel=2e-3)
    # falls faster than any law with a floor of at least 0, and three runs have no spare one
    straight = ladder["fit"](SIZES[:3], [3.0, 2.9, 2.8], [1e6])
    assert straight["E"] == [0, None, None]
    assert straight["losses"][0][1:] == [None, None]


@pytest.mark.parametrize("sizes", [4, 6])
def test_intervals_cover_what_a_further_run_has(sizes: int, ladder: dict[str, Any]) -> None:
    """In 19 of 20 ladders the next size's loss is in the interval; more of them is no fault, fewer is one."""
    draws, inside, widths = np.random.default_rng(0), 0, []
    own, size = SIZES[:sizes], SIZES[sizes]
    for _ in range(100):
        losses = [law_of(size) * (1 + 0.003 * draws.standard_normal()) for size in own]
        [[_, low, high]] = ladder["fit"](own, losses, [size])["losses"]
        inside += low <= law_of(size) * (1 + 0.003 * draws.standard_normal()) <= high
        widths.append((high - low) / law_of(size))
    assert inside >= 0.9 * 100
    assert np.median(widths) < (0.25 if len(own) == 4 else 0.05), "it says something"


def test_quantiles_are_those_of_student(ladder: dict[str, Any]) -> None:
    """Each is the value beyond which a twentieth of the density lies, on both sides together."""
    for degrees in (1, 2, 5, 10, 11, 20, 60):
        x = np.tan(np.linspace(0, np.arctan(ladder["student_t"](degrees)), 200_001))
        logs = math.lgamma((degrees + 1) / 2) - math.lgamma(degrees / 2) - 0.5 * math.log(degrees * math.pi)
        density = np.exp(logs) * (1 + x**2 / degrees) ** (-(degrees + 1) / 2)
        assert 2 * np.trapezoid(density, x) == pytest.approx(0.95, abs=1e-3), degrees


# Sizes


def rungs_of(ladder: dict[str, Any], config: str | Path, *words: str, **options: Any) -> list[Any]:
    defaults = {"sizes": 4, "factor": 2.0, "seeds": 1, "tokens_per_parameter": 20.0, "standard": False}
    return ladder["plan"](str(config), dict(map(ladder["option"], words)), argparse.Namespace(**(defaults | options)))


def test_the_page_shows_what_the_example_prints(
    ladder: dict[str, Any], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Sizes, tokens, steps and FLOPs of the page are those of the plan; law and prediction follow from its losses."""
    page = (ROOT / "docs" / "ladder.md").read_text()
    lines = [line.split() for line in page.partition("    run   ")[2].split("\n\n")[0].splitlines()[1:]]
    rungs = rungs_of(ladder, "ladder_example", seeds=2)
    record = ladder["predict"](rungs, [float(words[7]) for words in lines[:9]])
    ladder["show"](record)
    shown = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
    for number, (words, expected) in enumerate(zip(shown, lines, strict=True)):  # losses of the page are rounded
        assert words[: 9 if number < 9 else None] == expected[: 9 if number < 9 else None]
    target = record["target"]
    assert target["predicted"] == pytest.approx(record["law"]["A"] / 201216 ** record["law"]["alpha"][0])
    assert target["error"] == pytest.approx(target["predicted"] / 1.3099 - 1)
    ladder["draw"](record, tmp_path / "ladder.svg")
    texts = [(folder / "ladder.svg").read_text() for folder in (tmp_path, ROOT / "docs" / "images")]
    assert ["Predicted 1.333, measured 1.310" in text for text in texts] == [True, True]


def block(width: int, hidden: int) -> int:
    """Parameters of a block with as many key heads as heads."""
    return 4 * width**2 + 3 * width * hidden + 2 * width


def test_sizes_and_what_stays_in_proportion(ladder: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "my.toml"
    path.write_text(
        f"base = '{find_config('ladder_example')}'\n[job]\ndump_folder = '{tmp_path}'\n"
        "[lr_scheduler]\ndecay_steps = 200\n"
        "[training]\nbatch_ramp = [{until_tokens = 512000, global_batch_size = 4}]\n"
        "seq_len_ramp = [{until_tokens = 256000, seq_len = 64}]\n"
    )
    rungs = rungs_of(ladder, path, "--optimizer.lr=0.001")
    assert [(size.name, size.width, size.depth) for size in rungs] == [
        ("rung-0", 24, 2), ("rung-1", 32, 2), ("rung-2", 40, 3), ("rung-3", 56, 3), ("target", 64, 4)
    ]  # fmt: skip
    hidden = [66, 88, 110, 154, 176]
    for rung, size in zip(rungs, hidden, strict=True):
        assert rung.config.optimizer.lr == 0.001
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
    assert config.training.seq_len_ramp[0].until_tokens == round(256000 * share)
    assert config.lr_scheduler.warmup_steps == round(100 * share)
    assert config.lr_scheduler.decay_steps == round(200 * share)
    assert config.validation.freq == round(500 * share)
    options = config.optimizer
    assert (options.parametrization, options.base_width, options.base_depth) == ("completep", 64, 4)
    assert rungs[-1].config.model.args == titanlite.load_config(path).model.args, "the target is the config's model"
    standard = rungs_of(ladder, path, sizes=3, standard=True)[0].config.optimizer
    assert standard.parametrization == "standard"
    words = "--optimizer.parametrization=mup", "--optimizer.base_width=32"
    own = rungs_of(ladder, path, *words, sizes=3)[0].config.optimizer
    assert (own.parametrization, own.base_width, own.base_depth) == ("mup", 32, None)
    seeds = rungs_of(ladder, path, seeds=2, sizes=3, factor=1.5)
    assert [(rung.name, rung.config.debug.seed) for rung in seeds[:3]] == [
        ("rung-0", 0),
        ("rung-0-seed-1", 1),
        ("rung-1", 0),
    ]
    assert [rung.name for rung in seeds].count("target") == 1


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
SHAPE = ["dim=32", "n_layers=4", "n_heads=4", "n_kv_heads=4", "hidden_dim=96"]
OPTIONS = [*(f"--model.args.{name}" for name in SHAPE), "--training.global_batch_size=2", "--checkpoint.interval=4"]


@pytest.mark.parametrize(
    ("words", "arguments", "expected"),
    [
        ([], {"sizes": 7, "tokens_per_parameter": 1}, ["--sizes", "--factor"]),
        ([], {"tokens_per_parameter": 0.001}, ["rung-0", "--tokens-per-parameter"]),
        (["--training.epochs=2"], {}, ["training.epochs"]),
        (["--checkpoint.initial_load_path=weights"], {}, ["checkpoint.initial_load_path"]),
        (["--model.file=own_ladder.py"], {}, ["Args", "dim"]),
        (["--training.stepss=2"], {}, ["training.steps"]),
    ],
)
def test_what_has_no_ladder(
    tiny: TinyRun, ladder: dict[str, Any], words: list[str], arguments: dict[str, Any], expected: list[str]
) -> None:
    shape = OPTIONS
    if words == ["--model.file=own_ladder.py"]:
        (tiny.folder / "own_ladder.py").write_text(OWN_MODEL)
        tiny.toml.write_text(f'[data]\npath = "{tiny.text}"\n')
        words, shape = [f"--model.file={tiny.folder}/own_ladder.py"], []
    with pytest.raises(titanlite.UserError) as raised:
        rungs_of(ladder, tiny.toml, *shape, *words, **({"tokens_per_parameter": 0.02} | arguments))
    assert mentions(str(raised.value), *expected)


# Runs


@pytest.mark.slow
@pytest.mark.usefixtures("own_process_group")
def test_a_ladder_resumes_predicts_and_is_the_same_twice(
    tiny: TinyRun, ladder: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that was stopped ends as before, other options are refused, and the target confirms or refutes. The script
    runs as such where it resumes, and in this process else."""
    folder = tiny.folder / "outputs" / "tiny-ladder"
    validation = ["--validation.enable", f"--validation.path={tiny.text}", "--validation.sequences=8"]
    arguments = ["--sizes", "3", "--tokens-per-parameter", "0.02", *OPTIONS, *validation]

    def run_here(*more: str) -> dict[str, Any]:
        monkeypatch.setattr(sys, "argv", [str(SCRIPT), str(tiny.toml), *arguments, *more])
        ladder["main"]()
        return json.loads((folder / "ladder.json").read_text())

    def train_here(rung: Any) -> None:
        toml = rung.folder.with_name(f"{rung.name}.toml")
        toml.parent.mkdir(parents=True, exist_ok=True)
        toml.write_text(titanlite.dump(rung.config))
        assert cli.run(["train", str(toml)]) == 0

    monkeypatch.setitem(ladder["main"].__globals__, "train", train_here)
    record = run_here()
    assert record["target"]["loss"] is None
    for file in ("metrics.jsonl", "run.json"):
        (folder / "rung-1" / file).unlink()
    shutil.rmtree(folder / "rung-1" / "checkpoints" / f"step-{record['runs'][1]['steps']:08}")
    untouched = (folder / "rung-0" / "run.json").read_bytes()
    command = [sys.executable, str(SCRIPT), str(tiny.toml), *arguments, "--train-target"]
    done = subprocess.run(command, cwd=tiny.folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((folder / "ladder.json").read_text())
    assert (found["law"], found["runs"]) == (record["law"], record["runs"])
    assert (folder / "rung-0" / "run.json").read_bytes() == untouched, "it is not trained again"
    starts = json.loads((folder / "rung-1" / "run.json").read_text())["starts"]
    assert [record["step"] > 0 for record in starts] == [True], "it resumes"
    for record in [*found["runs"], found["target"]]:
        last = json.loads((folder / record["name"] / "validation.jsonl").read_text().splitlines()[-1])
        assert (last["step"], last["loss"]) == (record["steps"], record["loss"])
        assert record["error"] == pytest.approx(record["predicted"] / record["loss"] - 1)
    law, target = found["law"], found["target"]
    assert target["predicted"] == pytest.approx(law["E"][0] + law["A"] / target["parameters"] ** law["alpha"][0])
    with pytest.raises(titanlite.UserError) as error:
        run_here("--optimizer.lr=0.5")
    assert mentions(str(error.value), "rung-0", "optimizer.lr", "--job.name")
    assert json.loads((folder / "ladder.json").read_text()) == found
