"""Fit the law of a ladder, and draw it.

python examples/ladder/law.py FOLDER          # outputs/my-ladder: writes ladder.svg beside its ladder.json
"""

import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np

STUDENT_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
"""Two-sided 95 % quantiles of Student's t, from 1 degree of freedom on."""


def student_t(degrees: int) -> float:
    """Return the two-sided 95 % quantile of Student's t."""
    return STUDENT_T[degrees - 1] if degrees <= len(STUDENT_T) else 1.96 + 2.7 / degrees


def fit(sizes: Sequence[float], losses: Sequence[float], predicted: Sequence[float]) -> dict[str, Any]:
    """Fit loss = E + A / N^alpha by least squares of relative differences (the form of arXiv:2203.15556).

    For a given alpha, the law is a straight line in N^-alpha. So alpha is searched on a grid, and E (at least 0) and A
    of each are exact. An interval has all values for which the least sum of squares grows by at most t^2 times the
    variance of the runs, with Student's t for the runs beyond the three that the law needs. With three there is none.

    Returns:
        A, and [value, low, high] of E, of alpha, and in "losses" of a further run of each predicted size.
    """
    scale, y, spare = math.exp(mean(map(math.log, sizes))), np.array(losses), len(losses) - 3
    weights, alphas = 1 / y**2, np.geomspace(0.01, 4, 1500)
    for is_fine in (False, True):
        x = (np.array(sizes) / scale) ** -alphas[:, None]  # [alphas, runs]
        middle = (x @ weights) / weights.sum()
        spread, power = ((x - middle[:, None]) ** 2) @ weights, (x**2) @ weights
        slope = ((x - middle[:, None]) @ (weights * y)) / spread
        floor = (weights @ y) / weights.sum() - slope * middle
        is_zero = floor < 0
        slope, floor = np.where(is_zero, (x @ (weights * y)) / power, slope), np.where(is_zero, 0.0, floor)
        squares = ((y - floor[:, None] - slope[:, None] * x) ** 2) @ weights
        best = int(squares.argmin())
        if not is_fine:
            near = alphas[max(0, best - 1)], alphas[min(best + 1, alphas.size - 1)]
            alphas = np.unique([*alphas, *np.geomspace(*near, 1501)])
    room = squares[best] * (1 + student_t(spare) ** 2 / spare if spare else 1.0) - squares

    def estimate(values: np.ndarray, half: np.ndarray | float = 0.0) -> list[float | None]:
        low, high = ((values + sign * half)[room >= 0] for sign in (-1, 1))
        return [float(values[best]), *((max(0.0, float(low.min())), float(high.max())) if spare else (None, None))]

    def loss(size: float) -> list[float | None]:
        x = (size / scale) ** -alphas
        variance = np.where(is_zero, x**2 / power, 1 / weights.sum() + (x - middle) ** 2 / spread)
        values = floor + slope * x
        return estimate(values, np.sqrt(np.maximum(room, 0) * (variance + values**2 * math.isfinite(size))))

    law = {"E": loss(math.inf), "alpha": estimate(alphas), "A": float(slope[best] * scale ** alphas[best])}
    return law | {"losses": [loss(size) for size in predicted]}


def draw(record: dict[str, Any], path: Path) -> None:
    """Draw runs, law, prediction and truth."""
    import matplotlib as mpl

    mpl.use("svg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import EngFormatter, NullFormatter

    mpl.rcParams.update({"font.size": 11, "svg.hashsalt": "titanlite", "svg.fonttype": "none"})
    target, (sizes, losses) = record["target"], ([run[key] for run in record["runs"]] for key in ("parameters", "loss"))
    x = np.geomspace(min(sizes) / 1.15, target["parameters"] * 1.15, 200)
    line, low, high = zip(*fit(sizes, losses, x.tolist())["losses"], strict=True)
    canvas, axes = plt.subplots(figsize=(8, 4), layout="constrained")
    if None not in low:
        axes.fill_between(x, low, high, color="#1f6feb", alpha=0.12, linewidth=0, label="95 % of runs")
    axes.plot(x, line, color="#1f6feb", linewidth=1.5, label="law of the runs")
    axes.plot(sizes, losses, "o", color="#1f6feb", label="runs")
    axes.plot(target["parameters"], target["predicted"], "D", color="#e0662f", label="prediction", fillstyle="none")
    title = f"Predicted {target['predicted']:.3f}"
    if target["loss"]:
        axes.plot(target["parameters"], target["loss"], "x", color="#1a7f37", markeredgewidth=2, label="truth")
        title += f", measured {target['loss']:.3f}: {target['error']:+.1%}"
    axes.set(xscale="log", yscale="log", xlabel="N, parameters of the blocks", ylabel="loss, nats a token")
    axes.set_ylim(min(target["loss"] or math.inf, target["interval"][0] or min(line)) * 0.97, max(losses) * 1.06)
    axes.xaxis.set_major_formatter(EngFormatter(places=0, sep=""))
    axes.set_xticks(sorted({*sizes, target["parameters"]}))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("{x:g}")
    axes.set_title(title, fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    canvas.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    draw(json.loads((folder / "ladder.json").read_text()), folder / "ladder.svg")
