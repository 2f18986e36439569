"""Health of layers, at some steps: norms, largest values, zeros and non-finite values of what each layer holds.

The values are those of the whole model and the global batch, on any layout. Each rank measures its own shards and
tokens, and two all-reduces join them.
"""

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from titanlite.models.base import Model
from titanlite.observer import Phase, StepObserver
from titanlite.runtime.private_torch.tensors import local_tensor

if TYPE_CHECKING:
    from titanlite.run.records import RecordFile

KINDS = ("parameters", "gradients", "updates", "activations")
"""Tensors that are measured of each layer. Activations are its output."""


class LayerHealth(StepObserver):
    """Measurement of some steps, as an observer of training. Other steps cost nothing.

    A measured step keeps a copy of this rank's trainable parameters until its end, reads parameters, gradients and the
    outputs of layers once each, and waits for the device.

    Args:
        freq: steps between measured steps.
        file: on the rank that writes, the place of the records.
        replicas: ranks that hold the same part, of each parameter.
        world: all ranks.
        outputs: ranks that compute the same output, of each layer where there are several.
    """

    def __init__(
        self,
        model: Model,
        *,
        freq: int,
        file: "RecordFile | None",
        replicas: Mapping[nn.Parameter, int],
        world: dist.ProcessGroup,
        device: torch.device,
        outputs: Mapping[nn.Module, int],
    ) -> None:
        self._model, self._freq, self._file = model, freq, file
        self._replicas, self._outputs, self._world, self._device = replicas, outputs, world, device
        self._layers = layers_of(model)
        self._step = 0
        """Step that is measured; 0: none is."""
        self._is_forward = False
        self._before: dict[nn.Parameter, Tensor] = {}
        self._sums: dict[tuple[str, str], list[Tensor]] = {}
        """What `_measure` returns of each tensor, by layer and kind."""
        self._hooks: list[Any] = []

    @torch.no_grad()
    def begin_step(self, step: int) -> None:
        if step % self._freq:
            return
        self._step, self._sums = step, {}
        self._before = {p: local_tensor(p).clone() for p in self._model.parameters() if p.requires_grad}
        for name, layer in self._layers.items():
            self._hooks.append(layer.register_forward_hook(partial(self._measure_output, name)))

    @torch.no_grad()
    def phase(self, name: Phase) -> None:
        if not self._step:
            return
        self._is_forward = name is Phase.FORWARD
        if name is Phase.UPDATE:
            while self._hooks:
                self._hooks.pop().remove()
            self._measure_parameters("gradients", lambda p: None if p.grad is None else local_tensor(p.grad))
        elif name is Phase.METRICS:
            self._measure_parameters("parameters", local_tensor)
            self._measure_parameters("updates", self._update_of)
            step, self._step = self._step, 0
            self._before = {}
            self._write(step)

    def close(self) -> None:
        while self._hooks:
            self._hooks.pop().remove()
        if self._file:
            self._file.close()

    def _update_of(self, parameter: nn.Parameter) -> Tensor | None:
        before = self._before.get(parameter)
        return None if before is None else local_tensor(parameter).float() - before.float()

    def _measure_output(self, layer: str, module: nn.Module, inputs: object, output: object) -> None:
        if self._is_forward and isinstance(output, Tensor):  # not of a recomputation in backward
            with torch.no_grad():
                self._add(layer, "activations", output.detach(), share=self._outputs.get(module, 1))

    def _measure_parameters(self, kind: str, tensor_of: Callable[[nn.Parameter], Tensor | None]) -> None:
        for name, layer in self._layers.items():
            for parameter in layer.parameters():
                if (tensor := tensor_of(parameter)) is not None:
                    self._add(name, kind, tensor.detach(), share=self._replicas[parameter])

    def _add(self, layer: str, kind: str, tensor: Tensor, *, share: int) -> None:
        if tensor.numel():
            found = _measure(tensor).to(self._device)
            found[:-1] /= share
            self._sums.setdefault((layer, kind), []).append(found)

    def _write(self, step: int) -> None:
        """Join the sums of all ranks, and write them. Every rank calls it."""
        nothing = torch.zeros(5, dtype=torch.float64, device=self._device)
        keys = [(layer, kind) for layer in self._layers for kind in KINDS]
        found = [torch.stack(self._sums.get(key, [nothing])) for key in keys]
        sums = torch.stack([parts[:, :-1].sum(dim=0) for parts in found])
        largest = torch.stack([parts[:, -1].max() for parts in found])
        self._sums = {}
        dist.all_reduce(sums, group=self._world)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self._world)
        if self._file is None:
            return
        layers: dict[str, dict[str, Any]] = {layer: {} for layer in self._layers}
        for (layer, kind), (squares, zeros, nonfinite, count), high in zip(
            keys, sums.tolist(), largest.tolist(), strict=True
        ):
            if count:
                layers[layer][kind] = {
                    "norm": math.sqrt(squares),
                    "rms": math.sqrt(squares / count),
                    "max": high,
                    "zeros": zeros / count,
                    "nonfinite": nonfinite / count,
                }
        self._file.write({"step": step, "layers": layers})


def layers_of(model: Model) -> dict[str, nn.Module]:
    """Return the layers that are measured, by name: the blocks, and the other children of the model."""
    blocks = {block: index for index, block in enumerate(model.layers)}
    found: dict[str, nn.Module] = {}
    for name, child in model.named_children():
        inner = [(f"{name}.{part}", module) for part, module in child.named_children() if module in blocks]
        found.update(inner or [(name, child)])
    return found


def _measure(tensor: Tensor) -> Tensor:
    """Return what this rank measures of a tensor, float64 [5]: the sum of squares; the numbers of zeros, of non-finite
    elements and of all; the largest absolute value. The first and the last are of finite elements.
    """
    finite = tensor.isfinite()
    values = torch.where(finite, tensor, 0).float()
    rows = torch.linalg.vector_norm(values, dim=-1, dtype=torch.float32) if values.ndim else values
    counts = (tensor == 0).sum(), (~finite).sum(), torch.tensor(tensor.numel(), device=tensor.device)
    parts = rows.double().square().sum(), *counts, values.abs().max()
    return torch.stack([part.double() for part in parts])
