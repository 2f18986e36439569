"""Weights of a checkpoint of torchtitan 0.2: a folder of DCP, with the model's names at the top."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from titanlite.checkpoint.dcp_read import MOST_METADATA, load_stored, unpickle_metadata
from titanlite.checkpoint.manifest import CHECKSUMS, METADATA
from titanlite.models.formats import Formats, Table
from titanlite.runtime.errors import UserError
from titanlite.runtime.files import file_inside, read_small
from titanlite.storage.storage import MANIFEST
from titanlite.tools.convert.reader import ForeignSource, ForeignTensor, Part, Region

OTHER_STATES = ("optimizer", "lr_scheduler", "dataloader", "train_state")
IGNORED = ("freqs_cis", "rope_cache")
"""Tables of RoPE, which checkpoints of older versions contain."""


class TorchtitanFolder(ForeignSource):
    """Folder of one step of torchtitan's checkpoints."""

    def __init__(self, path: Path) -> None:
        self.folder = path
        self.where = str(path)

    @staticmethod
    def matches(path: Path) -> bool:
        """Return whether this is a folder of DCP that titanlite has not written."""
        names = {entry.name for entry in path.iterdir()} if path.is_dir() else set()
        return METADATA in names and CHECKSUMS not in names and not any(name.startswith(MANIFEST) for name in names)

    def table(self, formats: Formats) -> Table | None:
        return formats.torchtitan

    def files(self) -> list[Path]:
        return sorted(file for file in self.folder.iterdir() if file.is_file())

    def tensors(self, table: Table, shapes: Mapping[str, tuple[int, ...]]) -> list[ForeignTensor]:
        file = file_inside(self.folder, METADATA)
        metadata = unpickle_metadata(read_small(file, MOST_METADATA), str(file))
        found = []
        for fqn, entry in metadata.state_dict_metadata.items():
            name = fqn.removeprefix("model.")
            if isinstance(entry, TensorStorageMetadata) and not fqn.startswith(OTHER_STATES) and name not in IGNORED:
                found.append(self._tensor(fqn, name, entry, metadata.storage_data or {}))
        return found

    def _tensor(self, fqn: str, name: str, entry: TensorStorageMetadata, places: Any) -> ForeignTensor:
        parts = []
        for chunk in entry.chunks:
            place = places.get(MetadataIndex(fqn, chunk.offsets))
            if place is None or place.transform_descriptors:
                raise UserError(f"{self.folder / METADATA}: {fqn} is not complete: refused")
            parts.append(Part(tuple(chunk.offsets), tuple(chunk.sizes), self._reader(fqn, chunk.sizes, place)))
        if sum(chunk.sizes.numel() for chunk in entry.chunks) != entry.size.numel():
            raise UserError(f"{self.folder / METADATA}: {fqn} is not complete: refused")
        return ForeignTensor(name, tuple(entry.size), entry.properties.dtype, parts)

    def _reader(self, fqn: str, sizes: torch.Size, place: Any) -> Any:
        """Return a function that reads a region of a chunk.

        Raises:
            UserError: the chunk does not lie in a file of the folder.
        """
        file = file_inside(self.folder, str(place.relative_path))
        if not file.is_file():
            raise UserError(f"{file} is missing")
        if not 0 <= place.offset <= place.offset + place.length <= file.stat().st_size:
            raise UserError(f"{file} is damaged or incomplete: {fqn} ends at byte {place.offset + place.length}")

        def read(region: Region) -> Tensor:
            with open(file, "rb") as opened:
                opened.seek(place.offset)
                data = opened.read(place.length)
            return load_stored(data, sizes, f"{file} ({fqn})")[region]

        return read
