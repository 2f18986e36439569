"""Peak rates of devices, for the share of them that training reaches (MFU).

Dense bfloat16 with float32 accumulation, as the vendors' data sheets state it; where a sheet has only the figure "with
sparsity", half of that. No TF32, no sparsity, no float8. A device that is not here has no MFU: a guess would be worse.
"""

from typing import NamedTuple

import torch


class Gpu(NamedTuple):
    name: str
    """As the driver calls it. What follows (memory, form) does not matter, unless a longer name of the table fits."""
    bf16_flops: float
    source: str


GPUS = (
    Gpu("NVIDIA A100", 312e12, "A100 data sheet, 2021"),
    Gpu("NVIDIA L40S", 362.05e12, "L40S data sheet, 2023: 733 TFLOPS with sparsity"),
    Gpu("NVIDIA GeForce RTX 4090", 165.2e12, "Ada architecture white paper, appendix: bfloat16, float32 accumulation"),
    Gpu("NVIDIA H100 PCIe", 756e12, "H100 data sheet, 2022: 1,513 TFLOPS with sparsity"),
    Gpu("NVIDIA H100 NVL", 835e12, "H100 NVL data sheet, 2024: 1,671 TFLOPS with sparsity"),
    Gpu("NVIDIA H100 80GB HBM3", 989e12, "H100 data sheet, 2022, SXM: 1,979 TFLOPS with sparsity"),
    Gpu("NVIDIA H200 NVL", 835e12, "H200 data sheet, 2024, NVL: 1,671 TFLOPS with sparsity"),
    Gpu("NVIDIA H200", 989e12, "H200 data sheet, 2024, SXM: 1,979 TFLOPS with sparsity"),
    Gpu("NVIDIA B200", 2250e12, "HGX B200 data sheet, 2024: 36 PFLOPS with sparsity for 8"),
    Gpu("AMD Instinct MI300X", 1307.4e12, "MI300X data sheet, 2023: without sparsity"),
)


def peak_flops(device: torch.device, compute_type: str) -> float | None:
    """The device's dense bfloat16 rate in FLOP/s; None where it is not known for certain."""
    if device.type != "cuda" or compute_type != "bfloat16":
        return None
    name = torch.cuda.get_device_name(device)
    fitting = [gpu for gpu in GPUS if name == gpu.name or name.startswith((gpu.name + " ", gpu.name + "-"))]
    return max(fitting, key=lambda gpu: len(gpu.name)).bf16_flops if fitting else None
