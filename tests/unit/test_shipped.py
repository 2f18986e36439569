"""Shipped configs: found by bare names, in a checkout and in a wheel; `titanlite init` makes new ones from them."""

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.helpers import mentions
from titanlite.config.load import load
from titanlite.config.shipped import find_config, shipped_folder
from titanlite.tools import cli

ROOT = Path(__file__).parents[2]
SHIPPED = sorted(path.stem for path in (ROOT / "train_configs").glob("*.toml"))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder, which is the current one."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", ["llama3_8b", "llama3_8b.toml"])
def test_bare_names_are_shipped_configs(name: str, folder: Path) -> None:
    assert find_config(name) == shipped_folder() / "llama3_8b.toml"
    assert (shipped_folder() / "llama3_8b.toml").samefile(ROOT / "train_configs" / "llama3_8b.toml")
    assert find_config(f"./{name}").name == name, "a path is no bare name"
    assert not find_config(f"./elsewhere/{name}").exists()


def test_files_come_first(folder: Path) -> None:
    (folder / "debug").mkdir()
    assert find_config("debug") == shipped_folder() / "debug.toml", "a folder is no config"
    (folder / "debug.toml").touch()
    assert find_config("debug") == find_config("debug.toml") == Path("debug.toml")
    assert find_config(str(folder / "debug")) == folder / "debug.toml"
    (folder / "plain").touch()
    assert find_config("plain") == Path("plain")
    assert find_config("") == Path()


@pytest.mark.parametrize("command", ["check", "config show", "train"])
def test_commands_take_bare_names(command: str, folder: Path, refused: Callable[..., str]) -> None:
    for config in (["debug"], ["--config", "debug.toml"], []):
        line = refused(*command.split(), *config, "--training.stepss=3")
        assert line.startswith("error: training.stepss: ")
        assert mentions(line, "training.steps", "command line")


def test_a_base_can_be_a_shipped_config(folder: Path) -> None:
    (folder / "mine.toml").write_text('base = "llama3_8b.toml"\n[training]\nsteps = 700\n')
    config = load("mine.toml")
    assert (config.model.flavor, config.training.steps, config.training.seq_len) == ("8B", 700, 8192)
    (folder / "llama3_8b.toml").write_text('[model]\nflavor = "3B"\n')
    assert load("mine.toml").model.flavor == "3B", "a file beside it comes first"


# init


@pytest.mark.parametrize("origin", SHIPPED)
def test_init_writes_a_config_that_trains_the_same(
    origin: str, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["init", "mine", "--from", origin]) == 0
    settings = load(find_config(origin), ["--job.name=mine"])
    assert load("mine.toml") == settings
    text = Path("mine.toml").read_text()
    assert max(map(len, text.splitlines())) <= 120


def test_init_keeps_a_list_that_was_emptied(folder: Path) -> None:
    (folder / "origin.toml").write_text("[checkpoint]\ninitial_load = []\n")
    assert cli.run(["init", "mine", "--from", "origin.toml"]) == 0
    assert load("mine.toml").checkpoint.initial_load == []


def test_init_overwrites_nothing(folder: Path, refused: Callable[..., str]) -> None:
    (folder / "mine.toml").write_text("precious")
    for name in ("mine", "mine.toml"):
        assert mentions(refused("init", name), "mine.toml")
    assert (folder / "mine.toml").read_text() == "precious"
    assert mentions(refused("init", "no/folder"), "no/folder.toml")
    assert mentions(refused("init", "new", "--from", "debgu"), "debgu", "debug")
    assert not (folder / "new.toml").exists()


@pytest.mark.parametrize("uv", ["", "exit 0", "exit 1"], ids=["pip", "uv", "uv_fails"])
def test_the_first_command_shows_what_pip_or_uv_does(tmp_path: Path, uv: str) -> None:
    """On standard error, so that the output of the command stays its own; the second call is silent."""
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / "bin").mkdir()
    (tmp_path / "scripts").mkdir()
    for name in ("pyproject.toml", "constraints.txt", "scripts/environment.sh"):
        shutil.copy(ROOT / name, tmp_path / name)
    python = tmp_path / ".venv" / "bin" / "python"
    for path, code in [(python, "exit 0"), (tmp_path / "bin" / "uv", uv)]:
        if code:
            path.write_text(f'#!/bin/sh\necho "{path.name}${{UV_TORCH_BACKEND:+ $UV_TORCH_BACKEND}}: $*"\n{code}\n')
            path.chmod(0o755)
    find = "find_python start no_such_module; echo $PYTHON"
    script = (
        f"source {tmp_path}/scripts/environment.sh; PATH={tmp_path}/bin:/usr/bin:/bin; {find}; echo again >&2; {find}"
    )
    shown = subprocess.run(["bash", "-euc", script], capture_output=True, text=True, check=True)
    assert shown.stdout == f"{python}\n" * 2
    beginning, *installed, compiled, end, again = shown.stderr.splitlines()
    assert mentions(beginning, "titanlite[start]", tmp_path / ".venv")
    calls = {"": [], "exit 0": ["uv auto"], "exit 1": ["uv auto", "uv"]}
    by_uv = [f"{call}: pip install --python {python} " for call in calls[uv]]
    by_pip = ["python: -m pip install "] if uv != "exit 0" else []
    commands = [line for line in installed if "install" in line]
    assert all(line.startswith(by) for line, by in zip(commands, by_uv + by_pip, strict=True))
    assert all(
        line.endswith(f"--constraint {tmp_path}/constraints.txt --editable {tmp_path}[start]") for line in commands
    )
    assert not any("--quiet" in line for line in commands)
    assert mentions(compiled, "-I", "titanlite.train"), "what a run imports, even with PYTHONDONTWRITEBYTECODE"
    assert end.startswith("installed, in 0 min ")
    assert again == "again"


@pytest.mark.parametrize("uv", ["exit 0", "exit 1", ""], ids=["uv", "uv_fails", "venv"])
def test_an_environment_has_pip_by_uv_as_well(tmp_path: Path, uv: str) -> None:
    """So that `pip install` in an activated environment reaches it, whichever made it."""
    (tmp_path / "bin").mkdir()
    for name, code in {"uv": uv, "python3": "exit 0"}.items():
        if code:
            (tmp_path / "bin" / name).write_text(f'#!/bin/sh\necho "{name} $*"\n{code}\n')
            (tmp_path / "bin" / name).chmod(0o755)
    script = f"source {ROOT}/scripts/environment.sh; PATH={tmp_path}/bin:/usr/bin:/bin; make_venv {tmp_path}/new"
    shown = subprocess.run(["bash", "-euc", script], capture_output=True, text=True, check=True).stdout
    lines = [line for line in shown.splitlines() if "new" in line]
    by_uv = [f"uv venv --quiet --seed --allow-existing --python python3 {tmp_path}/new"] if uv else []
    assert lines == by_uv + ([] if uv == "exit 0" else [f"python3 -m venv {tmp_path}/new"])
