"""The same bits on every layout; `sums.py` adds so that they are."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from titanlite.schema import Config
from titanlite.techniques.technique import Claim, Conflict, Technique, reads

if TYPE_CHECKING:
    from titanlite.observer import StepObserver
    from titanlite.step import Gradients
    from titanlite.train import Run


class ReproducibleLayouts(Technique):
    option = "debug.reproducible_layouts"

    def is_used(self, config: Config) -> bool:
        return config.debug.reproducible_layouts or config.debug.hash_freq > 0

    def claims(self, config: Config) -> dict[Claim, str]:
        claims = (Claim.GRADIENTS, Claim.UPDATE) if config.debug.reproducible_layouts else ()
        return dict.fromkeys(claims, self.option)

    @reads(option, "training", "parallelism", "optimizer")
    def conflicts(self, config: Config) -> Iterator[Conflict]:
        if not config.debug.reproducible_layouts:
            return
        training, parallelism = config.training, config.parallelism
        batch = training.global_batch_size
        if batch & (batch - 1):
            lower = 1 << (batch.bit_length() - 1)
            yield (
                "training.global_batch_size",
                f"{self.option} adds sequences in a binary tree, and {batch} is no power of two: set {lower} or "
                f"{2 * lower}",
            )
        if training.local_batch_size != 1:
            yield (
                "training.local_batch_size",
                f"{self.option} adds the gradients of single sequences: set training.local_batch_size = 1",
            )
        names, args = config.optimizer.names, (config.optimizer.args, *(it.args for it in config.optimizer.groups))
        refused = {
            **{f"parallelism.{it}": degree > 1 for it, degree in parallelism if it.endswith("_parallel_degree")},
            'parallelism.fsdp_reduce_gradients = "last"': parallelism.fsdp_reduce_gradients == "last",
            'training.dtype = "bfloat16"': training.dtype != "float32",
            "optimizer.state_dtype": config.optimizer.state_dtype != "float32",
            "optimizer.args.fused": any(it.get("fused") for it in args),
            "an optimizer of torchao": any(name.startswith("torchao.") for name in names),
        }
        for other, is_set in refused.items():
            if is_set:
                yield self.option, f"cannot be combined with {other} yet: choose one of the two"

    @reads(option, "parallelism")
    def layout_conflicts(self, config: Config, world_size: int) -> Iterator[Conflict]:
        if config.debug.reproducible_layouts and world_size & (world_size - 1):
            lower = 1 << (world_size.bit_length() - 1)
            yield (
                self.option,
                f"adds over ranks in a binary tree, and {world_size} processes are no power of two: use {lower} or "
                f"{2 * lower}",
            )

    def summary(self, config: Config) -> str:
        return "same bits on any layout" if config.debug.reproducible_layouts else ""

    def gradients(self, config: Config, **parts: Any) -> "Gradients | None":
        from titanlite.techniques.reproducible.sums import ExactSums

        return ExactSums(parts["mesh"]) if config.debug.reproducible_layouts else None

    def observers(self, config: Config, run: "Run") -> "Sequence[StepObserver]":
        from titanlite.techniques.reproducible.hashes import StateHashes

        freq = config.debug.hash_freq or config.checkpoint.interval
        return [StateHashes(run, freq=freq, file=run.open_records("hashes.jsonl"))]


TECHNIQUE = ReproducibleLayouts()
