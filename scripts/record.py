"""Run rows of docs/records.md again, and say whether each of them holds.

    python scripts/record.py [A B C ...] [--seeds 0 1 2] [-- OPTIONS of `titanlite train`]
    python scripts/record.py --picture          # docs/images/records.svg, of the curves in benchmarks/shakespeare

A row is a config of examples/shakespeare, whose text prepare.py must have split before. Prints a line of the table for
each run, and ends with exit code 1 if a row does not hold. Seconds are those of the whole command, with the start and
the validation of the last step.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import titanlite
from titanlite.ops.cpu import describe_cpu

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "examples" / "shakespeare"
CURVES, PICTURE = ROOT / "benchmarks" / "shakespeare", ROOT / "docs" / "images" / "records.svg"
PUBLISHED = {"nanoGPT's README, CPU": (1_536_000, 1.88), "nanoGPT's README, GPU": (5000 * 64 * 256, 1.4697)}
"""Characters seen, and loss."""
PREDICTED = 111_539
"""Characters of the validation text but the first, which nothing predicts."""


@dataclass(frozen=True)
class Row:
    config: str
    most_loss: float
    """Nats a character that the row claims, with room for its seeds."""
    most_characters: int | None = None
    most_parameters: int | None = None


ROWS = {
    "A": Row("a.toml", 1.56, most_characters=1_536_000, most_parameters=810_000),
    "B": Row("b.toml", 1.44),
    "C": Row("c.toml", 1.88),
}


@dataclass(frozen=True)
class Run:
    loss: float
    characters: int
    parameters: int
    seconds: float
    predicted: int
    """Characters of the validation."""

    def broken(self, row: Row) -> list[str]:
        """Return the rules that the run breaks."""
        limits = {
            "loss": (self.loss, row.most_loss),
            "characters": (self.characters, row.most_characters),
            "parameters": (self.parameters, row.most_parameters),
        }
        found = [f"{name} {value:,} > {most:,}" for name, (value, most) in limits.items() if most and value > most]
        return [*found, *([f"{self.predicted:,} characters validated"] if self.predicted != PREDICTED else [])]


def train(row: Row, name: str, options: list[str]) -> Run:
    config = FOLDER / row.config
    began = time.monotonic()
    words = [f"--job.name={name}", *options]
    subprocess.run(
        [sys.executable, "-m", "titanlite", "train", str(config), *words],
        cwd=ROOT, check=True, stdout=sys.stderr,
    )  # fmt: skip
    seconds = time.monotonic() - began
    records = titanlite.read_run(ROOT / "outputs" / name)
    last = records.validation[-1]
    training = records.config["training"]
    model = titanlite.build_model(titanlite.load_config(records.path / "config.toml"))
    return Run(
        loss=last["loss"],
        characters=last["step"] * training["global_batch_size"] * training["seq_len"],
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        seconds=seconds,
        predicted=sum(source["tokens"] for source in last["sources"].values()),
    )


def draw() -> None:
    """Draw the loss of each curve, JSON lines of `characters` and `loss`, and the published losses."""
    import matplotlib as mpl

    mpl.use("svg")
    from matplotlib import pyplot as plt

    mpl.rcParams["svg.hashsalt"] = "titanlite"  # the same file each time
    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    for file in sorted(CURVES.glob("*.jsonl")):
        points = [json.loads(line) for line in file.read_text().splitlines()]
        characters, losses = ([point[name] for point in points] for name in ("characters", "loss"))
        axes.plot(characters, losses, marker=".", label=file.stem.replace("_", " "))
    for name, (characters, loss) in PUBLISHED.items():
        axes.plot(characters, loss, "x", markersize=10, color="black")
        side, offset = ("right", (-8, 6)) if characters > 10**7 else ("left", (10, -4))
        axes.annotate(f"{name}: {loss}", (characters, loss), offset, textcoords="offset points", ha=side)
    axes.set(xscale="log", xlabel="characters seen", ylabel="validation loss, nats a character")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(PICTURE, metadata={"Date": None})


def main() -> None:
    own, options = sys.argv[1:], []
    if "--" in own:
        own, options = own[: own.index("--")], own[own.index("--") + 1 :]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", default=[*ROWS])
    parser.add_argument("--picture", action="store_true")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    arguments = parser.parse_args(own)
    if arguments.picture:
        draw()
        return
    if unknown := {*arguments.rows} - {*ROWS}:
        parser.error(f"no such rows: {', '.join(sorted(unknown))} (there are {', '.join(ROWS)})")
    machine = f"{describe_cpu()}, {os.cpu_count()} cores, torch {version('torch')}"
    breaks = False
    for name in arguments.rows:
        for seed in arguments.seeds:
            job = f"shakespeare-{name.lower()}-{seed}-{time.strftime('%Y%m%d-%H%M%S')}"
            run = train(ROWS[name], job, [f"--debug.seed={seed}", *options])
            broken = run.broken(ROWS[name])
            breaks |= bool(broken)
            values = f"{run.loss:.4f} | {run.characters:,} | {run.parameters:,} | {run.seconds:.0f} s"
            verdict = f"broken: {'; '.join(broken)}" if broken else "holds"
            print(f"| {name} | seed {seed} | {values} | {machine} | {verdict} |", flush=True)
    sys.exit(int(breaks))


if __name__ == "__main__":
    main()
