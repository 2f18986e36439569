"""What blocks keep for backward, in host memory; `host.py` moves it."""

from collections.abc import Iterator, Mapping

from titanlite.schema import Config
from titanlite.techniques.technique import Conflict, HostTraffic, Options, Technique, reads


class ActivationsOnHost(Technique):
    option = "activation_checkpoint.offload"

    def is_used(self, config: Config) -> bool:
        return config.activation_checkpoint.offload

    @reads("activation_checkpoint", "compile.enable")
    def conflicts(self, config: Config) -> Iterator[Conflict]:
        recomputed = config.activation_checkpoint
        if (recomputed.mode, recomputed.selective_ac_option) == ("selective", "op") and not config.compile.enable:
            yield (
                self.option,
                "cannot move the results of operations that activation_checkpoint.selective_ac_option = "
                '"op" keeps, unless compile.enable = true: set that, or activation_checkpoint.mode = "full"',
            )

    def summary(self, config: Config) -> str:
        return "activations in host memory"

    def places(self, config: Config) -> dict[str, str]:
        return {"offloaded": "host"}

    def host_traffic(self, config: Config, sizes: Mapping[str, float], accumulation: int) -> HostTraffic:
        """Activations of a micro-batch go to the host beside its forward pass, and come back beside its backward."""
        return HostTraffic(beside_passes=sizes["offloaded"])

    def suggestions(self, config: Config, *, is_gpu: bool) -> Iterator[tuple[int, Options, str]]:
        if is_gpu and not config.activation_checkpoint.offload:
            cost = "inputs of blocks in host memory: recomputes forward, and copies beside it"
            yield 1, {"activation_checkpoint.mode": "full", self.option: True}, cost


TECHNIQUE = ActivationsOnHost()
