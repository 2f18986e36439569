"""On a CUDA device. Skipped without one: run with `./run_tests.sh tests/gpu` where there is."""

import os
import subprocess
import sys

import pytest

from tests.helpers import TinyRun

pytestmark = pytest.mark.gpu

FLOAT8 = ["--quantize.linear.float8.enable", "--compile.enable", "--model.args.dim=48", "--model.args.hidden_dim=64"]


@pytest.mark.parametrize(
    "options",
    [[], ["--compile.enable"], ["--training.enable_cpu_offload"], ["--activation_checkpoint.mode=full"], FLOAT8],
)
def test_training_on_one_gpu(tiny: TinyRun, options: list[str]) -> None:
    command = [sys.executable, "-m", "titanlite", "train", "--config", str(tiny.toml)]
    command += ["--training.mixed_precision_param=bfloat16", "--training.steps=20", *options]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "0"}
    result = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False, env=environment)
    assert result.returncode == 0, result.stderr
    assert "on cuda" in result.stdout
    losses = tiny.losses()
    assert losses[0] == pytest.approx(5.557, abs=0.2)
    assert losses[-1] < 3.5
    assert tiny.records()[-1]["memory_gib"] > 0
