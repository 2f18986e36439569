"""FSDP units over other ranks than the rest of a model, such as the experts of expert parallelism."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import Shard


@dataclass(frozen=True)
class SeparateUnits:
    """Modules whose parameters are sharded over other ranks than those of the units around them."""

    modules: Sequence[nn.Module]
    parameters: set[nn.Parameter]
    """Those of the modules. The modules may have further ones, which belong to the units around them."""
    mesh: DeviceMesh
    """For `fully_shard`."""
    placement: Callable[[Tensor], Shard]

    def shard(self, **options: Any) -> list[FSDPModule]:
        """Make each module an FSDP unit, after the units around them.

        Args:
            options: of `fully_shard`, but for the mesh.
        """
        options |= {"mesh": self.mesh, "shard_placement_fn": self.placement}
        return [fully_shard(it, ignored_params={*it.parameters()} - self.parameters, **options) for it in self.modules]
