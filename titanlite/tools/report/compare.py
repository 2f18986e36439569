"""Comparison of the values that two models compute, or one model on two layouts, by name.

`parity --where` compares dumps of a training step, and `export --check` a forward pass with that of transformers. Keys
are `direction role name`, such as `forward output layers.0.attention`.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from titanlite.capture import Kind, StepCapture, watch
from titanlite.mesh import context_rank, data_parallel_rank, pipeline_mesh
from titanlite.models.base import Model, head_of, unique_parameters
from titanlite.ops.attention import SequencePart
from titanlite.runtime.dtypes import DTYPES
from titanlite.runtime.errors import UserError
from titanlite.runtime.private_torch.compiler import is_compiled
from titanlite.tools.plan.output import format_size
from titanlite.train import Run, train

SCHEMA = 5
MOST_BYTES = 4 * 2**30
"""Largest dump of a rank, in memory."""
TOKENS, LOSS, LOGITS = "forward input tokens", "forward output loss", "forward output logits"
"""Keys of the token ids [B, L], of the sum of the cross entropy of each micro-batch, and of logits."""
BLOCK_INPUT = re.compile(r"forward input layers\.\d+")
"""Is kept in any case: between stages and FSDP units it is a tensor of its own."""
DIRECTIONS = ("before", "forward", "gradient", "update")
OF_UPDATES = 30
"""Factor of the tolerance of updates, and of the weights that they lead to: Adam's first update has the sign of each
gradient, however small."""
Values = dict[str, Tensor]
"""Values by key, in the order in which they are computed."""


@torch.no_grad()
def forward_values(modules: Iterable[tuple[str, nn.Module]], run: Callable[[], Tensor]) -> Values:
    """Return the inputs and outputs of modules in a forward pass, and the logits that `run` returns."""
    values: Values = {}

    def see(kind: Kind, name: str, source: object, value: Any) -> None:
        if isinstance(value, Tensor) and value.is_floating_point():
            values[f"{kind} {name}"] = value.clone()

    with watch(modules, see):
        values[LOGITS] = run().float()
    return values


@dataclass(frozen=True)
class Difference:
    """Difference of one tensor."""

    key: str
    most: float
    """Largest absolute difference of an element."""
    relative: float
    """L2 norm of the difference, relative to that of the reference."""
    is_within: bool
    dtypes: tuple[torch.dtype, torch.dtype]
    """Dtypes of the tensor and of its reference."""

    @property
    def direction(self) -> str:
        return self.key.split(" ", 2)[0]

    @property
    def name(self) -> str:
        return self.key.split(" ", 2)[2].partition(" (call")[0]


def difference(key: str, found: Tensor, wanted: Tensor, limit: float) -> Difference:
    """Compare a tensor with its reference.

    Args:
        limit: largest relative difference.
    """
    most = relative = inf
    if found.shape == wanted.shape:
        delta, norm = found.double() - wanted.double(), wanted.double().norm().item()
        most = delta.abs().max().item() if delta.numel() else 0.0
        relative = delta.norm().item() / norm if norm else (inf if delta.any() else 0.0)
    return Difference(key, most, relative, relative <= limit, (found.dtype, wanted.dtype))


# Dumps: the values of one training step


class StepDumped(Exception):
    """The step that was asked for is written, and training ends."""


class ValueDump(StepCapture):
    """Recorder of the values of one step: each rank writes those of its own samples, and one rank whole parameters.

    Args:
        folder: of the dump; the same for all ranks.
        dtype: in which matmuls compute.
        most_bytes: largest dump of a rank.
    """

    def __init__(
        self, model: Model, mesh: DeviceMesh, *, folder: Path, step: int, dtype: str, most_bytes: int = MOST_BYTES
    ) -> None:
        (data, size), (context, contexts), stages = data_parallel_rank(mesh), context_rank(mesh), pipeline_mesh(mesh)
        stage, rank, ranks = stages.get_local_rank() if stages else 0, data * contexts + context, size * contexts
        self._facts = {"schema": SCHEMA, "step": step, "dtype": dtype, "contexts": contexts, "stage": stage}
        self._facts |= {"ranks": ranks, "files": ranks * (stages.size() if stages else 1)}
        self._path, self._takes_parameters = _path(folder, stage * ranks + rank), rank == 0
        self._head, self._most_bytes, self._bytes = head_of(model), most_bytes, 0
        self._batch = torch.Size()
        self._seen: list[tuple[str, Tensor, Tensor]] = []
        """Key, tensor in the graph, and its value, of this micro-batch."""
        self._values: dict[str, list[Tensor]] = {}
        self._count(12 * sum(parameter.numel() for _, parameter in unique_parameters(model)))
        compiled = tuple(f"{name}." for name, module in model.named_modules() if is_compiled(module))
        modules = [("", stage) for stage in model.stages or [model]]
        for name, module in model.named_modules():
            if name and not name.startswith(compiled) and not isinstance(module, nn.Identity):
                modules.append((name, module))
        super().__init__(modules, unique_parameters(model), read=_whole)

    def is_captured(self, step: int) -> bool:
        return step == self._facts["step"]

    def see(self, kind: Kind, name: str, source: nn.Module | nn.Parameter, value: Any) -> None:
        """Keep a value. In a compiled block, all that is done is to append."""
        if isinstance(source, nn.Parameter):
            if kind != "after parameter" and self._takes_parameters:
                self._add(f"{kind} {name}", value)
            return
        if is_whole := not name:
            if kind == "forward output":
                self._end_forward()
                return
            name, self._batch = "tokens", value.shape[:2]
        if source is self._head and isinstance(getattr(value, "cross_entropy", None), Tensor):
            name, value = "loss", value.cross_entropy[None]
        if isinstance(value, Tensor) and (kind == "forward output" or value.is_floating_point() != is_whole):
            kept = value if torch.compiler.is_compiling() else value.detach().clone()  # nothing changes it there
            self._seen.append((f"{kind} {name}", value, kept))

    def _end_forward(self) -> None:
        """Keep the values of a micro-batch, and hook the gradients of its tensors."""
        keys, calls = dict[int, str](), dict[str, int]()
        for key, tensor, value in self._seen:
            if key.startswith("forward input") and id(tensor) in keys and not BLOCK_INPUT.fullmatch(key):
                continue  # it is the output of another module
            calls[key] = calls.get(key, 0) + 1
            name = key if calls[key] == 1 else f"{key} (call {calls[key]})"
            # Rows must be samples or tokens in their order, so that ranks can be joined.
            if key != LOSS and (tensor.ndim < 2 or len(tensor) not in (self._batch[0], self._batch.numel())):
                continue
            self._add(name, value)
            if tensor.requires_grad and id(tensor) not in keys:
                self._hook_gradient(tensor, name.replace("forward", "gradient", 1))
            keys[id(tensor)] = name
        self._seen = []

    def _hook_gradient(self, tensor: Tensor, key: str) -> None:
        """Keep the gradient of a tensor. Schedules of pipelines that split backward compute some twice."""

        def take(gradient: Tensor) -> None:
            handle.remove()
            self._add(key, gradient)

        handle = tensor.register_hook(take)

    def _add(self, key: str, value: Tensor) -> None:
        self._count(value.nbytes)
        self._values.setdefault(key, []).append(value.detach().to("cpu", copy=True))

    def _count(self, size: int) -> None:
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

    def end_capture(self, step: int) -> None:
        """Write the values, and end training."""
        values = {key: torch.cat(parts) if len(parts) > 1 else parts[0] for key, parts in self._values.items()}
        self._path.parent.mkdir(parents=True, exist_ok=True)
        torch.save({**self._facts, "values": values}, self._path)
        raise StepDumped


def _whole(tensor: Tensor) -> Tensor:
    """Return the whole of a sharded tensor in float32."""
    tensor = tensor.detach().float()  # collectives know few dtypes
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _path(folder: Path, number: int) -> Path:
    return folder / f"rank-{number}.pt"


def record(run: Run, *, folder: Path, step: int) -> None:
    """Train until a step, write its values, and close the run."""
    dtype = run.config.training.mixed_precision_param
    run.position.observers.append(ValueDump(run.model, run.setup.mesh, folder=folder, step=step, dtype=dtype))
    try:
        with suppress(StepDumped):
            train(run)
    finally:
        run.batches.close()
        run.metrics.close()


class Dump(NamedTuple):
    """Values of a step, of the global batch, in the order in which they were computed."""

    step: int
    dtype: str
    """Dtype in which matmuls computed."""
    values: Values


def read_dump(folder: Path) -> Dump:
    """Read a dump, and join the values of its ranks.

    Raises:
        UserError: there is none, it is of another version, or a file is missing or damaged.
    """
    try:
        first = _read_file(folder, 0)
        return _join_files([first, *(_read_file(folder, number) for number in range(1, first["files"]))])
    except UserError:
        raise
    except Exception as error:  # a damaged file may raise anything
        raise UserError(f"{folder}: the dump is damaged ({' '.join(str(error).split())})") from None


def _read_file(folder: Path, number: int) -> dict[str, Any]:
    path = _path(folder, number)
    if not path.is_file():
        raise UserError(f"{folder} is no whole dump: {path.name} is missing; titanlite parity CONFIG --dump {folder}")
    found = torch.load(path, mmap=True, weights_only=True)
    if found["schema"] != SCHEMA:
        raise UserError(f"{path}: the dump has schema {found['schema']}, and this version reads {SCHEMA}")
    return found


def _join_files(files: list[dict[str, Any]]) -> Dump:
    parts: dict[str, list[Tensor]] = {}
    for file in files:
        for key, value in file["values"].items():
            parts.setdefault(key, []).append(value)
    stages = {key: file["stage"] for file in files for key in file["values"]}
    places = {key: place for place, key in enumerate(parts)}

    def place(key: str) -> tuple[bool, int, int, int]:
        """Return the place of a value: first the tokens, last the updates. Backward goes from the last stage to the
        first. The gradients of a module's parameters follow that of its output."""
        direction, role, name = key.split(" ", 2)
        module = f"gradient output {name.rpartition('.')[0]}" if (direction, role) == ("gradient", "parameter") else key
        stage = stages[key] if direction != "gradient" else -stages[key]
        return key != TOKENS, DIRECTIONS.index(direction), stage, places.get(module, places[key])

    facts, sequences = files[0], len(parts[TOKENS][0])
    complete = [key for key, held in parts.items() if len(held) == (1 if " parameter " in key else facts["ranks"])]
    values = {key: _join(key, parts[key], sequences, facts["contexts"]) for key in sorted(complete, key=place)}
    return Dump(facts["step"], facts["dtype"], values)


def _join(key: str, parts: list[Tensor], sequences: int, contexts: int) -> Tensor:
    """Join the values of the ranks, of which `contexts` in a row have parts of the same sequences."""
    if key == LOSS:
        return torch.cat(parts).sum()
    if " parameter " in key:
        return parts[0]
    if key.startswith("gradient"):
        parts = [part / len(parts) for part in parts]  # FSDP averages, so the loss is scaled
    if contexts == 1:
        return torch.cat(parts)
    is_flat = len(parts[0]) > sequences
    parts = [part.unflatten(0, (sequences, -1)) if is_flat else part for part in parts]
    groups = [torch.cat(parts[first : first + contexts], dim=1) for first in range(0, len(parts), contexts)]
    joined = torch.cat(groups)
    places = [SequencePart(rank, contexts).indices(joined.shape[1], joined.device) for rank in range(contexts)]
    joined = joined.index_select(1, torch.cat(places).argsort())
    return joined.flatten(0, 1) if is_flat else joined


# The comparison of two dumps


@dataclass(frozen=True)
class Compared:
    """Result of a comparison: differences in the order in which the values are computed.

    Attributes:
        left_out: number of tensors that only one of the dumps has.
    """

    differences: list[Difference]
    tolerance: float
    left_out: int

    @property
    def first(self) -> Difference | None:
        """The first difference beyond the tolerance."""
        return next((difference for difference in self.differences if not difference.is_within), None)


def compare_dumps(dump: Dump, reference: Dump, *, tolerance: float | None = None) -> Compared:
    """Compare all values that two dumps have in common.

    Args:
        tolerance: largest relative difference; None takes that of the dtype.

    Raises:
        UserError: nothing is in both, or they are dumps of different steps.
    """
    if dump.step != reference.step:
        raise UserError(f"--where: one dump is of step {dump.step}, the other of step {reference.step}")
    if tolerance is None:
        known = [DTYPES.get(tensors.dtype) or DTYPES["float32"] for tensors in (dump, reference)]
        tolerance = max(dtype.tolerance or 0 for dtype in known)
    keys = [key for key in reference.values if key in dump.values]
    if {*keys} <= {TOKENS}:
        raise UserError("--where: the dumps have no module in common: are they of the same model?")

    def limit(key: str) -> float:
        return 0.0 if key == TOKENS else tolerance * (OF_UPDATES if key.startswith(("before", "update")) else 1)

    differences = [difference(key, dump.values[key], reference.values[key], limit(key)) for key in keys]
    return Compared(differences, tolerance, len(dump.values.keys() ^ reference.values.keys()))


def report(compared: Compared) -> Iterator[str]:
    """Yield the table by block (largest absolute difference, and largest relative norm of one), and the result."""
    shown = DIRECTIONS[1:]
    blocks: dict[str, dict[str, list[Difference]]] = {}
    for difference in compared.differences:
        if difference.direction in shown:
            block = re.match(r"(.*\.)?layers\.\d+|[^.]*", difference.name)
            blocks.setdefault(block[0] if block else "", {}).setdefault(difference.direction, []).append(difference)
    yield _row("block", *(f"{direction} {what}" for direction in shown for what in ("max abs", "relative")))
    for block, found in blocks.items():
        yield _row(block, *(cell for direction in shown for cell in _cells(found.get(direction))))
    yield (
        f"{len(compared.differences):,} tensors compared, tolerance {compared.tolerance:g} "
        f"(updates {compared.tolerance * OF_UPDATES:g})"
        + (f", {compared.left_out:,} are in one dump only" if compared.left_out else "")
    )
    if (first := compared.first) is None:
        yield "equal"
        return
    beyond = Counter(difference.direction for difference in compared.differences if not difference.is_within)
    yield "beyond it (*): " + ", ".join(f"{count:,} of {direction}" for direction, count in beyond.items())
    one, other = (str(dtype).removeprefix("torch.") for dtype in first.dtypes)
    yield f"first difference: {first.key}" + (f" ({one} in A, {other} in B)" if one != other else "")


def _cells(found: list[Difference] | None) -> tuple[str, str]:
    if not found:
        return "", ""
    mark = " " if all(diff.is_within for diff in found) else "*"
    return f"{max(diff.most for diff in found):.1e}", f"{max(diff.relative for diff in found):.1e}{mark}"


def _row(block: str, *cells: str) -> str:
    return " ".join([block.ljust(16), *(cell.rjust(18) for cell in cells)]).rstrip()
