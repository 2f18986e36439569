"""Values of one training step: what each module computes, and the gradients and updates that follow from it.

The values are those of the global batch, whatever the layout. Each rank writes the activations of its own samples, and
rank 0 writes whole parameters. Reading a dump joins the ranks in the order of samples.
"""

import json
import os
import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from titanlite.checks.preflight import preflight
from titanlite.config.load import load
from titanlite.mesh import context_rank, data_parallel_rank, pipeline_mesh
from titanlite.models.base import Model, head_of, unique_parameters
from titanlite.observer import Phase, StepObserver
from titanlite.ops.attention import SequencePart
from titanlite.runtime.console import start_logging
from titanlite.runtime.errors import UserError
from titanlite.runtime.files import json_text, read_small
from titanlite.runtime.private_torch.compiler import is_compiled
from titanlite.runtime.process_group import pick_device, process_group, read_ranks
from titanlite.tools.assemble import assemble
from titanlite.tools.convert.module_values import watch
from titanlite.tools.convert.source import open_model
from titanlite.tools.ingest.inputs import find_files
from titanlite.tools.plan.output import format_size
from titanlite.train import Run, train

SCHEMA = 4
MOST_BYTES = 4 * 2**30
"""Largest dump of a rank, in memory."""
INDEX = "dump.json"
TOKENS, LOSS = "forward input tokens", "forward output loss"
"""Keys of the token ids [B, L], and of the sum of the cross entropy of each micro-batch."""


class StepDumped(Exception):
    """The step that was asked for is written, and training ends."""


@dataclass(frozen=True)
class Index:
    """Contents of a dump. A key is `direction role name`: forward output layers.0.attention."""

    step: int
    ranks: int
    """Number of ranks with different tokens."""
    compute_dtype: str
    schema: int = SCHEMA
    forward: list[str] = field(default_factory=list)
    """Keys in the order of the forward pass. Inputs are there where no module returned them."""
    gradients: list[str] = field(default_factory=list)
    """Keys in the order of the backward pass; the gradients of a module's parameters follow that of its output."""
    updates: list[str] = field(default_factory=list)
    dtypes: dict[str, str] = field(default_factory=dict)
    """Dtypes in which values were computed, by key. The dump itself is in float32."""
    context: int = 1
    """Number of ranks in a row that split sequences."""


class ValueDump(StepObserver):
    """Recorder of one step. The hooks of earlier and later steps do not exist.

    Args:
        folder: of the dump; the same for all ranks.
        dtype: in which matmuls compute.
        most_bytes: largest dump of a rank.
    """

    def __init__(
        self,
        model: Model,
        mesh: DeviceMesh,
        *,
        folder: Path,
        step: int,
        dtype: str,
        most_bytes: int = MOST_BYTES,
    ) -> None:
        self._model, self._folder, self._most_bytes = model, folder, most_bytes
        (rank, ranks), (context, contexts) = data_parallel_rank(mesh), context_rank(mesh)
        self._rank, self._ranks = rank * contexts + context, ranks * contexts
        self._stages = pipeline_mesh(mesh)
        self._index = Index(step, self._ranks, dtype, context=contexts)
        self._head = next(name for name, module in model.named_modules() if module is head_of(model))
        self._is_forward = self._is_on = False
        self._batch: tuple[int, int] = (0, 0)
        self._hooks: list[Any] = []
        self._seen: list[tuple[str, str, Tensor, Tensor]] = []
        """Role, module, tensor in the graph, and its value, of this micro-batch."""
        self._values: dict[str, list[Tensor]] = {}
        self._before: dict[str, Tensor] = {}
        self._bytes = 0
        self._check(12 * sum(parameter.numel() for _, parameter in unique_parameters(model)))

    @torch.no_grad()
    def begin_step(self, step: int) -> None:
        if step != self._index.step:
            return
        self._is_on = True
        self._before = {name: _whole(parameter) for name, parameter in unique_parameters(self._model)}
        compiled = [name for name, module in self._model.named_modules() if is_compiled(module)]
        seen = (
            (name, module)
            for name, module in self._model.named_modules()
            if not any(name.startswith(f"{block}.") for block in compiled)
        )
        self._hooks += watch(seen, self._see)
        for module in self._model.stages or [self._model]:
            self._hooks.append(module.register_forward_pre_hook(self._see_tokens))
        for stage in self._model.stages:  # which may compute other micro-batches before it goes back
            self._hooks.append(stage.register_forward_hook(lambda *_: self._take_forward()))

    def phase(self, name: Phase) -> None:
        if not self._is_on:
            return
        self._is_forward = name is Phase.FORWARD
        if name is Phase.BACKWARD:
            self._take_forward()
        elif name is Phase.UPDATE:
            while self._hooks:
                self._hooks.pop().remove()
            self._take_parameter_gradients()
        elif name == "metrics":
            self._take_updates()
            self._write()
            raise StepDumped

    # The forward pass. A compiled block's hooks are compiled with it, so all they do is to append.

    def _see_tokens(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        self._batch = inputs[0].shape[:2]
        if not inputs[0].is_floating_point():  # else hidden states, which a stage receives
            self._add(TOKENS, inputs[0])

    def _see(self, role: str, name: str, value: Any) -> None:
        if not self._is_forward:
            return
        if name == self._head and isinstance(getattr(value, "cross_entropy", None), Tensor):
            name, value = "loss", value.cross_entropy[None]
        if isinstance(value, Tensor) and (role == "output" or value.is_floating_point()):
            self._seen.append((role, name, value, _kept(value)))

    @torch.no_grad()
    def _take_forward(self) -> None:
        """Keep the values of a micro-batch, and hook the gradients of its tensors."""
        keys: dict[int, str] = {}
        calls: dict[str, int] = {}
        for role, name, tensor, value in self._seen:
            key = f"forward {role} {name}"
            if role == "input" and id(tensor) in keys:
                continue
            calls[key] = number = calls.get(key, 0) + 1
            key = key if number == 1 else f"{key} (call {number})"
            if not self._has_samples(tensor) and key != LOSS:
                continue
            is_new = id(tensor) not in keys
            keys[id(tensor)] = key
            self._add(key, value)
            if tensor.requires_grad and is_new:
                self._hook_gradient(tensor, key.replace("forward", "gradient", 1))
        self._seen = []

    def _has_samples(self, tensor: Tensor) -> bool:
        """Return True if the rows of a tensor are samples or tokens in their order, so that ranks can be joined."""
        return tensor.ndim > 1 and tensor.shape[0] in (self._batch[0], self._batch[0] * self._batch[1])

    def _hook_gradient(self, tensor: Tensor, key: str) -> None:
        """Keep the gradient of a tensor. Schedules of pipelines that split backward compute some twice."""

        @torch.no_grad()
        def take(gradient: Tensor) -> None:
            handle.remove()
            self._add(key, gradient, scale=1 / self._ranks)  # FSDP averages, so the loss has a factor

        handle = tensor.register_hook(take)

    # Parameters

    @torch.no_grad()
    def _take_parameter_gradients(self) -> None:
        found = {name: p.grad for name, p in unique_parameters(self._model) if p.grad is not None}
        order: list[str] = []
        for key in self._index.gradients:
            order.append(key)
            if key.startswith("gradient output "):
                own = [name for name in found if name.rpartition(".")[0] == key.split(" ", 2)[2]]
                order += [f"gradient parameter {name}" for name in own]
        order += [key for name in reversed(found) if (key := f"gradient parameter {name}") not in order]
        for name, gradient in found.items():
            self._add(f"gradient parameter {name}", _whole(gradient))
        self._index.gradients[:] = order

    @torch.no_grad()
    def _take_updates(self) -> None:
        after = {
            name: _whole(parameter) for name, parameter in unique_parameters(self._model) if parameter.requires_grad
        }
        for name, value in after.items():
            self._add(f"update parameter {name}", value - self._before[name])

    # The dump

    def _add(self, key: str, value: Tensor, *, scale: float = 1) -> None:
        if key not in self._values:
            direction = key.split(" ", 1)[0]
            orders = {"forward": self._index.forward, "gradient": self._index.gradients, "update": self._index.updates}
            orders[direction].append(key)
            self._index.dtypes[key] = str(value.dtype).removeprefix("torch.")
        self._check(4 * value.numel())
        kept = value.detach().clone() if not value.is_floating_point() else value.detach().float().cpu() * scale
        self._values.setdefault(key, []).append(kept.cpu())

    def _check(self, size: int) -> None:
        """Count bytes that the dump needs.

        Raises:
            UserError: they are too many.
        """
        self._bytes += size
        if self._bytes > self._most_bytes:
            raise UserError(
                f"--where: the values of a step need more than {format_size(self._most_bytes)} on a rank; compare a "
                "smaller model.args.n_layers, training.seq_len or training.global_batch_size"
            )

    def _write(self) -> None:
        values = {key: torch.cat(parts) if parts[0].ndim else torch.stack(parts) for key, parts in self._values.items()}
        if self._rank:
            values = {key: value for key, value in values.items() if " parameter " not in key}
        else:
            values |= {f"before parameter {name}": value for name, value in self._before.items()}
        if (values := self._join_stages(values)) is None:
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        save_file({key: value.contiguous() for key, value in values.items()}, self._folder / _file(self._rank))
        if self._rank == 0:
            (self._folder / INDEX).write_text(json_text(asdict(self._index), indent=1))

    def _join_stages(self, values: dict[str, Tensor]) -> dict[str, Tensor] | None:
        """Return the values of all stages on the first rank of a pipeline, and None on its others."""
        if self._stages is None:
            return values
        is_first = self._stages.get_local_rank() == 0
        found: list[Any] | None = [None] * self._stages.size() if is_first else None
        dist.gather_object((values, self._index), found, group=self._stages.get_group(), group_dst=0)
        for _, index in (found or [])[1:]:
            self._index.forward.extend(index.forward)
            self._index.gradients[:0] = index.gradients
            self._index.updates.extend(index.updates)
            self._index.dtypes.update(index.dtypes)
        return {key: it for of_rank, _ in found for key, it in of_rank.items()} if found else None


@dataclass(frozen=True)
class Dump:
    """A dump that was read. Tensors are joined over the ranks when they are asked for."""

    index: Index
    parts: list[dict[str, Tensor]]
    """Tensors of each rank."""

    def __getitem__(self, key: str) -> Tensor:
        if " parameter " in key:
            return self.parts[0][key]
        parts, context = [part[key] for part in self.parts], self.index.context
        if key == LOSS or context == 1:
            joined = torch.cat(parts)
            return joined.sum() if key == LOSS else joined
        size = len(self.parts[0][TOKENS])  # sequences of a rank
        with_sequences = [part.unflatten(0, (size, -1)) if len(part) > size else part for part in parts]
        split = [with_sequences[first : first + context] for first in range(0, len(parts), context)]
        seq_len = context * split[0][0].shape[1]
        places = [SequencePart(rank, context).indices(seq_len, parts[0].device) for rank in range(context)]
        order = torch.cat(places).argsort()
        joined = torch.cat([torch.cat(of_sequences, dim=1).index_select(1, order) for of_sequences in split])
        return joined.flatten(0, 1) if len(parts[0]) > size else joined

    def __contains__(self, key: str) -> bool:
        return all(key in part for part in (self.parts[:1] if " parameter " in key else self.parts))


def read_dump(folder: Path) -> Dump:
    """Read a dump.

    Raises:
        UserError: there is none, it is of another version, or a file is missing or damaged.
    """
    try:
        record = json.loads(read_small(_existing(folder, INDEX)))
        if record.get("schema") != SCHEMA:
            raise UserError(f"{folder}: the dump has schema {record.get('schema')}, and this version reads {SCHEMA}")
        index = Index(**record)
        return Dump(index, [load_file(_existing(folder, _file(rank))) for rank in range(index.ranks)])
    except UserError:
        raise
    except Exception as error:  # a damaged file may raise anything
        raise UserError(f"{folder}: the dump is damaged ({error})") from None


def _existing(folder: Path, name: str) -> Path:
    if not (folder / name).is_file():
        raise UserError(f"{folder} is no whole dump: {name} is missing; titanlite parity CONFIG --dump {folder}")
    return folder / name


def _file(rank: int) -> str:
    return f"rank-{rank}.safetensors"


def _kept(tensor: Tensor) -> Tensor:
    """Return a copy; in a compiled block, where nothing changes a result later, the tensor itself."""
    return tensor if torch.compiler.is_compiling() else tensor.detach().clone()


def _whole(tensor: Tensor) -> Tensor:
    """Return the whole of a sharded tensor in float32, as a copy."""
    tensor = tensor.detach().float()  # collectives know few dtypes
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()


# A training run that ends with the dump of one step


def dump_step(path: str, overrides: Sequence[str], *, folder: Path, step: int) -> None:
    """Train on the processes of the environment until a step, and write its values.

    Raises:
        UserError: the parts do not fit together, or the step has too many values.
    """
    ranks = read_ranks(os.environ)
    config = load(path, overrides, world_size=ranks.world_size)
    if config.parallelism.tensor_parallel_degree > 1:
        raise UserError("parallelism.tensor_parallel_degree: values of parts of layers cannot be compared yet: set 1")
    start_logging(ranks.rank)
    device = pick_device(ranks)
    resolved = preflight(config, ranks, device, find_text=find_files, open_model=open_model)
    if ranks.rank == 0:
        shutil.rmtree(folder / "run", ignore_errors=True)
    with process_group(ranks, device, deterministic=config.debug.deterministic):
        run = assemble(config, resolved, ranks=ranks, device=device)
        record(run, folder=folder, step=step)


def record(run: Run, *, folder: Path, step: int) -> None:
    """Train until a step, write its values, and close the run."""
    dtype = run.config.training.mixed_precision_param
    run.observers.append(ValueDump(run.model, run.mesh, folder=folder, step=step, dtype=dtype))
    try:
        with suppress(StepDumped):
            train(run)
    finally:
        run.batches.close()
        run.metrics.close()
