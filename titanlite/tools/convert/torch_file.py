"""`--format torch`: one file of tensors, which torch.load(weights_only=True) reads."""

import os
from pathlib import Path

import torch

from titanlite.runtime.errors import UserError
from titanlite.tools.convert.source import Source, read_tensor


def write_torch_file(source: Source, out: str, *, dtype: torch.dtype | None) -> None:
    """Write {name: tensor} of the model, with the model's own names. The weights must fit in memory.

    Raises:
        UserError: the file exists, or cannot be written.
    """
    if "://" in out:
        raise UserError(f"--out: {out} is a URL, and --format torch writes a local file: name one")
    path = Path(out).expanduser()
    if os.path.lexists(path):
        raise UserError(f"{out} exists: name another --out, or delete it")
    names = [name.removeprefix("model.") for name in source.metadata.state_dict_metadata if name.startswith("model.")]
    tensors = {}
    for name in sorted(names):
        tensor = read_tensor(source, name)
        tensors[name] = tensor.to(dtype) if dtype and tensor.is_floating_point() else tensor
    staging = path.with_name(f".{path.name}.staging")
    try:
        with open(staging, "wb") as file:
            torch.save(tensors, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(staging, path)
    except OSError as error:
        staging.unlink(missing_ok=True)
        raise UserError(f"--out: {out} cannot be written: {error.strerror or error}") from None
