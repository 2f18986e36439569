"""Updates within backward; `updates.py` makes them."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from titanlite.runtime.errors import UserError
from titanlite.schema import Config
from titanlite.techniques.technique import Claim, Conflict, Options, Parts, Technique, reads, refuse_accumulation

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh


class UpdatesInBackward(Technique):
    option = "optimizer.in_backward"

    def is_used(self, config: Config) -> bool:
        return config.optimizer.in_backward

    def claims(self, config: Config) -> dict[Claim, str]:
        return {Claim.GRADIENTS: self.option}

    @reads("optimizer", "training.max_norm", "guard")
    def conflicts(self, config: Config) -> Iterator[Conflict]:
        if config.training.max_norm:
            yield (
                self.option,
                "updates parameters before the norm of all gradients is known: set training.max_norm = 0 (no clipping)",
            )
        if "Muon" in config.optimizer.names:
            yield (
                self.option,
                "updates parameters one by one, and Muon updates matrices of all ranks together: choose one of the two",
            )
        if config.guard.nonfinite == "skip":
            yield self.option, 'cannot skip a step that has begun: set guard.nonfinite = "stop"'
        if config.guard.spike_sigma:
            yield self.option, "cannot skip a step that has begun: set guard.spike_sigma = 0"

    @reads(option, "training.global_batch_size", "training.local_batch_size", "training.batch_ramp")
    def layout_conflicts(self, config: Config, world_size: int) -> Iterator[Conflict]:
        yield from refuse_accumulation(self.option, "updates after each forward pass", config, world_size)

    @reads(option, "training.enable_cpu_offload")
    def check_machine(self, config: Config, device: "torch.device") -> None:
        import torch

        check_offloaded_update(config, device, torch_version=torch.__version__)

    def summary(self, config: Config) -> str:
        return "optimizer in backward"

    def parts(self, config: Config, mesh: "DeviceMesh", run: Path) -> Parts:
        from titanlite.techniques.in_backward.updates import StepInBackward

        return Parts(step_cls=StepInBackward)

    def suggestions(self, config: Config, *, is_gpu: bool) -> Iterator[tuple[int, Options, str]]:
        if not config.optimizer.in_backward:
            clipping: Options = {"training.max_norm": 0.0} if config.training.max_norm else {}
            yield 1, {self.option: True} | clipping, "updates in backward and frees each gradient: no clipping"


def check_offloaded_update(config: Config, device: "torch.device", *, torch_version: str) -> None:
    """Check that offloaded gradients are complete when FSDP2 calls the hook that updates within backward.

    Before 2.13, FSDP2 queues the copy of a gradient from the GPU to pinned memory, and calls the hook without waiting
    for the copy. The hook would read half-written memory, and nothing would show that the weights are wrong. In 2.13,
    `foreach_reduce` (torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py) copies with `non_blocking=False` where
    the sharded parameter has such a hook, so that the host waits for each copy before it calls the hook.

    Args:
        torch_version: as `torch.__version__`.

    Raises:
        UserError: this version of PyTorch does not wait.
    """
    from torch.torch_version import TorchVersion

    is_copied = config.training.enable_cpu_offload and device.type == "cuda"
    if config.optimizer.in_backward and is_copied and TorchVersion(torch_version) < "2.13":
        raise UserError(
            f"on a GPU with training.enable_cpu_offload = true, torch {torch_version} updates parameters from "
            "gradients that are not copied completely, and weights become silently wrong: upgrade to torch 2.13 or "
            "newer, or turn one of the two options off"
        )


TECHNIQUE = UpdatesInBackward()
