"""How transformers renames, splits and joins the tensors of files: by the conversion mapping of transformers 5.

Files of many models have other names than the model, such as one tensor for each expert in place of a stack. Here the
mapping is applied tensor by tensor, so that no more is in memory than what one tensor is made of.
"""

# ruff: noqa: SLF001 (transformers has no other name for the tensors that it passes over)

import re
from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter

from titanlite.models.formats import Made
from titanlite.runtime.errors import UserError


class TransformersRenaming:
    """The renaming of a model of transformers, which may be on the meta device."""

    def __init__(self, whole: PreTrainedModel) -> None:
        self._whole = whole
        self._there: dict[str, Tensor] = whole.state_dict()
        self._ignored: Iterable[str] = whole._keys_to_ignore_on_load_unexpected or ()

    def read(self, stored: Mapping[str, Tensor]) -> list[Made]:
        """Return what becomes of the tensors of files. Those that the model does not know keep their names, and those
        that transformers passes over are left out, such as layers that predict further tokens.

        Args:
            stored: tensors of the files by name, on the meta device.

        Raises:
            UserError: tensors cannot be joined.
        """
        changes: list[Any] = get_model_conversion_mapping(self._whole)
        converters = [change for change in changes if isinstance(change, WeightConverter)]
        renamings = [change for change in changes if not isinstance(change, WeightConverter)]
        found = _Groups(self._whole, stored, converters)
        for name in sorted(stored, key=_natural):
            renamed = self._with_prefix(_renamed(name, renamings))
            renamed, pattern = _converted(renamed, converters)
            renamed = self._with_prefix(renamed)
            if renamed not in self._there and (own := self._with_prefix(name)) in self._there:
                renamed, pattern = own, None
            if renamed in self._there:
                found.add(renamed, name, pattern)
            elif not any(re.search(ignored, renamed) for ignored in self._ignored):
                found.add(name, name, None)
        return found.made(lambda name: name)

    def write(self, tensors: Mapping[str, Tensor]) -> list[Made]:
        """Return what the model's tensors become in files, as transformers' own `save_pretrained` writes them.

        What the mapping cannot undo keeps its names, which transformers reads, too.

        Args:
            tensors: tensors of the model by name, on the meta device.

        Raises:
            UserError: the mapping reads back neither of them.
        """
        kept = [Made(((name,),), {name: tensor}, None) for name, tensor in tensors.items()]
        try:
            found = self._undone(tensors)
            if self._reads(found, tensors):
                return found
        except Exception:  # whatever an operation that cannot be undone raises
            found = kept
        if self._reads(kept, tensors):
            return kept
        raise UserError(f"transformers renames tensors of {type(self._whole).__name__} in a way that cannot be undone")

    def _undone(self, tensors: Mapping[str, Tensor]) -> list[Made]:
        changes: list[Any] = get_model_conversion_mapping(self._whole, add_legacy=False)
        # What adds or removes a prefix is for files with another one, which ours are not.
        undone = [change.reverse_transform() for change in changes[::-1] if type(change).__name__ != "PrefixChange"]
        converters = [change for change in undone if isinstance(change, WeightConverter)]
        renamings = [change for change in undone if not isinstance(change, WeightConverter)]
        found = _Groups(self._whole, tensors, converters)
        for name in sorted(tensors, key=_natural):
            converted, pattern = _converted(name, converters)
            found.add(converted if pattern else _renamed(name, renamings), name, pattern)
        return found.made(lambda name: _renamed(name, renamings))

    def _reads(self, files: list[Made], tensors: Mapping[str, Tensor]) -> bool:
        """Return whether transformers would read these tensors from files."""
        read = self.read({name: tensor for made in files for name, tensor in made.tensors.items()})
        shapes = {name: tensor.shape for made in read for name, tensor in made.tensors.items()}
        return shapes == {name: tensor.shape for name, tensor in tensors.items()}

    def _with_prefix(self, name: str) -> str:
        """Return a name with the prefix of the decoder, or without it, where the model has it so."""
        prefix = f"{self._whole.base_model_prefix}."
        if name not in self._there and name.removeprefix(prefix) in self._there:
            return name.removeprefix(prefix)
        return prefix + name if name not in self._there and prefix + name in self._there else name


class _Groups:
    """Tensors that make one tensor, or several, together."""

    def __init__(self, whole: PreTrainedModel, tensors: Mapping[str, Tensor], converters: list[Any]) -> None:
        self._whole = whole
        self._tensors = tensors
        self._converters = {pattern: converter for converter in converters for pattern in converter.source_patterns}
        self._found: dict[str, list[tuple[str, str | None]]] = {}

    def add(self, first: str, source: str, pattern: str | None) -> None:
        """Add a tensor.

        Args:
            first: the first that it makes.
            pattern: that of the converter which makes it; None if it is only renamed.

        Raises:
            UserError: another tensor is the same.
        """
        group = self._found.setdefault(first, [])
        if group and not (pattern and group[0][1]):
            raise UserError(f"{group[0][0]} and {source} are both {first}")
        group.append((source, pattern))

    def made(self, rename: Callable[[str], str]) -> list[Made]:
        return [self._made(first, group, rename) for first, group in self._found.items()]

    def _made(self, first: str, group: list[tuple[str, str | None]], rename: Callable[[str], str]) -> Made:
        source, pattern = group[0]
        if pattern is None:
            return Made(((source,),), {first: self._tensors[source]}, None)
        kinds = {kind: tuple(name for name, own in group if own == kind) for _, kind in group}

        def convert(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
            converter = deepcopy(self._converters[pattern])
            for source, own in group:
                if source in values:
                    converter.add_tensor(first, source, own, values[source])
            made = converter.convert(first, model=self._whole, config=self._whole.config)
            made = made[0] if isinstance(made, tuple) else made  # transformers 5.0 returns errors, too
            return {rename(name): value[0] if isinstance(value, list) else value for name, value in made.items()}

        try:
            made = convert({source: self._tensors[source] for source, _ in group})
            return Made(tuple(kinds.values()), made, convert)
        except Exception as error:  # whatever the operations raise
            reason = f"{type(error).__name__}: {' '.join(str(error).split())}"[:200]
            raise UserError(f"transformers' conversion of {source} fails: {reason}") from error


def _renamed(name: str, renamings: list[Any]) -> str:
    for renaming in renamings:
        name, _ = renaming.rename_source_key(name)
    return name


def _converted(name: str, converters: list[Any]) -> tuple[str, str | None]:
    """Return the name of the first tensor that a converter makes, and its pattern; the name itself without one."""
    for converter in converters:
        renamed, pattern = converter.rename_source_key(name)
        if pattern is not None:
            return renamed, pattern
    return name, None


def _natural(name: str) -> list[tuple[int, int, str]]:
    """Return a key that sorts numbers in names as numbers, as transformers does: experts are joined in that order."""
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in re.split(r"(\d+)|\.", name) if part]
