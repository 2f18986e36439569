"""Dropout of the embeddings, and of the outputs of attention and feed-forward layers. Attention weights are not
dropped, because each of PyTorch's attention kernels would draw others."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from titanlite.runtime.errors import ConfigError, Problem
from titanlite.schema import Config
from titanlite.techniques.technique import Conflict, Technique, reads

if TYPE_CHECKING:
    from titanlite.models.base import Model


class DropoutTechnique(Technique):
    option = "training.dropout"

    def is_used(self, config: Config) -> bool:
        return config.training.dropout > 0

    @reads("parallelism", "training.multi_token_weight")
    def conflicts(self, config: Config) -> Iterator[Conflict]:
        parallelism = config.parallelism
        others = {
            "parallelism.pipeline_parallel_degree": parallelism.pipeline_parallel_degree > 1,
            "parallelism.tensor_parallel_degree": parallelism.tensor_parallel_degree > 1,
            "training.multi_token_weight": config.training.multi_token_weight > 0,
        }
        for key, is_set in others.items():
            if is_set:
                yield self.option, f"cannot be combined with {key}: leave one of the two out"

    @reads("training.dropout", "debug.seed")
    def choose_trained(self, model: "Model", config: Config) -> None:
        from titanlite.models.decoder import Decoder
        from titanlite.ops.dropout import Dropout

        if not isinstance(model, Decoder):
            problem = f"needs a decoder of titanlite's own, and {type(model).__name__} is none: set it to 0"
            raise ConfigError([Problem(self.option, problem)])
        model.set_dropout(Dropout.of(config.training.dropout, seed=config.debug.seed))

    def summary(self, config: Config) -> str:
        return f"dropout {config.training.dropout:g}"


TECHNIQUE = DropoutTechnique()
