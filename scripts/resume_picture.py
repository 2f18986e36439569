"""Make docs/images/resume.svg: a run that is killed twice and resumes with other numbers of processes, on the curve of
a run that nothing disturbs. With `debug.reproducible_layouts`, both are equal to the last bit.

    python scripts/resume_picture.py

Takes ten minutes on 2 CPU cores. The killed run resumes from its last checkpoint, and makes the steps after it again.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("svg")
import matplotlib.pyplot as plt

PICTURE = Path(__file__).parents[1] / "docs" / "images" / "resume.svg"
STEPS = 120
KILLS = [(4, 45), (1, 85), (2, STEPS)]
"""Number of processes of each start, and the step after which all of them are killed."""
OPTIONS = [
    f"--training.steps={STEPS}", "--checkpoint.interval=10", "--metrics.log_freq=1", "--validation.enable=false",
    "--debug.reproducible_layouts", "--training.local_batch_size=1", "--training.global_batch_size=16",
    "--model.args={dim=96,n_layers=4,n_heads=6,n_kv_heads=2,hidden_dim=256}",
]  # fmt: skip


def main() -> None:
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        train(folder, "undisturbed", processes=1, kill_after=STEPS)
        parts = []
        for processes, step in KILLS:
            first = len(losses(folder, "killed"))
            train(folder, "killed", processes=processes, kill_after=step)
            resumed = resumed_at(folder) if first else 0
            parts.append((processes, resumed, losses(folder, "killed")))
        hashes = {last_hash(folder, name) for name in ("undisturbed", "killed")}
        assert len(hashes) == 1, hashes
        draw(losses(folder, "undisturbed"), parts, hashes.pop())


def train(folder: Path, name: str, *, processes: int, kill_after: int) -> None:
    """Start a run or resume it, and kill all of its processes with SIGKILL once a step is logged."""
    launcher = ["torch.distributed.run", f"--nproc_per_node={processes}", "--standalone", "-m"] * (processes > 1)
    command = [
        sys.executable,
        "-m",
        *launcher,
        "titanlite",
        "train",
        "--config",
        "debug",
        f"--job.name={name}",
        *OPTIONS,
    ]
    environ = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, cwd=folder, env=environ)
    while process.poll() is None and (kill_after == STEPS or len(losses(folder, name)) < kill_after):
        time.sleep(0.05)
    if process.poll() is None:
        for pid in [*descendants(process.pid), process.pid]:  # torchrun's workers are in sessions of their own
            os.kill(pid, signal.SIGKILL)
    process.wait()


def descendants(pid: int) -> list[int]:
    """Return the processes that a process started, and those that they did, the youngest first."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid for child in children for pid in (*descendants(int(child)), int(child))]


def losses(folder: Path, name: str) -> list[float]:
    """Return the loss of each step that the run's records have."""
    file = folder / "outputs" / name / "metrics.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    return [json.loads(line)["loss"] for line in lines if line.endswith("}")]


def last_hash(folder: Path, name: str) -> str:
    """Return the hash of the weights and optimizer states after the last step."""
    lines = (folder / "outputs" / name / "hashes.jsonl").read_text().splitlines()
    return json.loads(lines[-1])["hash"]


def resumed_at(folder: Path) -> int:
    """Return the step that the last start resumed from."""
    starts: list[dict[str, Any]] = json.loads((folder / "outputs" / "killed" / "run.json").read_text())["starts"]
    return starts[-1]["step"]


def draw(reference: list[float], parts: list[tuple[int, int, list[float]]], state_hash: str) -> None:
    """Draw both curves, and check that they are one."""
    assert reference == parts[-1][2]
    assert len(reference) == STEPS
    mpl.rcParams.update({"font.size": 11, "svg.hashsalt": "titanlite", "svg.fonttype": "none"})
    canvas, axes = plt.subplots(figsize=(8, 3.6), layout="constrained")
    axes.plot(range(1, STEPS + 1), reference, color="#c8ccd2", linewidth=7, label="not disturbed, 1 process")
    for (processes, resumed, curve), color in zip(parts, ("#1f6feb", "#d1242f", "#1a7f37"), strict=True):
        word = "process" if processes == 1 else "processes"
        steps = range(resumed + 1, len(curve) + 1)
        axes.plot(steps, curve[resumed:], color=color, linewidth=1.8, label=f"{processes} {word}")
        if len(curve) < STEPS:
            axes.plot(len(curve), curve[-1], "x", color=color, markersize=10, markeredgewidth=2.5)
            axes.annotate("kill -9", (len(curve), curve[-1]), (4, 24), textcoords="offset points", color=color)
    axes.set(xlabel="step", ylabel="training loss")
    title = f"One run, three numbers of processes, the same to the last bit: hash {state_hash[:8]} on both"
    axes.set_title(title, fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    canvas.savefig(PICTURE, metadata={"Date": None})


if __name__ == "__main__":
    main()
