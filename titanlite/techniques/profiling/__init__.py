"""Profiles of a running job; `profiler.py` records them."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from titanlite.runtime.errors import UserError
from titanlite.schedule import known_steps
from titanlite.schema import Config
from titanlite.techniques.technique import Conflict, Observed, Parts, Technique, reads

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh

    from titanlite.observer import StepObserver


class Profiles(Technique):
    option = "profiling.enable_memory_snapshot"

    def is_used(self, config: Config) -> bool:
        return config.profiling.is_used

    @reads("profiling", "training")
    def conflicts(self, config: Config) -> Iterator[Conflict]:
        """Yield windows that overlap, and windows that never open."""
        profiling, key = config.profiling, "profiling.profile_freq"
        if not profiling.is_used:
            return
        needed = profiling.profiler_warmup + profiling.profiler_active
        if profiling.enable_profiling and profiling.profile_freq < needed:
            yield (
                key,
                f"{profiling.profile_freq} steps are too few for profiler_warmup + profiler_active = {needed}: set it "
                f"to {needed} or more",
            )
        elif (steps := known_steps(config.training)) is not None and profiling.profile_freq > steps:
            yield key, f"no window ends within the {steps} steps of the run: set it to {steps} or less"

    @reads("profiling")
    def check_machine(self, config: Config, device: "torch.device") -> None:
        if config.profiling.enable_memory_snapshot and device.type != "cuda":
            raise UserError(f"records the allocator of GPUs, and this run is on the {device.type}: set it to false")

    def parts(self, config: Config, mesh: "DeviceMesh", run: Path) -> Parts:
        from titanlite.techniques.profiling.profiler import Profiler

        def observers(observed: Observed) -> "list[StepObserver]":
            profiler = Profiler(
                config.profiling,
                run=run,
                ranks=observed.ranks,
                steps=observed.steps,
                device=observed.device,
                not_training=observed.paused,
            )
            return [profiler]

        return Parts(observers=observers)


TECHNIQUE = Profiles()
