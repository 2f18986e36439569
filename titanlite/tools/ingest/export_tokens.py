"""Write prepared tokens in the formats of other programs, for a comparison on the same tokens."""

import gzip
import os
from itertools import pairwise
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np

from titanlite.data.foreign import MEGATRON, MEGATRON_DTYPES, MEGATRON_MAGIC
from titanlite.data.tokens import TokenStore
from titanlite.runtime.errors import RunError, UserError
from titanlite.tools.ingest.inputs import local_folder
from titanlite.tools.ingest.inspect import open_named

BLOCK = 2**22
SUFFIXES = {"megatron": (".bin", ".idx"), "nanogpt": (".bin",), "olmo": (".npy", ".csv.gz")}
LEAST_OF_INT32 = 65_500
"""Vocabulary from which Megatron-core takes int32, not uint16."""


def export(
    folder: Path,
    *,
    out: str,
    format: Literal["megatron", "olmo", "nanogpt"],
    source_format: Literal["megatron", "nanogpt", "olmo", "datatrove"] | None = None,
    tokenizer: str | None = None,
) -> None:
    """Write prepared tokens in the format of another program.

    Args:
        folder (PATH): folder that `data prepare` wrote, or tokens of another program
        out (NAME): path of the files without .bin, .idx or .npy
        format: NAME.bin and NAME.idx of Megatron-LM; NAME.npy and NAME.csv.gz of OLMo-core; NAME.bin of nanoGPT
        source_format: program that wrote PATH, as data.format
        tokenizer (T): tokenizer of the tokens of another program

    Raises:
        UserError: the tokens are not complete, or some do not count in the loss, or files of this name are there.
        RunError: the files cannot be written.

    Example:
        tokens/corpus --format megatron --out megatron/corpus_text_document
    """
    place = local_folder(out)
    paths = [place.with_name(f"{place.name}{suffix}") for suffix in SUFFIXES[format]]
    if there := [path for path in paths if path.exists()]:
        raise UserError(f"--out: {there[0]} is there already: name another")
    with open_named(folder, tokenizer, source_format) as store:
        if store.has_mask:
            raise UserError(f"{folder} has tokens that do not count in the loss, which files of {format} cannot state")
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            for path, write in zip(paths, (_write_tokens, _write_index), strict=False):
                staging = path.with_name(f".{path.name}.partial")
                with open(staging, "wb") as file:
                    write(file, store, format)
                    file.flush()
                    os.fsync(file.fileno())
                os.replace(staging, path)
        except OSError as error:
            raise RunError(f"--out: {place} cannot be written: {error}") from error
        print(f"{len(store):,} tokens of {_dtype(store, format).name} in {' and '.join(map(str, paths))}")


def _dtype(store: TokenStore, form: str) -> np.dtype[Any]:
    vocab_size = store.index["tokenizer"]["vocab_size"]
    if form == "megatron":
        return np.dtype("<u2" if vocab_size < LEAST_OF_INT32 else "<i4")
    return np.dtype("<u2" if vocab_size <= 2**16 else "<u4")


def _write_tokens(file: IO[bytes], store: TokenStore, form: str) -> None:
    for at in range(0, len(store), BLOCK):
        file.write(store.read(at, min(BLOCK, len(store) - at)).astype(_dtype(store, form)).data)


def _write_index(file: IO[bytes], store: TokenStore, form: str) -> None:
    """Write where documents are. Those without a token are left out: other readers refuse them."""
    starts = np.unique(np.append([0], store.document_starts(0, len(store))))
    bounds = np.append(starts, len(store))
    if form == "olmo":
        with gzip.GzipFile(fileobj=file, mode="wb", mtime=0) as rows:
            rows.writelines(b"%d,%d\n" % pair for pair in pairwise(bounds.tolist()))
        return
    dtype = _dtype(store, form)
    code = next(code for code, name in MEGATRON_DTYPES.items() if np.dtype(name) == dtype)
    file.write(MEGATRON.pack(MEGATRON_MAGIC, 1, code, len(starts), len(starts) + 1))
    for values in (np.diff(bounds).astype("<i4"), (starts * dtype.itemsize).astype("<i8"), np.arange(len(bounds))):
        file.write(np.ascontiguousarray(values).data)
