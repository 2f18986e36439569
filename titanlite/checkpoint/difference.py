"""Names of a run and of a checkpoint: how they differ, and globs for them."""

import json
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from titanlite.runtime.ranks import gather
from titanlite.state import State, flat

STACK = re.compile(r" \[\d+, (?!1,)\d+, \d+\]")
"""Shape of a stack of matrices, in a line of a `Difference`. Kernels of convolutions have a dim of 1 in the middle."""


def names_of_ranks(state: State, group: dist.ProcessGroup | None) -> set[str]:
    """Return the names of the tensors of a state: of this rank, and of the ranks of a group that hold others."""
    names = {*flat(state)}
    return names if group is None else names.union(*gather(names, group))


def selected(name: str, patterns: Iterable[str]) -> bool:
    """Return whether a glob matches a name or a part before a dot: `model` selects model.head.weight."""
    return any(fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*") for pattern in patterns)


def to_globs(names: Iterable[str]) -> list[str]:
    """Return globs for names, with numbers of layers and experts as wildcards."""
    return [*dict.fromkeys(re.sub(r"(?<=\.)\d+(?=\.)", "*", name) for name in names)]


@dataclass(frozen=True)
class Difference:
    """Names that differ between this model and a checkpoint."""

    missing: dict[str, str]
    """Names of this model that the checkpoint lacks in this shape."""
    unexpected: dict[str, str]
    """Names of the checkpoint that this model lacks."""

    def without(self, *, missing: Iterable[str] = (), unexpected: Iterable[str] = ()) -> "Difference":
        return Difference(
            {name: text for name, text in self.missing.items() if not selected(name, missing)},
            {name: text for name, text in self.unexpected.items() if not selected(name, unexpected)},
        )

    def less(self, other: "Difference") -> "Difference":
        """Return the names of this difference that another one has not."""
        return Difference(
            {name: text for name, text in self.missing.items() if name not in other.missing},
            {name: text for name, text in self.unexpected.items() if name not in other.unexpected},
        )

    def offer(self) -> str:
        """Return the options that accept the difference, where something of use is left."""
        experts = (name for name, text in (self.missing | self.unexpected).items() if _is_expert(name, text))
        if self.missing and any(experts):
            return "Its experts are not those of this model, and the rest is of no use without them"
        globs = {"allow_missing": to_globs(self.missing), "allow_unexpected": to_globs(self.unexpected)}
        options = [f"  checkpoint.{option} = {json.dumps(of)}" for option, of in globs.items() if of]
        return "\n".join(["To load the rest all the same:", *options])

    def is_of_quantization(self) -> bool:
        """Return whether the only difference is that one side quantizes a moment and the other does not."""
        names = self.missing | self.unexpected
        quantized = {name.rpartition(".")[0] for name in names if name.endswith((".codes", ".scale"))}
        plain = {name for name in names if not name.endswith((".codes", ".scale"))}
        return bool(quantized) and quantized == plain

    def __str__(self) -> str:
        lines = [f"  missing     {text}" for text in self.missing.values()]
        lines += [f"  unexpected  {text}" for text in self.unexpected.values()]
        shown = lines[:20] + ([f"  and {len(lines) - 20} more"] if len(lines) > 20 else [])
        return "\n".join(shown)

    def __bool__(self) -> bool:
        return bool(self.missing or self.unexpected)


def difference(
    wanted: dict[str, Tensor], there: Metadata, patterns: Iterable[str], *, everywhere: Collection[str] = ()
) -> Difference:
    """Compare names and shapes.

    Args:
        patterns: globs of the names in the checkpoint to compare.
        everywhere: names of other ranks, which are not unexpected.
    """
    stored = {
        name: tuple(entry.size)
        for name, entry in there.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata) and selected(name, patterns)
    }
    missing = {
        name: f"{name} {[*tensor.shape]}" + (f", stored as {[*stored[name]]}" if name in stored else "")
        for name, tensor in wanted.items()
        if stored.get(name) != tuple(tensor.shape)
    }
    unexpected = {
        name: f"{name} {[*shape]}" for name, shape in stored.items() if name not in wanted and name not in everywhere
    }
    return Difference(missing, unexpected)


def _is_expert(name: str, text: str) -> bool:
    """Return whether a line of a `Difference` is of an expert, or of a stack of them."""
    return ".experts." in name or STACK.search(text) is not None
