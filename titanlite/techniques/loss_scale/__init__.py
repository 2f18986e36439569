"""Compute in float16; `scale.py` has the dynamic loss scale that it needs."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from titanlite.schema import Config
from titanlite.techniques.technique import Claim, Conflict, Parts, Technique, reads

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class Float16Compute(Technique):
    option = "training.mixed_precision_param"

    def is_used(self, config: Config) -> bool:
        return config.training.mixed_precision_param == "float16"

    def claims(self, config: Config) -> dict[Claim, str]:
        return {Claim.GRADIENTS: self.option, Claim.MATMULS: self.option}

    @reads("training")
    def conflicts(self, config: Config) -> Iterator[Conflict]:
        if self.is_used(config) and config.training.dtype != "float32":
            yield self.option, 'float16 cannot be combined with training.dtype = "bfloat16": choose one of the two'

    def parts(self, config: Config, mesh: "DeviceMesh", run: Path) -> Parts:
        from titanlite.techniques.loss_scale.scale import ScaledStep

        return Parts(step_cls=ScaledStep)


TECHNIQUE = Float16Compute()
