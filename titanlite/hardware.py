"""Peak rates of devices, for the share of them that training reaches (MFU).

Dense bfloat16 with float32 accumulation, as the vendors' data sheets state it; where a sheet has only the figure "with
sparsity", half of that. No TF32, no sparsity, no float8. A device that is not here has no MFU: a guess would be worse.
"""

from typing import NamedTuple

import torch


class Peak(NamedTuple):
    bf16_flops: float
    source: str


A100 = Peak(312e12, "A100 data sheet, 2021")

PEAKS = {
    "NVIDIA A100-PCIE-40GB": A100,
    "NVIDIA A100 80GB PCIe": A100,
    "NVIDIA A100-SXM4-40GB": A100,
    "NVIDIA A100-SXM4-80GB": A100,
    "NVIDIA L40S": Peak(362.05e12, "L40S data sheet, 2023: 733 TFLOPS with sparsity"),
    "NVIDIA GeForce RTX 4090": Peak(165.2e12, "Ada architecture white paper, appendix: float32 accumulation"),
    "NVIDIA H100 PCIe": Peak(756e12, "H100 data sheet, 2022: 1,513 TFLOPS with sparsity"),
    "NVIDIA H100 NVL": Peak(835e12, "H100 NVL data sheet, 2024: 1,671 TFLOPS with sparsity"),
    "NVIDIA H100 80GB HBM3": Peak(989e12, "H100 data sheet, 2022, SXM: 1,979 TFLOPS with sparsity"),
    "NVIDIA H200 NVL": Peak(835e12, "H200 data sheet, 2024, NVL: 1,671 TFLOPS with sparsity"),
    "NVIDIA H200": Peak(989e12, "H200 data sheet, 2024, SXM: 1,979 TFLOPS with sparsity"),
    "NVIDIA B200": Peak(2250e12, "HGX B200 data sheet, 2024: 36 PFLOPS with sparsity for 8"),
    "AMD Instinct MI300X": Peak(1307.4e12, "MI300X data sheet, 2023: without sparsity"),
}
"""By the whole name that the driver gives: parts of a GPU (MIG) and its variants for laptops have longer names."""


def peak_flops(device: torch.device, compute_type: str) -> float | None:
    """The device's dense bfloat16 rate in FLOP/s; None where it is not known for certain."""
    if device.type != "cuda" or compute_type != "bfloat16":
        return None
    peak = PEAKS.get(torch.cuda.get_device_name(device))
    return peak.bf16_flops if peak else None
