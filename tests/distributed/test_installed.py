"""titanlite installed from a wheel."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


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
    assert {"titanlite/data/tokenizers/python-2k.model", "titanlite/py.typed"} <= {*names}
    assert {name.partition("/")[0].partition("-")[0] for name in names} == {"titanlite"}


@pytest.mark.slow
def test_an_installed_wheel_trains_in_an_empty_folder(wheel: Path, tmp_path: Path) -> None:
    python = tmp_path / "venv" / "bin" / "python"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def run(*words: object) -> str:
        result = subprocess.run(
            [*map(str, words)], cwd=tmp_path / "empty", env=environment, capture_output=True, text=True, timeout=300,
            check=False,
        )  # fmt: skip
        assert result.returncode == 0, result.stderr
        return result.stdout

    (tmp_path / "empty").mkdir()
    run(sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv")
    pip = (sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check")
    run(*pip, "install", "--no-deps", "--no-index", wheel)
    packages = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
    Path(packages, "others.pth").write_text(str(Path(pytest.__file__).parents[1]))  # torch and all else that it needs
    assert run(python, "-c", "import titanlite; print(titanlite.__file__)").startswith(packages)
    titanlite = python.with_name("titanlite")
    (tmp_path / "text.txt").write_text("def f(x):\n    return x\n" * 500)
    words = f"--data.path={tmp_path}/text.txt --training.steps=2 --training.seq_len=32 --training.global_batch_size=2"
    assert "debug: 2 steps done" in run(titanlite, "train", *words.split(), "--validation.enable=false")
    assert 'flavor = "8B"' in run(titanlite, "config", "show", "llama3_8b.toml")
