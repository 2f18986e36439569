"""Build a frozen model beside the one that is trained: on the same mesh, with the same techniques, with its weights."""

import logging
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from titanlite.checkpoint.load import read_model
from titanlite.models.base import Model, unique_parameters
from titanlite.models.frozen import FrozenModel
from titanlite.ops.kernels import Kernels
from titanlite.parallelize import parallelize
from titanlite.parallelize.materialize import allocate
from titanlite.schema import ActivationCheckpoint, Config

logger = logging.getLogger(__name__)


def parallelize_frozen(
    frozen: FrozenModel, config: Config, *, mesh: DeviceMesh, kernels: Kernels, **options: Any
) -> Model:
    """Return the model on the meta device, with what the config asks for and a frozen model needs: compile and FSDP.

    Args:
        options: further ones of `parallelize`.
    """
    model = frozen.build(config.training.seq_len)
    degrees = {"fsdp_reshard_after_forward": "always", "expert_parallel_degree": 1}
    dtypes = {"dtype": frozen.dtype, "mixed_precision_param": frozen.dtype}
    parallelize(
        model,
        mesh=mesh,
        kernels=kernels,
        parallelism=config.parallelism.model_copy(update=degrees),
        training=config.training.model_copy(update=dtypes),
        activation_checkpoint=ActivationCheckpoint(),
        compile=config.compile,
        has_other_sizes=True,
        on_host=frozen.is_on_host,
        **options,
    )
    return model.eval()


def build_frozen(
    frozen: FrozenModel, config: Config, *, mesh: DeviceMesh, kernels: Kernels, device: torch.device
) -> Model:
    """Build the model on every rank, and read each rank's part of its weights.

    Raises:
        UserError: the weights are of another model or damaged.
    """
    assert frozen.weights
    model = parallelize_frozen(frozen, config, mesh=mesh, kernels=kernels)
    count = sum(parameter.numel() for _, parameter in unique_parameters(model))
    allocate(model, torch.device("cpu") if frozen.is_on_host else device, device)
    group = dist.new_group(backend="gloo", group_desc=frozen.section)
    assert isinstance(group, dist.ProcessGroup)
    where = frozen.weights.where
    read_model(model, frozen.weights.reader, where=where, key=f"{frozen.section}.path", group=group)
    dist.destroy_process_group(group)
    logger.info(f"{frozen.section} from {where}: {count:,} parameters in {frozen.dtype}, frozen")
    return model
