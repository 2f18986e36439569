"""Weights of a Hugging Face folder: config.json, and safetensors in one file or in shards with an index."""

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from titanlite.models.base import Model
from titanlite.models.formats import Formats, Table, complete
from titanlite.models.registry import MODELS
from titanlite.runtime.errors import UserError
from titanlite.runtime.files import file_inside, read_small
from titanlite.tools.convert.quantized import NARROW, form_of
from titanlite.tools.convert.reader import ForeignSource, ForeignTensor, Region
from titanlite.tools.convert.renamed import by_table

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
TIED = "tie_word_embeddings"
ROWS = 4096
"""Rows of a matrix that are compared at once."""
IGNORED = ".rotary_emb.inv_freq"
"""Tables of RoPE, which older files contain."""


class HuggingFaceFolder(ForeignSource):
    """A folder of transformers' `save_pretrained`, or one safetensors file beside its config.json."""

    TOKENIZER = "tokenizer.json"

    def __init__(self, path: Path) -> None:
        self.folder = path.parent if path.is_file() else path
        self.file = path if path.is_file() else None
        self.where = str(path)

    @staticmethod
    def matches(path: Path) -> bool:
        if path.is_file():
            return path.suffix == ".safetensors"
        return (path / CONFIG).is_file() or (path / INDEX).is_file() or any(path.glob("*.safetensors"))

    def table(self, formats: Formats) -> Table | None:
        return formats.hugging_face.tensors if formats.hugging_face else None

    def family(self) -> str | None:
        """Return the model family that config.json names; None if it names none.

        Raises:
            UserError: titanlite has no such family.
        """
        model_type = self._config().get("model_type")
        forms = {
            name: model_cls.formats.hugging_face for name, model_cls in MODELS.items() if model_cls.formats.hugging_face
        }
        tables = {model_type: name for name, form in forms.items() for model_type in form.model_types}
        if model_type is None:
            return None
        if not isinstance(model_type, str) or model_type not in tables:
            known = ", ".join(tables)
            code = " (its own code, auto_map, is not run)" if "auto_map" in self._config() else ""
            raise UserError(
                f"{self.folder} is a model of type {model_type!r}{code}, and titanlite has {known}: for one of your "
                'own, or of transformers (model.name = "transformers"), name its config (--config)'
            )
        return tables[model_type]

    def files(self) -> list[Path]:
        """Return the files of the weights and config.json."""
        return [*self._files(), self.folder / CONFIG]

    def read_args(self, model_cls: type[Model]) -> dict[str, Any]:
        """Return the arguments of the model in config.json.

        Raises:
            UserError: config.json is missing, or describes another family, or weights in an unknown form.
        """
        config, file = self._config(), self.folder / CONFIG
        known = model_cls.formats.hugging_face
        assert known is not None
        form_of(config, str(file))
        found = config.get("model_type")
        if found not in known.model_types and (family := self.family()):
            raise UserError(f"{file} is a config of {family}: set model.name, or --model, to it")
        try:
            args = known.to_args(config)
        except (ValueError, TypeError, AttributeError) as error:  # a value may have another type
            raise UserError(f"{file}: {error}") from None
        tied = next((name for name, key in known.fields.items() if key == TIED), TIED)
        if args.get(tied) and self._has_own_head(known.tensors):  # transformers takes the head of the file as well
            args[tied] = False
        return args

    def _has_own_head(self, table: Table) -> bool:
        """Return whether the files have a head that is not the embedding."""
        found = {tensor.name: tensor for tensor in self.tensors(table, {})}
        head, embedding = found.get(HEAD), found.get(EMBEDDING)
        if head is None or embedding is None:
            return False
        if head.shape != embedding.shape:
            return True
        parts = (
            [slice(row, min(row + ROWS, head.shape[0])), slice(0, head.shape[1])]
            for row in range(0, head.shape[0], ROWS)
        )
        return not all(head.read(tuple(part)).float().equal(embedding.read(tuple(part)).float()) for part in parts)

    def _config(self) -> dict[str, Any]:
        file = self.folder / CONFIG
        if not file.is_file():
            for weights in self._files():  # what they are may say more
                _open(weights, [])
            raise UserError(f"{self.folder} has no {CONFIG}, which describes the model")
        return _read_json(file_inside(self.folder, CONFIG))

    def tensors(self, table: Table, shapes: Mapping[str, tuple[int, ...]]) -> list[ForeignTensor]:
        """Return all tensors of the folder. Files of base models lack the prefix `model.` of the table."""
        config = self._config() if (self.folder / CONFIG).is_file() else {}
        form = form_of(config, str(self.folder / CONFIG))
        stored: dict[str, ForeignTensor] = {}
        for file, names in self._files().items():
            for tensor in _open(file, names):
                if tensor.name in stored:
                    raise UserError(f"{self.folder} has {tensor.name} in several files, and no {INDEX}")
                stored[tensor.name] = tensor
        found: dict[str, ForeignTensor] = {}
        for name, tensor in by_table(form.widened(stored) if form else stored, table).items():
            if tensor.dtype not in DTYPES.values():
                raise UserError(f"{self.where}: {name} is {tensor.dtype}: only {', '.join(DTYPES)} are read")
            if table.place(name) is None and table.place(f"model.{name}"):
                name = f"model.{name}"
            if not name.endswith(IGNORED):
                found[name] = replace(tensor, name=name)
        for name, other in (HEAD, EMBEDDING), (EMBEDDING, HEAD):  # safetensors' save_model keeps one of them, or other
            if name not in found and other in found and table.place(name) and _is_tied(config):
                found[name] = replace(found[other], name=name)
        return [*found.values()]

    def _files(self) -> dict[Path, list[str] | None]:
        """Return the files of the weights, with the names of the index to read from each; None: all that it has."""
        if self.file is not None:
            return {self.file: None}
        index = self.folder / INDEX
        if not index.is_file():
            single = self.folder / "model.safetensors"
            found = [single] if single.is_file() else sorted(self.folder.glob("*.safetensors"))
            if not found:
                other = sorted(self.folder.glob("*.bin"))
                saved = f" ({other[0].name} is a pickle: save it again with save_pretrained)" if other else ""
                raise UserError(f"{self.folder} has no *.safetensors{saved}")
            return {file_inside(self.folder, file.name): None for file in found}
        names = _read_json(file_inside(self.folder, INDEX)).get("weight_map")
        if not isinstance(names, dict) or not all(isinstance(file, str) for file in names.values()):
            raise UserError(f"{index} has no weight_map of names to files")
        files: dict[Path, list[str] | None] = {}
        for file in sorted(set(names.values())):
            path = file_inside(self.folder, file)
            if not path.is_file():
                raise UserError(f"{index} names {file}, which is missing")
            files[path] = [name for name, place in names.items() if place == file]
        return files


def _is_tied(config: dict[str, Any]) -> bool:
    with suppress(ValueError):
        config, _ = complete(config, str(config.get("model_type")))
    return bool(config.get(TIED))


def _read_json(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(read_small(file), object_hook=_number)
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{file} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise UserError(f"{file} is not a JSON object")
    return found


def _number(stored: dict[str, Any]) -> Any:
    """Return the infinity, or NaN, that transformers writes as an object, or the object itself."""
    return float(stored["__float__"]) if [*stored] == ["__float__"] else stored


def _open(path: Path, names: list[str] | None) -> list[ForeignTensor]:
    if path.exists() and not path.is_file():  # opening a named pipe would wait
        raise UserError(f"{path} is not a file")
    try:
        file = safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path} is damaged or incomplete: {error}") from None
    if _is_shard(file.metadata() or {}):
        raise UserError(
            f"{path} is a shard of DCP's HuggingFaceStorageWriter, and not consolidated: save with "
            "enable_consolidation = True, or call consolidate_safetensors_files of torch.distributed.checkpoint"
        )
    stored = {*file.keys()}
    if names and (missing := [name for name in names if name not in stored]):
        raise UserError(f"{path} lacks {missing[0]}, which the index lists")
    return [_tensor(file, path, name) for name in sorted(stored if names is None else names)]


def _is_shard(metadata: dict[str, str]) -> bool:
    """Return whether a file of DCP has parts of tensors that do not begin at their beginning, by its own word."""
    try:
        parts = json.loads(metadata.get("DCP_SHARDING_INFO", "{}"))
        return any(any(part["saved_offsets"]) for part in parts.values())
    except (ValueError, LookupError, AttributeError, TypeError, RecursionError):
        return True


def _tensor(file: Any, path: Path, name: str) -> ForeignTensor:
    stored = file.get_slice(name)
    dtype = (DTYPES | NARROW).get(stored.get_dtype())
    if dtype is None:
        raise UserError(f"{path}: {name} is {stored.get_dtype()}: only {', '.join(DTYPES)} are read")

    def read(region: Region) -> Tensor:
        return stored[region] if region else file.get_tensor(name)

    return ForeignTensor.in_one_part(name, stored.get_shape(), dtype, read)
