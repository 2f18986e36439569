"""What training changes, and a checkpoint keeps: the model, its optimizer, and what follows its weights, by name."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from titanlite.models.base import unique_parameters
from titanlite.optim.quantized import inner_tensors, is_quantized
from titanlite.runtime.dtensor import unwrapped
from titanlite.runtime.errors import UserError
from titanlite.runtime.private_torch.tensors import non_persistent_buffers

State = dict[str, dict[str, Tensor]]
"""Tensors in use, by the part of the state and their name in it."""
AVERAGE, OUTER = FURTHER = "average", "outer"
"""Parts of a state that a checkpoint and a run need not have: the average of the weights, and the outer optimizer."""


class Outer(Protocol):
    """An optimizer of the weights at the ends of rounds: `techniques.outer.optimizer.OuterOptimizer`."""

    tensors: dict[str, Tensor]
    worker: int | None

    def begin(self) -> None: ...
    def update(self, step: int, skip_reason: Tensor, finish_updates: Callable[[], None]) -> None: ...


class Average(Protocol):
    """An average of the weights: `techniques.average.weights.WeightAverage`."""

    tensors: Mapping[str, Tensor]

    def update(self, step: int, skip_reason: Tensor) -> None: ...
    def value(self, name: str) -> Tensor: ...
    def measured(self, measure: Callable[[], dict[str, Any] | None]) -> dict[str, Any]: ...


class Updates(Protocol):
    """A thread that updates parameters in host memory: `techniques.offload.updates.HostUpdates`."""

    def start(self, change: Callable[[Sequence[Tensor]], None] | None, *, skip: Tensor) -> None: ...
    def prepare(self) -> None: ...
    def start_unit(self, module: FSDPModule, *, skip: Tensor) -> None: ...
    def wait(self, module: FSDPModule) -> None: ...
    def finish(self) -> None: ...


@dataclass(kw_only=True, eq=False)
class TrainingState:
    """What a step changes. A load writes into its tensors, which are those in use and no copies."""

    model: nn.Module
    """Parallelized, with memory."""
    optimizer: torch.optim.Optimizer
    outer: Outer | None = None
    average: Average | None = None
    updates: Updates | None = None
    """Its updates may still run after the step."""
    weights_changed: Callable[[], None] = lambda: None
    """Is called at the start, and whenever weights have changed."""
    flush: Callable[[], None] | None = None
    """Writes what is kept on a disk. Such a state is too large for a copy in memory: it is saved while training waits.
    """

    def __post_init__(self) -> None:
        self._has_state_from_start = {*self.optimizer.state}
        self._initial: dict[str, Tensor] = {}
        """Values of parameters that no checkpoint has yet, since a changed setting has added them."""

    @property
    def is_cut(self) -> bool:
        """Whether ranks have tensors of different names: stages of a pipeline, or workers with weights of their own."""
        return bool(getattr(self.model, "stages", ())) or self._prefix is not None

    @property
    def _prefix(self) -> str | None:
        """Prefix of the names of this replica's own parts, where replicas have states of their own; "" for the first,
        whose names are the usual ones. The parts `FURTHER` are the same everywhere."""
        worker = self.outer.worker if self.outer else None
        return None if worker is None else f"worker{worker}." if worker else ""

    # In a step

    def begin(self) -> None:
        """Begin with the present weights."""
        if self.outer:
            self.outer.begin()
        self.weights_changed()

    def end_step(self, step: int, skip_reason: Tensor) -> None:
        """Let everything follow the weights at the end of a step.

        Args:
            skip_reason: 0 if the optimizer made its step; see `StepResult`.
        """
        if self.outer:
            self.outer.update(step, skip_reason, self.finish)
        if self.average:
            self.average.update(step, skip_reason)
        self.weights_changed()

    def finish(self) -> None:
        """Return when parameters and states of the optimizer are those after the last step."""
        if self.updates:
            self.updates.finish()

    # For a checkpoint

    def tensors(self) -> State:
        """Return the tensors of a checkpoint, which nothing changes before the next step."""
        return self.as_saved(self._tensors())

    def as_saved(self, state: State) -> State:
        """Return a state with the names of a checkpoint."""
        return {part if part in FURTHER else f"{self._prefix or ''}{part}": state[part] for part in state}

    def to_load(self, *, moments: bool = True) -> State:
        """Return the tensors for a load to write into, for which `end_load` is called afterwards.

        Args:
            moments: with all states of the optimizer, also where it has not made a step.
        """
        if moments:
            complete_optimizer_state(self.model, self.optimizer)
        return self._tensors()

    def end_load(self, state: State, loaded: Collection[str]) -> None:
        """Take over what a load has written into `to_load`. What it left out begins anew.

        Args:
            loaded: names of the tensors that it has written, as in a checkpoint.
        """
        names = {name.removeprefix(self._prefix or "") for name in loaded}
        put_back_numbers(self.model, self.optimizer, state)
        begin_anew(self.model, self.optimizer, names, has_from_start=self._has_state_from_start)
        for name, tensor in state["model"].items():
            if f"model.{name}" not in names:  # a rollback finds trained values
                tensor.copy_(self._initial.setdefault(name, tensor.detach().clone()))

    def _tensors(self) -> State:
        self.finish()
        followers = {OUTER: self.outer, AVERAGE: self.average}
        further = {part: {**follower.tensors} for part, follower in followers.items() if follower}
        return state_of(self.model, self.optimizer) | further


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> State:
    """Return the tensors to save: {"model": {name: tensor}, "optimizer": {"state.<parameter>.<moment>": tensor}}.

    They are the tensors in use and no copies, so loading into them restores the model and the optimizer. Only numbers
    that an optimizer keeps are copied into tensors, and `put_back_numbers` sets them after a load. A parameter that
    modules share has one entry. A quantized moment has one for each of its tensors (<moment>.codes, <moment>.scale).
    Learning rates and weight decay are not state: they come from the config.

    Raises:
        UserError: the optimizer keeps something other than tensors and numbers.
    """
    parameters = dict(unique_parameters(model))
    moments = {
        f"state.{name}.{key}": value
        for name, parameter in parameters.items()
        for key, value in optimizer.state.get(parameter, {}).items()
        if value is not None
    }
    for name, value in [*moments.items()]:
        if is_quantized(value):
            del moments[name]
            moments |= {f"{name}.{piece}": tensor for piece, tensor in inner_tensors(value).items()}
        elif not isinstance(value, Tensor | int | float):
            kinds = f"{type(optimizer).__name__} keeps {name} as {type(value).__name__}"
            raise UserError(f"{kinds}: only tensors and numbers can be saved")
    return {
        "model": model_state(model),
        "optimizer": {name: unwrapped(_as_tensor(value)) for name, value in moments.items()},
    }


def model_state(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and persistent buffers of a model by name. A shared parameter has one entry."""
    modules: dict[str, nn.Module] = dict(model.named_modules())  # pyright: ignore[reportUnknownArgumentType]
    buffers = {
        f"{prefix}.{name}" if prefix else name: buffer
        for prefix, module in modules.items()
        for name, buffer in module.named_buffers(recurse=False)
        if name not in non_persistent_buffers(module)
    }
    return {name: unwrapped(tensor) for name, tensor in (dict(unique_parameters(model)) | buffers).items()}


def put_back_numbers(model: nn.Module, optimizer: torch.optim.Optimizer, state: State) -> None:
    """Set the numbers that an optimizer keeps from the tensors into which they were loaded."""
    for name, parameter in unique_parameters(model):
        moments = optimizer.state.get(parameter, {})
        for key, value in moments.items():
            if isinstance(value, int | float):
                moments[key] = state["optimizer"][f"state.{name}.{key}"].item()


def begin_anew(
    model: nn.Module, optimizer: torch.optim.Optimizer, loaded: Collection[str], *, has_from_start: Collection[Tensor]
) -> None:
    """Let the optimizer begin with parameters of which nothing was loaded, as in its first step, after
    `complete_optimizer_state` made a step.

    Args:
        loaded: names in a state with `state_of`'s part `optimizer` that were loaded.
        has_from_start: parameters whose state the optimizer's class makes before its first step, as zeros.
    """
    trained = {parameter_of(name) for name in loaded if name.startswith("optimizer.")}
    for name, parameter in unique_parameters(model):
        if f"optimizer.state.{name}" in trained or parameter not in optimizer.state:
            continue
        if parameter not in has_from_start:
            del optimizer.state[parameter]
            continue
        for key, value in optimizer.state[parameter].items():
            if isinstance(value, int | float):
                optimizer.state[parameter][key] = type(value)(0)
            elif isinstance(value, Tensor):
                value.zero_()


def parameter_of(moment: str) -> str:
    """Return the name of a moment in a checkpoint without that of the moment: optimizer.state.<parameter>."""
    return moment.removesuffix(".codes").removesuffix(".scale").rpartition(".")[0]


def complete_optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Create the state of an optimizer that has not made a step, so that a checkpoint can be loaded into it.

    The optimizer makes a step with learning rates and gradients of zero. Adam counts that step, so a load must follow.
    """
    if all(parameter in optimizer.state for parameter in model.parameters() if parameter.requires_grad):
        return
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], Tensor) else 0.0
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


def flat(state: State) -> dict[str, Tensor]:
    """Return the tensors of a state by their names in a checkpoint: <part>.<name>."""
    return {f"{part}.{name}": tensor for part, tensors in state.items() for name, tensor in tensors.items()}


def _as_tensor(value: Tensor | int | float) -> Tensor:
    if isinstance(value, Tensor):
        return value
    return torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else None)
