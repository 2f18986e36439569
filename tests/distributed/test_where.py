"""`titanlite parity --where` runs both sides, on one and on two processes."""

from pathlib import Path

import pytest

from tests.helpers import TinyRun, mentions
from titanlite.tools import cli
from titanlite.tools.report.compare import TOKENS


@pytest.mark.nightly
def test_the_command_runs_both_sides(tiny: TinyRun, capfd: pytest.CaptureFixture[str]) -> None:
    tiny.toml.write_text(tiny.toml.read_text().replace("n_layers = 1", "n_layers = 3"))
    config, folder = str(tiny.toml), str(tiny.folder / "before")
    assert cli.run(["parity", config, "--where", "1x2", "compile.enable=true"]) == 0
    captured = capfd.readouterr()
    assert mentions(captured.out.splitlines()[0], "A: 1x2", "compile.enable=true", "step 1")
    assert captured.out.splitlines()[-1] == "equal"
    rows = {line.split()[0] for line in captured.out.splitlines()}
    assert {"layers.0", "layers.2", "head"} <= rows

    assert cli.run(["parity", config, "--where", "1x2", "1x1 training.mixed_precision_param=bfloat16"]) == 0
    stages = "1x1 parallelism.pipeline_parallel_degree=2 training.local_batch_size=1"
    assert cli.run(["parity", config, "--where", stages, "1x1 training.local_batch_size=1"]) == 0
    assert cli.run(["parity", config, "--where", "1x1 parallelism.context_parallel_degree=2", "1x1"]) == 0
    capfd.readouterr()
    assert cli.run(["parity", config, "--where", "debug.seed=1", "1x1", "--step=2"]) == 1
    assert TOKENS in capfd.readouterr().err
    where = tiny.folder / "outputs" / "tiny-where"
    Path(folder).symlink_to(where / "b")
    assert cli.run(["parity", "--where", str(where / "b"), folder]) == 0
