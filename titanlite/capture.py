"""Values of a model by name: what its modules receive and return, and the gradients and updates of its parameters.

`parity --where`, `export --check`, examples/coordcheck.py and the health of layers read them here.
"""

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from titanlite.observer import Phase, StepObserver

Kind = Literal[
    "before parameter", "forward input", "forward output", "gradient parameter", "after parameter", "update parameter"
]
"""Kinds of values, in the order in which a step computes them. Gradients are those before clipping."""
See = Callable[[Kind, str, nn.Module | nn.Parameter, Any], None]
"""Receives a kind, the name and the object that were given, and the value."""


def watch(modules: Iterable[tuple[str, nn.Module]], see: See) -> ExitStack:
    """Pass the inputs and outputs of modules to `see`, until the stack that is returned is closed.

    Of several inputs or outputs, the value is the first. The hooks of a compiled block are compiled with it.
    """

    def before(name: str, module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        see("forward input", name, module, inputs[0] if inputs else named.get("hidden_states"))

    def after(name: str, module: nn.Module, inputs: object, output: Any) -> None:
        see("forward output", name, module, output[0] if type(output) is tuple else output)

    hooks = ExitStack()
    for name, module in modules:
        hooks.callback(module.register_forward_pre_hook(partial(before, name), with_kwargs=True).remove)
        hooks.callback(module.register_forward_hook(partial(after, name)).remove)
    return hooks


class StepCapture(StepObserver):
    """Observer that passes the values of some steps to its method `see`. Other steps have no hooks, and cost nothing.

    Forward passes that recompute activations are left out. Updates are those of trained parameters, in float32; their
    values before the step are kept until its end.

    Args:
        read: returns what is passed on of a parameter or its gradient, such as this rank's shard.
    """

    def __init__(
        self,
        modules: Iterable[tuple[str, nn.Module]],
        parameters: Iterable[tuple[str, nn.Parameter]],
        *,
        read: Callable[[Tensor], Tensor],
    ) -> None:
        self._modules, self._parameters, self._read = [*modules], [*parameters], read
        self._step = 0
        """Step whose values are captured; 0: none is."""
        self._is_forward = False
        self._before: dict[nn.Parameter, Tensor] = {}
        self._hooks = ExitStack()

    def is_captured(self, step: int) -> bool:
        """Return whether the values of a step are passed on."""
        raise NotImplementedError

    def see(self, kind: Kind, name: str, source: nn.Module | nn.Parameter, value: Any) -> None:
        """Receive a value, which may change after the call."""
        raise NotImplementedError

    def end_capture(self, step: int) -> None:
        """Receive the end of a step whose values were passed on."""
        raise NotImplementedError

    @torch.no_grad()
    def begin_step(self, step: int) -> None:
        if not self.is_captured(step):
            return
        self._step = step
        for name, parameter in self._parameters:
            value = self._read(parameter)
            self.see("before parameter", name, parameter, value)
            if parameter.requires_grad:
                self._before[parameter] = value.clone()
        self._hooks = watch(self._modules, self._see_forward)

    def _see_forward(self, kind: Kind, name: str, source: nn.Module | nn.Parameter, value: Any) -> None:
        if self._is_forward:
            self.see(kind, name, source, value)

    @torch.no_grad()
    def on_phase(self, phase: Phase) -> None:
        if not self._step:
            return
        self._is_forward = phase is Phase.FORWARD
        if phase is Phase.UPDATE:
            self._hooks.close()
            for of, parameter in self._parameters:
                if parameter.grad is not None:
                    self.see("gradient parameter", of, parameter, self._read(parameter.grad))
        elif phase is Phase.METRICS:
            for of, parameter in self._parameters:
                value, before = self._read(parameter), self._before.get(parameter)
                self.see("after parameter", of, parameter, value)
                if before is not None:
                    self.see("update parameter", of, parameter, value.float() - before.float())
            step, self._step, self._before = self._step, 0, {}
            self.end_capture(step)

    def close(self) -> None:
        self._hooks.close()
