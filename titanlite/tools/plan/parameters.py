"""Account of what `parallelize` and the optimizer did with each parameter, read from the model that they changed.

`inspect_ranks` makes that model on fake ranks, as a plan does. `layouts_of` reads any model, a training one too.
"""

from collections.abc import Hashable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from titanlite.mesh import axis_sizes, root_axes
from titanlite.models.base import Model, unique_parameters
from titanlite.optim.groups import ParameterGroup, parameter_groups
from titanlite.optim.registry import accepts, find_optimizer_cls
from titanlite.optim.state_size import local_bytes, local_state_bytes
from titanlite.parallelize.activation_checkpoint import recompute_policies
from titanlite.parallelize.materialize import allocate
from titanlite.runtime.private_torch.compiler import is_compiled
from titanlite.runtime.private_torch.fsdp import mixed_precision, sharded_parameters, unit_of
from titanlite.runtime.private_torch.tensors import local_tensor
from titanlite.runtime.private_torch.tracing import FakeTensorMode
from titanlite.schema import Config
from titanlite.techniques import every_technique, keeps_gradients
from titanlite.tools.plan.estimate import model_of
from titanlite.tools.plan.gpu_kernels import GpuKernels
from titanlite.tools.plan.trace import fake_optimizer, fake_ranks, fill_states, parallelized

ROOT = "(root)"
"""Name of the FSDP unit of parameters that are in no other one."""


@dataclass(frozen=True, kw_only=True)
class ParameterLayout:
    """A parameter on one rank. A shared parameter is one, with the name of its first place."""

    name: str
    unit: str
    """Modules that FSDP gathers together with this parameter."""
    shape: list[int]
    local_shape: list[int]
    placements: dict[str, str]
    """Placement on each mesh axis: S(d) is sharded along dim d, R is replicated."""
    dtype: str
    """Dtype of the shard, which the optimizer updates."""
    compute_dtype: str
    """Dtype of the gathered parameter. Some layers cast further."""
    reduce_dtype: str
    """Dtype of its gradient while that is reduced over ranks."""
    recompute: str | None
    """Recompute policy of its block; None outside of blocks."""
    compiled: bool
    frozen: bool
    optimizer: str | None
    group: str | None
    lr: float | None
    """Peak learning rate."""
    weight_decay: float | None
    """None: it is frozen, or its optimizer has no weight decay."""
    parameter_bytes: int
    gradient_bytes: int
    """0 if the gradient lives within backward only."""
    optimizer_bytes: int
    facts: dict[str, Any]
    """What techniques report of it: their `parameter_facts`."""

    @property
    def bytes(self) -> int:
        """Bytes of the rank for the parameter, its gradient and its optimizer state."""
        return self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes

    def record(self) -> dict[str, Any]:
        """Return JSON values, with the facts as further keys."""
        record = asdict(self)
        return record | record.pop("facts")


@dataclass(frozen=True, kw_only=True)
class RankLayout:
    """All parameters on one rank."""

    name: str
    """Name of the run."""
    rank: int
    mesh: dict[str, int]
    """Ranks along each axis."""
    parameters: list[ParameterLayout]


def inspect_ranks(config: Config, *, world_size: int, rank: int = 0) -> RankLayout:
    """Apply every technique of the config to its model on fake ranks, and give the optimizer its states.

    Raises:
        UserError: the config does not fit the model, or the optimizer needs values.
    """
    model_cls, args = model_of(config)
    kernels = GpuKernels(compiles=config.compile.enable, attention=config.training.attention_backend)
    with fake_ranks(world_size, rank=rank):
        model, mesh = parallelized(config, model_cls, args, world_size=world_size, kernels=kernels)
        with FakeTensorMode(allow_non_fake_inputs=True):
            allocate(model, torch.device("cpu"), torch.device("cpu"))
            optimizer = fake_optimizer(config, model, kernels)
            with torch.compiler.set_stance("force_eager"):
                fill_states(optimizer, one_by_one=not keeps_gradients(config))
            layouts = layouts_of(model, optimizer, config, mesh)
        return RankLayout(name=str(config.job.name), rank=rank, mesh=axis_sizes(mesh), parameters=layouts)


def layouts_of(
    model: Model, optimizer: torch.optim.Optimizer, config: Config, mesh: DeviceMesh
) -> list[ParameterLayout]:
    """Return the layout of every parameter of a parallelized model, in the order of the model.

    Args:
        optimizer: its states count, so it must have made a step.
    """
    blocks = _recompute_by_parameter(model, config)
    compiled = {it for module in model.modules() if is_compiled(module) for it in module.parameters()}
    techniques = every_technique()
    facts = [it.parameter_facts(model, config) for it in techniques]
    groups = {it: group for group in parameter_groups(config.optimizer, model)
              for it in group.parameters.values()}  # fmt: skip
    units = {it: (unit, policy) for unit, policy, parameters in _units(model) for it in parameters}
    found = []
    for name, parameter in unique_parameters(model):
        local = local_tensor(parameter)
        unit, policy = units.get(parameter, (ROOT, None))
        compute = (policy and policy.param_dtype) or parameter.dtype
        size = local_bytes(parameter)
        keeps_gradient = parameter.requires_grad and keeps_gradients(config)
        found.append(
            ParameterLayout(
                name=name,
                unit=unit,
                shape=[*parameter.shape],
                local_shape=[*local.shape],
                placements=_placements(parameter, mesh),
                dtype=_name(parameter.dtype),
                compute_dtype=_name(compute),
                reduce_dtype=_name((policy and policy.reduce_dtype) or compute),
                recompute=blocks.get(parameter),
                compiled=parameter in compiled,
                frozen=not parameter.requires_grad,
                **_update_of(groups.get(parameter)),
                parameter_bytes=size,
                gradient_bytes=size if keeps_gradient else 0,
                optimizer_bytes=local_state_bytes(optimizer.state.get(parameter, {})),
                facts={
                    key: value
                    for it, found in zip(techniques, facts, strict=True)
                    for key, value in (it.facts | found.get(parameter, {})).items()
                },
            )
        )
    return found


def _recompute_by_parameter(model: Model, config: Config) -> dict[nn.Parameter, str]:
    policies = recompute_policies(config.activation_checkpoint, len(model.layers))
    return {it: policy for block, policy in zip(model.layers, policies, strict=True) for it in block.parameters()}


def _units(model: Model) -> Iterator[tuple[str, MixedPrecisionPolicy | None, list[nn.Parameter]]]:
    """Yield (name, mixed-precision policy, parameters) of each FSDP unit. Modules of one unit share its name."""
    names: dict[Hashable, list[str]] = {}
    units: dict[Hashable, FSDPModule] = {}
    for name, module in model.named_modules():
        if isinstance(module, FSDPModule) and (unit := unit_of(module)) is not None:
            names.setdefault(unit, []).append(name or ROOT)
            units.setdefault(unit, module)
    for key, module in units.items():
        yield " + ".join(names[key]), mixed_precision(module), sharded_parameters(module)


def _placements(parameter: Tensor, mesh: DeviceMesh) -> dict[str, str]:
    """Return the placement on each axis of the whole mesh. A parameter knows only the axes that it is sharded over."""
    placements = {axis: list[str]() for axis in axis_sizes(mesh)}
    if isinstance(parameter, DTensor):
        axes = parameter.device_mesh.mesh_dim_names or ()
        for axis, placement in zip(axes, parameter.placements, strict=True):
            for root in placements.keys() & root_axes(axis):
                placements[root].append(str(placement))
    return {axis: " ".join(found) or "R" for axis, found in placements.items()}


def _update_of(group: ParameterGroup | None) -> dict[str, Any]:
    if group is None:
        return dict.fromkeys(("optimizer", "group", "lr", "weight_decay"))
    decays = accepts(find_optimizer_cls(group.name), "weight_decay")
    return {
        "optimizer": group.name,
        "group": group.label,
        "lr": group.lr,
        "weight_decay": group.weight_decay if decays else None,
    }


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
