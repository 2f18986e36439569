"""Teacher of distillation: a frozen model beside the one that is trained, sharded over the same mesh.

For each micro-batch, the teacher's final hidden states are computed before the student's forward pass, when few
activations exist. The loss then gathers the teacher's head once more, and computes both models' logits chunk by chunk.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from titanlite.batch import Batch
from titanlite.checkpoint.load import read_model
from titanlite.config.distill_schema import Distill
from titanlite.config.distill_schema import Teacher as TeacherConfig
from titanlite.config.schema import ActivationCheckpoint, Compile, Float8, Freeze, Parallelism, Training
from titanlite.distill import HeadDivergence
from titanlite.kernels import Kernels
from titanlite.models.base import Model, head_of, unique_parameters
from titanlite.parallelize import parallelize
from titanlite.parallelize.materialize import allocate
from titanlite.parallelize.mesh import world_group
from titanlite.runtime.ranks import check_same_everywhere
from titanlite.step import document_arguments
from titanlite.teacher_source import TeacherSource, fingerprint, forward_flops, teacher_model

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class HiddenStates:
    """`TeacherOutput` of a model: its final hidden states for one micro-batch."""

    hidden_BLD: Tensor
    """Input of the teacher's projection to the vocabulary."""
    teacher: "Teacher"

    @contextmanager
    def divergence(self, distill: Distill, kernels: Kernels) -> Iterator[HeadDivergence]:
        with self.teacher.head_weight() as weight_VD:
            yield HeadDivergence(self.hidden_BLD.flatten(0, 1), weight_VD, distill, kernels)


class Teacher:
    """Frozen model.

    Args:
        keeps_gathered: whether gathered parameters stay on every process.
        flops_per_token: of the forward pass, full and causal; see `Model.flops_per_token`.
    """

    def __init__(self, model: Model, *, keeps_gathered: bool, flops_per_token: tuple[float, float]) -> None:
        self.model = model
        self.flops_per_token = flops_per_token
        self._keeps_gathered = keeps_gathered
        self._head = head_of(model)
        self._weight: str | Tensor = ""
        """Name of the projection's weight in the head, or a weight that the head computes."""

    @torch.no_grad()
    def __call__(self, batch: Batch) -> HiddenStates:
        """Return the teacher's final hidden states. Labels and gradients play no part."""
        hidden_BLD = self.model(batch["tokens"], loss=self._keep_weight, **document_arguments(batch))
        return HiddenStates(hidden_BLD, self)

    def _keep_weight(self, hidden_BLD: Tensor, weight_VD: Tensor) -> Tensor:
        names = [name for name, parameter in self._head.named_parameters() if parameter is weight_VD]
        self._weight = names[0] if names else weight_VD
        return hidden_BLD

    @contextmanager
    def head_weight(self) -> Iterator[Tensor]:
        """Gather the projection's weight [V, D] for the time of the context."""
        assert isinstance(self._head, FSDPModule)
        self._head.unshard()
        weight = self._weight
        yield self._head.get_parameter(weight).detach() if isinstance(weight, str) else weight
        if not self._keeps_gathered:
            self._head.reshard()


def teacher_training(config: TeacherConfig, training: Training) -> Training:
    """Return `[training]` with the dtype and the place of the teacher's parameters."""
    dtype = config.dtype or training.mixed_precision_param
    offload = config.enable_cpu_offload
    return training.model_copy(update={"dtype": dtype, "mixed_precision_param": dtype, "enable_cpu_offload": offload})


def parallelize_teacher(
    model: Model,
    config: TeacherConfig,
    *,
    mesh: DeviceMesh,
    kernels: Kernels,
    parallelism: Parallelism,
    training: Training,
    compile: Compile,
    **options: Any,
) -> None:
    """Apply what the student's config asks for and the teacher needs, in place: compile and FSDP.

    Args:
        options: further ones of `parallelize`.
    """
    reshard = config.fsdp_reshard_after_forward
    parallelize(
        model,
        mesh=mesh,
        kernels=kernels,
        parallelism=parallelism.model_copy(update={"fsdp_reshard_after_forward": reshard, "expert_parallel_degree": 1}),
        training=teacher_training(config, training),
        activation_checkpoint=ActivationCheckpoint(),
        compile=compile,
        float8=Float8(),
        freeze=Freeze(),
        has_other_model=True,
        **options,
    )


def build_teacher(
    config: TeacherConfig,
    source: TeacherSource,
    *,
    mesh: DeviceMesh,
    device: torch.device,
    kernels: Kernels,
    parallelism: Parallelism,
    training: Training,
    compile: Compile,
) -> Teacher:
    """Build the teacher on every rank, and read each rank's part of its weights.

    Raises:
        UserError: the weights are of another model or damaged, or not the same on all ranks.
    """
    check_same_everywhere(fingerprint(source), "teacher.path: the teacher", group=world_group(mesh))
    model = teacher_model(source.spec, seq_len=training.seq_len)
    full, causal = (forward_flops(source.spec, training.seq_len, causal=causal) for causal in (False, True))
    count = sum(parameter.numel() for _, parameter in unique_parameters(model))
    parallelize_teacher(
        model, config, mesh=mesh, kernels=kernels, parallelism=parallelism, training=training, compile=compile
    )
    allocate(model, torch.device("cpu") if config.enable_cpu_offload else device, device)
    group = dist.new_group(backend="gloo", group_desc="teacher")
    assert isinstance(group, dist.ProcessGroup)
    read_model(model, source.reader, where=source.where, key="teacher.path", group=group)
    dist.destroy_process_group(group)
    dtype = teacher_training(config, training).dtype
    logger.info(f"teacher from {source.where}: {count:,} parameters in {dtype}, frozen")
    keeps_gathered = config.fsdp_reshard_after_forward == "never"
    return Teacher(model.eval(), keeps_gathered=keeps_gathered, flops_per_token=(full, causal))
