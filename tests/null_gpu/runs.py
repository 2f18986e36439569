"""Runs of `titanlite train` on devices that compute nothing."""

import json
import subprocess
from pathlib import Path
from typing import Any

from tests.null_gpu.conftest import RunPython

OPTIONS = [
    "--training.steps=6", "--training.seq_len=256", "--training.global_batch_size=4", "--metrics.log_freq=1",
    "--lr_scheduler.warmup_steps=1", "--training.mixed_precision_param=bfloat16", "--checkpoint.interval=2",
    "--checkpoint.async_mode=async_with_pinned_mem", "--data.document_mask=true", "--data.num_workers=1",
    "--validation.freq=3", "--validation.sequences=4",
]  # fmt: skip


def train(run_python: RunPython, *options: str, devices: int = 1, **environ: str) -> subprocess.CompletedProcess[str]:
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={devices}"] if devices > 1 else []
    return run_python(
        *launcher, "-m", "titanlite", "train", "--config", "debug", "--job.name=run", *OPTIONS, *options,
        NULL_GPU_DEVICES=str(devices), **environ,
    )  # fmt: skip


def metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "outputs/run/metrics.jsonl").read_text().splitlines()]
