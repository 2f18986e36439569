"""`titanlite check --machines` on GPUs that compute nothing: every test runs, and wrong values are found."""

import pytest

from tests.null_gpu.conftest import RunPython

pytestmark = pytest.mark.null_gpu


def test_devices_that_compute_nothing_fail(run_python: RunPython) -> None:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    words = ["-m", "titanlite", "check", "debug", "--machines"]
    result = run_python(*launcher, *words, succeeds=False, NULL_GPU_DEVICES="2")
    assert result.returncode == 1, "torchrun's, whatever its workers end with"
    lines = result.stdout.splitlines()
    status = {line[9:27].strip(): line[:8].strip() for line in lines if not line.startswith(" ")}
    assert status["collectives"] == "FAILED", result.stdout
    assert {status[name] for name in ("versions, config", "bandwidths", "clocks")} <= {"ok", "warning"}
    assert "rank 0 on " in result.stdout or "ranks 0-1 on " in result.stdout
    assert "gives wrong values" in result.stdout
