"""Commands and examples of the guides, run as they stand."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.documented import commands_to_run
from titanlite.tools import cli

ROOT = Path(__file__).parents[2]


def commands(guide: str, heading: str) -> list[str]:
    """The lines of the first block of shell under a heading."""
    text = (ROOT / "docs" / guide).read_text().partition(f"## {heading}\n")[2]
    block = re.search(r"```sh\n(.*?)```", text, re.DOTALL)
    assert block, f"no commands under {heading}"
    return block[1].strip().splitlines()


def run(command: str, folder: Path) -> str:
    """Run a command of a guide in a folder; return what it prints."""
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        ["bash", "-c", command], cwd=folder, env=environment, capture_output=True, text=True, timeout=200
    )
    assert result.returncode == 0, f"{command}\n{result.stdout}\n{result.stderr}"
    return result.stdout


def losses(folder: Path, name: str) -> list[float]:
    records = (folder / "outputs" / name / "metrics.jsonl").read_text().splitlines()
    return [json.loads(record)["loss"] for record in records]


def blocks(guide: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / "docs" / guide).read_text(), re.DOTALL)


EXAMPLE = ROOT / "examples" / "my_model"


@pytest.mark.nightly
def test_the_tutorial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """Each command as it stands, with fewer steps in the TOML and after it."""
    for name in ("docs", "README.md", "CHANGELOG.md", "CONTRIBUTING.md"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    [toml] = blocks("tutorial.md", "toml")
    assert toml.count("steps = 100") == toml.count("interval = 50") == toml.count("warmup_steps = 10") == 1
    short = (
        toml.replace("steps = 100", "steps = 4")
        .replace("freq = 50", "freq = 4")
        .replace("warmup_steps = 10", "warmup_steps = 1")
    )
    Path("tutorial.toml").write_text(short.replace("interval = 50", "interval = 2"))
    printed = {}
    lines = "".join(blocks("tutorial.md", "sh")).strip().splitlines()
    assert lines == commands_to_run("docs/tutorial.md")
    for command in lines:
        if command.startswith("titanlite "):
            assert cli.run(shlex.split(command)[1:]) == 0, command
            printed[command.split(" --")[0]] = capfd.readouterr().out
        else:
            printed[command] = run(command.replace("=150", "=6").replace("./run", f"{ROOT}/run"), tmp_path)
    assert "vocabulary 1,024" in printed["titanlite data inspect tutorial/tokens"]
    resumed = printed["NPROC=2 ./run_train.sh --config tutorial.toml --training.steps=150"]
    assert "mesh     replicate 1 x shard 2" in resumed
    assert "(2, 4, 6)" in resumed
    assert Path("tutorial.html").stat().st_size > 1e6
    assert Path("tutorial_hf/config.json").exists()
    assert 5 < losses(tmp_path, "tutorial")[-1] < 7.2


def without_blank_lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.strip()]


def test_the_guide_to_a_model_builds_the_example() -> None:
    built = without_blank_lines("".join(blocks("add_a_model.md", "python")))
    assert built == without_blank_lines((EXAMPLE / "gpt2.py").read_text())
    [toml] = blocks("add_a_model.md", "toml")
    settings = {line.split("#")[0].strip() for line in toml.splitlines()}
    assert settings <= {line.strip() for line in (EXAMPLE / "gpt2.toml").read_text().splitlines()}


@pytest.mark.nightly
def test_a_model_outside_the_package_trains_by_the_commands_of_its_guide(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    plain, wider, sharded = commands("add_a_model.md", "Train it")
    assert [plain, wider, sharded] == commands_to_run("docs/add_a_model.md")
    small = "--training.steps=2 --lr_scheduler.warmup_steps=0 --training.seq_len=32 --training.global_batch_size=4"
    small += " --validation.enable=false"
    at_root = [
        command.replace("./run_train.sh", f"{ROOT}/run_train.sh").replace(" examples/", f" {ROOT}/examples/")
        for command in (plain, wider, sharded)
    ]
    printed = []
    for command in at_root[:2]:  # one process: this one
        script, *words = shlex.split(f"{command} {small} --job.dump_folder={tmp_path}/outputs")
        assert script == f"{ROOT}/run_train.sh"
        assert cli.run(["train", *words]) == 0
        printed.append(capfd.readouterr().out)
    printed.append(run(f"{at_root[2]} {small}", tmp_path))
    assert "model    gpt2 debug, 3,692,032 parameters" in printed[0]
    assert "model    gpt2 debug, 5,598,080 parameters" in printed[1]
    assert "mesh     replicate 1 x shard 2" in printed[2]
    assert losses(tmp_path, "sharded") == pytest.approx(losses(tmp_path, "gpt2"), rel=1e-5)


@pytest.mark.nightly
def test_examples_of_own_parts(tmp_path: Path) -> None:
    for source in blocks("extend.md", "python"):
        name = source.splitlines()[0].removeprefix("# ")
        assert len(without_blank_lines(source)) <= 21
        (tmp_path / name).write_text(source)
    config = "\n".join(blocks("extend.md", "toml")).replace("[training]", "[training]\nsteps = 4")
    assert config.count("[") >= 3
    (tmp_path / "own.toml").write_text(f"base = '{ROOT}/train_configs/debug.toml'\n{config}")
    options = "--training.seq_len=64 --training.global_batch_size=4 --metrics.log_freq=1 --data.num_workers=1"
    options += " --lr_scheduler.warmup_steps=2"
    printed = run(f"{ROOT}/run_train.sh --config own.toml --job.name=own --validation.enable=false {options}", tmp_path)
    assert "100,000 sequences of its own" in printed
    rows = (tmp_path / "outputs" / "own" / "loss.csv").read_text().splitlines()
    assert [float(row.split(",")[1]) for row in rows] == pytest.approx(losses(tmp_path, "own"))
    assert len(rows) == 4
    records = (tmp_path / "outputs" / "own" / "metrics.jsonl").read_text().splitlines()
    first = json.loads(records[0])
    assert 7 < first["loss"] < 8.5, "ln 2048 is 7.6: the plain cross entropy"
    assert 0 < abs(first["added_loss"]) < 1, "what smoothing adds"
