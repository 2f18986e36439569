"""Context parallelism; `sequences.py` splits sequences over ranks."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from titanlite.schema import Config
from titanlite.techniques.technique import Conflict, Options, Parts, Technique, reads

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from titanlite.models.base import Model
    from titanlite.models.registry import ModelSpec
    from titanlite.runtime.hardware import Hardware


METHOD = "parallelism.context_parallel_method"


def exchanges_heads(config: Config) -> bool:
    """Return True if attention exchanges tokens for heads."""
    parallelism = config.parallelism
    return parallelism.context_parallel_degree > 1 and parallelism.context_parallel_method == "ulysses"


class ContextParallel(Technique):
    option = "parallelism.context_parallel_degree"

    def is_used(self, config: Config) -> bool:
        return config.sequence_parts > 1

    @reads(option, "debug.reproducible_context_degree", "training.seq_len", "training.seq_len_ramp")
    def conflicts(self, config: Config) -> Iterator[Conflict]:
        if config.debug.reproducible_context_degree > 1 and not config.debug.reproducible_layouts:
            yield (
                "debug.reproducible_context_degree",
                "needs debug.reproducible_layouts = true: set that, or leave it out",
            )
        if exchanges_heads(config) and config.debug.reproducible_context_degree > 1:
            yield (
                METHOD,
                "ulysses cannot be combined with debug.reproducible_context_degree, whose parts attend one by one: "
                "set ring",
            )
        degree = config.sequence_parts
        is_shared = degree == config.parallelism.context_parallel_degree
        for seq_len in config.training.seq_lens:
            if seq_len % (2 * degree):
                near = -(-seq_len // (2 * degree)) * 2 * degree
                yield (
                    self.option if is_shared else "debug.reproducible_context_degree",
                    f"{degree} ranks split each sequence into {2 * degree} equal chunks, and training.seq_len or a "
                    f"stage of training.seq_len_ramp is {seq_len}: set it to {near}",
                )
                return

    def parts(self, config: Config, mesh: "DeviceMesh", run: Path) -> Parts:
        from titanlite.techniques.context.sequences import part_of, split_batch

        batch = partial(split_batch, part=part_of(mesh, config.sequence_parts))
        count = config.debug.reproducible_context_degree // config.parallelism.context_parallel_degree
        if count <= 1:
            return Parts(batch=batch)
        from titanlite.runtime.dtypes import torch_dtype
        from titanlite.techniques.reproducible.parts import loss_by_parts

        dtype = torch_dtype(config.training.mixed_precision_reduce)
        return Parts(batch=batch, loss=partial(loss_by_parts, parts=count, dtype=dtype))

    @reads("parallelism", "training.seq_len")
    def check_model(self, config: Config, spec: "ModelSpec", model: "Model", world_size: int) -> None:
        from titanlite.techniques.context.sequences import check_context

        degrees = config.parallelism
        degree, tensor = degrees.context_parallel_degree, degrees.tensor_parallel_degree
        check_context(model, degree=degree, tensor=tensor, exchanges_heads=exchanges_heads(config))

    def summary(self, config: Config) -> str:
        return "attention by heads of whole sequences (ulysses)" if exchanges_heads(config) else ""

    def variants(self, config: Config, spec: "ModelSpec", hardware: "Hardware") -> list[tuple[str, Options]]:
        if config.parallelism.context_parallel_degree == 1 or config.debug.reproducible_context_degree > 1:
            return []
        return [("", {METHOD: "ring"}), ("ulysses", {METHOD: "ulysses"})][: 1 + can_exchange_heads(config, spec)]


def can_exchange_heads(config: Config, spec: "ModelSpec") -> bool:
    """Return True if the context degree divides the heads of a model."""
    from titanlite.runtime.errors import UserError
    from titanlite.techniques.context.sequences import check_context

    degrees = config.parallelism.context_parallel_degree, config.parallelism.tensor_parallel_degree
    try:
        check_context(spec.build(), degree=degrees[0], tensor=degrees[1], exchanges_heads=True)
    except UserError:
        return False
    return True


TECHNIQUE = ContextParallel()
