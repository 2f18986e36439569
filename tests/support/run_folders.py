"""Folders of runs with records of a test, for `titanlite report`."""

import json
from pathlib import Path
from typing import Any


def seconds(start: float, compute: float) -> dict[str, float]:
    return {"start": start, "compile": 0.0, "compute": compute, "data": 1.0, "checkpoint": 0.0, "validation": 0.0}


def write_run(folder: Path, *, lr: float = 0.1, steps: int = 6, resumed: int = 4) -> Path:
    """Write the records of a run that was killed, and resumed once."""
    folder.mkdir(parents=True)
    records: list[dict[str, Any]] = [
        {
            "schema": 2, "step": step, "time": 100.0 + step, "loss": None if step == 3 else 8.0 / step,
            "grad_norm": 1.0, "lr": lr, "samples": 8 * step, "data_shares": {"a": 0.25, "b": 0.75},
            "phase_seconds": seconds(5, step) if step <= resumed else seconds(3, step - resumed),
            "tokens_per_second": 100.0 * step, "step_seconds": 1.0, "data_wait_seconds": 0.1, "memory_gib": 2.0,
            "tflops_per_device": 1.0, "mfu": None, "mfu_causal": None,
            "slowest_rank": step % 2, "slowest_host": "h", "own_seconds_slowest": 1.0, "own_seconds_median": 0.9,
        }
        for step in range(1, steps + 1)
    ]  # fmt: skip
    validation = [{"schema": 2, "step": step, "loss": 9.0 / step, "sources": {"v": {"loss": 1.0}}} for step in (2, 6)]
    layers = {"layers.0": {"gradients": {"rms": 0.5}}, "head": {"gradients": {"rms": 0.25}}}
    for name, found in (
        ("metrics", records),
        ("validation", validation),
        ("checkpoints", [{"schema": 2, "step": 4}]),
        ("skipped", [{"schema": 2, "step": 3}]),
        ("layers", [{"schema": 2, "step": 2, "layers": layers}]),
    ):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in found))
    starts = [
        {"time": "t0", "host": "h", "processes": 2, "device": "cpu", "step": 0},
        {"time": "t1", "host": "h", "processes": 1, "device": "cpu", "step": resumed,
         "end": {"code": 0, "reason": "done </script><b>", "step": steps}, "phase_seconds": seconds(3, 2.5)},
    ]  # fmt: skip
    (folder / "run.json").write_text(json.dumps({"id": "abc", "starts": starts}))
    (folder / "config.toml").write_text(f"[optimizer]\nlr = {lr}\n[training]\nsteps = {steps}\n")
    return folder
