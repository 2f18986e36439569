"""Runs on several layouts of one mesh: options for a layout, whole tensors, and functions that ranks call."""

from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.helpers import TinyRun, run_in_turn, train_on_this_rank
from titanlite.build import Run, build
from titanlite.config.schema import Config
from titanlite.convert.source import open_teacher
from titanlite.convert.weights import open_weights
from titanlite.ingest.prepare import prepare_text
from titanlite.preflight import preflight
from titanlite.runtime.process_group import Ranks
from titanlite.step import StepResult, train_step

# (replicate, shard)
LAYOUTS = [(1, 1), (4, 1), (1, 4), (2, 2)]


def degrees(replicate: int, shard: int, context: int = 1, tensor: int = 1) -> list[str]:
    axes = {"context": context, "tensor": tensor}
    further = [f"--parallelism.{axis}_parallel_degree={degree}" for axis, degree in axes.items() if degree > 1]
    return [
        *further,
        f"--parallelism.data_parallel_replicate_degree={replicate}",
        f"--parallelism.data_parallel_shard_degree={shard}",
    ]


class CountOperators(TorchDispatchMode):
    """Number of calls of operators whose name contains a text, also within backward."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text, self.count = text, 0

    def __enter__(self) -> "CountOperators":
        torch.autograd.set_multithreading_enabled(False)  # another thread would not have this mode
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        torch.autograd.set_multithreading_enabled(True)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += self.text in str(func)
        return func(*args, **(kwargs or {}))


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def built(rank: int, world_size: int, config: Config) -> Run:
    ranks, device = Ranks(rank, world_size, rank, world_size), torch.device("cpu")
    return build(
        config,
        preflight(config, ranks, device, open_teacher=open_teacher),
        ranks=ranks,
        device=device,
        prepare_text=prepare_text,
        open_weights=open_weights,
    )


def one_step(run: Run) -> StepResult:
    batches = list(islice(run.batches, run.accumulation))
    return train_step(
        run.model,
        batches,
        optimizer=run.optimizer,
        group=run.group,
        max_norm=1.0,
        loss_function=run.loss_function,
        teacher=run.teacher,
        decide=run.guard.decide,
    )


def trained(rank: int, world_size: int, config: Config) -> dict[str, Any]:
    run = train_on_this_rank(config, rank, world_size)
    return {name: whole(parameter).float().numpy() for name, parameter in run.model.named_parameters()}


def on_every_layout(function: Callable[..., Any], tiny: TinyRun, *options: str) -> dict[tuple[int, int], list[Any]]:
    """Return what each rank returned, by layout. Runs are named run-1-1, run-4-1, ..."""
    [results] = each_on_every_layout(function, tiny, [options])
    return results


def each_on_every_layout(
    function: Callable[..., Any], tiny: TinyRun, several: Sequence[Sequence[str]]
) -> list[dict[tuple[int, int], list[Any]]]:
    """Return for each of several lists of options what each rank returned, by layout.

    All runs on as many ranks are in one process group. Runs of the first list are named run-1-1, run-4-1, ..., and of
    each further one run-1-1-1, run-4-1-1, ...
    """
    results: list[dict[tuple[int, int], list[Any]]] = [{} for _ in several]
    for world_size in (1, 4):
        layouts = [layout for layout in LAYOUTS if layout[0] * layout[1] == world_size]
        configs = [
            tiny.config(
                *degrees(*layout),
                f"--job.name=run-{layout[0]}-{layout[1]}{f'-{number}' if number else ''}",
                *options,
                world_size=world_size,
            )
            for number, options in enumerate(several)
            for layout in layouts
        ]
        found = iter(run_in_turn(function, world_size, configs))
        for of_options in results:
            of_options |= {layout: next(found) for layout in layouts}
    return results


def optimizer_moments(rank: int, world_size: int, config: Config) -> dict[str, Any]:
    """The optimizer's state as it is after loading, before any further step."""
    run = built(rank, world_size, config)
    return {
        f"{name}.{key}": whole(value).numpy()
        for name, parameter in run.model.named_parameters()
        for key, value in run.optimizer.state[parameter].items()
    }
