"""Shipped configs: found by bare names, in a checkout and in a wheel; `titanlite init` makes new ones from them."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from titanlite import cli
from titanlite.config.load import load
from titanlite.config.shipped import find_config, nearest_config, shipped_folder
from titanlite.config.starter import OFTEN_SET, starter_text

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


def test_the_nearest_name_of_files_and_shipped_configs(folder: Path) -> None:
    assert nearest_config(Path("lama3_8b.toml")) == "llama3_8b"
    assert nearest_config(Path("xyzzy")) is None
    (folder / "my_run.toml").touch()
    assert nearest_config(Path("my_rnu")) == "my_run.toml"


@pytest.mark.parametrize("command", ["check", "config show", "train", "config check"])
def test_commands_take_bare_names(command: str, folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for config in (["debug"], ["--config", "debug.toml"], []):
        assert cli.run([*command.split(), *config, "--training.stepss=3"]) == 2
        assert capfd.readouterr().err == (
            "error: training.stepss: unknown key, did you mean training.steps? (command line)\n"
        )


def test_a_base_can_be_a_shipped_config(folder: Path) -> None:
    (folder / "mine.toml").write_text('base = "llama3_8b.toml"\n[training]\nsteps = 7\n')
    config = load("mine.toml")
    assert (config.model.flavor, config.training.steps, config.training.seq_len) == ("8B", 7, 8192)
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
    assert {key.rpartition(".")[2] for key in OFTEN_SET} <= {*re.findall(r"^#?(\w+) = ", text, re.MULTILINE)}


def test_lines_of_init_can_be_uncommented(folder: Path) -> None:
    text = starter_text(load(find_config("debug")).model_dump(exclude_none=True), run="mine", origin="debug")
    options = [line for line in text.splitlines() if re.match(r"#\w+ = ", line) and not line.endswith("...")]
    assert len(options) > 15
    for line in options:
        text = text.replace(line, line.removeprefix("#"))
    (folder / "debug.toml").write_text(text)
    assert load("debug.toml").model_dump() == load(ROOT / "train_configs/debug.toml").model_dump()


def test_init_overwrites_nothing(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (folder / "mine.toml").write_text("precious")
    for name in ("mine", "mine.toml"):
        assert cli.run(["init", name]) == 2
        assert capfd.readouterr().err == "error: mine.toml exists; choose another name\n"
    assert (folder / "mine.toml").read_text() == "precious"
    assert cli.run(["init", "no/folder"]) == 2
    assert capfd.readouterr().err == "error: cannot write no/folder.toml: No such file or directory\n"
    assert cli.run(["init", "new", "--from", "debgu"]) == 2
    assert capfd.readouterr().err == "error: no config file debgu, did you mean debug?\n"
    assert not (folder / "new.toml").exists()


# Installed


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel, built from a copy of the checkout."""
    source = tmp_path_factory.mktemp("source") / "titanlite"
    ignored = shutil.ignore_patterns("__pycache__")
    source.mkdir()
    for name in ("titanlite", "train_configs"):
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    code = "from setuptools.build_meta import build_wheel; build_wheel('dist')"
    subprocess.run([sys.executable, "-c", code], cwd=source, check=True, capture_output=True)
    [path] = (source / "dist").glob("*.whl")
    return path


def test_the_wheel_holds_configs_and_tokenizer(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    configs = sorted(name for name in names if "train_configs" in name)
    assert configs == sorted(f"titanlite/train_configs/{path.name}" for path in (ROOT / "train_configs").iterdir())
    assert "titanlite/data/tokenizers/python-2k.model" in names
    assert {name.partition("/")[0].partition("-")[0] for name in names} == {"titanlite"}


@pytest.mark.slow
def test_an_installed_wheel_trains_in_an_empty_folder(wheel: Path, folder: Path) -> None:
    python = folder / "venv" / "bin" / "python"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def run(*words: object) -> str:
        result = subprocess.run(
            [*map(str, words)], cwd=folder / "empty", env=environment, capture_output=True, text=True, timeout=300,
            check=False,
        )  # fmt: skip
        assert result.returncode == 0, result.stderr
        return result.stdout

    (folder / "empty").mkdir()
    run(sys.executable, "-m", "venv", folder / "venv")
    run(python, "-m", "pip", "install", "--no-deps", "--no-index", "--disable-pip-version-check", wheel)
    packages = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
    Path(packages, "others.pth").write_text(sysconfig.get_path("purelib"))  # torch and all else that it needs
    assert run(python, "-c", "import titanlite; print(titanlite.__file__)").startswith(packages)
    titanlite = python.with_name("titanlite")
    assert "debug: 2 steps done" in run(titanlite, "train", "--training.steps=2", "--validation.enable=false")
    run(titanlite, "check", "--config", "llama3_8b.toml", "--model.flavor=debug")
    assert 'flavor = "8B"' in run(titanlite, "config", "show", "llama3_8b.toml")
