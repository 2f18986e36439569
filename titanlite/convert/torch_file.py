"""`--format torch`: one file of tensors, which torch.load(weights_only=True) reads."""

import os
from pathlib import Path

import torch

from titanlite.convert.source import Source, read_tensor
from titanlite.runtime.errors import UserError


def write_torch_file(source: Source, out: Path, *, dtype: torch.dtype | None) -> None:
    """Write {name: tensor} of the model, with the model's own names. The weights must fit in memory.

    Raises:
        UserError: the file exists, or cannot be written.
    """
    if os.path.lexists(out):
        raise UserError(f"{out} exists: name another --out, or delete it")
    names = [name.removeprefix("model.") for name in source.metadata.state_dict_metadata if name.startswith("model.")]
    tensors = {}
    for name in sorted(names):
        tensor = read_tensor(source, name)
        tensors[name] = tensor.to(dtype) if dtype and tensor.is_floating_point() else tensor
    staging = out.with_name(f".{out.name}.staging")
    try:
        with open(staging, "wb") as file:
            torch.save(tensors, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(staging, out)
    except OSError as error:
        staging.unlink(missing_ok=True)
        raise UserError(f"--out: {out} cannot be written: {error.strerror or error}") from None
