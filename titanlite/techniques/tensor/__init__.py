"""Tensor parallelism; `layers.py` splits layers over ranks."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from titanlite.schema import Config
from titanlite.techniques.technique import Claim, Conflict, Parts, Technique, reads

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from titanlite.models.base import Model
    from titanlite.models.registry import ModelSpec


class TensorParallel(Technique):
    option = "parallelism.tensor_parallel_degree"

    def is_used(self, config: Config) -> bool:
        return config.parallelism.tensor_parallel_degree > 1

    def claims(self, config: Config) -> dict[Claim, str]:
        return {Claim.LAYERS: self.option}

    @reads("parallelism", "training.loss")
    def conflicts(self, config: Config) -> Iterator[Conflict]:
        refused = {"teacher.path": config.teacher.path, "training.loss": config.training.loss}
        for other in (key for key, value in refused.items() if value):
            yield self.option, f"cannot be combined with {other} yet: set it to 1, or leave that out"
        keep = config.parallelism.fsdp_reshard_after_forward
        if isinstance(keep, int) and keep > 1:
            problem = f"FSDP2 cannot combine {keep} with {self.option}: set default"
            yield "parallelism.fsdp_reshard_after_forward", problem

    def parts(self, config: Config, mesh: "DeviceMesh", run: Path) -> Parts:
        from titanlite.techniques.tensor.layers import tensor_ranks

        return Parts(vocabulary=tensor_ranks(mesh))

    def column_shards(self, config: Config, model: "Model", world_size: int) -> dict[str, tuple[str, int]]:
        from titanlite.techniques.tensor.layers import column_shards

        degrees = config.parallelism.degrees(world_size)
        return dict.fromkeys(column_shards(model, degrees.sharded), ("tensor", degrees.sharded * degrees.tensor))

    @reads("training.seq_len", "training.seq_len_ramp")  # the degree may be wrong for the number of processes too
    def check_model(self, config: Config, spec: "ModelSpec", model: "Model", world_size: int) -> None:
        from titanlite.techniques.tensor.layers import check_tensor

        parallelism = config.parallelism
        for seq_len in config.training.seq_lens:
            of_a_rank = seq_len // parallelism.context_parallel_degree
            check_tensor(model, parallelism.tensor_parallel_degree, seq_len=of_a_rank)


TECHNIQUE = TensorParallel()
