"""Tables of a model family's tensors and arguments in the checkpoints of other programs.

A table stands in the family's file. Import and export read the same table, so they cannot disagree. Training does not
need it.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from titanlite.runtime.console import install_hint

if TYPE_CHECKING:
    from torch import Tensor

ConfigJson = dict[str, Any]
"""Content of a config.json."""


@dataclass(frozen=True)
class Entry:
    """Counterpart of one tensor of a model, or of one in each block.

    Names hold `{layer}` in place of the number of a block.
    """

    ours: str
    """Fully qualified name in the model."""
    theirs: str
    """Name in the other format. With `{expert}`, each index of our first dim is a tensor of its own there."""
    transposed: bool = False
    """The last two dims have the other order there."""
    interleaved: bool = False
    """Rows pair for RoPE as neighbours (2i, 2i + 1) there. Ours pair as halves of a head (i, i + H/2)."""
    keeps_dtype: bool = False
    """The tensor has our dtype there, whatever the dtype of the other tensors."""
    column: int | None = None
    """0 or 1: column i of ours is column 2i + this one there. Two entries share their tensor."""
    is_copy: bool = False
    """Our tensor is there under another name, too. This one is written, and not read."""

    def shape_there(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of their tensor, or of all experts' tensors, for that of ours."""
        if self.column is not None:
            return *shape[:-1], 2 * shape[-1]
        return (*shape[:-2], shape[-1], shape[-2]) if self.transposed else shape


class Made(NamedTuple):
    """Tensors that are made of others, where a format renames, splits and joins them."""

    sources: tuple[tuple[str, ...], ...]
    """Names of what it is made of: for each kind, such as gates and downs, one or a list, as of all experts."""
    tensors: "Mapping[str, Tensor]"
    """What is made, by name, on the meta device."""
    convert: "Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]] | None"
    """Return what is made of the values of the sources; None if the one source is only renamed."""


class Renaming(Protocol):
    """Further names of a format, on top of those of its table."""

    def read(self, stored: "Mapping[str, Tensor]") -> list[Made]:
        """Return what becomes of tensors of files, which have the names of the table then."""
        ...

    def write(self, tensors: "Mapping[str, Tensor]") -> list[Made]:
        """Return what tensors with the names of the table become in files."""
        ...


class Place(NamedTuple):
    """Tensor of a model that a tensor of another format belongs to."""

    name: str
    entry: Entry
    expert: int | None
    """Index of the first dim that the other tensor holds; None if it holds the whole tensor."""


class Table:
    """Entries of a format, searched by either name.

    Args:
        further: names of the tensors of a `FurtherToken` and its norm, and of what it shares with the model, by ours.
            `{layer}` is the number of layers. The names of its block's tensors begin with that of
            `layers.{layer}.block.`, and go on as those of other blocks.
        renaming: names of files on top of these.
    """

    def __init__(
        self, entries: Sequence[Entry], further: Mapping[str, str] | None = None, renaming: Renaming | None = None
    ) -> None:
        self.entries = tuple(entries)
        self.further = further or {}
        self.renaming = renaming
        self._ours = [(_pattern(entry.ours), entry) for entry in entries if not entry.is_copy]
        self._theirs = [(_pattern(entry.theirs), entry) for entry in entries]

    def with_further(self, args: Any) -> "Table":
        """Return the table of a model of this shape that has a `FurtherToken`."""
        layer, names = str(args.n_layers), dict(self.further)
        of_block = names.pop("layers.{layer}.block.")
        entries = [Entry(ours, theirs, is_copy=self.find(ours) is not None) for ours, theirs in names.items()]
        for entry in self.entries:
            if "{layer}" in entry.ours:
                ours = entry.ours.replace("{layer}.", "{layer}.block.", 1)
                entries.append(replace(entry, ours=ours, theirs=of_block + entry.theirs.partition(".{layer}.")[2]))
        numbered = [
            replace(entry, ours=entry.ours.replace("{layer}", layer), theirs=entry.theirs.replace("{layer}", layer))
            for entry in entries
        ]
        return Table([*numbered, *self.entries], self.further, self.renaming)

    def with_renaming(self, renaming: Renaming | None) -> "Table":
        """Return the table with names of files on top of its own."""
        return self if renaming is None else Table(self.entries, self.further, renaming)

    def find(self, name: str) -> tuple[Entry, str] | None:
        """Return (entry, the other format's name, in which `{expert}` may be left) of our tensor; None if unknown."""
        for pattern, entry in self._ours:
            if match := pattern.fullmatch(name):
                return entry, entry.theirs.replace("{layer}", match.groupdict().get("layer", ""))
        return None

    def place(self, name: str) -> Place | None:
        """Return the first place of the other format's tensor in the model; None if the name is unknown."""
        return next(self.places(name), None)

    def places(self, name: str) -> Iterator[Place]:
        """Yield the places of the other format's tensor in the model: several where our tensors share it."""
        for pattern, entry in self._theirs:
            if match := pattern.fullmatch(name):
                numbers = match.groupdict()
                expert = int(numbers["expert"]) if "expert" in numbers else None
                yield Place(entry.ours.replace("{layer}", numbers.get("layer", "")), entry, expert)
                if entry.column is None:
                    return


def _pattern(name: str) -> re.Pattern[str]:
    pattern = re.escape(name)
    for number in ("layer", "expert"):
        pattern = pattern.replace(re.escape(f"{{{number}}}"), f"(?P<{number}>0|[1-9][0-9]*)")
    return re.compile(pattern)


@dataclass(frozen=True, kw_only=True)
class HuggingFace:
    """Format of a family in Hugging Face's folders: its tensors, and its arguments in config.json."""

    architecture: str
    """Class of transformers, such as LlamaForCausalLM."""
    model_type: str
    """Name of the family in config.json."""
    other_types: tuple[str, ...] = ()
    """Other names of the same architecture, which are read and not written."""
    tensors: Table
    fields: Mapping[str, str]
    """Key of config.json for each argument of the model that has one of its own."""
    constants: Mapping[str, Any] = field(default_factory=dict)
    """Keys of config.json that have one value in this family. Another value is another model."""
    write_rest: Callable[[Any], ConfigJson] = lambda args: {}
    """Return the keys of config.json that follow from several arguments."""
    read_rest: Callable[[ConfigJson], dict[str, Any]] = lambda config: {}
    """Return the arguments that follow from those keys of a config.json in the form of transformers 5. Raises
    ValueError for what the model cannot compute, and KeyError for a key that is missing."""

    @property
    def model_types(self) -> tuple[str, ...]:
        return self.model_type, *self.other_types

    def to_config(self, args: Any) -> ConfigJson:
        """Return the config.json of a model.

        Args:
            args: dataclass of the model's shape.
        """
        known = {key: getattr(args, name) for name, key in self.fields.items()}
        names = {"architectures": [self.architecture], "model_type": self.model_type}
        return {**names, **known, **self.constants, **self.write_rest(args)}

    def to_args(self, config: ConfigJson) -> dict[str, Any]:
        """Return the arguments of the model that a config.json describes.

        Raises:
            ValueError: lists every reason for which the model cannot be computed by this family.
        """
        found = config.get("model_type")
        if found not in self.model_types:
            raise ValueError(f"model_type is {found!r}, not {self.model_type!r}")
        config, is_complete = complete(config, self.model_type)
        needed = [*self.fields.values(), *(() if is_complete else self.constants)]
        problems = [f"{key} is missing" for key in needed if key not in config]
        problems += [
            f"{key} = {config[key]!r} is not supported, only {value!r}"
            for key, value in self.constants.items()
            if key in config and config[key] != value
        ]
        rest: dict[str, Any] = {}
        try:
            rest = self.read_rest(config)
        except ValueError as error:
            problems.append(str(error))
        except KeyError as error:
            problems.append(f"{error.args[0]} is missing")
        if problems:
            raise ValueError("; ".join(problems) + ("" if is_complete else f". {install_hint('transformers')}"))
        return {name: config[key] for name, key in self.fields.items()} | rest


def complete(config: ConfigJson, model_type: str) -> tuple[ConfigJson, bool]:
    """Return a config.json in the form of transformers 5, and whether it has the defaults of the family's own class.

    Without transformers 5, a key that is missing stays so, as it does in models that transformers does not know.

    Raises:
        ValueError: transformers refuses it, or it has two descriptions of RoPE that differ.
    """
    try:
        from transformers import CONFIG_MAPPING, __version__

        is_known = int(__version__.partition(".")[0]) >= 5  # the classes of version 4 have other keys
    except ImportError:
        CONFIG_MAPPING, is_known = {}, False
    if not is_known:
        return {**config, "rope_parameters": _ropes(config)}, False
    if model_type not in CONFIG_MAPPING:
        return config, True
    own = {key: value for key, value in config.items() if key != "quantization_config"}
    try:
        filled = CONFIG_MAPPING[model_type].from_dict({**deepcopy(own), "model_type": model_type})
    except Exception as error:  # whatever the checks of the class raise
        raise ValueError(f"transformers refuses it: {' '.join(str(error).split())}") from error
    return filled.to_dict(), True


def _ropes(config: ConfigJson) -> dict[str, Any]:
    found, scaling = config.get("rope_parameters") or {}, config.get("rope_scaling") or {}
    if found and not scaling.items() <= found.get("full_attention", found).items():
        raise ValueError("rope_parameters and rope_scaling differ")
    return found or {**scaling, **{key: config[key] for key in ROPE_OF_VERSION_4 if key in config}}


ROPE_OF_VERSION_4 = ("rope_theta", "partial_rotary_factor")
"""Keys of config.json that transformers 5 has in rope_parameters."""


@dataclass(frozen=True, kw_only=True)
class Formats:
    """Formats in which the weights of a model family can come and go. None: that format is not known."""

    hugging_face: HuggingFace | None = None
    torchtitan: Table | None = None
    """Names in checkpoints of torchtitan 0.2."""
