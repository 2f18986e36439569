"""What a teacher brings: the same small student with and without one, at equal steps.

    python benchmarks/bench_distill.py [--seeds 3] [--steps 100] [--teacher-steps 300] [--folder FOLDER] [--write]

Trains the teacher of train_configs/distill_example.toml once, then the student of that file and the same student
without the teacher, for each seed. Runs of one seed have the same initial weights and the same data in the same order.
Prints the validation loss of each, and the difference. --write puts the table into docs/distill.md, and the picture
beside it. With --folder, runs stay there, and finished ones are not repeated.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import matplotlib
from record import ROOT, add_record_option, record

from titanlite.config.load import load

PAGE, PICTURE = ROOT / "docs" / "distill.md", ROOT / "docs" / "images" / "distill.svg"
BEGIN, END = "<!-- from benchmarks/bench_distill.py --write: begin -->", "<!-- end -->"
EXAMPLE, PLAIN = ROOT / "train_configs" / "distill_example.toml", ROOT / "train_configs" / "debug.toml"
TEACHER = "--model.args={dim=256, n_layers=4, n_heads=4, n_kv_heads=2, hidden_dim=704}"
VARIANTS = {"alone": "#1971c2", "distilled": "#d9480f"}
Curve = dict[int, float]
"""Validation loss by step."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--teacher-steps", type=int, default=300)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--write", action="store_true", help="write docs/distill.md's table and picture")
    add_record_option(parser)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        measure(options, options.folder or Path(temporary))


def measure(options: argparse.Namespace, folder: Path) -> None:
    teacher = run(PLAIN, folder, "teacher", options.teacher_steps, TEACHER, f"--checkpoint.interval={10**6}")
    args = load(EXAMPLE).model.args
    shape = "--model.args={" + ", ".join(f"{name}={value}" for name, value in args.items()) + "}"
    freq = max(1, options.steps // 4)
    curves: dict[tuple[str, int], Curve] = {}
    for seed in range(options.seeds):
        same = [f"--debug.seed={seed}", f"--validation.freq={freq}", "--checkpoint.enable=false"]
        curves["alone", seed] = run(PLAIN, folder, f"alone-{seed}", options.steps, shape, *same)
        curves["distilled", seed] = run(
            EXAMPLE, folder, f"distilled-{seed}", options.steps, f"--teacher.path={folder}/teacher", *same
        )
    losses = {name: [curves[name, seed][options.steps] for seed in range(options.seeds)] for name in VARIANTS}
    gains = [alone - taught for alone, taught in zip(losses["alone"], losses["distilled"], strict=True)]
    last = teacher[max(teacher)]
    text = table(losses, gains, last)
    print(text)
    record(
        options.record, name="validation loss of the debug student, alone - distilled", values=gains, unit="",
        better="higher", aim="> 0",
    )  # fmt: skip
    if options.write:
        draw(curves, last)
        page = PAGE.read_text()
        before, _, rest = page.partition(BEGIN)
        PAGE.write_text(f"{before}{BEGIN}\n\n{text}\n{END}{rest.partition(END)[2]}")


def run(config: Path, folder: Path, name: str, steps: int, *words: str) -> Curve:
    """Train, unless the run is finished, and return its validation losses."""
    file = folder / name / "validation.jsonl"
    if not file.exists() or steps not in (curve := read(file)):
        command = [
            sys.executable, "-m", "titanlite", "train", str(config), f"--job.dump_folder={folder}",
            f"--job.name={name}", f"--training.steps={steps}", "--metrics.loggers=[]", *words,
        ]  # fmt: skip
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)
        curve = read(file)
    return curve


def read(file: Path) -> Curve:
    records = [json.loads(line) for line in file.read_text().splitlines()]
    return {found["step"]: found["loss"] for found in records}


def table(losses: Mapping[str, list[float]], gains: list[float], teacher: float) -> str:
    """Return the table of docs/distill.md: one row a seed."""
    lines = ["| seed | alone | distilled | alone - distilled |", "|---|---|---|---|"]
    for seed, (alone, taught, gain) in enumerate(zip(*losses.values(), gains, strict=True)):
        lines.append(f"| {seed} | {alone:.4f} | {taught:.4f} | {gain:+.4f} |")
    means = [statistics.mean(values) for values in (*losses.values(), gains)]
    lines.append(f"| mean | {means[0]:.4f} | {means[1]:.4f} | {means[2]:+.4f} |")
    return "\n".join([*lines, "", f"The teacher's own validation loss is {teacher:.4f}.", ""])


def draw(curves: Mapping[tuple[str, int], Curve], teacher: float) -> None:
    """Draw all curves of validation loss."""
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    sheet, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for (name, seed), curve in curves.items():
        axes.plot(*zip(*sorted(curve.items()), strict=True), color=VARIANTS[name], label="" if seed else name)
    axes.axhline(teacher, color="#2f9e44", linestyle="--", label="the teacher, at its end")
    axes.set(xlabel="optimizer step", ylabel="validation loss (nats a token), each seed")
    axes.legend()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "distill"}):
        sheet.savefig(PICTURE, transparent=True)
    plt.close(sheet)


if __name__ == "__main__":
    main()
