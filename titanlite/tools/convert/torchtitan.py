"""Weights in a folder of DCP that titanlite has not written: of torchtitan 0.2, or with the names of Hugging Face.

Lightning Fabric and plain PyTorch save a model of transformers under its own names.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from titanlite.checkpoint.dcp_read import MOST_METADATA, load_stored, unpickle_metadata
from titanlite.checkpoint.manifest import CHECKSUMS, METADATA
from titanlite.models.formats import Formats, Table
from titanlite.runtime.errors import UserError
from titanlite.runtime.files import file_inside, read_small
from titanlite.storage.storage import MANIFEST
from titanlite.tools.convert.reader import ForeignSource, ForeignTensor, Part, Region
from titanlite.tools.convert.renamed import by_table

OTHER_STATES = ("optimizer", "lr_scheduler", "dataloader", "train_state")
DEEPEST = 3
"""Levels above the model's tensors that are looked through, one less."""
IGNORED = ("freqs_cis", "rope_cache")
"""Tables of RoPE, which checkpoints of older versions contain."""


class TorchtitanFolder(ForeignSource):
    """Folder of one step of torchtitan's checkpoints, or of others by DCP."""

    def __init__(self, path: Path) -> None:
        self.folder = path
        self.where = str(path)

    @staticmethod
    def matches(path: Path) -> bool:
        """Return whether this is a folder of DCP that titanlite has not written."""
        names = {entry.name for entry in path.iterdir()} if path.is_dir() else set()
        return METADATA in names and CHECKSUMS not in names and not any(name.startswith(MANIFEST) for name in names)

    def table(self, formats: Formats) -> Table | None:
        tables = [formats.torchtitan, formats.hugging_face.tensors if formats.hugging_face else None]
        known = [table for table in tables if table is not None]
        names = self._metadata().state_dict_metadata
        return max(known, key=lambda table: max(_places(names, table).values(), default=0), default=None)

    def files(self) -> list[Path]:
        return sorted(file for file in self.folder.iterdir() if file.is_file())

    def tensors(self, table: Table, shapes: Mapping[str, tuple[int, ...]]) -> list[ForeignTensor]:
        metadata = self._metadata()
        prefix = self._prefix(metadata.state_dict_metadata, table)
        found = {}
        for fqn, entry in metadata.state_dict_metadata.items():
            name = fqn.removeprefix(prefix)
            is_other = fqn.startswith(OTHER_STATES) or not fqn.startswith(prefix)
            if isinstance(entry, TensorStorageMetadata) and not is_other and name not in IGNORED:
                found[name] = self._tensor(fqn, name, entry, metadata.storage_data or {})
        return [*by_table(found, table).values()]

    def _metadata(self) -> Metadata:
        file = file_inside(self.folder, METADATA)
        return unpickle_metadata(read_small(file, MOST_METADATA), str(file))

    def _prefix(self, names: Iterable[str], table: Table) -> str:
        """Return what the names of the model's tensors begin with.

        Raises:
            UserError: there are several models.
        """
        places = _places(names, table)
        most = max(places.values(), default=0)
        found = [prefix for prefix, count in places.items() if count == most]
        if len(found) > 1 and not {"", "model."} & {*found}:
            raise UserError(f"{self.folder} has several models, {', '.join(found)}: save one of them as model")
        return min(found, key=lambda prefix: (prefix not in ("", "model."), prefix), default="model.")

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


def _places(names: Iterable[str], table: Table) -> Counter[str]:
    """Return how many names are those of a table, by what stands before them."""
    found: Counter[str] = Counter()
    for name in names:
        parts = name.split(".")
        prefixes = (".".join([*parts[:depth], ""]) if depth else "" for depth in range(min(len(parts), DEEPEST)))
        found.update(prefix for prefix in prefixes if table.place(name.removeprefix(prefix)))
    return found
