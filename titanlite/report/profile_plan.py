"""Prediction of the plan for a window's step, to print beside what was measured."""

from dataclasses import dataclass
from pathlib import Path

import torch

from titanlite.config.load import load
from titanlite.plan.command import share_of_process
from titanlite.plan.estimate import Layout, plan
from titanlite.report.trace_file import Trace
from titanlite.runtime.hardware import find_hardware, load_hardware


@dataclass(frozen=True)
class Prediction:
    """Predicted times of a step in seconds, and bytes of each collective."""

    hardware: str
    total: float
    compute: float
    """Forward, backward and update."""
    communication: float
    """All collectives, hidden or not."""
    exposed: float
    """Time in which the device waits for collectives."""
    bytes: dict[str, int]
    """Sent by a rank in a step, by the name of the collective."""

    @property
    def hidden_share(self) -> float | None:
        return max(0.0, 1 - self.exposed / self.communication) if self.communication else None


def predict(run: Path, trace: Trace, *, gpu: str | None, gpus_per_node: int | None) -> Prediction:
    """Plan a step of a run on the hardware that a trace is of.

    Args:
        gpu: name or TOML file of the hardware, as for `titanlite plan`. None: the name in the trace.
        gpus_per_node: None: the GPUs that the trace's process saw.

    Raises:
        UserError: the hardware is not known, or the config of the run cannot be planned here.
    """
    config = load(run / "config.toml", world_size=trace.world_size)
    hardware = load_hardware(Path(gpu)) if gpu and gpu.endswith(".toml") else find_hardware(gpu or trace.device)
    in_node = min(trace.world_size, gpus_per_node or trace.devices or trace.world_size)
    if hardware.measured:
        hardware = share_of_process(hardware, in_node)
    torch.set_num_threads(1)
    planned = plan(config, Layout(trace.world_size, hardware, in_node))
    sizes: dict[str, int] = {}
    for (collective, _), size in planned.traffic.items():
        name = collective.replace("_", "-")
        sizes[name] = sizes.get(name, 0) + size
    time = planned.time
    return Prediction(
        hardware=hardware.name,
        total=time.total,
        compute=time.compute + time.update,
        communication=time.communication,
        exposed=time.exposed,
        bytes=sizes,
    )
