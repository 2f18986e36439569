"""Prediction of the plan for a window's step, to print beside what was measured."""

from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from titanlite.config.foreign import load_of_run
from titanlite.tools.plan.command import share_of_process
from titanlite.tools.plan.estimate import Layout, plan
from titanlite.tools.plan.hardware import find_hardware, load_hardware
from titanlite.tools.plan.schedule import CollectiveTime
from titanlite.tools.report.trace_file import Trace


@dataclass(frozen=True)
class Prediction:
    """Predicted times of a step in seconds, and bytes of each collective. None: the plan has none."""

    hardware: str
    total: float | None
    compute: float
    """Forward, backward and update."""
    communication: float | None
    """All collectives, hidden or not."""
    exposed: float | None
    """Time in which the device waits for collectives."""
    bytes: dict[str, int]
    """Sent by a rank in a step, by the name of the collective."""
    collectives: dict[str, CollectiveTime] = field(default_factory=dict)
    """Times by the name of the collective."""
    note: str = ""
    """Reason why times of collectives are missing."""

    @property
    def hidden_share(self) -> float | None:
        if not self.communication or self.exposed is None:
            return None
        return max(0.0, 1 - self.exposed / self.communication)


def predict(run: Path, trace: Trace, *, config: str | None, gpu: str | None, gpus_per_node: int | None) -> Prediction:
    """Plan a step of a run on the hardware that a trace is of.

    Args:
        config: of the run; None takes that of its folder, if it names no code.
        gpu: name or TOML file of the hardware, as for `titanlite plan`. None: the name in the trace.
        gpus_per_node: None: the GPUs that the trace's process saw.

    Raises:
        UserError: the hardware is not known, or the config of the run cannot be planned here.
    """
    of_run = load_of_run(run, config, world_size=trace.world_size)
    hardware = load_hardware(Path(gpu)) if gpu and gpu.endswith(".toml") else find_hardware(gpu or trace.device)
    in_node = min(trace.world_size, gpus_per_node or trace.devices or trace.world_size)
    if hardware.measured:
        hardware = share_of_process(hardware, in_node)
    torch.set_num_threads(1)
    planned = plan(of_run, Layout(trace.world_size, hardware, in_node))
    sizes: dict[str, int] = {}
    for (collective, _), size in planned.traffic.items():
        name = collective.replace("_", "-")
        sizes[name] = sizes.get(name, 0) + size
    time = planned.time
    found = Prediction(
        hardware=hardware.name,
        total=time.total,
        compute=time.compute + time.update,
        communication=time.communication,
        exposed=time.exposed,
        bytes=sizes,
        collectives={name.replace("_", "-"): it for name, it in time.by_collective.items()},
    )
    if not time.communication or hardware.knows_links:
        return found
    note = (
        f"the plan has no times of collectives on {hardware.name}, whose links were not measured: titanlite calibrate "
        "writes a file for --gpu"
    )
    return replace(found, total=None, communication=None, exposed=None, collectives={}, note=note)
