"""`train` from its command line to its end on one and two devices that compute nothing."""

from pathlib import Path

import pytest

from tests.null_gpu.conftest import RunPython
from tests.null_gpu.runs import metrics, train

pytestmark = pytest.mark.null_gpu


@pytest.mark.parametrize("devices", [1, 2])
def test_a_run_ends_and_resumes(run_python: RunPython, tmp_path: Path, devices: int) -> None:
    """The run has validation, a document mask, a worker that pins batches, and checkpoints saved from pinned memory."""
    first = train(run_python, devices=devices)
    assert f"on cuda; global batch 4 = {devices} processes" in first.stdout + first.stderr
    steps = [record for record in metrics(tmp_path) if "grad_norm" in record]
    assert [record["step"] for record in steps] == [1, 2, 3, 4, 5, 6]
    assert all(0.05 < record["memory_gib"] < 1 for record in steps)
    for record in steps:  # of CUDA events on the compute stream
        assert 0 < record["own_seconds_median"] <= record["own_seconds_slowest"] < 60
        assert record["slowest_rank"] in range(devices)
    saved = sorted(path.name for path in (tmp_path / "outputs/run/checkpoints").glob("step-*"))
    assert saved[-1] == "step-00000006"
    second = train(run_python, "--training.steps=8", devices=devices)
    assert "6" in second.stdout
    steps = [record for record in metrics(tmp_path) if "grad_norm" in record]
    assert [record["step"] for record in steps] == [1, 2, 3, 4, 5, 6, 7, 8]


@pytest.mark.parametrize("devices", [1, 2])
def test_nothing_waits_between_log_steps(run_python: RunPython, tmp_path: Path, devices: int) -> None:
    """The whole loop, with its data, guard and metrics: twelve steps wait as often as eight."""
    waits = []
    for steps in (8, 12):
        prefix = tmp_path / f"steps{steps}"
        train(
            run_python, f"--training.steps={steps}", f"--job.name={steps}", "--metrics.log_freq=100",
            "--validation.freq=100", "--checkpoint.enable=false", devices=devices, NULL_GPU_RECORD=str(prefix),
        )  # fmt: skip
        rows = [
            line.split("\t") for path in tmp_path.glob(f"{prefix.name}.*") for line in path.read_text().splitlines()
        ]
        assert sum(int(count) for what, _, count, _ in rows if what == "kernel") > 100 * devices * steps
        waits.append({detail: int(count) for what, detail, count, _ in rows if what == "wait"})
    assert waits[0] == waits[1]


def test_techniques_together(run_python: RunPython, tmp_path: Path) -> None:
    """Compiled float8 blocks with activation checkpointing and updates in backward, on two devices."""
    train(
        run_python, "--compile.enable", "--quantize.linear.float8.enable", "--quantize.linear.float8.skip_small=false",
        "--activation_checkpoint.mode=selective", "--optimizer.in_backward", "--training.max_norm=0",
        "--optimizer.state_dtype=bfloat16", "--training.global_batch_size=2", devices=2,
    )  # fmt: skip
    assert [record["step"] for record in metrics(tmp_path) if "grad_norm" in record] == [1, 2, 3, 4, 5, 6]


def test_updates_on_the_host(run_python: RunPython, tmp_path: Path) -> None:
    """Beside the next step of compiled blocks, with checkpoints in the background, on two devices."""
    train(run_python, "--training.enable_cpu_offload=true", "--compile.enable", devices=2)
    assert [record["step"] for record in metrics(tmp_path) if "grad_norm" in record] == [1, 2, 3, 4, 5, 6]
    assert (tmp_path / "outputs/run/checkpoints/step-00000006").is_dir()
