"""`titanlite inspect CONFIG`: what `parallelize` and the optimizer did with each parameter of a model.

A row is a dict, as `--json` prints it. `inspect_ranks` makes the rows of fake ranks, as a plan does; `rows_of` reads
those of any parallelized model.
"""

import math
import os
import re
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Any

import torch
from rich.console import Console
from rich.table import Column, Table
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from titanlite.config.load import load
from titanlite.mesh import axis_sizes, root_axes
from titanlite.models.base import Model, unique_parameters
from titanlite.optim.groups import parameter_groups
from titanlite.optim.registry import accepts, find_optimizer_cls
from titanlite.optim.state_size import local_bytes, local_state_bytes
from titanlite.parallelize.activation_checkpoint import recompute_policies
from titanlite.parallelize.materialize import allocate
from titanlite.runtime.errors import UserError
from titanlite.runtime.files import json_text
from titanlite.runtime.private_torch.compiler import is_compiled
from titanlite.runtime.private_torch.fsdp import mixed_precision, sharded_parameters, unit_of
from titanlite.runtime.private_torch.tensors import local_tensor
from titanlite.runtime.private_torch.tracing import FakeTensorMode
from titanlite.runtime.ranks import runs_of
from titanlite.schema import Config
from titanlite.techniques import every_technique
from titanlite.tools.arguments import Count, Index
from titanlite.tools.plan.estimate import model_of
from titanlite.tools.plan.gpu_kernels import GpuKernels
from titanlite.tools.plan.output import format_size
from titanlite.tools.plan.trace import fake_optimizer, fake_ranks, fill_states, parallelized

ROOT = "(root)"
"""Name of the FSDP unit of parameters that are in no other one."""
SIZES = ("parameter_bytes", "gradient_bytes", "optimizer_bytes")
BLOCK = re.compile(r"(?<=\blayers\.)\d+")
"""Number of a block in a name."""
Row = dict[str, Any]
"""Facts about a parameter on one rank. A shared parameter is one, with the name of its first place."""


def inspect(
    config: str | None = None,
    overrides: Sequence[str] = (),
    *,
    world_size: Count | None = None,
    rank: Index = 0,
    json_: bool = False,
) -> None:
    """Show what each rank holds of a config: what the techniques do with each parameter.

    The table has shapes, placement, dtypes, FSDP unit, recompute policy, compile, float8, adapters, optimizer and bytes
    of one rank. The ranks are not real, and no GPU is needed.

    Args:
        world_size: processes; default: as many as the config's degrees ask for
        rank (R): rank to show
        json_: print JSON, with every parameter

    Example:
        llama3_8b --world-size 64
        my.toml --world-size 8 --rank 7 --json
    """
    if not config:
        raise UserError("titanlite inspect: name a config; see titanlite inspect --help")
    if world_size is None:
        parallelism = load(config, overrides).parallelism
        world_size = parallelism.data_parallel_replicate_degree * max(1, parallelism.data_parallel_shard_degree)
    if rank >= world_size:
        raise UserError(f"--rank {rank}: there are ranks 0 to {world_size - 1}; set --world-size")
    loaded = load(config, overrides, world_size=world_size)
    torch.set_num_threads(1)
    record = inspect_ranks(loaded, world_size=world_size, rank=rank)
    show(record if json_ else _lines(record))


def inspect_ranks(config: Config, *, world_size: int, rank: int = 0) -> dict[str, Any]:
    """Apply every technique of the config to its model on fake ranks, and give the optimizer its states.

    Returns:
        the name of the run, the rank, the mesh, a row for each of the `parameters`, and the rank's bytes: of the FSDP
        `units`, in the order of the model, and in `total`.

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
                fill_states(optimizer, one_by_one=config.optimizer.in_backward)
            rows = rows_of(model, optimizer, config, mesh)
        names = dict.fromkeys(row["unit"] for row in rows)
        units = {name: _totals(row for row in rows if row["unit"] == name) for name in names}
        facts = {"name": str(config.job.name), "rank": rank, "mesh": axis_sizes(mesh)}
        return facts | {"parameters": rows, "units": units, "total": _totals(rows)}


def rows_of(model: Model, optimizer: torch.optim.Optimizer, config: Config, mesh: DeviceMesh) -> list[Row]:
    """Return the rows of a parallelized model, in its order.

    `placements` are those on each mesh axis: S(d) is sharded along dim d, R is replicated. `dtype` is that of the
    shard, `compute_dtype` that of the gathered parameter, which some layers cast further, and `reduce_dtype` that of
    its gradient while it is reduced. `lr` is the peak. Gradients that live within backward only take 0 bytes. The last
    keys are what techniques report: their `parameter_facts`.

    Args:
        optimizer: its states count, so it must have made a step.
    """
    policies = zip(model.layers, recompute_policies(config.activation_checkpoint, len(model.layers)), strict=True)
    recompute = {parameter: policy for block, policy in policies for parameter in block.parameters()}
    compiled = {parameter for module in model.modules() if is_compiled(module) for parameter in module.parameters()}
    facts = [(technique.facts, technique.parameter_facts(model, config)) for technique in every_technique()]
    of_groups = parameter_groups(config.optimizer, model)
    groups = {parameter: group for group in of_groups for parameter in group.parameters.values()}
    names: dict[Hashable, list[str]] = {}  # the modules of each FSDP unit
    units: dict[nn.Parameter, tuple[Hashable, MixedPrecisionPolicy | None]] = {}
    for name, module in model.named_modules():
        if isinstance(module, FSDPModule) and (unit := unit_of(module)) is not None:
            names.setdefault(unit, []).append(name or ROOT)
            units |= dict.fromkeys(sharded_parameters(module), (unit, mixed_precision(module)))
    rows: list[Row] = []
    for name, parameter in unique_parameters(model):
        unit, policy = units.get(parameter, (None, None))
        group, size, compute = groups.get(parameter), local_bytes(parameter), policy and policy.param_dtype
        decays = group is not None and accepts(find_optimizer_cls(group.name), "weight_decay")
        row: Row = {
            "name": name,
            "unit": " + ".join(names.get(unit, [ROOT])),
            "shape": [*parameter.shape],
            "local_shape": [*local_tensor(parameter).shape],
            "placements": _placements(parameter, mesh),
            "dtype": parameter.dtype,
            "compute_dtype": compute or parameter.dtype,
            "reduce_dtype": (policy and policy.reduce_dtype) or compute or parameter.dtype,
            "recompute": recompute.get(parameter),
            "compiled": parameter in compiled,
            "frozen": not parameter.requires_grad,
            "optimizer": group and group.name,
            "group": group and group.label,
            "lr": group and group.lr,
            "weight_decay": group.weight_decay if group and decays else None,
            "parameter_bytes": size,
            "gradient_bytes": size if parameter.requires_grad and not config.optimizer.in_backward else 0,
            "optimizer_bytes": local_state_bytes(optimizer.state.get(parameter, {})),
        }
        row |= {key: str(row[key]).removeprefix("torch.") for key in ("dtype", "compute_dtype", "reduce_dtype")}
        for usual, found in facts:
            row |= usual | found.get(parameter, {})
        rows.append(row)
    return rows


def _placements(parameter: Tensor, mesh: DeviceMesh) -> dict[str, str]:
    """Return the placement on each axis of the whole mesh. A parameter knows only the axes that it is sharded over."""
    placements = {axis: list[str]() for axis in axis_sizes(mesh)}
    if isinstance(parameter, DTensor):
        axes = parameter.device_mesh.mesh_dim_names or ()
        for axis, placement in zip(axes, parameter.placements, strict=True):
            for root in placements.keys() & root_axes(axis):
                placements[root].append(str(placement))
    return {axis: " ".join(found) or "R" for axis, found in placements.items()}


def _totals(rows: Iterable[Row]) -> dict[str, int]:
    rows = [*rows]
    return {name: sum(row[name] for row in rows) for name in SIZES}


# Output


def _lines(record: dict[str, Any]) -> Iterator[str | Table]:
    """Yield what the console prints. Rows that differ in their block only are one."""
    rows, mesh = record["parameters"], record["mesh"]
    elements, here = (sum(math.prod(row[shape]) for row in rows) for shape in ("shape", "local_shape"))
    axes = " x ".join(f"{axis} {size}" for axis, size in mesh.items())
    yield f"{record['name']}: {elements:,} parameters in {len(rows):,} tensors"
    yield f"mesh       {axes}; rank {record['rank']} holds {here:,} of the parameters"
    yield f"placement  on {' x '.join(mesh)}; S(0): sharded along dim 0, R: replicated"
    yield "dtype      stored, compute, reduction of gradients; one where they are equal"
    yield from dict.fromkeys(map(_update_line, rows))
    sizes = [Column(name, justify="right", no_wrap=True) for name in ("parameter", "gradient", "optimizer")]
    texts = Column("name", no_wrap=True), "shape", "on this rank", "placement", "dtype", "update", "unit", "notes"
    table = Table(*texts, *sizes, box=None, pad_edge=False, padding=(0, 2, 0, 0))
    alike: dict[str, list[Row]] = {}
    for row in rows:
        alike.setdefault(BLOCK.sub("", str(row)), []).append(row)
    for first, *others in alike.values():
        numbers = (BLOCK.search(row["name"]) for row in (first, *others))
        blocks = ",".join(runs_of(int(match[0]) for match in numbers if match))
        name, unit = (BLOCK.sub(blocks, first[key]) for key in ("name", "unit"))
        dtypes = [first[key] for key in ("dtype", "compute_dtype", "reduce_dtype")]
        table.add_row(
            name,
            *(str(first[key]) for key in ("shape", "local_shape")),
            " ".join(first["placements"].values()),
            "/".join(dtypes[: 1 if len({*dtypes}) == 1 else None]),
            _update(first),
            unit,
            ", ".join(_notes(first)),
            *_sizes(first),
        )
    table.add_row("all", *[""] * 7, *_sizes(record["total"]))
    yield table
    yield f"together   {format_size(sum(record['total'].values()))}"


def _notes(row: Row) -> Iterator[str]:
    """Yield what is not usual of a parameter, with the facts of techniques."""
    usual = {"recompute": "none", "compiled": False, "frozen": False}
    for technique in every_technique():
        usual |= technique.facts
    for name, value in usual.items():
        if (found := row[name]) not in (value, None):
            words = f"{found:.3g}" if isinstance(found, float) else found
            yield name if found is True else f"{name} {words}"


def _update(row: Row) -> str:
    return f"{row['optimizer']} {row['group']}".rstrip() if row["optimizer"] else ""


def _update_line(row: Row) -> str:
    if not row["optimizer"]:
        return "frozen     no gradient, no update"
    decay = "" if row["weight_decay"] is None else f", weight decay {row['weight_decay']:g}"
    return f"update     {_update(row)}: peak lr {row['lr']:g}{decay}"


def _sizes(sizes: Row) -> list[str]:
    return [format_size(sizes[name]) for name in SIZES]


def show(output: dict[str, Any] | Iterable[str | Table]) -> None:
    """Print a record as JSON, or lines and tables for people."""
    if isinstance(output, dict):
        print(json_text(output, indent=1))
        return
    console = Console(width=None if os.isatty(1) else 1000, markup=False, emoji=False, highlight=False)
    for part in output:
        console.print(part, soft_wrap=isinstance(part, str))  # in a pipe, lines are not wrapped
