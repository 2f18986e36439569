"""Health of each rank's device: matmuls with known results, free memory, access to other GPUs, the driver's records."""

import time
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch

from titanlite.selfcheck.findings import Job, Result, gather, merge, on_each, size_text

Matmul = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
INNER = 128
"""Inner size of the matmuls. With values of -1, 0 and 1, every sum is exact in bfloat16."""
OTHERS = 2**30
"""Bytes of a GPU in use by other programs above which there is a warning."""
NO_DRIVER_RECORDS = "ECC and throttling not available (pip install nvidia-ml-py)"


def check_arithmetic(
    device: torch.device, job: Job, *, multiply: Matmul = torch.matmul, seconds: float | None = None
) -> Result:
    """Repeat a matmul on each device and compare every element with its exact value: silent data corruption.

    Args:
        multiply: matmul to test.
        seconds: how long to repeat; default: 0.5 on CPUs, 5 on GPUs.
    """
    is_cpu = device.type == "cpu"
    size = 512 if is_cpu else 8192
    limit = seconds or (0.5 if is_cpu else 5.0)
    found = on_each(lambda: _multiply(device, size, multiply, limit))
    flops = [one[0] for one in found if isinstance(one, tuple)]
    results = [one[1] if isinstance(one, tuple) else one for one in found]
    return merge(results, job, value=_rates(flops))


def _rates(flops: list[float]) -> str:
    if not flops:
        return ""
    span = f"{min(flops) / 1e12:.3g}" + (f" to {max(flops) / 1e12:.3g}" if len(flops) > 1 else "")
    return f"bfloat16 matmuls exact, {span} TFLOP/s"


def _multiply(device: torch.device, size: int, multiply: Matmul, seconds: float) -> tuple[float, Result]:
    """Return (FLOP/s, result). The expected values are from a small float64 matmul on the CPU: rows repeat."""
    a, b = known_matrices(size)
    expected = (a[: period(0)].double() @ b[:, : period(1)].double()).to(torch.bfloat16)
    left, right = a.to(torch.bfloat16).to(device), b.to(torch.bfloat16).to(device)
    rows, columns = expected.shape
    repeats = (-(-size // rows), -(-size // columns))
    exact = expected.repeat(*repeats)[:size, :size].contiguous()
    whole = exact.to(device)
    wrong = torch.zeros((), dtype=torch.int64, device=device)
    found, rounds, busy, end = whole, 0, 0.0, time.perf_counter() + seconds
    while rounds < 2 or time.perf_counter() < end:
        began = time.perf_counter()
        found = multiply(left, right)
        _wait(device)
        busy += time.perf_counter() - began
        wrong += (found != whole).sum()
        rounds += 1
    problems = []
    count = max(int(wrong), int((found.cpu() != exact).sum()))  # the device may compare wrongly, too
    if count:
        problems = [
            f"{_name(device)} computes wrong values: {count:,} elements in {rounds} matmuls of {size} x {INNER} x "
            f"{size} with known results: take it out of the job"
        ]
    return 2 * size * INNER * size * rounds / max(busy, 1e-9), Result(problems=problems)


def period(side: int) -> int:
    """Return the number of different rows of the left matrix (0), or of columns of the right one (1)."""
    return (61, 67)[side]


def known_matrices(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (left [size, INNER], right [INNER, size]) with values of -1, 0 and 1. Rows and columns repeat."""
    rows, inner = torch.arange(size) % period(0), torch.arange(INNER)
    columns = torch.arange(size) % period(1)
    left = (rows[:, None] * 419 + inner[None, :] * 727 + rows[:, None] * inner[None, :] * 31) % 1009 % 3 - 1
    right = (columns[None, :] * 523 + inner[:, None] * 811 + columns[None, :] * inner[:, None] * 37) % 1013 % 3 - 1
    return left, right


def check_gpus(device: torch.device, job: Job) -> Result:
    """Compare free memory, access to the other GPUs of the host, and the driver's records of each GPU."""
    if device.type != "cuda":
        return Result("not available: the job runs on CPUs")
    results = on_each(lambda: _gpu(device, job))
    names = sorted(set(gather(torch.cuda.get_device_name(device))))
    merged = merge(results, job)
    if len(names) > 1:
        merged.warnings.append(f"GPUs of {len(names)} kinds ({', '.join(names)}): the slowest sets the speed")
    return merged


def _gpu(device: torch.device, job: Job) -> Result:
    problems, warnings = [], []
    free, total = torch.cuda.mem_get_info(device)
    used = total - free - torch.cuda.memory_reserved(device)
    if used > OTHERS:
        warnings.append(
            f"{size_text(used)} of its {size_text(total)} are in use, by contexts and other programs (nvidia-smi)"
        )
    here = range(min(job.ranks.local_world_size, torch.cuda.device_count()))
    others = [other for other in here if other != device.index]
    apart = [other for other in others if not torch.cuda.can_device_access_peer(device.index or 0, other)]
    if apart:
        warnings.append(f"no direct access to the GPUs {', '.join(map(str, apart))}: copies pass host memory")
    more, wrong, hot = driver_records(device.index or 0)
    peers = f"direct access to {len(others) - len(apart)} of {len(others)} GPUs; " if others else ""
    value = f"{torch.cuda.get_device_name(device)}, {size_text(free)} of {size_text(total)} free; {peers}{more}"
    return Result(value, problems + wrong, warnings + hot)


def driver_records(index: int) -> tuple[str, list[str], list[str]]:
    """Return (value, problems, warnings) of the driver's records of a GPU, where NVIDIA's package reads them."""
    if find_spec("pynvml") is None:
        return NO_DRIVER_RECORDS, [], []
    import importlib

    nvml: Any = importlib.import_module("pynvml")
    problems, warnings = [], []
    try:
        nvml.nvmlInit()
        handle = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(index).uuid}")
    except Exception as error:  # the package has exceptions of its own
        return f"ECC and throttling not available ({error})", [], []

    def ask(read: Callable[[], Any]) -> Any:
        try:
            return read()
        except Exception:  # this GPU has no such record
            return None

    errors = ask(lambda: nvml.nvmlDeviceGetTotalEccErrors(handle, 1, 0))  # uncorrected, since the driver was loaded
    if errors:
        problems.append(f"{errors} uncorrected ECC errors since the driver was loaded: reset or replace the GPU")
    remapped = ask(lambda: nvml.nvmlDeviceGetRemappedRows(handle))
    if remapped and (remapped[2] or remapped[3]):
        problems.append("rows of its memory wait to be remapped, or could not be: reset or replace the GPU")
    reasons = ask(lambda: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)) or 0
    if reasons & 0x68:  # hardware slowdown, software and hardware thermal slowdown
        warnings.append("it is slowed down because of heat or power: look at its cooling and supply")
    shown = "not recorded" if errors is None else str(errors)
    return f"uncorrected ECC errors {shown}; XIDs are in dmesg", problems, warnings


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "the CPU"


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
