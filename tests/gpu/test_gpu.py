"""On a CUDA device. Skipped without one: run with `./run_tests.sh tests/gpu` where there is."""

import json
import os
import subprocess
import sys

import pytest

from tests.helpers import TinyRun

pytestmark = pytest.mark.gpu

FLOAT8 = ["--quantize.linear.float8.enable", "--compile.enable"]
OPTIONS = {
    "accumulation": ["--training.local_batch_size=1"],
    "bf16 reduction": ["--training.mixed_precision_reduce=bfloat16", "--training.local_batch_size=2"],
    "offload": ["--training.enable_cpu_offload", "--training.local_batch_size=4"],
    "checkpointing": ["--activation_checkpoint.mode=full"],
    "per operation": ["--activation_checkpoint.mode=selective"],
    "workers": ["--data.num_workers=2"],
    "compile": ["--compile.enable", "--activation_checkpoint.mode=selective"],
    "float8": FLOAT8,
}
SIZES = ["--model.args.dim=48", "--model.args.hidden_dim=64", "--training.mixed_precision_param=bfloat16"]


def train(tiny: TinyRun, name: str, *options: str) -> list[float]:
    command = [sys.executable, "-m", "titanlite", "train", "--config", str(tiny.toml), f"--job.name={name}", *SIZES]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "0"}
    result = subprocess.run(
        [*command, *options], capture_output=True, text=True, timeout=600, check=False, env=environment
    )
    assert result.returncode == 0, result.stderr
    assert "on cuda" in result.stdout
    assert tiny.records(name)[-1]["memory_gib"] > 0
    return tiny.losses(name)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_each_technique_trains_as_the_plain_run_does(tiny: TinyRun, options: list[str]) -> None:
    import torch

    if options is FLOAT8 and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU has no float8")
    steps = ["--training.steps=20", "--optimizer.lr=3e-3"]
    plain = train(tiny, "plain", *steps)
    assert plain[0] == pytest.approx(5.557, abs=0.2)
    assert plain[-1] < 4
    assert train(tiny, "other", *steps, *options) == pytest.approx(plain, rel=0.05 if options is FLOAT8 else 0.02)


def test_a_run_resumes_on_the_gpu(tiny: TinyRun) -> None:
    whole = train(tiny, "whole", "--training.steps=6")
    train(tiny, "halves", "--training.steps=3")
    assert train(tiny, "halves", "--training.steps=6") == pytest.approx(whole, rel=1e-3)


@pytest.mark.parametrize("mode", ["disabled", "async", "async_with_pinned_mem"])
def test_a_checkpoint_is_of_its_step_whatever_the_mode(tiny: TinyRun, mode: str) -> None:
    """The copy is made beside the next step: if that could overtake it, going on would give other losses."""
    sizes = ["--model.args.dim=480", "--model.args.hidden_dim=1280", "--model.args.n_heads=6"]
    whole = train(tiny, "whole", "--training.steps=8", *sizes)
    options = [*sizes, f"--checkpoint.async_mode={mode}", "--checkpoint.interval=2"]
    train(tiny, mode, "--training.steps=6", *options)
    for newer in (4, 6):
        (tiny.folder / "outputs" / mode / "checkpoints" / f"step-0000000{newer}" / "manifest.json").unlink()
    assert train(tiny, mode, "--training.steps=8", *options) == pytest.approx(whole, rel=1e-3)
    saves = (tiny.folder / "outputs" / mode / "checkpoints.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in saves] == [2, 4, 6, 8]
