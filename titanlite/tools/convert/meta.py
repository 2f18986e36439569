"""Weights of Meta's releases: consolidated.00.pth, 01, ..., one file for each model-parallel part, and params.json."""

import json
import pickle
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from titanlite.models.base import Model
from titanlite.models.formats import Formats, Table
from titanlite.runtime.errors import UserError
from titanlite.runtime.files import file_inside, read_small
from titanlite.tools.convert.reader import ForeignSource, ForeignTensor, Part, Region

PARAMS = "params.json"
IGNORED = ("rope.freqs",)
FIELDS = ("dim", "n_layers", "n_heads", "n_kv_heads", "vocab_size", "norm_eps", "rope_theta")


class MetaFolder(ForeignSource):
    """A folder with consolidated.*.pth, or one .pth file."""

    TOKENIZER = "tokenizer.model"

    def __init__(self, path: Path) -> None:
        self.where = str(path)
        self.folder = path.parent if path.is_file() else path
        is_part = path.is_dir() or re.fullmatch(r"consolidated\.\d+\.pth", path.name)
        parts = sorted(it.name for it in self.folder.glob("consolidated.*.pth"))
        self._parts = [file_inside(self.folder, name) for name in parts] if is_part else [path]

    @staticmethod
    def matches(path: Path) -> bool:
        return path.suffix == ".pth" if path.is_file() else any(path.glob("consolidated.*.pth"))

    def table(self, formats: Formats) -> Table | None:
        return formats.meta

    def family(self) -> str | None:
        """Return the only family of which Meta has released weights in this form."""
        return "llama3"

    def files(self) -> list[Path]:
        params = self.folder / PARAMS
        return [*self._parts, *([params] if params.is_file() else [])]

    def read_args(self, model_cls: type[Model]) -> dict[str, Any] | None:
        """Return the arguments of the model in params.json; None without that file.

        The scaling of RoPE and the tied head stand in no params.json. They are those of the flavor of the same size.

        Raises:
            UserError: params.json lacks something.
        """
        file = self.folder / PARAMS
        if not file.is_file():
            return None
        try:
            params = json.loads(read_small(file_inside(self.folder, PARAMS)))
            return _args(params, model_cls)
        except UserError:
            raise
        except (OSError, ValueError, TypeError, AttributeError) as error:
            raise UserError(f"{file}: {error}") from None
        except KeyError as error:
            raise UserError(f"{file}: {error.args[0]} is missing") from None

    def tensors(self, table: Table, shapes: Mapping[str, tuple[int, ...]]) -> list[ForeignTensor]:
        """Return all tensors of the files, mapped into memory. The split dim of a part follows from `shapes`."""
        numbers = [int(match[1]) for file in self._parts if (match := re.search(r"\.(\d+)\.pth$", file.name))]
        if numbers and numbers != [*range(len(numbers))]:
            lost = next(number for number in range(max(numbers) + 1) if number not in numbers)
            raise UserError(f"{self.folder} has consolidated.{max(numbers):02}.pth, but not consolidated.{lost:02}.pth")
        parts = [_load(file) for file in self._parts]
        for file, part in zip(self._parts, parts, strict=True):
            if odd := sorted(part.keys() ^ parts[0].keys()):
                raise UserError(f"{file}: {odd[0]} is not in all of the {len(parts)} files")
        return [
            _joined(name, [part[name] for part in parts], shapes.get(name)) for name in parts[0] if name not in IGNORED
        ]


def _args(params: dict[str, Any], model_cls: type[Model]) -> dict[str, Any]:
    defaults = {"n_kv_heads": params["n_heads"], "rope_theta": 10000.0}
    args = {name: params[name] if name not in defaults else params.get(name, defaults[name]) for name in FIELDS}
    hidden = int(2 * 4 * params["dim"] / 3)
    if (multiplier := params.get("ffn_dim_multiplier")) is not None:
        hidden = int(multiplier * hidden)
    multiple = params["multiple_of"]
    args["hidden_dim"] = -(-hidden // multiple) * multiple
    args |= {name: float(args[name]) for name in ("norm_eps", "rope_theta")}
    same = [
        flavor
        for flavor in model_cls.flavors.values()
        if all(getattr(flavor, name, None) == args[name] for name in ("dim", "n_layers", "n_heads", "hidden_dim"))
    ]
    args["tied_head"] = bool(same) and getattr(same[0], "tied_head", False)
    factor = getattr(same[0], "rope_scaling_factor", 8.0) if same else 8.0
    args["rope_scaling_factor"] = factor if params.get("use_scaled_rope") else 1.0
    return args


def _load(file: Path) -> dict[str, Tensor]:
    try:
        found = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
    except pickle.UnpicklingError:
        raise UserError(f"{file} holds more than tensors, and loading it could run code: refused") from None
    except FileNotFoundError:
        raise UserError(f"no file {file}") from None
    except Exception as error:  # an arbitrary file can fail in any way
        first_line = (str(error).splitlines() or [repr(error)])[0]
        raise UserError(f"{file} is damaged or incomplete: {first_line}") from None
    if not isinstance(found, dict) or not all(isinstance(tensor, Tensor) for tensor in found.values()):
        raise UserError(f"{file} is not a table of tensors by name: refused")
    return found


def _joined(name: str, parts: list[Tensor], whole: tuple[int, ...] | None) -> ForeignTensor:
    """Return a tensor of its parts. Parts of the whole shape are replicas, of which the first is taken."""
    first = parts[0]
    if len(parts) == 1 or whole is None or tuple(first.shape) == whole:
        return ForeignTensor.in_one_part(name, first.shape, first.dtype, _reader(first))
    shape = first.shape
    for dim in range(first.ndim):
        joined = [*shape[:dim], sum(part.shape[dim] for part in parts), *shape[dim + 1 :]]
        if tuple(joined) == whole and all(part.shape == shape for part in parts):
            offsets = [[0] * dim + [number * shape[dim]] + [0] * (first.ndim - dim - 1) for number in range(len(parts))]
            pieces = [
                Part(tuple(offset), tuple(shape), _reader(part)) for offset, part in zip(offsets, parts, strict=True)
            ]
            return ForeignTensor(name, whole, first.dtype, pieces)
    return ForeignTensor.in_one_part(name, shape, first.dtype, _reader(first))  # does not fit, and will be listed


def _reader(tensor: Tensor) -> Any:
    def read(region: Region) -> Tensor:
        return tensor[region]

    return read
