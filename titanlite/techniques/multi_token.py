"""Multi-token prediction (arXiv:2412.19437, section 2.2): one more module predicts the token after the next, too.

The decoder has the module, see `models/multi_token.py`. Its loss is added where gradients are computed.
Its weight is no argument of the model, because checkpoints of before would not resume with a new argument.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from titanlite.runtime.errors import ConfigError, Problem
from titanlite.schema import Config
from titanlite.techniques.technique import Parts, Technique, reads

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from titanlite.models.base import Model


class MultiTokenPrediction(Technique):
    option = "training.multi_token_weight"

    def is_used(self, config: Config) -> bool:
        return config.training.multi_token_weight > 0

    @reads("training.multi_token_weight")
    def choose_trained(self, model: "Model", config: Config) -> None:
        from titanlite.models.decoder import Decoder

        if not isinstance(model, Decoder):
            problem = f"needs a decoder of titanlite's own, and {type(model).__name__} is none: set it to 0"
            raise ConfigError([Problem(self.option, problem)])
        model.predict_further(config.training.multi_token_weight)

    def parts(self, config: Config, mesh: "DeviceMesh", run: Path) -> Parts:
        from titanlite.models.multi_token import look_ahead

        return Parts(batch=look_ahead)

    def summary(self, config: Config) -> str:
        return f"prediction of two tokens (weight {config.training.multi_token_weight:g})"

    def resume_settings(self, config: Config) -> dict[str, Any]:
        return {self.option: config.training.multi_token_weight}


TECHNIQUE = MultiTokenPrediction()
