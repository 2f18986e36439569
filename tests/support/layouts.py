"""Runs on several layouts of one mesh: options for a layout, whole tensors, and functions that ranks call."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.helpers import TinyRun, built, one_process, run_in_turn, train_on_this_rank
from titanlite.batch import IGNORE
from titanlite.loss import TokenLoss
from titanlite.models.base import Model
from titanlite.parallelize.compile import compile_blocks
from titanlite.schema import Config
from titanlite.step import StepResult
from titanlite.train import Run

# (replicate, shard)
LAYOUTS = [(1, 1), (4, 1), (1, 4), (2, 2)]


def trace_blocks(model: Model, **_: object) -> None:
    """Compile with a backend that is ready in a second; graphs are the same for any backend."""
    compile_blocks(model, backend="aot_eager")


def smoothed_loss(hidden_BLD: torch.Tensor, weight_VD: torch.Tensor, *, labels_BL: torch.Tensor) -> TokenLoss:
    """A user's own loss: cross entropy with smoothed labels."""
    logits_TV, labels_T = hidden_BLD.flatten(0, 1) @ weight_VD.t(), labels_BL.flatten()
    sums = partial(F.cross_entropy, target=labels_T, ignore_index=IGNORE, reduction="sum")
    return TokenLoss(sums(logits_TV, label_smoothing=0.1), sums(logits_TV.detach()))


def degrees(
    replicate: int, shard: int, context: int = 1, tensor: int = 1, expert: int = 1, pipeline: int = 1
) -> list[str]:
    axes = {"context": context, "tensor": tensor, "expert": expert, "pipeline": pipeline}
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


def one_step(run: Run) -> StepResult:
    batches = list(islice(run.batches, run.accumulation))
    return run.train_step(batches, decide=run.guard.decide)


def with_loss(run: Run, loss_function: Any) -> Run:
    """Return a run whose step minimizes another function."""
    run.train_step.loss_function = loss_function
    return run


def trained(rank: int, world_size: int, config: Config) -> dict[str, Any]:
    run = train_on_this_rank(config, rank, world_size)
    return {name: whole(parameter).float().numpy() for name, parameter in run.model.named_parameters()}


def job(name: str, *layout: int) -> str:
    """Name of a run of some options on a layout."""
    return "-".join([*name.replace(",", "").split(), *map(str, layout)])


def trained_on(tiny: TinyRun, techniques: dict[str, list[str]], *layouts: tuple[int, ...]) -> None:
    """Train with each technique on each layout; the runs are named `job(technique, *layout)`.

    Args:
        layouts: arguments of `degrees`.
    """
    sizes = {layout: math.prod(layout[:4]) for layout in layouts}
    for world_size in sorted({*sizes.values()}):
        configs = [
            tiny.config(*words, *degrees(*layout), f"--job.name={job(name, *layout)}", world_size=world_size)
            for layout in layouts
            if sizes[layout] == world_size
            for name, words in techniques.items()
        ]
        run_in_turn(trained, world_size, configs)


def on_one(function: Callable[..., Any], *configs: Config) -> list[Any]:
    """Return what the function returns for each config, in a process group of this process alone."""
    with one_process():
        return [function(0, 1, config) for config in configs]


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
        if world_size == 1:
            found = iter([[result] for result in on_one(function, *configs)])
        else:
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
