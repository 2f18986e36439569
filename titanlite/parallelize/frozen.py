"""Build a frozen model beside the one that is trained: on the same mesh, with the same techniques, with its weights."""

import logging

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from titanlite.checkpoint.initial import read_model
from titanlite.models.base import Model, unique_parameters
from titanlite.models.frozen import FrozenModel
from titanlite.ops.kernels import Kernels
from titanlite.parallelize import parallelize
from titanlite.parallelize.materialize import allocate
from titanlite.schema import Config

logger = logging.getLogger(__name__)


def parallelize_frozen(
    frozen: FrozenModel, config: Config, *, mesh: DeviceMesh, kernels: Kernels, compile_backend: str = "inductor"
) -> Model:
    """Return the model on the meta device, with what the config asks for and a frozen model needs: compile and FSDP."""
    model = frozen.build(config.training.seq_len)
    degrees = {"fsdp_reshard_after_forward": "always", "expert_parallel_degree": 1}
    training = {
        "dtype": frozen.dtype, "mixed_precision_param": frozen.dtype, "enable_cpu_offload": frozen.is_on_host,
        "multi_token_weight": 0.0,
    }  # fmt: skip
    own = Config().model_copy(
        update={
            "compile": config.compile,
            "parallelism": config.parallelism.model_copy(update=degrees),
            "teacher": config.teacher,
            "training": config.training.model_copy(update=training),
        }
    )
    parallelize(model, own, mesh=mesh, kernels=kernels, compile_backend=compile_backend)
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
