"""The stages of a pipeline: which blocks each has, and a model that is cut to those of one rank.

Names of parameters stay, so that checkpoints, initial values and groups of parameters do not know of stages. A stage
passes hidden states [B, L, D] on in the place of logits, and takes them in the place of tokens.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from titanlite.mesh import pipeline_mesh
from titanlite.models.base import Model, head_of, unique_parameters
from titanlite.ops.kernels import in_every_pass
from titanlite.runtime.errors import UserError, did_you_mean
from titanlite.schema import Parallelism
from titanlite.techniques.tensor.layers import split_blocks, take_own_tokens, tensor_ranks

ONE_STAGE, V_SHAPED = ("1F1B", "GPipe"), ("ZBVZeroBubble", "DualPipeV")
"""Schedules of one stage on each rank, and those of two of which the last rank's follow each other."""
BLOCK = re.compile(r"layers\.(\d+)")


class Blocks(nn.ModuleList):
    """Some of the blocks of a model, under their names in it."""

    def __init__(self, blocks: Iterable[tuple[str, nn.Module]]) -> None:
        super().__init__()
        for name, block in blocks:
            self.add_module(name, block)

    def __getitem__(self, index: int) -> nn.Module:  # pyright: ignore[reportIncompatibleMethodOverride]
        return [*self][index]


class Received(nn.Identity):
    """Stands for the embedding where hidden states come from another stage."""


class Passed(nn.Identity):
    """Stands for the head where hidden states go to another stage."""

    own: Callable[[Tensor], Tensor] | None = None
    """Returns this rank's part of all tokens, where ranks have different ones between blocks."""

    def forward(self, hidden_BLD: Tensor, loss: Any = None) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        next_BLD = getattr(loss, "next_BLD", None)  # of a `LossOfTwo`
        if next_BLD is None:
            return hidden_BLD
        return torch.stack([hidden_BLD, self.own(next_BLD) if self.own else next_BLD], dim=2)


def embedding_of(model: nn.Module) -> str:
    """Return the name of the embedding: of the first direct child."""
    return next(name for name, _ in model.named_children())


def blocks_of_stages(blocks: int, parallelism: Parallelism) -> list[range]:
    """Return the blocks of each stage: as equal numbers as can be, where embedding and head count as some blocks.

    Raises:
        ValueError: there is a stage without a block, or ranks have different numbers of stages.
    """
    first, last = (
        parallelism.pipeline_parallel_first_stage_less_layers,
        parallelism.pipeline_parallel_last_stage_less_layers,
    )
    ranks, per_stage = parallelism.pipeline_parallel_degree, parallelism.pipeline_parallel_layers_per_stage
    single, parts = parallelism.pipeline_parallel_schedule in ONE_STAGE, parallelism.module_fqns_per_model_part
    stages = -(-(blocks + first + last) // per_stage) if per_stage else ranks * (1 if single else 2)
    stages = len(parts) or stages
    if stages % ranks or (stages == ranks) != single:
        wanted = f"{ranks}" if single else f"a multiple of {ranks} from {2 * ranks} on"
        what = "" if parts else f" of {blocks} blocks, {first} for the embedding and {last} for the head"
        raise ValueError(
            f"{f'{per_stage} blocks a stage make ' if per_stage else ''}{stages} stages{what}; "
            f"{parallelism.pipeline_parallel_schedule} on {ranks} ranks needs {wanted}"
        )
    if parts:
        return _named_blocks(blocks, parts)
    if stages > blocks:
        raise ValueError(f"{stages} stages need as many blocks, and the model has {blocks}")
    counts, loads = [1] * stages, [1.0] * stages
    loads[0] += first
    loads[-1] += last
    for _ in range(blocks - stages):
        stage = loads.index(min(loads))
        counts[stage] += 1
        loads[stage] += 1
    ends = [sum(counts[: stage + 1]) for stage in range(stages)]
    return [range(end - count, end) for end, count in zip(ends, counts, strict=True)]


def stages_of(model: Model, parallelism: Parallelism) -> list[range]:
    """Return the blocks of each stage. One that predicts the token after the next is a further one of the last stage.

    Raises: as `blocks_of_stages`.
    """
    further = sum(not in_every_pass(block) for block in model.layers)
    stages = blocks_of_stages(len(model.layers) - further, parallelism)
    stages[-1] = range(stages[-1].start, stages[-1].stop + further)
    return stages


def _named_blocks(blocks: int, parts: Sequence[Sequence[str]]) -> list[range]:
    """Return the blocks of each stage by the names of its modules.

    Raises:
        ValueError: they are not all blocks, in their order.
    """
    numbers = [[int(match[1]) for name in part if (match := BLOCK.fullmatch(name))] for part in parts]
    if [number for part in numbers for number in part] != [*range(blocks)] or not all(numbers):
        raise ValueError(
            f"module_fqns_per_model_part must name layers.0 to layers.{blocks - 1} in this order, and some in each part"
        )
    for part in parts[1:-1]:
        if others := [name for name in part if not BLOCK.fullmatch(name)]:
            raise ValueError(f"module_fqns_per_model_part: {others[0]} is in a part that is neither first nor last")
    return [range(part[0], part[-1] + 1) for part in numbers]


class Stage(nn.Module):
    """The children of a model that compute a stage. They stand for those of the model in its forward.

    FSDP takes it for a root. Names of parameters are those of the model.
    """

    metrics: Sequence[str] = ()
    """Names of the metrics that the whole model gives after a step."""
    counters: Sequence[tuple[torch.Size, bool]] = ()
    """Shapes of the counters of the whole model, and whether this rank has them."""

    def __init__(self, model: nn.Module, stages: list[range], number: int) -> None:
        super().__init__()
        children = dict(model.named_children())
        layers, embedding, head = children["layers"], embedding_of(model), [*children][-1]
        self.number, self.is_last = number, number == len(stages) - 1
        self.sizes = [*map(len, stages)]
        """Blocks of each stage of the pipeline."""
        self.add_module(embedding, children[embedding] if number == 0 else Received())
        self.layers = Blocks((str(layer), layers.get_submodule(str(layer))) for layer in stages[number])
        self.add_module(head, children[head] if self.is_last else Passed())
        self._model = (model,)  # no child

    def forward(self, inputs: Tensor, **arguments: Any) -> Any:
        """Return what the model's forward does: hidden states, and of the last stage its result."""
        [model] = self._model
        whole = {name: model.get_submodule(name) for name, _ in self.named_children()}
        try:
            for name, part in self.named_children():
                setattr(model, name, part)
            return type(model).forward(model, inputs, **arguments)
        finally:
            for name, child in whole.items():
                setattr(model, name, child)


def rank_of_stage(stage: int, parallelism: Parallelism) -> int:
    """Return the rank on the axis that has a stage."""
    ranks = parallelism.pipeline_parallel_degree
    turns_back = parallelism.pipeline_parallel_schedule in V_SHAPED and stage >= ranks
    return 2 * ranks - 1 - stage if turns_back else stage % ranks


def cut_to_stages(model: Model, mesh: DeviceMesh, parallelism: Parallelism) -> None:
    """Leave out of a meta model what other ranks have, in place, and set its `stages`."""
    axis = pipeline_mesh(mesh)
    assert axis is not None, "the mesh has no pipeline axis"
    blocks = stages_of(model, parallelism)
    own = [number for number in range(len(blocks)) if rank_of_stage(number, parallelism) == axis.get_local_rank()]
    model.stages = stages = [Stage(model, blocks, number) for number in own]
    if ranks := tensor_ranks(mesh) if split_blocks(model) else None:
        for number in {*own} - {0}:  # the first block has the hook, since the embedding gives all tokens, too
            take_own_tokens(model.layers[blocks[number][0]], ranks)
        for passed in (child for stage in stages for child in stage.children() if isinstance(child, Passed)):
            passed.own = ranks.own
    counters, metrics = model.counters(), [*model.end_step(torch.ones((), device="meta"))]
    for name, _ in [*model.named_children()]:
        parts = [stage.get_submodule(name) for stage in model.stages]
        kept = next((part for part in parts if not isinstance(part, Received | Passed)), parts[0])
        if name == "layers":
            kept = Blocks(child for part in parts for child in part.named_children())
        setattr(model, name, kept)
    own_counters = {id(counter) for counter in model.counters()}
    for stage in stages:
        stage.metrics = metrics
        stage.counters = [(counter.shape, id(counter) in own_counters) for counter in counters]


def check_stages(model: Model, parallelism: Parallelism) -> None:
    """Check that a model can be cut: its forward must be embedding, blocks, head, in which hidden states may stand for
    tokens. Each rank must train something.

    Args:
        model: on the meta device, with its frozen parameters marked.

    Raises:
        UserError: it cannot.
    """
    name = type(model).__name__
    try:
        stages = stages_of(model, parallelism)
    except ValueError as error:
        raise UserError(str(error)) from None
    children = [child for child, module in model.named_children() if any(True for _ in module.parameters())]
    if len(children) != 3 or children[1] != "layers":
        raise UserError(
            f"needs a model of an embedding, `layers` and a head, and {name} has {', '.join(children)}: make one "
            "module of what is before the layers, or set 1"
        )
    known = *dict(model.named_modules()), "norm", "output"  # the last two are torchtitan's names
    others = [name for part in parallelism.module_fqns_per_model_part for name in part if not BLOCK.fullmatch(name)]
    if unknown := [name for name in others if name not in known]:
        raise UserError(f"module_fqns_per_model_part: {name} has no {unknown[0]}{did_you_mean(unknown[0], known)}")
    if shared := {id(parameter) for parameter in model.get_submodule(children[0]).parameters()} & {
        id(parameter) for parameter in head_of(model).parameters()
    }:
        weight = next(key for key, parameter in unique_parameters(model) if id(parameter) in shared)
        raise UserError(
            f"embedding and head share {weight}, and are on different stages: set model.args.tied_head = false, or the "
            "degree to 1"
        )
    parts = [Stage(model, stages, number) for number in range(len(stages))]
    for rank in range(parallelism.pipeline_parallel_degree):
        own = [part for part in parts if rank_of_stage(part.number, parallelism) == rank]
        if not any(parameter.requires_grad for part in own for parameter in part.parameters()):
            blocks = ", ".join(str(layer) for part in own for layer, _ in part.layers.named_children())
            raise UserError(f"rank {rank} would train nothing, with the blocks {blocks}: freeze less, or set 1")
    tokens = torch.zeros(1, 2, dtype=torch.int64, device="meta")
    x = tokens
    try:
        for part in parts:
            x = part(x)
    except Exception as error:  # code of the user's own may raise anything
        raise UserError(f"{name}.forward fails with hidden states in the place of tokens: {error}, or set 1") from error
    if x.shape != model(tokens).shape:
        raise UserError(f"{name}.forward does not compute stages one after the other: set 1")
