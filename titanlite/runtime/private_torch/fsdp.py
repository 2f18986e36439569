"""What FSDP2 does not offer by public names.

- `gather_local_parts`: modules that tensor parallelism splits compute with plain tensors. FSDP gathers DTensors.
- `gather_in_place`: at shard degree 1, where the weights have the compute dtype, FSDP would copy them. What prevents it
  is its public interface for tensors that gather themselves; which tensors that are is not public.
- `gather_asynchronously`: on CPUs, all-gathers beside compute. FSDP has the setting, and no public name for it.
- `before_gathering`: parameters that another thread updates must be awaited where FSDP reads them, ahead of use or not.
- `release_all_reduce_input`: an optimizer within backward would wait for all gradients that FSDP holds.
- `unit_of`, `sharded_parameters`, `mixed_precision`: which parameters are gathered together, and with which dtypes.
- `observe_fsdp`: only for the plan, which counts the memory and the collectives of each unit.
"""

import weakref
from collections.abc import Callable, Hashable, Iterable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from titanlite.runtime.private_torch.tensors import local_tensor


def _param_group(module: FSDPModule) -> Any:
    """Return FSDP's record of the parameters that a module gathers together; None if it has none of its own."""
    return module._get_fsdp_state()._fsdp_param_group


def unit_of(module: FSDPModule) -> Hashable | None:
    """Return the identity of the FSDP unit that a module's parameters belong to; None if it has none of its own."""
    return None if (group := _param_group(module)) is None else id(group)


def mixed_precision(module: FSDPModule) -> MixedPrecisionPolicy | None:
    """Return the policy of an FSDP unit; None if the module has no parameters of its own."""
    return None if (group := _param_group(module)) is None else group.fsdp_params[0].mp_policy


def release_all_reduce_input(module: FSDPModule) -> None:
    """Let go of the gradients that an FSDP unit reduced last over replicas.

    FSDP holds them until the end of backward, so that their memory is not used again while the all-reduce runs.
    Recording the stream does the same.
    """
    param_group = _param_group(module)
    if (state := param_group._all_reduce_state) is not None:
        if state.all_reduce_input.is_cuda:
            state.all_reduce_input.record_stream(torch.cuda.current_stream())
        param_group._all_reduce_state = None


def sharded_parameters(module: FSDPModule) -> list[nn.Parameter]:
    """Return the sharded parameters of an FSDP unit, with the gradients and hooks that the optimizer sees."""
    unit = _param_group(module)
    return [parameter.sharded_param for parameter in unit.fsdp_params] if unit else []


def before_gathering(module: FSDPModule, call: Callable[[], None]) -> None:
    """Call a function whenever the parameters of an FSDP unit are about to be gathered, before it reads them."""
    unit = _param_group(module)
    unshard = unit.unshard

    def gather(*args: Any, **options: Any) -> None:
        call()
        unshard(*args, **options)

    unit.unshard = gather


def gather_asynchronously(module: FSDPModule) -> None:
    """Let FSDP's all-gathers of a unit run beside compute, as on a GPU."""
    module._set_unshard_async_op(True)


def gather_in_place(model: nn.Module) -> None:
    """Let gathered parameters share the memory of the sharded ones where FSDP would copy them: at shard degree 1, where
    the sharded parameters have the compute dtype. Nothing is copied, and nothing freed.

    FSDP's interface for tensors that gather themselves does it: they return nothing to gather, and are the result. Call
    it when parameters have their memory, and again when they have another.
    """
    units = [_param_group(module) for module in model.modules() if isinstance(module, FSDPModule)]
    for parameter in [parameter for unit in units if unit for parameter in unit.fsdp_params]:
        local = parameter.sharded_param._local_tensor
        is_changed = parameter.mp_policy.param_dtype is not None or parameter.offload_to_cpu
        if parameter.mesh_info.shard_mesh_size == 1 and not is_changed and not hasattr(local, "fsdp_pre_all_gather"):
            local.fsdp_pre_all_gather = lambda mesh: ((torch.empty(0),), None)
            local.fsdp_post_all_gather = partial(_the_tensor_itself, weakref.ref(local))


def _the_tensor_itself(local: weakref.ReferenceType[Any], *gathered: Any, out: Tensor | None = None) -> Any:
    return (local(), ()) if out is None else None


def gather_local_parts(
    module: FSDPModule, *, gradient_hooks: Mapping[tuple[nn.Module, str], Callable[[Tensor], Tensor]]
) -> None:
    """Let a unit's gathered parameters be plain tensors where they were DTensors before `fully_shard`: this rank's part
    over the axes that FSDP does not shard. Sharded parameters and gradients stay DTensors on all axes.

    Args:
        gradient_hooks: functions of the gradients of gathered parameters, by their module and name in it.
    """
    unit = _param_group(module)
    for parameter in unit.fsdp_params if unit else ():
        assert isinstance(parameter, FSDPParam)
        parameter.is_dtensor = False
        parameter._unsharded_dtensor_spec = None
        hook = gradient_hooks.get((parameter._module_info.module, parameter._module_info.param_name))
        if hook is not None and not isinstance(parameter, _HookedParam):  # modules of one unit have one record
            parameter.__class__ = type(_HookedParam.__name__, (_HookedParam, type(parameter)), {})
            assert isinstance(parameter, _HookedParam)
            parameter.gradient_hook = hook


class _HookedParam(FSDPParam):
    """FSDPParam whose gathered parameter has a hook of its gradient."""

    gradient_hook: Callable[[Tensor], Tensor]

    def init_unsharded_param(self) -> None:
        is_new = not hasattr(self, "_unsharded_param")
        super().init_unsharded_param()
        if is_new and self._unsharded_param.requires_grad:
            self._unsharded_param.register_hook(self.gradient_hook)


class FSDPObserver(Protocol):
    """Hooks of `observe_fsdp`."""

    def unit(self, name: str) -> None:
        """An FSDP unit begins to compute or to reduce: `backward NAME` or `reduce NAME`."""

    def collective(self, category: str, unit: str) -> AbstractContextManager[None]:
        """An FSDP unit communicates within the context, and allocates and frees memory for it.

        Args:
            category: all-gather or reduce-scatter.
            unit: name of the FSDP unit's first module.
        """
        ...

    def label(self, tensors: Iterable[Tensor], category: str) -> None:
        """The memory of tensors has a category from here on: gradients or reduce-scatter."""


def observe_fsdp(model: nn.Module, observer: FSDPObserver, *, prefix: str = "") -> None:
    """Call an observer's hooks from inside FSDP, for every FSDP unit of a model. The plan does; a run does not.

    NAME is that of the unit's first module. A unit inside another one has that one's name, and no beginnings.

    Args:
        prefix: of each name, where a step has several models.
    """
    outer = {model: ""}
    for name, module in model.named_modules():
        if name and isinstance(module, FSDPModule):
            outer |= dict.fromkeys(set(model.get_submodule(name).modules()) - outer.keys(), name)
    names = {module: name for name, module in model.named_modules()}
    for module in model.modules():
        unit = _param_group(module) if isinstance(module, FSDPModule) else None
        if unit is not None and unit.modules[0] is module:  # a tied embedding and head have one unit
            assert type(unit) is FSDPParamGroup
            unit.__class__ = _ObservedUnit
            assert isinstance(unit, _ObservedUnit)
            unit.observer, unit.name = observer, prefix + outer[module]
            unit.is_inside = names[module] != outer[module]


class _ObservedUnit(FSDPParamGroup):
    """FSDPParamGroup that calls an observer's hooks."""

    observer: FSDPObserver
    name: str
    is_inside: bool

    def unshard(self, async_op: bool = False) -> None:
        with self.observer.collective("all-gather", self.name):
            super().unshard(async_op)

    def wait_for_unshard(self) -> None:
        with self.observer.collective("all-gather", ""):
            super().wait_for_unshard()

    def reshard(self) -> None:
        with self.observer.collective("all-gather", ""):
            super().reshard()

    def pre_backward(self, default_prefetch: bool, *unused: Any) -> None:
        if not self.is_inside:
            self.observer.unit(f"backward {self.name}")
        super().pre_backward(default_prefetch, *unused)

    def post_backward(self, *unused: Any) -> None:
        if not self.is_inside:
            self.observer.unit(f"reduce {self.name}")
        unreduced = (
            _unsharded_gradient(parameter) for parameter in self.fsdp_params
        )  # not a list: it would keep them in memory
        self.observer.label((gradient for gradient in unreduced if gradient is not None), "reduce-scatter")
        with self.observer.collective("reduce-scatter", self.name):
            super().post_backward(*unused)
        sharded = (parameter.sharded_param.grad for parameter in self.fsdp_params)
        self.observer.label((gradient for gradient in sharded if gradient is not None), "gradients")


def _unsharded_gradient(parameter: FSDPParam) -> Tensor | None:
    """Return the gradient of a gathered parameter before it is reduced."""
    if not hasattr(parameter, "_unsharded_param"):
        return None
    accumulated = parameter.unsharded_accumulated_grad  # since torch 2.15 the gradient itself
    gradient = parameter.unsharded_param.grad if accumulated is None else accumulated
    return None if gradient is None else local_tensor(gradient)
