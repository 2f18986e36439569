"""The `titanlite calibrate` command: rates that this machine reaches, measured into a file for `plan --gpu`.

Every rank measures at the same time, as in training, where the others also take power and memory bandwidth. Rates are
medians. Measured are matmuls, attention and copies of common sizes, and links (`plan/links.py`); no model.
"""

import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import date
from pathlib import Path

import torch
import torch.nn.functional as F

from titanlite.plan.links import host_transfers, measure_links
from titanlite.runtime.files import write_atomically
from titanlite.runtime.hardware import Hardware, hardware_of, host_memory
from titanlite.runtime.process_group import Ranks, pick_device, process_group
from titanlite.runtime.rates import Curve, Rates, rates_text

GPU_MATMULS = (
    *((size, size, size) for size in (256, 512, 1024, 2048, 4096, 8192)),
    *((8192, 4096, 14336), (8192, 14336, 4096), (2048, 4096, 128256), (16384, 8192, 28672)),
)
"""(rows, inner, columns): squares, and layers and heads of Llama 3."""
CPU_MATMULS = (
    *((size, size, size) for size in (64, 128, 256, 512, 1024)),
    *((512, 384, 384), (2048, 384, 1024), (2048, 1024, 384), (2048, 384, 2048)),
)
LONGEST_CALL = 0.3
"""Seconds: larger sizes are left out after a call that took this long."""

Seconds = Callable[[Callable[[], object]], float]
Print = Callable[[str], None]


def main(out: Path, ranks: Ranks) -> None:
    """Run `titanlite calibrate OUT` on every rank; rank 0 writes the file."""
    device = pick_device(ranks)
    with process_group(ranks, device):
        report: Print = print if ranks.rank == 0 else lambda line: None
        hardware = measure(device, ranks, report)
        if ranks.rank == 0:
            write_atomically(out, file_text(hardware))
            print(f"wrote {out}; use it with: titanlite plan my.toml --world-size N --gpu {out}")


def measure(device: torch.device, ranks: Ranks, report: Print, *, seconds: float | None = None) -> Hardware:
    """Return this device with measured rates.

    Args:
        report: prints a line about what was measured.
        seconds: how long each size is measured; default: 0.3 on GPUs, 0.15 on CPUs.
    """
    is_cpu = device.type == "cpu"
    timed = timer(device, seconds or (0.15 if is_cpu else 0.3))
    tiny = torch.zeros(1, device=device)
    launch = timed(lambda: tiny.add_(1))

    def net(work: Callable[[], object]) -> float:
        """Seconds without the launch, which `plan` adds on CPUs."""
        found = timed(work)
        return max(found - launch, found / 2) if is_cpu else found

    dtypes = {"bfloat16": torch.bfloat16, "float32": torch.float32}
    matmul = {name: matmul_curve(dtype, device, net) for name, dtype in dtypes.items()}
    if not is_cpu and (float8 := float8_curve(device, net)):
        matmul["float8"] = float8
    attention = {name: attention_curve(dtype, device, net) for name, dtype in dtypes.items()}
    memory = memory_curve(device, net)
    host = host_seconds(device, timed)
    for name, curves in (("matmul", matmul), ("attention", attention)):
        for dtype, curve in curves.items():
            report(f"{name:<9} {dtype:<8} {_range(curve)} TFLOP/s, FLOPs {curve[0][0]:.1e} to {curve[-1][0]:.1e}")
    report(f"memory             {_range(memory, 1e9)} GB/s, {memory[0][0]:.1e} to {memory[-1][0]:.1e} bytes")
    report(f"a small operation  {host * 1e6:.1f} us")
    links = measure_links(device, ranks, report)
    to_device, to_host = (None, None) if is_cpu else host_transfers(device, net, report)
    rates = Rates(
        matmul=matmul,
        attention=attention,
        memory=memory,
        launch_seconds=host,
        hop_seconds=links.hop_seconds,
        links=links.within_node,
        network=links.between_nodes,
        to_device=to_device,
        to_host=to_host,
    )
    if is_cpu:  # the file is of the whole machine
        rates = rates.shared_by(1 / ranks.local_world_size)
    return _named(device, rates)


def timer(device: torch.device, seconds: float) -> Seconds:
    """Return a function that measures the seconds of a call: the median of five series that take `seconds` together."""

    def wait() -> None:
        if device.type != "cpu":
            torch.cuda.synchronize(device)

    def series(work: Callable[[], object], calls: int) -> float:
        wait()
        began = time.perf_counter()
        for _ in range(calls):
            work()
        wait()
        return max((time.perf_counter() - began) / calls, 1e-9)

    def timed(work: Callable[[], object]) -> float:
        series(work, 1)  # the first call prepares
        once = series(work, 1)
        if once > LONGEST_CALL:
            return once
        calls = max(1, min(10_000, int(seconds / 5 / once)))
        return statistics.median(series(work, calls) for _ in range(5))

    return timed


def matmul_curve(dtype: torch.dtype, device: torch.device, timed: Seconds) -> Curve:
    """Return FLOP/s of matmuls by their FLOPs, in ascending order."""
    shapes = sorted(CPU_MATMULS if device.type == "cpu" else GPU_MATMULS, key=_flops)
    points = []
    for rows, inner, columns in shapes:
        a = torch.ones(rows, inner, dtype=dtype, device=device)
        b = torch.ones(columns, inner, dtype=dtype, device=device)
        seconds = timed(lambda a=a, b=b: F.linear(a, b))
        points.append((_flops((rows, inner, columns)), seconds))
        if seconds > LONGEST_CALL:
            break
    return as_curve(points)


def float8_curve(device: torch.device, timed: Seconds) -> Curve:
    """Return the same for float8 with a scale for each tensor; empty if the device or PyTorch has no such matmul."""
    scaled_mm, scaling = getattr(F, "scaled_mm", None), getattr(F, "ScalingType", None)
    if scaled_mm is None or scaling is None:
        return ()
    one, points = torch.ones((), device=device), []
    for rows, inner, columns in sorted(GPU_MATMULS, key=_flops):
        a = torch.ones(rows, inner, device=device).to(torch.float8_e4m3fn)
        b = torch.ones(columns, inner, device=device).to(torch.float8_e4m3fn).t()

        def multiply(a: torch.Tensor = a, b: torch.Tensor = b) -> object:
            return scaled_mm(
                a, b, one, scaling.TensorWise, one, scaling.TensorWise,
                output_dtype=torch.bfloat16, use_fast_accum=True,
            )  # fmt: skip

        try:
            points.append((_flops((rows, inner, columns)), timed(multiply)))
        except (RuntimeError, ValueError, NotImplementedError):
            return ()
    return as_curve(points)


def attention_curve(dtype: torch.dtype, device: torch.device, timed: Seconds) -> Curve:
    """Return FLOP/s of causal attention by the FLOPs of one forward.

    Forward is two matmuls, and backward five. Half of the scores are masked, and count nowhere.
    """
    is_cpu = device.type == "cpu"
    heads, size = (6, 64) if is_cpu else (32, 128)
    points = []
    for batch, length in ((4, 64), (4, 128), (16, 128), (4, 512)) if is_cpu else ((1, 1024), (1, 4096), (2, 8192)):
        if not is_cpu and dtype == torch.float32 and length > 4096:
            break  # kernels that keep all scores would need gigabytes
        shape = (batch, heads, length, size)
        q, k, v = (torch.ones(shape, dtype=dtype, device=device, requires_grad=True) for _ in range(3))
        out_gradient = torch.ones(shape, dtype=dtype, device=device)

        def both(q: torch.Tensor = q, k: torch.Tensor = k, v: torch.Tensor = v, g: torch.Tensor = out_gradient) -> None:
            torch.autograd.grad(F.scaled_dot_product_attention(q, k, v, is_causal=True), (q, k, v), g)

        forward = 2 * batch * heads * length**2 * size
        seconds = timed(both)
        points.append((forward, seconds / 3.5))
        if seconds > LONGEST_CALL:
            break
    return as_curve(points)


def memory_curve(device: torch.device, timed: Seconds) -> Curve:
    """Return bytes a second of copies by the bytes that they read and write."""
    largest = 27 if device.type == "cpu" else 30
    points = []
    for power in range(14, largest + 1, 2 if device.type == "cpu" else 4):
        source = torch.ones(2**power // 4, device=device)
        target = torch.zeros_like(source)
        points.append((2 * source.nbytes, timed(lambda a=target, b=source: a.copy_(b))))
    return as_curve(points)


def host_seconds(device: torch.device, timed: Seconds) -> float:
    """Return the host's time for a small operation: forward and backward of autograd, each half."""
    x = torch.ones(8, device=device, requires_grad=True)

    def chain() -> None:
        y = x
        for _ in range(50):
            y = y * 1.5
        y.sum().backward()

    return timed(chain) / 100


def as_curve(points: Sequence[tuple[float, float]]) -> Curve:
    """Return (size, rate) of each size from (size, seconds). Of equal sizes the mean counts."""
    by_size: dict[float, list[float]] = {}
    for size, seconds in points:
        by_size.setdefault(size, []).append(size / seconds)
    return tuple((float(size), statistics.mean(rates)) for size, rates in sorted(by_size.items()))


def file_text(hardware: Hardware) -> str:
    """Return the device as a TOML file for `--gpu`."""
    base = "cpu" if hardware.measured else hardware.name
    lines = [f'base = "{base}"'] if hardware.measured or hardware.driver_names else []
    lines += [f"name = {json.dumps(hardware.name)}", f"sources = {json.dumps(hardware.sources)}"]
    lines += [f"memory = {hardware.memory}"]
    for name in ("bf16_flops", "fp8_flops", "fp32_flops", "memory_bandwidth", "link_bandwidth", "network_bandwidth"):
        if (value := getattr(hardware, name)) is not None:
            lines.append(f"{name} = {value:.4g}")
    assert hardware.rates
    return "\n".join(lines) + "\n\n" + rates_text(hardware.rates)


def _named(device: torch.device, rates: Rates) -> Hardware:
    """Return the device's row of the table. A device that is not there has its best measured rates as peaks."""
    sources = f"titanlite calibrate, {date.today()}, torch {torch.__version__}"
    known = hardware_of(device)
    if known:
        return replace(known, rates=rates, sources=f"{sources}; peaks: {known.sources}")
    is_cpu = device.type == "cpu"
    best = {dtype: max(rate for _, rate in curve) for dtype, curve in rates.matmul.items()}
    bandwidth = rates.memory[-1][1]
    assumed = "network 10 Gbit/s" if is_cpu else "link PCIe 4 x16, network 10 Gbit/s"
    return Hardware(
        name="cpu" if is_cpu else torch.cuda.get_device_name(device),
        driver_names=(),
        memory=host_memory() if is_cpu else torch.cuda.get_device_properties(device).total_memory,
        bf16_flops=best["bfloat16"],
        fp8_flops=best.get("float8"),
        fp32_flops=best["float32"],
        memory_bandwidth=bandwidth,
        link_bandwidth=bandwidth / 2 if is_cpu else 32e9,
        network_bandwidth=1.25e9,
        sources=f"{sources}; peaks are the best measured rates. Assumed unless measured: {assumed}",
        measured=is_cpu,
        rates=rates,
    )


def _flops(shape: tuple[int, int, int]) -> int:
    return 2 * shape[0] * shape[1] * shape[2]


def _range(curve: Curve, unit: float = 1e12) -> str:
    rates = [rate / unit for _, rate in curve]
    return f"{min(rates):.3g} to {max(rates):.3g}"
