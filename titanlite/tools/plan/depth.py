"""Models of few blocks in place of one of many: whether its blocks are alike, and after how many they repeat."""

from dataclasses import replace
from typing import Any

from titanlite.models.base import Model
from titanlite.models.registry import ModelSpec
from titanlite.runtime.errors import ConfigError
from titanlite.schema import Config
from titanlite.techniques import choose_trained


def period_of(config: Config) -> int:
    """Number of blocks after which activation checkpointing repeats."""
    options = config.activation_checkpoint
    every_nth = options.selective_ac_option
    return every_nth if options.mode == "selective" and isinstance(every_nth, int) else 1


def can_vary(spec: ModelSpec, config: Config, few: int) -> bool:
    """Return True if the number of blocks can be changed to a few, and all blocks train the same parameters."""
    layers = trained_model(spec, config).layers
    if getattr(spec.args, "n_layers", None) != len(layers):
        return False
    shapes = [[(name, p.shape, p.requires_grad) for name, p in block.named_parameters()] for block in layers]
    args: Any = spec.args
    try:
        trained_model(spec._replace(args=replace(args, n_layers=few)), config)
    except ConfigError:  # a pattern names a block beyond the few
        return False
    return all(shape == shapes[0] for shape in shapes)


def trained_model(spec: ModelSpec, config: Config) -> Model:
    """Return the model with its adapters, and its frozen parameters marked."""
    model = spec.build()
    choose_trained(model, config)
    return model
