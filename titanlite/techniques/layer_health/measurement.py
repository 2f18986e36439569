"""Health of layers, at some steps: norms, largest values, zeros and non-finite values of what each layer holds.

The values are those of the whole model and the global batch, on any layout. Each rank measures its own shards and
tokens, and two all-reduces join them.
"""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from titanlite.capture import Kind, StepCapture
from titanlite.models.base import Model
from titanlite.runtime.private_torch.tensors import local_tensor
from titanlite.techniques.layer_health.names import NAMES

if TYPE_CHECKING:
    from titanlite.run.records import RecordFile


class LayerHealth(StepCapture):
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
        self._freq, self._file = freq, file
        self._replicas, self._outputs, self._world, self._device = replicas, outputs, world, device
        self._layers = layers_of(model)
        self._sums: dict[tuple[str, str], list[Tensor]] = {}
        """What `_measure` returns of each tensor, by layer and kind."""
        parameters = ((name, of_layer) for name, layer in self._layers.items() for of_layer in layer.parameters())
        super().__init__(self._layers.items(), parameters, read=local_tensor)

    def is_captured(self, step: int) -> bool:
        return step % self._freq == 0

    def see(self, kind: Kind, name: str, source: nn.Module | nn.Parameter, value: Any) -> None:
        if kind not in NAMES or not isinstance(value, Tensor) or not value.numel():
            return
        with torch.no_grad():
            found = _measure(value.detach()).to(self._device)
            found[:-1] /= self._replicas[source] if isinstance(source, nn.Parameter) else self._outputs.get(source, 1)
        self._sums.setdefault((name, NAMES[kind]), []).append(found)

    def close(self) -> None:
        super().close()
        if self._file:
            self._file.close()

    def end_capture(self, step: int) -> None:
        """Join the sums of all ranks, and write them. Every rank calls it."""
        nothing = torch.zeros(1, 5, dtype=torch.float64, device=self._device)
        keys = [(layer, kind) for layer in self._layers for kind in NAMES.values()]
        found = [torch.stack(self._sums[key]) if key in self._sums else nothing for key in keys]
        sums = torch.stack([parts[:, :-1].sum(dim=0) for parts in found])
        largest = torch.stack([parts[:, -1].max() for parts in found])
        self._sums = {}
        dist.all_reduce(sums, group=self._world)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self._world)
        if self._file is None:
            return
        layers: dict[str, dict[str, Any]] = {layer: {} for layer in self._layers}
        for (layer, kind), of_all, high in zip(keys, sums.tolist(), largest.tolist(), strict=True):
            squares, zeros, nonfinite, count = of_all
            if count:
                values = math.sqrt(squares), math.sqrt(squares / count), high, zeros / count, nonfinite / count
                layers[layer][kind] = dict(zip(("norm", "rms", "max", "zeros", "nonfinite"), values, strict=True))
        self._file.write({"step": step, "layers": layers})


def layers_of(model: Model) -> dict[str, nn.Module]:
    """Return the layers that are measured, by name: the blocks, and the other children of the model."""
    blocks, found = {*model.layers}, dict[str, nn.Module]()
    for name, child in model.named_children():
        inner = {f"{name}.{part}": module for part, module in child.named_children() if module in blocks}
        found |= inner or {name: child}
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
