"""The compiler's cache, from process to process."""

import os
import subprocess
import sys

import pytest

from tests.support.helpers import TinyRun


@pytest.mark.nightly
def test_the_next_start_finds_what_was_compiled(tiny: TinyRun) -> None:
    """Compile with the real compiler, in processes of their own. The folder is the default one."""
    variables = {key: value for key, value in os.environ.items() if key != "TORCHINDUCTOR_CACHE_DIR"}
    variables["XDG_CACHE_HOME"] = str(tiny.folder)
    cache = tiny.folder / "titanlite" / "compile"
    found = []
    for name in ("cold", "warm"):
        command = [sys.executable, "-m", "titanlite", "train", "--config", str(tiny.toml), f"--job.name={name}"]
        command += ["--compile.enable", "--training.steps=2"]
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=400, env=variables)
        found.append({str(path.relative_to(cache)) for path in cache.rglob("*") if path.is_file()})
        first, second = tiny.records(name)
        assert first["compile_seconds"] > 0
        assert "compile_seconds" not in second
    assert {path.split("/")[0] for path in found[0]} >= {"fxgraph", "aotautograd"}
    assert found[1] == found[0]
    assert tiny.losses("warm") == tiny.losses("cold")
