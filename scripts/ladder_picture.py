"""Make docs/images/ladder.svg: losses of a ladder, the law, its prediction and the truth.

    python scripts/ladder_picture.py [FOLDER]

Without a folder of a ladder, it trains that of ladder_example first: 40 minutes on 2 busy CPU cores.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import matplotlib as mpl
import numpy as np

mpl.use("svg")
import matplotlib.pyplot as plt

from titanlite.tools.ladder.law import Law

PICTURE = Path(__file__).parents[1] / "docs" / "images" / "ladder.svg"
COMMAND = "ladder ladder_example --sizes 4 --tokens-per-parameter 20 --seeds 2 --train-target"


def main() -> None:
    if sys.argv[1:]:
        draw(Path(sys.argv[1]))
        return
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, "-m", "titanlite", *COMMAND.split()], cwd=folder, check=True)
        draw(Path(folder, "outputs", "ladder_example-ladder"))


def draw(folder: Path) -> None:
    """Draw the ladder of a folder, whose target is trained."""
    record = json.loads((folder / "ladder.json").read_text())
    runs, target = record["runs"], record["target"]
    sizes, losses = ([run[key] for run in runs] for key in ("parameters", "loss"))
    law = Law(sizes, losses)
    x = np.geomspace(min(sizes) / 1.15, target["parameters"] * 1.15, 200)
    line, low, high = zip(*(law.predict(size) for size in x), strict=True)
    mpl.rcParams.update({"font.size": 11, "svg.hashsalt": "titanlite", "svg.fonttype": "none"})
    canvas, axes = plt.subplots(figsize=(8, 4), layout="constrained")
    axes.fill_between(x, low, high, color="#1f6feb", alpha=0.12, linewidth=0, label="95 % of runs")
    axes.plot(x, line, color="#1f6feb", linewidth=1.5, label="law of the runs")
    axes.plot(sizes, losses, "o", color="#1f6feb", label="runs")
    axes.plot(target["parameters"], target["predicted"], "D", color="#e0662f", label="prediction", fillstyle="none")
    axes.plot(target["parameters"], target["loss"], "x", color="#1a7f37", markeredgewidth=2, label="truth")
    axes.set(xscale="log", yscale="log", xlabel="N, parameters of the blocks", ylabel="validation loss, nats a byte")
    axes.set_ylim(min(target["loss"], target["interval"][0]) * 0.97, max(losses) * 1.06)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter("{x:g}")
        axis.set_minor_formatter("{x:g}")
    axes.set_xticks([20_000, 50_000, 100_000, 200_000], ["20k", "50k", "100k", "200k"])
    axes.set_xticks([], minor=True)
    title = f"Predicted {target['predicted']:.3f}, measured {target['loss']:.3f}: {target['error']:+.1%}"
    axes.set_title(title, fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    canvas.savefig(PICTURE, metadata={"Date": None})


if __name__ == "__main__":
    main()
