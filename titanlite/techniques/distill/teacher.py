"""Teacher of distillation: a frozen model beside the one that is trained, sharded over the same mesh.

For each micro-batch, the teacher's final hidden states are computed before the student's forward pass, when few
activations exist. The loss then gathers the teacher's head once more, and computes both models' logits chunk by chunk.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from titanlite.batch import Batch
from titanlite.loss import LossFunction, LossTerm
from titanlite.models.base import Model, head_of
from titanlite.models.frozen import FrozenModel
from titanlite.observer import OnPhase, Phase
from titanlite.ops.attention import document_arguments
from titanlite.ops.kernels import Kernels
from titanlite.schema import Distill
from titanlite.techniques.distill.divergence import distilled_loss, head_divergence


@dataclass(frozen=True)
class HiddenStates:
    """`TeacherOutput` of a model: its final hidden states for one micro-batch."""

    hidden_BLD: Tensor
    """Input of the teacher's projection to the vocabulary."""
    teacher: "Teacher"

    @contextmanager
    def divergence(self, distill: Distill, kernels: Kernels) -> Iterator[LossTerm]:
        with self.teacher.head_weight() as weight_VD:
            yield head_divergence(self.hidden_BLD.flatten(0, 1), weight_VD, distill, kernels)


class Teacher:
    """Targets that a frozen model computes.

    Args:
        fingerprint: of the model and its weights.
    """

    title = "teacher.path: the teacher"

    def __init__(self, frozen: FrozenModel, distill: Distill, *, fingerprint: str) -> None:
        self.frozen = frozen
        self.model: Model | None = None
        """The teacher with its weights, after `use`."""
        self.settings: Mapping[str, str] = {"teacher": fingerprint}
        self.token_loss: LossFunction = partial(distilled_loss, distill=distill)
        self._weight: str | Tensor = ""
        """Name of the projection's weight in the head, or a weight that the head computes."""

    def use(self, model: Model) -> None:
        self.model, self._head = model, head_of(model)

    def __call__(self, batch: Batch, on_phase: OnPhase) -> dict[str, Any]:
        on_phase(Phase.TEACHER)
        return {"teacher": self.hidden_states(batch)}

    @torch.no_grad()
    def hidden_states(self, batch: Batch) -> HiddenStates:
        """Return the teacher's final hidden states. Labels and gradients play no part."""
        assert self.model
        hidden_BLD = self.model(batch["tokens"], loss=self._keep_weight, **document_arguments(batch))
        return HiddenStates(hidden_BLD, self)

    def _keep_weight(self, hidden_BLD: Tensor, weight_VD: Tensor) -> Tensor:
        names = [name for name, parameter in self._head.named_parameters() if parameter is weight_VD]
        self._weight = names[0] if names else weight_VD
        return hidden_BLD

    @contextmanager
    def head_weight(self) -> Iterator[Tensor]:
        """Gather the projection's weight [V, D] for the time of the context."""
        head, weight = self._head, self._weight
        if isinstance(head, FSDPModule):
            head.unshard()
        yield head.get_parameter(weight).detach() if isinstance(weight, str) else weight
        if isinstance(head, FSDPModule):
            head.reshard()
