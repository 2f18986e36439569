"""Reads DCP's .metadata, a pickle, without letting it call anything but what such metadata consists of."""

import pathlib
import pickle
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem, metadata


class Forbidden(pickle.UnpicklingError):
    pass


class MetadataUnpickler(pickle.Unpickler):
    """Knows the names that DCP's metadata consists of, and no other: an unpickler calls what a pickle names."""

    PLAIN = (
        metadata.Metadata,
        metadata.MetadataIndex,
        metadata.StorageMeta,
        metadata.TensorStorageMetadata,
        metadata.BytesStorageMetadata,
        metadata.ChunkStorageMetadata,
        metadata.TensorProperties,
        metadata._MEM_FORMAT_ENCODING,
        filesystem._StorageInfo,
    )

    def find_class(self, module_name: str, global_name: str) -> Any:
        for known in self.PLAIN:
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
