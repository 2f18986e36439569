"""Tracing without memory: fake tensors, fake process groups, and what a dispatch mode sees of operators.

Only tools import this file.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses import fake_tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

FakeTensor = fake_tensor.FakeTensor
"""Tensor on a device that has shape and dtype, but no memory."""

FakeTensorMode = fake_tensor.FakeTensorMode
"""Mode in which new tensors are fake."""


def without_fake_tensors() -> AbstractContextManager[Any]:
    """Make new tensors real within the context, inside a FakeTensorMode."""
    return fake_tensor.unset_fake_temporarily()


ValueNeeded = fake_tensor.DataDependentOutputException, fake_tensor.DynamicOutputShapeException
"""Errors of an operator whose result, or the shape of whose result, depends on values. Fake tensors have none. The
attribute `func` is the operator."""


@contextmanager
def propagate_shardings_without_modes() -> Iterator[None]:
    """Let DTensor try operators at their global shapes outside the active dispatch modes, within the context."""
    propagator = DTensor._op_dispatcher.sharding_propagator
    propagator.__class__ = _PropagatorWithoutModes
    try:
        yield
    finally:
        propagator.__class__ = ShardingPropagator


class _PropagatorWithoutModes(ShardingPropagator):
    def _propagate_tensor_meta_non_cached(self, op_schema: Any) -> Any:
        with _disable_current_modes():
            return super()._propagate_tensor_meta_non_cached(op_schema)


def is_mutating(operator: Any) -> bool:
    """Return whether an operator changes one of its arguments in place."""
    return operator._schema.is_mutable


def changed_arguments(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Return the arguments that an operator changes in place: tensors, or lists of tensors.

    Fused optimizers declare that they change gradients, which they do only if they get a `grad_scale`.
    """
    found = []
    for number, argument in enumerate(operator._schema.arguments):
        is_changed = argument.alias_info is not None and argument.alias_info.is_write
        if is_changed and not (argument.name == "grads" and kwargs.get("grad_scale") is None):
            found.append(args[number] if number < len(args) else kwargs.get(argument.name))
    return found


def unboxed_group(value: Any) -> dist.ProcessGroup | None:
    """Return the process group that an argument of a collective's operator is; None if it is something else."""
    if isinstance(value, torch.ScriptObject) and "ProcessGroup" in str(value._type()):
        return dist.ProcessGroup.unbox(value)
    return None


def run_random_operators_plainly(mode_cls: type[TorchDispatchMode]) -> None:
    """Let a dispatch mode see the operators that compiled code recomputes with a saved random state.

    The compiler runs such an operator, attention with dropout for one, inside a pair of higher-order operators, which
    hide it from modes. Under `mode_cls` the operator runs by itself, and the saved state is empty.
    """
    from torch._prims.rng_prims import run_and_save_rng_state, run_with_rng_state

    @run_and_save_rng_state.py_impl(mode_cls)
    def _(mode: TorchDispatchMode, operator: Any, *args: Any, **kwargs: Any) -> Any:
        with mode:
            return torch.empty(0), operator(*args, **kwargs)

    @run_with_rng_state.py_impl(mode_cls)
    def _(mode: TorchDispatchMode, state: Tensor, operator: Any, *args: Any, **kwargs: Any) -> Any:
        with mode:
            return operator(*args, **kwargs)


@contextmanager
def fake_process_group(world_size: int, *, rank: int = 0) -> Iterator[None]:
    """Start a process group as one rank; the others do not exist. This process must have no process group.

    DTensor remembers the layouts of operators by meshes, and takes one of an earlier world of the same shape for its
    own. Its groups are gone, so the memory is cleared.
    """
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()
        _clear_sharding_prop_cache()
