"""Interface of weights in other formats, which training is handed a function to open."""

from abc import abstractmethod
from typing import Any, Protocol

from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan
from torch.distributed.checkpoint.storage import StorageReader

from titanlite.models.registry import ModelSpec


class ForeignWeights(StorageReader):
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

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None: ...

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def reset(self, checkpoint_id: Any = None) -> None: ...

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True


class OpenWeights(Protocol):
    """Open weights of another program: `titanlite.convert.weights.open_weights`.

    It returns None if the path may be a checkpoint of titanlite's, and raises UserError if the weights are of another
    model. `allow_changes` are globs of arguments of the model that may differ.
    """

    def __call__(self, path: str, spec: ModelSpec, allow_changes: list[str], /) -> ForeignWeights | None: ...
