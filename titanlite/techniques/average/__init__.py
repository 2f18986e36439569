"""Averages of the weights over steps; `weights.py` keeps them."""

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from titanlite.schema import Config
from titanlite.techniques.technique import Conflict, HostTraffic, Options, Parts, Technique, reads

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class AverageOfWeights(Technique):
    option = "average"

    def is_used(self, config: Config) -> bool:
        return config.average.decay > 0 or config.average.window > 0

    @reads("average", "offload")
    def conflicts(self, config: Config) -> Iterator[Conflict]:
        average = config.average
        if average.decay and average.window:
            yield "average.decay", "cannot be combined with average.window: choose one of the two"
        elif not self.is_used(config):
            yield self.option, "has no effect: set average.decay or average.window"
        elif config.offload.parameters == "disk":
            yield self.option, 'keeps weights in memory, so it cannot be combined with offload.parameters = "disk"'

    def summary(self, config: Config) -> str:
        average = config.average
        kind = f"EMA {average.decay:g}" if average.decay else f"mean of {average.window} snapshots"
        return f"{kind} of weights every {average.freq} steps" if average.freq > 1 else f"{kind} of weights"

    def parts(self, config: Config, mesh: "DeviceMesh", run: Path) -> Parts:
        from titanlite.techniques.average.weights import MovingAverage, WindowAverage

        kind = MovingAverage if config.average.decay else WindowAverage
        return Parts(average=partial(kind, config.average, on_host=_is_on_host(config)))

    def places(self, config: Config) -> dict[str, str]:
        return {"average": "host"} if _is_on_host(config) and config.offload.average == "memory" else {}

    def suggestions(self, config: Config, *, is_gpu: bool) -> Iterator[tuple[int, Options, str]]:
        if is_gpu and self.is_used(config) and not _is_on_host(config):
            cost = "the average of weights in host memory: training waits for a copy of the weights at each update"
            yield 2, {"average.enable_cpu_offload": True}, cost

    def host_traffic(self, config: Config, sizes: Mapping[str, float], accumulation: int) -> HostTraffic:
        """The weights go to the host at each update, which reads the average and writes it."""
        if not _is_on_host(config):
            return HostTraffic()
        copy = sizes["average"] / max(config.average.window, 1) / config.average.freq
        return HostTraffic(0.0 if config.training.enable_cpu_offload else copy, 3 * copy)


def _is_on_host(config: Config) -> bool:
    on_disk = config.offload.average == "disk"
    return config.average.enable_cpu_offload or config.training.enable_cpu_offload or on_disk


TECHNIQUE = AverageOfWeights()
