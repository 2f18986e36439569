"""What is told after an out-of-memory error: where it happened, what was planned and what is there, what would fit.

Nothing of this costs training anything: where it happened is read from the functions that were running.
"""

import fcntl
import logging
import time
import traceback
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from types import FrameType
from typing import IO, Any

import torch
from torch import Tensor, nn

import titanlite
from titanlite.models.base import Model, unique_parameters
from titanlite.plan.forecast import PATIENCE, Forecast, Forecasted, gib
from titanlite.runtime.private_torch import local_tensor

logger = logging.getLogger(__name__)

STATES = ("parameters", "gradients", "optimizer")
"""Causes of memory that can be measured one by one."""
SHOWN = 3
"""Ways out."""
WAYS = "what takes less: docs/memory.md"


def explain(error: torch.OutOfMemoryError, forecast: Forecast) -> str:
    """Lines: where it happened, the plan beside what is measured, and ways out. Of several ranks one explains, and the
    others wait: the first to end ends all.
    """
    message = str(error).partition(" If reserved")[0].partition("\n")[0]
    head = f"{where(error, forecast.ranks.rank)}: {message}"
    forecast.lock = _lock(forecast.folder)
    if forecast.lock is None:
        return head
    logger.warning(f"out of memory: what was planned, and what would fit, takes up to {3 * PATIENCE:.0f} s to find out")
    measured = measure(_frames(error), forecast.device)
    found = forecast.advised()
    lines = [head]
    if found is None or "failed" in found:
        why = "none was made in time" if found is None else found["failed"]
        lines.append(f"there is no plan of memory to compare with ({why}); GiB as measured now:")
        return "\n".join([*lines, *_rows({}, measured), *_device_lines(forecast.device), WAYS])
    lines.append(f"GiB at the highest moment that the plan has ({found['phase']}), and as measured now:")
    lines += _rows(found["breakdown"], measured) + _device_lines(forecast.device)
    if found["fits"] and forecast.device.type == "cuda":
        lines.append(
            "by its plan this config fits. Is another process on this GPU, does code of your own keep tensors, or is "
            "memory in pieces (PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True)?"
        )
    return "\n".join(lines + _way_lines(found))


def where(error: BaseException, rank: int) -> str:
    """In words: step, rank, phase, and the innermost line that is not PyTorch's."""
    stack = [*traceback.walk_tb(error.__traceback__)]
    frames = _frames(error)
    steps = [frame.f_locals["step"] for frame in frames if _is(frame, "train.py", "train") and "step" in frame.f_locals]
    own = [(frame, line) for frame, line in stack if not frame.f_code.co_filename.startswith(_folder(torch))]
    place = f", {Path(own[-1][0].f_code.co_filename).name}:{own[-1][1]}" if own else ""
    return (f"step {steps[-1]}: " if steps else "") + f"out of memory on rank {rank}, {phase_of(frames)}{place}"


def phase_of(frames: Sequence[FrameType]) -> str:
    """What a step was doing, by the functions that were running, outermost first: forward or backward (and of which
    unit, where a frame shows it), loss, update, ..."""
    if any(_is(frame, "checkpoint/", "load") for frame in frames):
        return "loading a checkpoint"
    if any(_is(frame, "checkpoint/") for frame in frames):
        return "saving a checkpoint"
    if any(_is(frame, "validation.py") for frame in frames):
        return "validation"
    step = next((place for place, frame in enumerate(frames) if _is(frame, "step.py", "train_step")), None)
    if step is None:
        return "the start" if any(_is(frame, "train.py", "build") for frame in frames) else "between steps"
    model, loss_function = (frames[step].f_locals.get(name) for name in ("model", "loss_function"))
    inner = frames[step + 1 :]
    if any(_is(frame, "optim/") or _is(frame, "step.py", "clip", "sum_of_squares") for frame in inner):
        return "update (optimizer)"
    phase = "forward"
    if any(frame.f_code.co_name == "backward" and frame.f_code.co_filename.endswith("_tensor.py") for frame in inner):
        phase = "backward"
    elif any(_is(frame, "loss.py") or frame.f_code is _code(loss_function) for frame in inner):
        return "loss"
    units = {id(module): name for name, module in model.named_children()} if isinstance(model, nn.Module) else {}
    if isinstance(model, Model):
        units |= {id(block): f"layers.{number}" for number, block in enumerate(model.layers)}
    met = [units[id(frame.f_locals["self"])] for frame in inner if id(frame.f_locals.get("self")) in units]
    return " ".join([phase, *met[-1:]])


def measure(frames: Iterable[FrameType], device: torch.device) -> dict[str, int]:
    """Bytes on the device of what is alive and known: by cause, as in a plan; on a GPU with `rest`, the highest that
    was allocated beyond that."""
    named = [frame.f_locals for frame in frames if frame.f_code.co_filename.startswith(_folder(titanlite))]
    models = [names["model"] for names in named if isinstance(names.get("model"), Model)]
    optimizers = [names["optimizer"] for names in named if isinstance(names.get("optimizer"), torch.optim.Optimizer)]
    for run in [names["run"] for names in named if "run" in names]:
        models.append(run.model)
        optimizers.append(run.optimizer)
    found: dict[str, int] = {}
    if models or optimizers:
        # A model that is just computing has gathered parameters in place of its own; the optimizer always has these.
        groups = [group["params"] for group in optimizers[0].param_groups] if optimizers else []
        parameters = [p for group in groups for p in group] or [p for _, p in unique_parameters(models[0])]
        found["parameters"] = _bytes(parameters, device)
        found["gradients"] = _bytes((p.grad for p in parameters if p.grad is not None), device)
    if optimizers:
        values = (value for state in optimizers[0].state.values() for value in state.values())
        found["optimizer"] = _bytes((value for value in values if isinstance(value, Tensor)), device)
    if device.type == "cuda" and found:
        found["rest"] = max(0, torch.cuda.max_memory_allocated(device) - sum(found.values()))
    return found


def _bytes(tensors: Iterable[Tensor], device: torch.device) -> int:
    return sum(tensor.nbytes for tensor in map(local_tensor, tensors) if tensor.device.type == device.type)


def _rows(planned: dict[str, int], measured: dict[str, int]) -> list[str]:
    """A table, GiB. What cannot be measured by cause stands in one line, as the rest."""
    rows = [(cause, planned.get(cause), measured.get(cause)) for cause in dict.fromkeys([*STATES, *planned])]
    if "rest" in measured:
        rest = sum(size for cause, size in planned.items() if cause not in STATES)
        rows.append(("all but the first three", rest if planned else None, measured["rest"]))
    total = sum(measured.values()) if "rest" in measured else None
    rows.append(("total", sum(planned.values()) if planned else None, total))
    return [f"  {'':24} {'planned':>10} {'measured':>10}"] + [
        f"  {name:24} {gib(first):>10} {gib(second):>10}" for name, first, second in rows
    ]


def _device_lines(device: torch.device) -> list[str]:
    if device.type != "cuda":
        return []
    stats = torch.cuda.memory_stats(device)
    free, total = torch.cuda.mem_get_info(device)
    allocated, peak, reserved = (
        stats[f"{kind}.all.{which}"]
        for kind, which in (
            ("allocated_bytes", "current"),
            ("allocated_bytes", "peak"),
            ("reserved_bytes", "current"),
        )
    )
    return [
        f"the GPU has {gib(total)} GiB. PyTorch has reserved {gib(reserved)}, allocated {gib(allocated)}, at most "
        f"{gib(peak)}; outside of PyTorch (CUDA context, NCCL, other processes) are {gib(total - free - reserved)}"
    ]


def _way_lines(found: Forecasted) -> list[str]:
    ways = found["ways_out"]
    if ways is None:
        return [WAYS]
    if not ways:
        return ["no option takes less: use more processes, and a higher shard degree"]
    fit = "what takes less, cheapest first:" if found["fits"] or ways[0]["fits"] else "nothing fits; what takes less:"
    shown = ways[:SHOWN]
    width = max(len(way["options"]) for way in shown)
    return [fit] + [f"  {way['options']:{width}}  {gib(way['peak'])} GiB  {way['cost']}" for way in shown]


def _lock(folder: Path) -> IO[str] | None:
    """To be kept until the process ends. None: another rank was explaining, and has ended or had its time."""
    lock = open(folder / ".explaining", "a")  # noqa: SIM115 (the caller keeps it)
    end = time.monotonic() + 3 * PATIENCE + 10
    is_first = True
    while time.monotonic() < end:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            is_first = False
            time.sleep(0.2)
        except OSError:  # a file system without locks
            return lock
        else:
            return lock if is_first else None
    return None


def _frames(error: BaseException) -> list[FrameType]:
    return [frame for frame, _ in traceback.walk_tb(error.__traceback__)]


def _is(frame: FrameType, file: str, *functions: str) -> bool:
    """Whether it runs one of these functions of a file of titanlite, or of a folder's; no function means any."""
    path = frame.f_code.co_filename.removeprefix(_folder(titanlite))
    is_file = path.startswith(file) if file.endswith("/") else path == file
    return is_file and (not functions or frame.f_code.co_name in functions)


def _folder(module: Any) -> str:
    return f"{Path(module.__file__).parent}/"


def _code(function: Any) -> Any:
    while isinstance(function, partial):
        function = function.func
    return getattr(function, "__code__", getattr(type(function).__call__, "__code__", None))
