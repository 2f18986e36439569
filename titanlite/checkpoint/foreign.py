"""Interface of weights in other formats, which training is handed a function to open."""

from abc import abstractmethod
from typing import Any, Protocol

from torch.distributed.checkpoint.metadata import Metadata

from titanlite.checkpoint.rank_reader import RankReader
from titanlite.models.registry import ModelSpec


class ForeignWeights(RankReader):
    """Reader of weights of another program, under the names and in the layout of a model of ours."""

    where: str
    """Place, for errors."""
    metadata: Metadata
    """Our names and shapes of all tensors that the other format names."""
    unknown: dict[str, str]
    """Description of each tensor that it does not name, by the name there."""
    kept: set[str]
    """Our tensors that the other format does not know: they keep their initial values."""

    @abstractmethod
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata: ...


class OpenWeights(Protocol):
    """Open weights of another program: `titanlite.tools.convert.weights.open_weights`.

    It returns None if the path may be a checkpoint of titanlite's, and raises UserError if the weights are of another
    model. `allow_changes` are globs of arguments of the model that may differ.
    """

    def __call__(self, path: str, spec: ModelSpec, allow_changes: list[str], /) -> ForeignWeights | None: ...
