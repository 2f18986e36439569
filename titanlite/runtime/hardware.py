"""Peak rates and memory of devices: for MFU (the share of the peak that training reaches), and for `titanlite plan`.

Peak rates are dense, with float32 accumulation, from the vendors' data sheets. Where a sheet has only the rate "with
sparsity", the table has half of that. No TF32. A device that is not in the table has no MFU.

Memory is the total that PyTorch reports, rounded down: drivers differ by some tenths of a GiB.
"""

import os
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from titanlite.runtime.dtypes import DTYPES


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
    """Share of the peak that large matmuls reach. An assumption except for `SXM5`: GPUs from Hopper on reach 0.55 to
    0.75, since their clock falls under load; A100s reach 0.75 to 0.85."""
    attention_efficiency: float = 0.33
    """The same for attention of whole sequences, forward and backward together, by the kernel that PyTorch takes: on
    Hopper cuDNN's. An assumption except for `SXM5`."""
    flash_efficiency: float = 0.33
    """The same for FlashAttention-2 (arXiv:2307.08691), which attends within documents, windows and parts of sequences.
    """
    clock: float = 1.0
    """Share of its clock that the device keeps under a lower power limit."""
    exchange_share: float = 1.0
    """Share of the bytes of all-to-alls that is sent. titanlite sends a token once to each rank that has some of its
    experts; there are fewer such ranks where a router chooses neighbouring experts."""
    node_memory: int = 2 * 2**40
    """Bytes of host memory of a node, for CPU offload. An assumption: DGX H100 and p5.48xlarge have 2 TiB."""
    measured: bool = False
    """The device is this machine's CPU, and its rates are measured instead of peaks."""

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
    efficiency: tuple[float, float, float] = (0.62, 0.33, 0.33),
) -> Hardware:
    """Return a row of the table.

    Args:
        tflops: bfloat16, float8 (0: it has none), float32.
        gigabytes: a second: memory, link, network.
        efficiency: of matmuls, of attention, and of FlashAttention-2.
    """
    bf16, fp8, fp32 = (rate * 1e12 for rate in tflops)
    memory, link, network = (rate * 1e9 for rate in gigabytes)
    sources += " Memory: what PyTorch reported on such devices, rounded down."
    rates = (bf16, fp8 or None, fp32, memory, link, network)
    return Hardware(name, (driver_name,), int(gib * 2**30), *rates, sources, *efficiency)


A100 = 0.8, 0.55, 0.55
"""Efficiencies of A100s, whose clock holds."""
SXM5 = 0.7, 0.47, 0.26
"""Efficiencies measured in training steps on an H100 at 700 W (benchmarks/gpu/h100.json). FlashAttention-2 has 0.56 of
cuDNN's rate in single kernels on an H200 (benchmarks/README.md)."""

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
         + SXM.format(400), SXM5),
    _gpu("H100-PCIe", "NVIDIA H100 PCIe",        79.1, (756, 1513, 51),          (2000, 64, 25),
         "H100 data sheet, 2022, PCIe: bfloat16 1,513 and float8 3,026 TFLOPS with sparsity. " + PCIE.format(5, 200)),
    _gpu("H100-NVL", "NVIDIA H100 NVL",          93.0, (835, 1670, 60),          (3900, 64, 25),
         "H100 NVL data sheet, 2024: bfloat16 1,671 and float8 3,341 TFLOPS with sparsity. " + PCIE.format(5, 200)),
    _gpu("H200", "NVIDIA H200",                 139.7, (989, 1979, 67),          (4800, 450, 50),
         "H200 data sheet, 2024, SXM: bfloat16 1,979 and float8 3,958 TFLOPS with sparsity, NVLink 900 GB/s both ways. "
         + SXM.format(400), SXM5),
    _gpu("H200-NVL", "NVIDIA H200 NVL",         139.7, (835, 1670, 60),          (4800, 64, 25),
         "H200 data sheet, 2024, NVL: bfloat16 1,671 and float8 3,341 TFLOPS with sparsity. " + PCIE.format(5, 200)),
    _gpu("B200", "NVIDIA B200",                 178.3, (2250, 4500, 75),         (7700, 900, 50),
         "HGX B200 data sheet, 2024: 8 have bfloat16 36 and float8 72 PFLOPS with sparsity, float32 600 TFLOPS; "
         f"7.7 TB/s, NVLink 1.8 TB/s both ways. {SXM.format(400)}"),
    _gpu("GB200", "NVIDIA GB200",               184.3, (2500, 5000, 80),         (8000, 900, 50),
         "GB200 NVL72 data sheet, 2024: 72 have bfloat16 360 and float8 720 PFLOPS with sparsity, float32 5,760 "
         f"TFLOPS; 576 TB/s, NVLink 130 TB/s both ways. {SXM.format(400)}"),
    _gpu("GB300", "NVIDIA GB300",               276.5, (2500, 5000, 80),         (8000, 900, 100),
         "GB300 NVL72 data sheet, 2025: 72 have bfloat16 360 and float8 720 PFLOPS with sparsity; 576 TB/s, NVLink 130 "
         f"TB/s both ways. float32 as GB200. {SXM.format(800)}"),
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
    """Return the device's dense bfloat16 rate in FLOP/s, also that of float16; None if it is not known for certain."""
    hardware = _known(device) if DTYPES[compute_type].rate == "bf16_flops" else None
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


def host_memory(root: Path = Path("/")) -> int:
    """Return the bytes of memory of the machine, or the least limit of this process's cgroups (v1, v2) and of those
    above them.

    Args:
        root: folder of /proc and /sys.
    """
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    with suppress(OSError, ValueError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if "memory" in controllers.split(","):
                folder, name = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes"
            elif not controllers:
                folder, name = root / "sys/fs/cgroup", "memory.max"
            else:
                continue
            for part in ("", *path.split("/")):  # in a container, its own group is where its parents would be
                folder = folder if part == ".." else folder / part
                with suppress(OSError, ValueError):  # the limit is "max", or cannot be seen from here
                    limits.append(int((folder / name).read_text()))
    return min(limits)
