"""Parameters and optimizer states in host memory, to which FSDP2 offloads, or in files on a local disk (`disk.py`)."""

import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from titanlite.runtime.files import why_not_writable
from titanlite.schema import Config
from titanlite.techniques.technique import Claim, Conflict, HostTraffic, Options, Parts, Technique, reads

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class CPUOffload(Technique):
    option = "offload.path"

    def is_used(self, config: Config) -> bool:
        return config.training.enable_cpu_offload or config.offload.is_used

    def claims(self, config: Config) -> dict[Claim, str]:
        if config.offload.parameters == "disk":
            return dict.fromkeys((Claim.UPDATE_KERNEL, Claim.PARAMETERS), "offload.parameters")
        return {Claim.UPDATE_KERNEL: "offload.optimizer"} if config.offload.optimizer == "disk" else {}

    @reads("offload", "average", "optimizer", "training.enable_cpu_offload")
    def conflicts(self, config: Config) -> Iterator[Conflict]:
        offload, optimizer = config.offload, config.optimizer
        if not offload.is_used:
            if offload.path is not None:
                problem = 'has no effect: set offload.optimizer or offload.parameters to "disk", or leave it out'
                yield self.option, problem
            return
        if sys.platform != "linux":
            yield "offload", 'files instead of memory need Linux: set "memory"'
        key = "offload.optimizer" if offload.optimizer == "disk" else "offload.parameters"
        of_states = "disk" in (offload.optimizer, offload.parameters)
        if of_states and (others := ", ".join(sorted(optimizer.names - {"AdamW"}))):
            yield key, f"disk works with AdamW only, not with {others}"
        elif of_states and (optimizer.args or any(group.args for group in optimizer.groups)):
            yield key, "AdamW takes no optimizer.args on disk: leave them out"
        if offload.parameters == "disk" and not config.training.enable_cpu_offload:
            yield "offload.parameters", "disk needs training.enable_cpu_offload = true"
        if offload.average == "disk" and not (config.average.decay or config.average.window):
            yield "offload.average", 'has no effect: set [average], or "memory"'
        if offload.path is not None and (problem := why_not_writable(offload.path)):
            yield self.option, problem

    def parts(self, config: Config, mesh: "DeviceMesh", run: Path) -> Parts:
        if not config.offload.is_used:
            from titanlite.techniques.offload.updates import host_updates

            return Parts(updates=host_updates)
        from titanlite.techniques.offload.disk import DiskMemory

        return Parts(memory=DiskMemory(_folder(config, run), _on_disk(config)))

    def places(self, config: Config) -> dict[str, str]:
        states = ("parameters", "gradients", "optimizer") if config.training.enable_cpu_offload else ()
        return dict.fromkeys(states, "host") | dict.fromkeys(_on_disk(config), "disk")

    def host_traffic(self, config: Config, sizes: Mapping[str, float], accumulation: int) -> HostTraffic:
        """Parameters go to the device twice a micro-batch, and gradients come back. The update reads parameters,
        gradients and moments, and writes all but the gradients; beside the next forward pass if `updates.py` makes it.
        """
        if not config.training.enable_cpu_offload:
            return HostTraffic()
        states = sum(sizes[category] for category in ("parameters", "gradients", "optimizer"))
        average, is_adamw = config.average, config.optimizer.names == {"AdamW"}
        waits = config.offload.is_used or average.decay or average.window or config.debug.reproducible_layouts
        memory = (0.0, 1.75 * states) if is_adamw and not waits else (1.75 * states, 0.0)
        return HostTraffic(accumulation * 3 * sizes["parameters"], *memory)

    def summary(self, config: Config) -> str:
        return "CPU offload" if config.training.enable_cpu_offload else ""

    def suggestions(self, config: Config, *, is_gpu: bool) -> Iterator[tuple[int, Options, str]]:
        if config.offload.optimizer != "disk":
            cost = "AdamW's moments on a local disk, read and written in each step"
            yield 3, {"offload.optimizer": "disk"}, cost
        if is_gpu and not config.training.enable_cpu_offload:
            cost = "parameters and updates in host memory: much slower steps"
            yield 4, {"training.enable_cpu_offload": True}, cost


def check_disk(config: Config, needed: float) -> None:
    """Check that the disk has room.

    Args:
        needed: bytes of all processes of this machine in the place "disk"; see `Technique.places`.

    Raises:
        UserError: it has not.
    """
    from titanlite.techniques.offload.disk import check_room

    check_room(_folder(config, Path(config.job.dump_folder, str(config.job.name))), needed)


def _on_disk(config: Config) -> list[str]:
    """Return the categories of states that are in files."""
    return [name for name in ("parameters", "optimizer", "average") if getattr(config.offload, name) == "disk"]


def _folder(config: Config, run: Path) -> Path:
    """Return the folder of a run's files on disk."""
    path = config.offload.path
    return Path(os.path.expanduser(path)) if path else run / "offload"


TECHNIQUE = CPUOffload()
