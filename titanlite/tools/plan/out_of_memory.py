"""Lines about an out-of-memory error: PyTorch's numbers, and the command that finds options which need less memory."""

from collections.abc import Callable, Iterator
from pathlib import Path
from shlex import join

import torch

from titanlite.runtime.hardware import hardware_of
from titanlite.runtime.process_group import Ranks
from titanlite.schema import Config
from titanlite.techniques.profiling.profiler import PROFILE, save_memory_snapshot


def explain(error: torch.OutOfMemoryError, config: Config, ranks: Ranks, device: torch.device) -> str:
    """Return the lines to print for an out-of-memory error of this rank."""
    reason = str(error).partition(" If reserved")[0].partition("\n")[0]
    phase = ", ".join(reversed(getattr(error, "__notes__", ["start"])))
    lines = [f"out of memory on rank {ranks.rank}, {phase}: {reason}", *snapshot_lines(config, ranks)]
    command = plan_command(Path(config.job.dump_folder, str(config.job.name), "config.toml"), ranks, device)
    return "\n".join([*lines, f"This finds options that need less memory: {command}"])


def plan_command(config: Path, ranks: Ranks, device: torch.device) -> str:
    """Return the command that plans a run as it is here, and suggests options."""
    hardware = hardware_of(device)
    gpu = "cpu" if device.type == "cpu" else hardware.name if hardware else "FILE.toml"
    sizes = ["--world-size", str(ranks.world_size), "--gpus-per-node", str(ranks.local_world_size)]
    return join(["titanlite", "plan", str(config), *sizes, "--gpu", gpu, "--suggest"])


def snapshot_lines(
    config: Config, ranks: Ranks, save: Callable[[Path, int], Path] = save_memory_snapshot
) -> Iterator[str]:
    """Write the rank's memory snapshot if the run records one, and yield a line with its path."""
    if not config.profiling.enable_memory_snapshot:
        return
    try:
        path = save(Path(config.job.dump_folder, str(config.job.name), PROFILE, "out-of-memory"), ranks.rank)
    except (OSError, RuntimeError) as error:
        yield f"The memory snapshot cannot be written: {error}"
    else:
        yield f"Memory snapshot, for pytorch.org/memory_viz: {path}"
