"""Sizes of a ladder, and the config of each run.

Each run has a config of its own. Every size is trained on the same number of
tokens for each parameter, so that its loss depends on the size alone.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from titanlite.config.load import load
from titanlite.models.registry import ModelSpec
from titanlite.optim.checks import check_optimizer
from titanlite.runtime.errors import ConfigError, UserError
from titanlite.schedule import BatchSizes, known_steps
from titanlite.schema import Config
from titanlite.tools.plan.estimate import model_of, resized_options, trained_model, with_options

TARGET = "target"


@dataclass(frozen=True)
class Rung:
    """A run of the ladder: a size with a seed."""

    name: str
    width: int
    depth: int
    parameters: int
    """Those of the blocks."""
    tokens: int
    steps: int
    flops: float
    """Floating point operations of the whole run, as MFU counts them."""
    config: Config

    @property
    def toml(self) -> Path:
        return Path(self.config.job.dump_folder, f"{self.name}.toml")

    @property
    def folder(self) -> Path:
        return Path(self.config.job.dump_folder, self.name)


def plan(
    path: Path,
    overrides: Sequence[str],
    *,
    sizes: int,
    factor: float,
    seeds: int,
    tokens_per_parameter: float,
    standard: bool,
) -> list[Rung]:
    """Return the runs of the ladder, the smallest size first, and the target as the last one.

    Raises:
        UserError: the model has no such sizes, or the config sets what a ladder cannot have.
    """
    config = load(path, overrides)
    if config.training.epochs is not None:
        raise UserError("training.epochs: a ladder trains each size on its own number of tokens: set training.steps")
    if config.checkpoint.initial_load_path is not None:
        raise UserError("checkpoint.initial_load_path: a ladder trains from initial weights: leave it out")
    spec = model_of(config)
    width, depth = getattr(spec.args, "dim", None), len(spec.build().layers)
    if width is None:
        raise UserError(
            f"titanlite ladder: {type(spec.args).__name__} has no dim, and so no sizes (docs/add_a_model.md)"
        )
    transfers = config.optimizer.parametrization == "standard" and not standard
    if transfers:
        rule = {"parametrization": "completep", "base_width": width, "base_depth": depth}
        config = with_options(config, {f"optimizer.{key}": value for key, value in rule.items()})
    ladder, outputs = f"{config.job.name}-ladder", Path(config.job.dump_folder).resolve()
    common = {"job.dump_folder": str(outputs / ladder)}
    common["data.cache_folder"] = config.data.cache_folder or str(outputs / "data_cache")
    rungs: list[Rung] = []
    try:
        for number, shape in enumerate([*_shapes(spec, width, depth, sizes=sizes, factor=factor), (width, depth)]):
            for seed in range(1 if number == sizes else seeds):
                name = TARGET if number == sizes else f"rung-{number}" + (f"-seed-{seed}" if seed else "")
                own = {"job.name": name, "debug.seed": config.debug.seed + seed}
                if config.checkpoint.folder:
                    own["checkpoint.folder"] = f"{config.checkpoint.folder}/{ladder}/{name}"
                size = resized_options(spec, width=shape[0], depth=shape[1])
                rungs.append(_rung(with_options(config, common | own | size), *shape, tokens_per_parameter))
    except ConfigError as error:
        if not transfers:
            raise
        raise UserError(f"titanlite ladder, which sets completep unless --standard is given: {error}") from error
    except ValueError as error:
        raise UserError(f"titanlite ladder: {error}") from error
    for small, large in pairwise(rung for rung in rungs if "-seed-" not in rung.name):
        if small.parameters >= large.parameters:
            raise UserError(
                f"titanlite ladder: {small.name} and {large.name} have {small.parameters:,} and {large.parameters:,} "
                "parameters: lower --sizes, raise --factor, or take a larger model"
            )
    return rungs


def _rung(config: Config, width: int, depth: int, tokens_per_parameter: float) -> Rung:
    """Return the run of a config that has its size already."""
    training = config.training
    model = trained_model(model_of(config), config)
    if problems := check_optimizer(config.optimizer, model, dtype=training.dtype):
        raise ConfigError(problems)
    parameters = sum(it.numel() for it in model.layers.parameters())
    tokens = round(parameters * tokens_per_parameter)
    if tokens < (least := training.batch_sizes[0] * training.seq_len):
        raise ValueError(
            f"{config.job.name} has {parameters:,} parameters and {tokens:,} tokens, less than the {least:,} of one "
            "step: raise --tokens-per-parameter, or lower training.global_batch_size"
        )
    whole = BatchSizes.of(training).after(0, known_steps(training) or 0) * training.seq_len

    def share(number: int | None) -> int | None:
        return number and max(1, round(number * tokens / whole))

    stages = {
        "training.batch_ramp": training.batch_ramp,
        "training.seq_len_ramp": training.seq_len_ramp,
        "data.stages": config.data.stages,
    }
    lengths = ("warmup_steps", "decay_steps", "warmup_tokens", "decay_tokens")
    options = {
        "training.tokens": tokens,
        **{
            key: [it.model_dump() | {"until_tokens": share(it.until_tokens)} for it in parts]
            for key, parts in stages.items()
        },
        **{f"lr_scheduler.{name}": share(getattr(config.lr_scheduler, name)) for name in lengths},
        "validation.freq": share(config.validation.freq) if config.validation.enable else config.validation.freq,
    }
    config = with_options(config, options)
    return Rung(
        name=str(config.job.name),
        width=width,
        depth=depth,
        parameters=parameters,
        tokens=tokens,
        steps=known_steps(config.training) or 0,
        flops=tokens * model.flops_per_token(training.seq_len),
        config=config,
    )


def _shapes(spec: ModelSpec, width: int, depth: int, *, sizes: int, factor: float) -> Iterator[tuple[int, int]]:
    """Yield (width, depth) of each size, the smallest first: those nearest to the wanted number of parameters, and to
    the proportion of width and depth of the whole model.

    Raises:
        ValueError: the model has no smaller sizes.
    """

    def parameters(width: int, depth: int) -> int:
        args = spec.args.resized(width=width, depth=depth)
        return sum(it.numel() for it in spec._replace(args=args).build().layers.parameters())

    whole = parameters(width, depth)
    for number in range(sizes, 0, -1):
        wanted = factor**-number
        ideal = min(width, max(1, round(width * wanted ** (1 / 3))))
        found = []
        for candidates in (range(ideal, 0, -1), range(ideal + 1, width + 1)):
            if near := next((it for it in candidates if _is_width(spec, it, depth)), None):
                layers = min(depth, max(1, round(depth * wanted * whole / parameters(near, depth))))
                size = math.log(parameters(near, layers) / whole / wanted)
                proportion = math.log(near / width * depth / layers)
                found.append((abs(size) + abs(proportion) / 2, (near, layers)))
        yield min(found)[1]


def _is_width(spec: ModelSpec, width: int, depth: int) -> bool:
    try:
        spec.args.resized(width=width, depth=depth)
    except ValueError:
        return False
    return True
