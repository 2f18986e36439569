"""`titanlite calibrate` from its command to the plan that reads its file. Rates of the stand-in mean nothing."""

from pathlib import Path

import pytest

from tests.null_gpu.conftest import RunPython
from titanlite.runtime.hardware import load_hardware
from titanlite.runtime.rates import COLLECTIVES

pytestmark = pytest.mark.null_gpu

CALIBRATE = """
import sys, torch
torch.backends.cuda.enable_cudnn_sdp(False)  # cuDNN's graphs are beyond the stand-in
from titanlite import cli
sys.exit(cli.run(["calibrate", "gpu.toml"]))
"""


@pytest.mark.parametrize("devices", [1, 2])
def test_a_file_is_written_and_read(run_python: RunPython, tmp_path: Path, devices: int) -> None:
    (tmp_path / "calibrate.py").write_text(CALIBRATE)
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={devices}"] if devices > 1 else []
    run_python(*launcher, "calibrate.py", NULL_GPU_DEVICES=str(devices))
    found = load_hardware(tmp_path / "gpu.toml")
    assert found.rates is not None
    assert not found.measured
    assert set(found.rates.matmul) == {"bfloat16", "float32", "float8"}
    assert set(found.rates.attention) == {"bfloat16", "float32"}
    assert len(found.rates.memory) == 5
    assert (found.rates.hop_seconds is None) == (devices == 1)
    assert set(found.rates.links) == (set(COLLECTIVES) if devices > 1 else set())
    assert found.rates.to_device is not None
    assert found.rates.to_host is not None
    planned = run_python("-m", "titanlite", "plan", "llama3_8b", "--world-size=8", "--gpu=gpu.toml")
    assert "8 x " in planned.stdout
