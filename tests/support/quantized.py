"""Quantizers that write the files of released DeepSeek-V3 and gpt-oss from those of tiny models."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

MAGNITUDES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
FLOAT8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.embed_tokens", "lm_head"]}


def to_float8(weight: Tensor, height: int, width: int) -> tuple[Tensor, Tensor]:
    """Return (codes [R, C], scales) of a matrix. Each block's largest value is 448; the last ones may be smaller."""
    codes = torch.empty_like(weight, dtype=torch.float8_e4m3fn)
    scales = torch.empty(-(-len(weight) // height), -(-weight.shape[1] // width))
    for i in range(len(scales)):
        for j in range(scales.shape[1]):
            block = slice(i * height, (i + 1) * height), slice(j * width, (j + 1) * width)
            scales[i, j] = weight[block].abs().max() / 448 + 1e-6
            codes[block] = (weight[block] / scales[i, j]).to(torch.float8_e4m3fn)
    return codes, scales


def of_float8(codes: Tensor, scales: Tensor, height: int, width: int) -> Tensor:
    """Return the weight, element by element."""
    rows, columns = codes.shape
    values = codes.float().tolist()
    found = [[values[r][c] * float(scales[r // height, c // width]) for c in range(columns)] for r in range(rows)]
    return torch.tensor(found, dtype=torch.float64).float()  # of 4 bits times 24: exact in float64


def to_mxfp4(stack: Tensor) -> tuple[Tensor, Tensor]:
    """Return (blocks [E, out, in / 32, 16], scales [E, out, in / 32]) of a stack [E, in, out] of matrices."""
    groups = stack.transpose(1, 2).unflatten(-1, (-1, 32)).float()
    exponents = torch.floor(torch.log2(groups.abs().amax(-1))) - 2
    scaled = groups / torch.exp2(exponents).unsqueeze(-1)
    codes = (scaled.abs().unsqueeze(-1) - MAGNITUDES).abs().argmin(-1) + 8 * (scaled < 0)
    return (codes[..., ::2] + 16 * codes[..., 1::2]).to(torch.uint8), (exponents + 127).to(torch.uint8)


def save(folder: Path, tensors: dict[str, Tensor], quantization: dict[str, Any]) -> None:
    """Write tensors on three shards with an index, such that codes and scales are on different ones."""
    names = sorted(tensors, key=lambda name: (not name.endswith(("_scales", "_scale_inv")), name))
    size = -(-len(names) // 3)
    files = {f"model-{i + 1:05}-of-00003.safetensors": names[i * size : (i + 1) * size] for i in range(3)}
    for file, some in files.items():
        save_file({name: tensors[name].contiguous() for name in some}, folder / file, {"format": "pt"})
    weight_map = {name: file for file, some in files.items() for name in some}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))


def quantize_folder(folder: Path, block: tuple[int, int] | None) -> None:
    """Quantize the matrices of a folder: in float8 blocks, or the experts in MXFP4."""
    file = folder / "model.safetensors"
    tensors, found = load_file(file), dict[str, Tensor]()
    file.unlink()
    for name, tensor in tensors.items():
        if block and tensor.ndim == 2 and not name.startswith(("lm_head", "model.embed")) and ".gate." not in name:
            found[name], found[f"{name}_scale_inv"] = to_float8(tensor.float(), *block)
        elif block is None and tensor.ndim == 3:
            found[f"{name}_blocks"], found[f"{name}_scales"] = to_mxfp4(tensor)
        else:
            found[name] = tensor
    save(folder, found, MXFP4 if block is None else {**FLOAT8, "weight_block_size": [*block]})
