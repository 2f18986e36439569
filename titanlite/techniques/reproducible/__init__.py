"""The same bits on every layout; `sums.py` adds so that they are."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titanlite.runtime.errors import UserError
from titanlite.schema import Config
from titanlite.techniques.technique import Claim, Conflict, Parts, Technique, reads

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from titanlite.models.base import Model
    from titanlite.models.registry import ModelSpec


PARTS = "debug.reproducible_context_degree"
WHOLE_VECTORS = 64
"""Elements after which loops of PyTorch's CPU kernels repeat: two vectors of 32 bfloat16 numbers. What is left over is
computed by other instructions, which round exponentials otherwise."""


class ReproducibleLayouts(Technique):
    option = "debug.reproducible_layouts"

    def is_used(self, config: Config) -> bool:
        return config.debug.reproducible_layouts or config.debug.hash_freq > 0

    def claims(self, config: Config) -> dict[Claim, str]:
        claims = (Claim.GRADIENTS, Claim.UPDATE_KERNEL) if config.debug.reproducible_layouts else ()
        return dict.fromkeys(claims, self.option)

    @reads(option, "training", "parallelism", "optimizer", "compile.enable", "teacher", PARTS)
    def conflicts(self, config: Config) -> Iterator[Conflict]:
        if not config.debug.reproducible_layouts:
            return
        training, parallelism = config.training, config.parallelism
        batch, micro = min(training.batch_sizes), training.local_batch_size or 0
        stages = [(f"batch_ramp.{n}.global_batch_size", size) for n, size in enumerate(training.batch_sizes[:-1])]
        for key, size in (*stages, ("global_batch_size", training.global_batch_size), ("local_batch_size", micro)):
            if size & (size - 1):
                yield f"training.{key}", f"{self.option} adds micro-batches in a binary tree: {_not_a_power(size)}"
        if not 0 < micro <= batch:
            yield (
                "training.local_batch_size",
                f"{self.option} adds the gradients of micro-batches, which must be the same on every layout: set how "
                "many sequences each has. With 1, up to training.global_batch_size processes can share a step",
            )
        names, args = (
            config.optimizer.names,
            (config.optimizer.args, *(group.args for group in config.optimizer.groups)),
        )
        parts, context = config.debug.reproducible_context_degree, parallelism.context_parallel_degree
        if parts & (parts - 1):
            yield PARTS, f"{self.option} adds parts of sequences in a binary tree: {_not_a_power(parts)}"
        elif parts % context:
            yield (
                PARTS,
                f"{parts} part(s) of a sequence cannot be shared by parallelism.context_parallel_degree = {context}: "
                f"set it to {context}, or to the largest degree of any layout of this run. Each value has other bits",
            )
        refused = {
            "parallelism.tensor_parallel_degree": parallelism.tensor_parallel_degree > 1,
            "compile.enable with parallelism.expert_parallel_degree": (
                config.compile.enable and parallelism.expert_parallel_degree > 1
            ),
            'parallelism.fsdp_reduce_gradients = "last"': parallelism.fsdp_reduce_gradients == "last",
            "a training.mixed_precision_reduce that is not training.dtype": (
                training.mixed_precision_reduce != training.dtype
            ),
            "optimizer.args.fused": any(options.get("fused") for options in args),
            "an optimizer of torchao": any(name.startswith("torchao.") for name in names),
        }
        for other, is_set in refused.items():
            if is_set:
                yield self.option, f"cannot be combined with {other} yet: choose one of the two"
        refused_by_parts = {
            "compile.enable": config.compile.enable,
            "parallelism.expert_parallel_degree": parallelism.expert_parallel_degree > 1,
            "teacher": config.teacher.path is not None,
            "training.multi_token_weight": training.multi_token_weight > 0,
        }
        for other, is_set in refused_by_parts.items():
            if is_set and parts > 1:
                yield PARTS, f"cannot be combined with {other} yet: set it to 1, or leave that out"

    @reads(option, "training", "parallelism")
    def layout_conflicts(self, config: Config, world_size: int) -> Iterator[Conflict]:
        if not config.debug.reproducible_layouts:
            return
        if world_size & (world_size - 1):
            yield self.option, f"adds over processes in a binary tree: {_not_a_power(world_size)}"
        micro_batches = min(config.training.batch_sizes) // (config.training.local_batch_size or 1)
        processes = micro_batches * config.parallelism.context_parallel_degree
        if 0 < processes < world_size:
            yield (
                self.option,
                f"a step has {micro_batches} micro-batches of training.local_batch_size = "
                f"{config.training.local_batch_size} sequences, too few for {world_size} processes: use "
                f"{processes} processes. With smaller micro-batches, results have other bits",
            )

    @reads(option, "parallelism", PARTS)
    def check_model(self, config: Config, spec: "ModelSpec", model: "Model", world_size: int) -> None:
        from titanlite.models.base import expert_layers

        if config.debug.reproducible_context_degree > 1:
            from titanlite.techniques.reproducible.parts import check_parts

            check_parts(model)
        if not config.debug.reproducible_layouts or config.parallelism.expert_parallel_degree == 1:
            return
        for layer in expert_layers(model):
            for stack, dim in zip(layer.stacks, layer.hidden_dims, strict=True):
                if dim is not None and (size := layer.get_parameter(stack).shape[dim]) % WHOLE_VECTORS:
                    raise UserError(
                        f"needs expert hidden dims that are multiples of {WHOLE_VECTORS} with expert parallelism "
                        f"(found {size}): set another hidden_dim or expert_parallel_degree = 1"
                    )

    def resume_settings(self, config: Config) -> dict[str, Any]:
        size = config.training.local_batch_size if config.debug.reproducible_layouts else 1
        settings = {"training.local_batch_size": size, PARTS: config.debug.reproducible_context_degree}
        return {key: value for key, value in settings.items() if value != 1}  # 1 was the only value before

    def summary(self, config: Config) -> str:
        return "same bits on any layout" if config.debug.reproducible_layouts else ""

    def parts(self, config: Config, mesh: "DeviceMesh", run: Path) -> Parts:
        from titanlite.techniques.reproducible.hashes import StateHashes
        from titanlite.techniques.reproducible.step import ReproducibleStep

        freq = config.debug.hash_freq or config.checkpoint.interval
        return Parts(
            step_cls=ReproducibleStep if config.debug.reproducible_layouts else None,
            observers=lambda observed: [StateHashes(observed, freq=freq)],
        )


def _not_a_power(number: int) -> str:
    lower = 1 << (number.bit_length() - 1)
    return f"{number} is no power of two; use {lower} or {2 * lower}"


TECHNIQUE = ReproducibleLayouts()
