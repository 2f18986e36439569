"""A restricted unpickler for DCP's .metadata, which is a pickle: an unpickler calls what a pickle names."""

import pathlib
import pickle
from typing import Any

import torch
from torch.distributed.checkpoint import metadata

from titanlite.runtime.private_torch.checkpoint import MemoryFormat, StorageInfo


class Forbidden(pickle.UnpicklingError):
    """A pickle names something that is no part of DCP's metadata."""


class MetadataUnpickler(pickle.Unpickler):
    """Unpickler that knows the names of which DCP's metadata consists, and no other."""

    CLASSES = (
        metadata.Metadata,
        metadata.MetadataIndex,
        metadata.StorageMeta,
        metadata.TensorStorageMetadata,
        metadata.BytesStorageMetadata,
        metadata.ChunkStorageMetadata,
        metadata.TensorProperties,
        MemoryFormat,
        StorageInfo,
    )

    def find_class(self, module_name: str, global_name: str) -> Any:
        for known in self.CLASSES:
            if (module_name, global_name) == (known.__module__, known.__name__):
                return known
        match module_name, global_name:
            case "torch", "Size":
                return torch.Size
            case "torch", _ if isinstance(found := vars(torch).get(global_name), torch.dtype):
                return found
            case "torch.serialization", "_get_layout":
                return lambda name: {str(layout): layout for layout in (torch.strided, torch.sparse_coo)}[name]
            case "pathlib" | "pathlib._local", "PosixPath" | "WindowsPath" | "PurePosixPath" | "PureWindowsPath":
                return lambda *parts: pathlib.PurePosixPath(*parts)
        raise Forbidden(f"{module_name}.{global_name}")
