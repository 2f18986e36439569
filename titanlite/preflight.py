"""What can be known to be wrong before any process group starts and anything is allocated."""

from dataclasses import dataclass, replace

import torch

from titanlite.config.schema import Config
from titanlite.data.prepare import find_inputs
from titanlite.data.tokenizer import Tokenizer, load_tokenizer
from titanlite.errors import ConfigError, Problem
from titanlite.job import Ranks
from titanlite.models.base import Model, ModelArgs
from titanlite.models.registry import resolve_model
from titanlite.parallelize.float8 import check_float8
from titanlite.parallelize.materialize import check_memory

SIZES = {"bfloat16": 2, "float32": 4}


@dataclass(frozen=True)
class Ingredients:
    """What the config's names stand for."""

    model: type[Model]
    args: ModelArgs
    tokenizer: Tokenizer

    def build_model(self) -> Model:
        """The model on the meta device: shapes without memory."""
        with torch.device("meta"):
            return self.model(self.args)


def preflight(config: Config, ranks: Ranks, device: torch.device) -> Ingredients:
    """Resolve the model, the tokenizer and the data by name, and check that they fit together and fit in memory.

    Raises:
        UserError: with what does not.
    """
    model, args = resolve_model(config.model.name, config.model.flavor, config.model.args)
    tokenizer = load_tokenizer(config.data.tokenizer)
    for source in [*config.data.all_sources(), *config.validation.all_sources()]:
        find_inputs(source.path)
    check_float8(config.quantize.linear.float8)
    problems = []
    if config.training.seq_len > args.max_seq_len:
        message = f"{config.training.seq_len} is more than the {args.max_seq_len} positions of the model"
        problems.append(Problem("training.seq_len", message))
    if tokenizer.vocab_size > args.vocab_size:
        message = f"has {tokenizer.vocab_size} tokens, the model only {args.vocab_size} (model.args.vocab_size)"
        problems.append(Problem("data.tokenizer", message))
    if problems:
        raise ConfigError(problems)
    ingredients = Ingredients(model, replace(args, max_seq_len=config.training.seq_len), tokenizer)
    weight, moment = SIZES[config.training.dtype], SIZES[config.optimizer.state_dtype]
    check_memory(
        ingredients.build_model(),
        bytes_per_parameter=2 * weight + 2 * moment,  # weight and gradient, two moments
        shard_degree=config.parallelism.degrees(ranks.world_size)[1],
        local_world_size=ranks.local_world_size,
        device=device,
        offload=config.training.enable_cpu_offload,
    )
    return ingredients
