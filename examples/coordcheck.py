"""Coordinate check: do activations and their changes keep their size at other widths and depths?

    python examples/coordcheck.py CONFIG --widths 128 256 512 [--depths 2 4 8] [--steps 5] [options of a run]

Trains each size a few steps, with the peak learning rate from the first step on. After each step, it measures the
outputs of the embedding, the middle block, the last block and the head on one batch: their root mean squares, and those
of their changes since step 0. Where a parametrization transfers options between sizes, they do not depend on the size
(arXiv:2203.03466, appendix D.1). A quantity is flat if the logarithm of it, against that of the width or the depth, has
a slope of at most 0.25 after the last step. The exit code is 1 if one grows or vanishes; logits may vanish, but not
their changes. A width is `dim`; heads keep their size, and `hidden_dim` stays in proportion.
"""

import argparse
import math
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import islice, product
from typing import NamedTuple

import torch
from torch import Tensor

from titanlite import UserError, build_run
from titanlite.batch import Batch
from titanlite.config.keys import toml_text
from titanlite.config.load import load
from titanlite.config.shipped import find_config
from titanlite.models.registry import resolve_model
from titanlite.ops.attention import document_arguments
from titanlite.ops.kernels import in_every_pass
from titanlite.optim import set_learning_rate
from titanlite.schema import Config
from titanlite.tools.report.compare import forward_values
from titanlite.train import Run

FLAT = 0.25
"""Largest absolute slope of a quantity that counts as flat."""
AXES = ("width", "depth")
Size = tuple[int, int]
"""(width, depth)"""


class Growth(NamedTuple):
    """What a quantity does as models grow."""

    slopes: dict[str, float]
    """Slopes by width and by depth, for each of which several sizes were tried."""
    words: str
    """flat, grows or vanishes."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config")
    parser.add_argument("--widths", type=int, nargs="+", required=True)
    parser.add_argument("--depths", type=int, nargs="+", default=[])
    parser.add_argument("--steps", type=int, default=5)
    arguments, options = parser.parse_known_args()
    try:
        sizes = sized(arguments.config, options, arguments.widths, arguments.depths)
        if len(sizes) < 2:
            raise UserError("name two sizes or more, for example --widths 128 256 512")
        values = {size: measure(config, steps=arguments.steps) for size, config in sizes.items()}
    except UserError as error:
        sys.exit(f"coordcheck: {error}")
    growths = growth_of(values)
    print_table(values)
    for quantity, growth in growths.items():
        slopes = ", ".join(f"{axis}^{slope:+.2f}" for axis, slope in growth.slopes.items())
        print(f"{quantity}: {slopes}: {growth.words}")
    sys.exit(any(growth.words != "flat" for growth in growths.values()))


def sized(name: str, options: Sequence[str], widths: Sequence[int], depths: Sequence[int]) -> dict[Size, Config]:
    """Return the config with the model of each size.

    Raises:
        UserError: there is no such model, or an option is wrong.
    """
    path = find_config(name)
    config = load(path, options)
    model = config.model
    spec = resolve_model(model.name, model.flavor, model.args, model.file, path=model.path)
    common = {"checkpoint.enable": False, "validation.enable": False, "metrics.loggers": []}
    common |= {"data.cache_folder": config.data.cache_folder or f"{config.job.dump_folder}/data_cache"}
    sizes = {}
    for width, depth in product(widths, depths or [len(spec.build().layers)]):
        try:
            resized = asdict(spec.args.resized(width=width, depth=depth))
        except ValueError as error:
            raise UserError(f"width {width}, depth {depth}: {error}") from error
        changed = {f"model.args.{key}": value for key, value in resized.items() if value != asdict(spec.args)[key]}
        words = [f"--{key}={toml_text(value)}" for key, value in {**common, **changed}.items()]
        sizes[width, depth] = load(path, [*options, *words])
    return sizes


def measure(config: Config, *, steps: int) -> dict[str, list[float]]:
    """Train a few steps in a folder that is removed afterwards.

    Returns:
        root mean square of each quantity after each step, from step 0 on.
    """
    with tempfile.TemporaryDirectory() as folder:
        job = config.job.model_copy(update={"dump_folder": folder})
        with build_run(config.model_copy(update={"job": job})) as run:
            set_learning_rate(run.optimizer, config.optimizer.lr)
            batches = [*islice(run.batches, run.accumulation)]
            probe, first = batches[0], outputs(run, batches[0])
            values = {name: [rms(value)] for name, value in first.items()} | {f"{name}, change": [] for name in first}
            for _ in range(steps):
                run.train_step(batches)
                for name, value in outputs(run, probe).items():
                    values[name].append(rms(value))
                    values[f"{name}, change"].append(rms(value - first[name]))
                batches = [*islice(run.batches, run.accumulation)]
            return values


def outputs(run: Run, batch: Batch) -> dict[str, Tensor]:
    """Return what embedding, middle and last block, and head compute of a batch."""
    blocks = [*filter(in_every_pass, run.model.layers)]
    modules = {"first block": blocks[0], "middle block": blocks[(len(blocks) - 1) // 2], "last block": blocks[-1]}
    values = forward_values(modules.items(), lambda: run.model(batch["tokens"], **document_arguments(batch)))
    keys = {"embedding": "forward input first block"} | {key: f"forward output {key}" for key in (*modules, "logits")}
    return {name: values[key] for name, key in keys.items() if name != "first block"}


def rms(values: Tensor) -> float:
    return values.float().square().mean().sqrt().item()


def growth_of(values: Mapping[Size, Mapping[str, Sequence[float]]]) -> dict[str, Growth]:
    """Return what each quantity does, from its values after the last step."""
    axes = [axis for axis in (0, 1) if len({size[axis] for size in values}) > 1]
    points = torch.tensor([[1.0, *(math.log(size[axis]) for axis in axes)] for size in values], dtype=torch.float64)
    growths = {}
    for quantity in next(iter(values.values())):
        last = torch.tensor([sizes[quantity][-1] for sizes in values.values()], dtype=torch.float64)
        slopes = torch.linalg.lstsq(points, last.log().unsqueeze(1)).solution[1:, 0].tolist()
        grows, vanishes = not max(slopes) <= FLAT, min(slopes) < -FLAT and quantity != "logits"
        words = "grows" if grows else "vanishes" if vanishes else "flat"
        growths[quantity] = Growth({AXES[axis]: slope for axis, slope in zip(axes, slopes, strict=True)}, words)
    return growths


def print_table(values: Mapping[Size, Mapping[str, Sequence[float]]]) -> None:
    steps = len(next(iter(values.values()))["logits"])
    print(f"{'root mean square of':<24} width depth" + "".join(f"{f'step {step}':>10}" for step in range(steps)))
    for quantity in next(iter(values.values())):
        for (width, depth), quantities in values.items():
            row = "".join(f"{value:>10.3g}" for value in quantities[quantity])
            print(f"{quantity:<24} {width:>5} {depth:>5}{row:>{10 * steps}}")


if __name__ == "__main__":
    main()
