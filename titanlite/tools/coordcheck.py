"""`titanlite coordcheck`: sizes of activations and of their changes in the first steps, at several widths and depths.

Where a parametrization transfers options between sizes, they do not depend on the size (the coordinate check of
arXiv:2203.03466, appendix D.1).
"""

import math
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice, product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.table import Column, Table
from torch import Tensor

from titanlite.batch import Batch
from titanlite.config.load import load
from titanlite.models.registry import resolve_model
from titanlite.ops.attention import document_arguments
from titanlite.ops.kernels import in_every_pass
from titanlite.optim import set_learning_rate
from titanlite.runtime.errors import RunError, UserError
from titanlite.schema import Config
from titanlite.tools.api import build_run
from titanlite.tools.arguments import Count
from titanlite.tools.plan.estimate import resized_options, with_options
from titanlite.tools.report.compare import forward_values
from titanlite.tools.report.page import check_page, page, write_page
from titanlite.tools.report.parameters import show
from titanlite.train import Run

FLAT = 0.25
"""Largest absolute slope of a quantity that counts as flat: of its logarithm, against that of the width or depth."""
AXES = ("width", "depth")
Size = tuple[int, int]
"""(width, depth)"""


class Verdict(NamedTuple):
    """What a quantity does as models grow."""

    quantity: str
    slopes: dict[str, float]
    """Slopes by width and by depth, for each of which several sizes were tried."""
    words: str
    """flat, grows or vanishes. Logits without a change may vanish: those of mup do before training."""


def coordcheck(
    config: str | None = None,
    overrides: Sequence[str] = (),
    *,
    widths: Sequence[Count],
    depths: Sequence[Count] = (),
    steps: Count = 5,
    out: Path | None = None,
) -> None:
    """Check that activations and their changes have the same size at other widths and depths.

    Trains each size a few steps in this process, on the config's data, with the peak learning rate from the first step
    on. After each step, it measures the outputs of the embedding, the middle block, the last block and the head on one
    batch: their root mean squares, and those of their changes since step 0. A quantity is flat if the logarithm of it,
    against that of the width or the depth, has a slope of at most 0.25 after the last step. Exit code 1 if one grows or
    vanishes; logits may vanish, but not their changes.

    A width is dim. Heads keep their size, and hidden_dim stays in proportion.

    Args:
        widths (N): widths to try
        depths (N): numbers of layers to try; default: that of the config
        steps: steps to train
        out (FILE): HTML page to write, with a picture of each quantity by width and by depth

    Raises:
        UserError: the config or an argument is wrong.
        RunError: a quantity is not flat.

    Example:
        my.toml --widths 128 256 512
        my.toml --widths 256 --depths 2 4 8 --steps 10 --out check.html
        my.toml --widths 128 256 512 --optimizer.parametrization=mup --optimizer.base_width=128
    """
    if not config:
        raise UserError("titanlite coordcheck: name a config; see titanlite coordcheck --help")
    if out:
        check_page(out, "titanlite coordcheck")
    configs = dict(_sized(load(config, overrides), widths, depths))
    if len(configs) < 2:
        raise UserError("titanlite coordcheck: name two sizes or more, for example --widths 128 256 512")
    found = {size: measure(sized, steps=steps) for size, sized in configs.items()}
    verdicts = judge(found)
    if out:
        charts = {"tables": [], "charts": [*_charts(found, verdicts)]}
        write_page(out, page([], above=charts, title="Coordinate check"))
    show(_lines(found, verdicts))
    if wrong := [f"{verdict.quantity} {verdict.words}" for verdict in verdicts if verdict.words != "flat"]:
        raise RunError(f"not flat: {', '.join(wrong)}")


def _sized(config: Config, widths: Sequence[int], depths: Sequence[int]) -> Iterator[tuple[Size, Config]]:
    """Yield the sizes, and the config with the model of each.

    Raises:
        UserError: there is no such model.
    """
    model = config.model
    spec = resolve_model(model.name, model.flavor, model.args, model.file, path=model.path)
    cache = config.data.cache_folder or str(Path(config.job.dump_folder, "data_cache"))
    common = {"data.cache_folder": cache, "checkpoint.enable": False, "checkpoint.initial_load_path": None}
    common |= {"validation.enable": False, "metrics.loggers": [], "training.batch_ramp": []}
    common |= {"training.seq_len_ramp": []}
    for width, depth in product(widths, depths or [len(spec.build().layers)]):
        try:
            size = resized_options(spec, width=width, depth=depth)
        except ValueError as error:
            raise UserError(f"titanlite coordcheck: width {width}, depth {depth}: {error}") from error
        yield (width, depth), with_options(config, common | size)


def measure(config: Config, *, steps: int) -> dict[str, list[float]]:
    """Train a few steps in a folder that is removed afterwards.

    Returns:
        root mean square of each quantity after each step, from step 0 on.
    """
    with tempfile.TemporaryDirectory() as folder, build_run(with_options(config, {"job.dump_folder": folder})) as run:
        set_learning_rate(run.optimizer, config.optimizer.lr)
        batches = [*islice(run.batches, run.accumulation)]
        probe, first = batches[0], _outputs(run, batches[0])
        found = {name: [_rms(value)] for name, value in first.items()} | {f"{name}, change": [] for name in first}
        for _ in range(steps):
            run.train_step(batches)
            for name, value in _outputs(run, probe).items():
                found[name].append(_rms(value))
                found[f"{name}, change"].append(_rms(value - first[name]))
            batches = [*islice(run.batches, run.accumulation)]
        return found


def _outputs(run: Run, batch: Batch) -> dict[str, Tensor]:
    """Return what embedding, middle and last block, and head make of a batch."""
    blocks = [*filter(in_every_pass, run.model.layers)]
    modules = {"first block": blocks[0], "middle block": blocks[(len(blocks) - 1) // 2], "last block": blocks[-1]}
    found = forward_values(modules.items(), lambda: run.model(batch["tokens"], **document_arguments(batch)))
    keys = {"embedding": "forward input first block"} | {key: f"forward output {key}" for key in (*modules, "logits")}
    return {name: found[key] for name, key in keys.items() if name != "first block"}


def _rms(values: Tensor) -> float:
    return values.float().square().mean().sqrt().item()


def judge(found: Mapping[Size, Mapping[str, Sequence[float]]]) -> list[Verdict]:
    """Return the verdict on each quantity, from its values after the last step."""
    axes = [axis for axis in (0, 1) if len({size[axis] for size in found}) > 1]
    points = torch.tensor([[1.0, *(math.log(size[axis]) for axis in axes)] for size in found], dtype=torch.float64)
    verdicts = []
    for quantity in next(iter(found.values())):
        values = torch.tensor([sizes[quantity][-1] for sizes in found.values()], dtype=torch.float64)
        slopes = torch.linalg.lstsq(points, values.log().unsqueeze(1)).solution[1:, 0].tolist()
        grows, vanishes = not max(slopes) <= FLAT, min(slopes) < -FLAT and quantity != "logits"
        words = "grows" if grows else "vanishes" if vanishes else "flat"
        verdicts.append(Verdict(quantity, {AXES[axis]: slope for axis, slope in zip(axes, slopes, strict=True)}, words))
    return verdicts


def _charts(
    found: Mapping[Size, Mapping[str, Sequence[float]]], verdicts: Sequence[Verdict]
) -> Iterator[dict[str, Any]]:
    """Yield a chart of each quantity by width and by depth, with a line for each step and size along the other axis."""
    for verdict in verdicts:
        for axis, name in enumerate(AXES):
            if name not in verdict.slopes:
                continue
            others = sorted({size[1 - axis] for size in found})
            steps = range(len(next(iter(found.values()))[verdict.quantity]))
            first = 1 if verdict.quantity.endswith("change") else 0
            traces = [
                {
                    "name": f"step {step + first}" + (f", {AXES[1 - axis]} {other}" if len(others) > 1 else ""),
                    "x": sorted(size[axis] for size in found if size[1 - axis] == other),
                    "y": [found[size][verdict.quantity][step] for size in sorted(found) if size[1 - axis] == other],
                    "color": step,
                    "dash": number % 4,
                }
                for number, other in enumerate(others)
                for step in steps
            ]
            yield {
                "name": f"{verdict.quantity} {name}", "title": f"{verdict.quantity}: {verdict.words}", "x": name,
                "unit": "root mean square", "kind": "lines", "log": True, "log_x": True, "marks": [], "traces": traces,
            }  # fmt: skip


def _lines(found: Mapping[Size, Mapping[str, Sequence[float]]], verdicts: Sequence[Verdict]) -> Iterator[str | Table]:
    steps = len(next(iter(found.values()))["logits"])
    numbers = (Column(text, justify="right") for text in ("width", "depth", *(f"step {step}" for step in range(steps))))
    table = Table("root mean square of", *numbers, box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for verdict in verdicts:
        for (width, depth), quantities in found.items():
            values = [f"{value:.3g}" for value in quantities[verdict.quantity]]
            table.add_row(verdict.quantity, str(width), str(depth), *[""] * (steps - len(values)), *values)
    yield table
    yield ""
    for verdict in verdicts:
        slopes = ", ".join(f"{axis}^{slope:+.2f}" for axis, slope in verdict.slopes.items())
        yield f"{verdict.quantity}: {slopes}: {verdict.words}"
