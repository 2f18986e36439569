"""Peak rates and memory of devices, for MFU (the share of the peak that training reaches) and for `titanlite plan`.

Peak rates are dense, with float32 accumulation, from the vendors' data sheets. Where a sheet has only the rate "with
sparsity", the table has half of that. No TF32. A device that is not in the table has no MFU.

Memory is the total that PyTorch reports, rounded down: drivers differ by some tenths of a GiB.
"""

import math
import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import tomli
import torch

from titanlite.runtime.errors import ConfigError, Place, Problem, UserError
from titanlite.runtime.nearest import did_you_mean, nearest_name


@dataclass(frozen=True)
class Hardware:
    """A device and the usual server around it. Bandwidths are in bytes a second."""

    name: str
    """Name for --gpu."""
    driver_names: tuple[str, ...]
    """Full names, as the driver reports them. Parts of a GPU (MIG) and variants for laptops have longer names."""
    memory: int
    """Bytes that PyTorch reports as the device's total."""
    bf16_flops: float
    """Peak of dense matmuls, in FLOP/s."""
    fp8_flops: float | None
    """None: the device has no float8."""
    fp32_flops: float
    """Peak of float32 matmuls, without TF32."""
    memory_bandwidth: float
    link_bandwidth: float
    """Per direction, from one GPU to the others of its node."""
    network_bandwidth: float
    """Per direction and GPU, between nodes. An assumption: it depends on the server, not on the GPU."""
    sources: str
    """Sources of the values, and which of them are assumptions."""
    matmul_efficiency: float = 0.62
    """Share of the peak that large matmuls reach. An assumption: GPUs from Hopper on reach 0.55 to 0.75, since their
    clock falls under load; A100s reach 0.75 to 0.85."""
    attention_efficiency: float = 0.33
    """The same for flash attention, forward and backward together. An assumption."""
    node_memory: int = 2 * 2**40
    """Bytes of host memory of a node, for CPU offload. An assumption: DGX H100 and p5.48xlarge have 2 TiB."""
    measured: bool = False
    """The device is this machine's CPU, and its rates are measured instead of peaks."""
    knows_links: bool = True
    """`link_bandwidth` and `network_bandwidth` are more than a guess about this machine's CPU."""

    @property
    def overlaps(self) -> bool:
        """The device communicates while it computes."""
        return not self.measured


SXM = "Network assumed: a {} Gbit/s InfiniBand card a GPU, as in the vendor's own servers."
PCIE = "Link assumed: PCIe {} x16 through the host (no bridge joins all GPUs). Network assumed: {} Gbit/s a GPU."


def _gpu(
    name: str,
    driver_name: str,
    gib: float,
    tflops: tuple[float, float, float],
    gigabytes: tuple[float, float, float],
    sources: str,
    efficiency: tuple[float, float] = (0.62, 0.33),
) -> Hardware:
    """Return a row of the table.

    Args:
        tflops: bfloat16, float8 (0: it has none), float32.
        gigabytes: a second: memory, link, network.
        efficiency: of matmuls and of attention.
    """
    bf16, fp8, fp32 = (rate * 1e12 for rate in tflops)
    memory, link, network = (rate * 1e9 for rate in gigabytes)
    sources += " Memory: what PyTorch reported on such devices, rounded down."
    rates = (bf16, fp8 or None, fp32, memory, link, network)
    return Hardware(name, (driver_name,), int(gib * 2**30), *rates, sources, *efficiency)


A100 = 0.8, 0.55
"""Efficiencies of A100s, whose clock holds."""

# fmt: off
HARDWARE = (
    # --gpu          the driver's name           GiB    TFLOP/s                  GB/s memory, link, network
    _gpu("A100-40", "NVIDIA A100-SXM4-40GB",     39.3, (312, 0, 19.5),           (1555, 300, 25),
         f"A100 data sheet, 2021: NVLink 600 GB/s both ways. {SXM.format(200)}", A100),
    _gpu("A100-80", "NVIDIA A100-SXM4-80GB",     79.1, (312, 0, 19.5),           (2039, 300, 25),
         f"A100 data sheet, 2021: NVLink 600 GB/s both ways. {SXM.format(200)}", A100),
    _gpu("A100-PCIe-40", "NVIDIA A100-PCIE-40GB", 39.3, (312, 0, 19.5),          (1555, 32, 12.5),
         f"A100 data sheet, 2021. {PCIE.format(4, 100)}", A100),
    _gpu("A100-PCIe-80", "NVIDIA A100 80GB PCIe", 79.1, (312, 0, 19.5),          (1935, 32, 12.5),
         f"A100 data sheet, 2021. {PCIE.format(4, 100)}", A100),
    _gpu("H100", "NVIDIA H100 80GB HBM3",        79.1, (989, 1979, 67),          (3350, 450, 50),
         "H100 data sheet, 2022, SXM: bfloat16 1,979 and float8 3,958 TFLOPS with sparsity, NVLink 900 GB/s both ways. "
         + SXM.format(400)),
    _gpu("H100-PCIe", "NVIDIA H100 PCIe",        79.1, (756, 1513, 51),          (2000, 64, 25),
         "H100 data sheet, 2022, PCIe: bfloat16 1,513 and float8 3,026 TFLOPS with sparsity. " + PCIE.format(5, 200)),
    _gpu("H100-NVL", "NVIDIA H100 NVL",          93.0, (835, 1670, 60),          (3900, 64, 25),
         "H100 NVL data sheet, 2024: bfloat16 1,671 and float8 3,341 TFLOPS with sparsity. " + PCIE.format(5, 200)),
    _gpu("H200", "NVIDIA H200",                 139.7, (989, 1979, 67),          (4800, 450, 50),
         "H200 data sheet, 2024, SXM: bfloat16 1,979 and float8 3,958 TFLOPS with sparsity, NVLink 900 GB/s both ways. "
         + SXM.format(400)),
    _gpu("H200-NVL", "NVIDIA H200 NVL",         139.7, (835, 1670, 60),          (4800, 64, 25),
         "H200 data sheet, 2024, NVL: bfloat16 1,671 and float8 3,341 TFLOPS with sparsity. " + PCIE.format(5, 200)),
    _gpu("B200", "NVIDIA B200",                 178.3, (2250, 4500, 75),         (7700, 900, 50),
         "HGX B200 data sheet, 2024: 8 have bfloat16 36 and float8 72 PFLOPS with sparsity, float32 600 TFLOPS; "
         f"7.7 TB/s, NVLink 1.8 TB/s both ways. {SXM.format(400)}"),
    _gpu("L40S", "NVIDIA L40S",                  44.3, (362.05, 733, 91.6),      (864, 32, 12.5),
         "L40S data sheet, 2023: bfloat16 733 and float8 1,466 TFLOPS with sparsity. " + PCIE.format(4, 100)),
    _gpu("RTX4090", "NVIDIA GeForce RTX 4090",   23.5, (165.2, 330.3, 82.6),     (1008, 32, 1.25),
         "Ada architecture white paper, appendix: float32 accumulation. " + PCIE.format(4, 10)),
    _gpu("MI300X", "AMD Instinct MI300X",       191.6, (1307.4, 2614.9, 163.4),  (5300, 448, 50),
         "MI300X data sheet, 2023: without sparsity, float32 of the matrix cores; 7 Infinity Fabric links, each 128 "
         "GB/s both ways. Network assumed: a 400 Gbit/s card a GPU."),
)
# fmt: on


def peak_flops(device: torch.device, compute_type: str) -> float | None:
    """Return the device's dense bfloat16 rate in FLOP/s; None if it is not known for certain."""
    hardware = _known(device) if compute_type == "bfloat16" else None
    return hardware.bf16_flops if hardware else None


def hardware_of(device: torch.device) -> Hardware | None:
    """Return the table's row of a GPU, with the memory of this device; None if the GPU is not in the table."""
    hardware = _known(device)
    return hardware and replace(hardware, memory=torch.cuda.get_device_properties(device).total_memory)


def _known(device: torch.device) -> Hardware | None:
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((hardware for hardware in HARDWARE if name in hardware.driver_names), None)


def find_hardware(name: str) -> Hardware:
    """Return a device by its name in the table or its driver's name; "cpu" is measured.

    Case, "-", "_" and spaces do not count.

    Raises:
        UserError: there is no such device. The error names the nearest device and all others.
    """
    names = {_plain(alias): hardware for hardware in HARDWARE for alias in (hardware.name, *hardware.driver_names)}
    wanted = _plain(name)
    if wanted == "cpu":
        return this_cpu()
    if wanted in names:
        return names[wanted]
    longer = [known.name for known in HARDWARE if wanted and _plain(known.name).startswith(wanted)]
    nearest = nearest_name(wanted, names)
    near = longer or ([names[nearest].name] if nearest else [])
    hint = f", did you mean {' or '.join(near)}?" if near else "."
    raise UserError(
        f"the table has no GPU named {name!r}{hint} Known are {', '.join(known.name for known in HARDWARE)} and cpu; "
        "any other can be described in a file: --gpu my_gpu.toml"
    )


def _plain(name: str) -> str:
    return re.sub("[-_ ]", "", name).lower()


REQUIRED = ("memory", "bf16_flops", "fp32_flops", "memory_bandwidth", "link_bandwidth", "network_bandwidth")
EFFICIENCIES = ("matmul_efficiency", "attention_efficiency")
NUMBERS = (*REQUIRED, *EFFICIENCIES, "memory_gib", "fp8_flops", "node_memory")
TEXTS = ("base", "name", "sources")


def load_hardware(path: Path) -> Hardware:
    """Return the device that a TOML file describes, by the fields of `Hardware`.

    `memory_gib` can stand for `memory`. `base = "H100"` takes missing fields from the table, and `base = "cpu"`
    measures them.

    Raises:
        ConfigError: every mistake in the file.
    """
    values = _read(path)
    problems = {key: problem for key, value in values.items() if (problem := _problem_of(key, value))}
    if "memory" in values and "memory_gib" in values:
        problems.setdefault("memory", "stands beside memory_gib; one of them is enough")
    base = None
    given = {"memory" if key == "memory_gib" else key for key in values}
    is_cpu = set(REQUIRED) <= given and _plain(str(values.get("base"))) == "cpu"
    if "base" in values and "base" not in problems and not is_cpu:
        try:
            base = find_hardware(values["base"])
        except UserError as error:
            problems["base"] = str(error)
    if "base" not in values:
        problems |= {key: "missing, and there is no base" for key in REQUIRED if key not in given}
    if problems:
        raise ConfigError([Problem(key, problems[key], Place(0, 0, path.name)) for key in problems])
    values.pop("base", None)
    if "memory_gib" in values:
        values["memory"] = values.pop("memory_gib") * 2**30
    if "memory" in values:
        values["memory"] = int(values["memory"])
    if "link_bandwidth" in values:
        values["knows_links"] = True
    values = {"name": path.stem, "driver_names": (), **values}
    if base:
        return replace(base, **{"sources": f"{path.name}; the rest: {base.sources}", **values})
    return Hardware(**{"sources": path.name, "fp8_flops": None, "measured": is_cpu, **values})


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomli.loads(path.read_bytes().decode("utf-8-sig"))
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not valid TOML: {error}") from error


def _problem_of(key: str, value: Any) -> str | None:
    """Return the mistake in an entry of the file, or None."""
    if key in TEXTS:
        return None if isinstance(value, str) and value else f"expected a text, got {value!r}"
    if key not in NUMBERS:
        return f"unknown key{did_you_mean(key, (*NUMBERS, *TEXTS))}"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return f"expected a number, got {value!r}"
    if not math.isfinite(value) or value <= 0:
        return f"expected a number above 0, got {value!r}"
    if key in EFFICIENCIES:
        return None if value <= 1 else f"expected a share, 1 at most, got {value!r}"
    if key != "memory_gib" and value < 1e6:
        return f"got {value!r}: it is counted in single bytes or FLOP/s, as in 989e12"
    return None


def host_memory() -> int:
    """Return the bytes of memory of the machine, or of its container (cgroup v2)."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = Path("/sys/fs/cgroup/memory.max")
    allowed = limit.read_text().strip() if limit.is_file() else "max"
    return physical if allowed == "max" else min(physical, int(allowed))


def this_cpu() -> Hardware:
    """Return this machine, measured for about half a second with PyTorch's present number of threads."""
    source, target = torch.ones(2**25), torch.zeros(2**25)  # 128 MiB each: more than most caches hold
    bandwidth = 2 * source.nbytes / min(_durations(lambda: target.copy_(source)))
    return Hardware(
        name="cpu",
        driver_names=(),
        memory=host_memory(),
        bf16_flops=_matmul_rate(torch.bfloat16),
        fp8_flops=None,
        fp32_flops=_matmul_rate(torch.float32),
        memory_bandwidth=bandwidth,
        link_bandwidth=bandwidth / 2,
        network_bandwidth=1.25e9,
        sources=f"Measured with {torch.get_num_threads()} threads. Link assumed: a copy through memory. "
        "Network assumed: 10 Gbit/s.",
        measured=True,
        knows_links=False,
    )


def _matmul_rate(dtype: torch.dtype) -> float:
    """Return the FLOP/s of square matmuls of the best size.

    Small sizes come first: a CPU without hardware bfloat16 takes seconds for 1024.
    """
    best = 0.0
    for size in (256, 512, 1024):
        a, b = torch.ones(size, size, dtype=dtype), torch.ones(size, size, dtype=dtype)
        seconds = min(_durations(lambda a=a, b=b: a @ b))
        best = max(best, 2 * size**3 / seconds)
        if 8 * seconds > 0.15:  # so the next may take
            break
    return best


def _durations(work: Callable[[], object]) -> list[float]:
    """Return the seconds of repeated calls, made for a twentieth of a second after a first call."""
    work()
    durations, end = [], time.perf_counter() + 0.05
    while not durations or time.perf_counter() < end:
        started = time.perf_counter()
        work()
        durations.append(time.perf_counter() - started)
    return durations
