"""Layouts with further axes of the mesh that a config allows, for `titanlite parity`."""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from titanlite.config.load import load
from titanlite.runtime.errors import UserError
from titanlite.techniques import used

AXES = ("context", "expert", "tensor")
ONE_OF_EACH = tuple(f"parallelism.{axis}_parallel_degree=1" for axis in AXES)
"""Overrides without further axes."""

PLAIN = (
    "--parallelism.data_parallel_replicate_degree=1",
    "--parallelism.data_parallel_shard_degree=-1",
    "--parallelism.fsdp_reshard_after_forward=default",
)
"""Arguments that replace the layout of a config."""


class FurtherLayout(NamedTuple):
    name: str
    options: tuple[str, ...]
    """Degrees of the further axes. All other processes shard parameters."""


def further_layouts(path: str, overrides: Sequence[str], processes: int) -> Iterator[FurtherLayout]:
    """Yield the layouts with one or two further axes that the config, its model and the processes allow."""
    from titanlite.tools.plan.estimate import model_of  # imports torch

    alone = [{"context": 2}, {"context": processes}, {"expert": 2}, {"expert": processes}, {"tensor": 2}]
    tried = [*alone, {"context": 2, "tensor": 2}, {"context": 2, "expert": 2}, {"expert": 2, "tensor": 2}]
    for degrees in [it for number, it in enumerate(tried) if it not in tried[:number]]:
        axes = {f"parallelism.{axis}_parallel_degree": degrees.get(axis, 1) for axis in AXES}
        options = tuple(f"{key}={degree}" for key, degree in axes.items())
        try:
            config = load(path, [*overrides, *PLAIN, *(f"--{it}" for it in options)], world_size=processes)
            spec = model_of(config)
            model = spec.build()
            for technique in used(config):
                technique.check_model(config, spec, model, processes)
        except UserError:
            continue
        rest = processes // math.prod(degree for axis, degree in degrees.items() if axis != "expert")
        yield FurtherLayout(" x ".join([*(f"{axis} {it}" for axis, it in degrees.items()), f"FSDP {rest}"]), options)
