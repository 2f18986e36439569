"""Files of safetensors, written as a stream.

The library writes tensors that are all in memory. The format is a header of JSON, then the bytes of the tensors.
"""

import json
import re
from collections.abc import Callable, Sequence
from typing import BinaryIO

import torch
from torch import Tensor

from titanlite.runtime.errors import UserError
from titanlite.tools.convert.layout import Outgoing

CODES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def parse_size(text: str) -> int:
    """Return the bytes of a size such as 5GB or 200MiB.

    Raises:
        UserError: the text is no size.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]+)", text)
    unit = UNITS.get(match[2].upper()) if match else None
    if match is None or unit is None or float(match[1]) * unit < 1:
        raise UserError(f"--max-shard-size: expected a size such as 5GB or 200MB, got {text!r}")
    return int(float(match[1]) * unit)


def split(tensors: Sequence[Outgoing], max_bytes: int) -> dict[str, list[Outgoing]]:
    """Return {file: tensors}, in order. A tensor that is larger than a file may be gets a file of its own."""
    files: list[list[Outgoing]] = [[]]
    for tensor in tensors:
        if files[-1] and sum(it.bytes for it in files[-1]) + tensor.bytes > max_bytes:
            files.append([])
        files[-1].append(tensor)
    if len(files) == 1:
        return {"model.safetensors": files[0]}
    return {f"model-{i:05}-of-{len(files):05}.safetensors": part for i, part in enumerate(files, start=1)}


def index_json(files: dict[str, list[Outgoing]]) -> bytes:
    """Return the text of model.safetensors.index.json."""
    tensors = [tensor for part in files.values() for tensor in part]
    body = {
        "metadata": {
            "total_parameters": sum(torch.Size(tensor.shape).numel() for tensor in tensors),
            "total_size": sum(tensor.bytes for tensor in tensors),
        },
        "weight_map": dict(sorted((tensor.name, file) for file, part in files.items() for tensor in part)),
    }
    return (json.dumps(body, indent=2) + "\n").encode()


def write(
    file: BinaryIO,
    tensors: Sequence[Outgoing],
    values: Callable[[Outgoing], Tensor],
    on_write: Callable[[int], None] = lambda size: None,
) -> None:
    """Write a file.

    Args:
        values: returns a tensor.
        on_write: called with the number of bytes of each tensor.
    """
    # Wide dtypes first, so that every tensor begins at a multiple of its element's size.
    tensors = sorted(tensors, key=lambda tensor: -tensor.dtype.itemsize)
    file.write(_header(tensors))
    for tensor in tensors:
        file.write(_bytes(values(tensor), tensor))
        on_write(tensor.bytes)


def _bytes(values: Tensor, tensor: Outgoing) -> memoryview:
    data = values.view(-1).view(torch.uint8).numpy().data
    assert (values.dtype, len(data)) == (tensor.dtype, tensor.bytes), tensor.name
    return data


def _header(tensors: Sequence[Outgoing]) -> bytes:
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in tensors:
        begin, end = end, end + tensor.bytes
        entries[tensor.name] = {"dtype": CODES[tensor.dtype], "shape": [*tensor.shape], "data_offsets": [begin, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
