"""Parameters and optimizer states in host memory, or in files on a local disk; `disk.py` has what is particular there.

FSDP2 offloads to host memory. The optimizer reads moments in slices from `storage/disk.py`.
"""

import sys
from collections.abc import Iterator

from titanlite.runtime.files import why_not_writable
from titanlite.schema import Config
from titanlite.techniques.technique import Claim, Conflict, Options, Technique, reads


class CPUOffload(Technique):
    option = "offload.path"

    def is_used(self, config: Config) -> bool:
        return config.training.enable_cpu_offload or config.offload.is_used

    def claims(self, config: Config) -> dict[Claim, str]:
        if config.offload.parameters == "disk":
            return dict.fromkeys((Claim.UPDATE, Claim.PARAMETERS), "offload.parameters")
        return {Claim.UPDATE: "offload.optimizer"} if config.offload.optimizer == "disk" else {}

    @reads("offload", "optimizer", "training.enable_cpu_offload")
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
        if others := ", ".join(sorted(optimizer.names - {"AdamW"})):
            yield key, f"disk works with AdamW only, not with {others}"
        elif optimizer.args or any(group.args for group in optimizer.groups):
            yield key, "AdamW takes no optimizer.args on disk: leave them out"
        if offload.parameters == "disk" and not config.training.enable_cpu_offload:
            yield "offload.parameters", "disk needs training.enable_cpu_offload = true"
        if offload.path is not None and (problem := why_not_writable(offload.path)):
            yield self.option, problem

    def summary(self, config: Config) -> str:
        return "CPU offload" if config.training.enable_cpu_offload else ""

    def suggestions(self, config: Config, *, is_gpu: bool) -> Iterator[tuple[int, Options, str]]:
        if config.offload.optimizer != "disk":
            cost = "AdamW's moments on a local disk, read and written in each step"
            yield 3, {"offload.optimizer": "disk"}, cost
        if is_gpu and not config.training.enable_cpu_offload:
            cost = "parameters and updates in host memory: much slower steps"
            yield 4, {"training.enable_cpu_offload": True}, cost


TECHNIQUE = CPUOffload()
