"""Explain an out-of-memory error: PyTorch's numbers, the planned peak beside them, and options that need less memory.

The plan is made after the error, in a child process with a time limit: it needs a process group of its own.
"""

import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

import torch

from titanlite.config.schema import Config
from titanlite.plan.estimate import Layout, plan
from titanlite.plan.suggestions import Suggestion, suggest
from titanlite.profiling import PROFILE, save_memory_snapshot
from titanlite.runtime.files import FileLocked, lock_file
from titanlite.runtime.hardware import find_hardware, host_memory
from titanlite.runtime.process_group import Ranks

logger = logging.getLogger(__name__)

PLAN_SECONDS = 60.0
"""Time limit of the plan, and again of the suggestions."""
WAIT_SECONDS = 3 * PLAN_SECONDS
"""Longest wait of a rank for the rank that explains."""
SHOWN = 3
"""Suggestions that are printed."""


def explain(error: torch.OutOfMemoryError, config: Config, ranks: Ranks, device: torch.device) -> str:
    """Return the lines to print for an out-of-memory error of this rank.

    Several ranks can run out of memory at once, and torchrun ends all of them when the first one exits. So one rank
    explains. The others wait for it, for at most `WAIT_SECONDS`, and return the first lines only: the reason, and the
    memory snapshot.
    """
    reason = str(error).partition(" If reserved")[0].partition("\n")[0]
    phase = ", ".join(reversed(getattr(error, "__notes__", ["start"])))
    head = "\n".join([f"out of memory on rank {ranks.rank}, {phase}: {reason}", *snapshot_lines(config, ranks)])
    if not _is_first(Path(config.job.dump_folder) / str(config.job.name)):
        return head
    logger.warning(f"out of memory: planning what would fit, for at most {2 * PLAN_SECONDS:.0f} s")
    hardware = replace(find_hardware("H100"), memory=_device_memory(ranks, device), measured=device.type == "cpu")
    layout = Layout(ranks.world_size, hardware, ranks.local_world_size)  # the speed of the device does not matter
    return "\n".join([head, *_allocator_lines(device), *_plan_lines(config, layout)])


def _is_first(run_folder: Path) -> bool:
    """Return True if no other rank explains; otherwise False, after that rank has ended or had its time."""
    holders: list[str] = []
    try:
        lock = lock_file(run_folder / ".out-of-memory.lock", timeout=WAIT_SECONDS, on_wait=holders.append)
    except FileLocked:
        return False
    except OSError:  # no run folder yet, or a file system without locks
        return True
    os.dup(lock.fileno())  # never closed: the lock is held until the process ends
    return not holders


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


def _device_memory(ranks: Ranks, device: torch.device) -> int:
    if device.type == "cpu":
        return host_memory() // ranks.local_world_size
    return torch.cuda.get_device_properties(device).total_memory


def _allocator_lines(device: torch.device) -> Iterator[str]:
    if device.type != "cuda":
        return
    stats = torch.cuda.memory_stats(device)
    free, total = torch.cuda.mem_get_info(device)
    allocated, reserved = (stats[f"{name}_bytes.all.current"] for name in ("allocated", "reserved"))
    peak = stats["allocated_bytes.all.peak"]
    yield (
        f"PyTorch has allocated {gib(allocated)} (peak {gib(peak)}) and reserved {gib(reserved)}. The GPU has "
        f"{gib(free)} free of {gib(total)}; {gib(total - free - reserved)} are used outside PyTorch (CUDA context, "
        "NCCL, other processes)."
    )


def _plan_lines(config: Config, layout: Layout) -> Iterator[str]:
    try:
        with get_context("spawn").Pool(1, _begin) as pool:  # its end kills the child
            planned = pool.apply_async(plan, (config, layout)).get(PLAN_SECONDS)
            yield f"The plan's peak is {gib(planned.peak)}, at {planned.peak_phase}:"
            yield from (f"  {name:16}{gib(size):>12}" for name, size in planned.breakdown.items() if size)
            if planned.fits and not layout.hardware.measured:
                yield (
                    "By the plan this config fits. Check for another process on the GPU, for tensors that code of your "
                    "own keeps, and for fragmentation, if your PYTORCH_ALLOC_CONF turns expandable segments off."
                )
            found = pool.apply_async(suggest, (config, layout, planned), {"seconds": PLAN_SECONDS}).get(
                2 * PLAN_SECONDS
            )
            yield from _suggestion_lines(found)
    except Exception as error:
        yield f"No plan to compare with ({type(error).__name__}: {error}). What needs less memory: docs/memory.md"


def _suggestion_lines(found: list[Suggestion]) -> Iterator[str]:
    if not found:
        yield "No option needs less memory: use more processes and a higher shard degree."
        return
    yield "Suggestions, cheapest first:" if found[0].fits else "No single option fits. These need less memory:"
    width = max(len(suggestion.text) for suggestion in found[:SHOWN])
    for it in found[:SHOWN]:
        yield f"  {it.text:{width}}  {gib(it.peak):>10}  {it.cost}"


def gib(size: float) -> str:
    return f"{size / 2**30:,.1f} GiB" if size >= 2**30 else f"{size / 2**30:.3g} GiB"


def _begin() -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    torch.set_num_threads(1)
