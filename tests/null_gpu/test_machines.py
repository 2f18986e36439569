"""Several processes on GPUs that compute nothing: `titanlite check --machines`, and forks of the launcher."""

from pathlib import Path

import pytest

from tests.null_gpu.conftest import ROOT, RunPython

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


def test_ranks_are_forks_of_a_process_that_has_not_used_cuda(run_python: RunPython, tmp_path: Path) -> None:
    """On the stand-in, as on GPUs, a fork of a process that has used CUDA has no device."""
    launcher = ["-u", "-m", "titanlite.tools.launch", "1", "2", "localhost:0", "0", "debug", "--training.steps=1"]
    words = [*launcher, "--lr_scheduler.warmup_steps=0", "--validation.enable=false", "--checkpoint.enable=false"]
    forked = run_python(*words, NULL_GPU_DEVICES="2")
    assert "shard 2 on cuda" in forked.stdout
    assert "no forks" not in forked.stderr
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text("import torch; torch.cuda.is_available()")
    again = run_python(*words, NULL_GPU_DEVICES="2", PYTHONPATH=f"{tmp_path}/site:{ROOT}")
    assert "shard 2 on cuda" in again.stdout
    [line] = [line for line in again.stderr.splitlines() if "no forks" in line]
    assert "CUDA" in line
