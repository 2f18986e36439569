"""Compute in float16; `scale.py` has the dynamic loss scale that it needs."""

from collections.abc import Iterator

from titanlite.schema import Config
from titanlite.techniques.technique import Conflict, Technique, reads


class Float16Compute(Technique):
    option = "training.mixed_precision_param"

    def is_used(self, config: Config) -> bool:
        return config.training.mixed_precision_param == "float16"

    @reads("training", "optimizer", "quantize", "lora")
    def conflicts(self, config: Config) -> Iterator[Conflict]:
        if not self.is_used(config):
            return
        refused = {
            'training.dtype = "bfloat16"': config.training.dtype != "float32",
            "optimizer.in_backward": config.optimizer.in_backward,
            "quantize.linear.float8.enable": config.quantize.linear.float8.enable,
            "lora.quantize_base": config.lora.quantize_base != "none",
        }
        for other, is_set in refused.items():
            if is_set:
                yield self.option, f"float16 cannot be combined with {other}: choose one of the two"


TECHNIQUE = Float16Compute()
