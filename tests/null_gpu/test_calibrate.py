"""`titanlite calibrate` from its command to the plan that reads its file. Rates of the stand-in mean nothing."""

from pathlib import Path

import pytest

from tests.null_gpu.conftest import RunPython
from titanlite.tools.plan.hardware import load_hardware

pytestmark = pytest.mark.null_gpu

CALIBRATE = """
import sys, torch
torch.backends.cuda.enable_cudnn_sdp(False)  # cuDNN's graphs are beyond the stand-in
from titanlite.tools import cli
sys.exit(cli.run(["calibrate", "gpu.toml"]))
"""


@pytest.mark.parametrize("devices", [1, 2])
def test_a_file_is_written_and_read(run_python: RunPython, tmp_path: Path, devices: int) -> None:
    (tmp_path / "calibrate.py").write_text(CALIBRATE)
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={devices}"] if devices > 1 else []
    run_python(*launcher, "calibrate.py", NULL_GPU_DEVICES=str(devices))
    found = load_hardware(tmp_path / "gpu.toml")
    assert not found.measured
    assert 0 < found.matmul_efficiency <= 1
    assert 0 < found.attention_efficiency <= 1
    assert 0 < found.flash_efficiency <= 1
    assert found.memory_bandwidth > 0
    assert ("link_bandwidth" in (tmp_path / "gpu.toml").read_text()) == (devices == 2)
    planned = run_python("-m", "titanlite", "plan", "llama3_8b", "--world-size=8", "--gpu=gpu.toml")
    assert "8 x " in planned.stdout
