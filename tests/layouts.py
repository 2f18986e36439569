"""Runs on several layouts of one mesh: options for a layout, whole tensors, and functions that ranks call."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.helpers import TinyRun, built, one_process, run_in_turn, train_on_this_rank
from titanlite.batch import IGNORE
from titanlite.loss import TokenLoss
from titanlite.models.base import Model
from titanlite.parallelize.compile import compile_blocks
from titanlite.schema import Config
from titanlite.step import StepResult, train_step
from titanlite.train import Run

# (replicate, shard)
LAYOUTS = [(1, 1), (4, 1), (1, 4), (2, 2)]

LORA = ["--lora.rank=3", "--lora.alpha=6", "--training.max_norm=0", "--optimizer.lr=0.01"]
ON_FURTHER_AXES = {
    "reduced once": ["--training.local_batch_size=1", "--parallelism.fsdp_reduce_gradients=last"],
    "always": ["--parallelism.fsdp_reshard_after_forward=always"],
    "never": ["--parallelism.fsdp_reshard_after_forward=never"],
    "prefetch": ["--parallelism.fsdp_forward_prefetch=2", "--parallelism.fsdp_backward_prefetch=2"],
    "in backward": ["--optimizer.in_backward", "--training.max_norm=0"],
    "offload": ["--training.enable_cpu_offload"],
    "disk": ["--training.enable_cpu_offload", "--offload.parameters=disk", "--offload.optimizer=disk"],
    "tied head": ["--model.args.tied_head=true"],
    "z-loss, every 2nd": [
        "--training.z_loss=1e-3", "--activation_checkpoint.mode=selective",
        "--activation_checkpoint.selective_ac_option=2",
    ],
}  # fmt: skip
"""Techniques that change no loss on any axis of the mesh. Models have two layers."""
ADAPTERS = {"LoRA": LORA, "LoRA int8": [*LORA, "--lora.quantize_base=int8"]}
OWN_LOSS = {"own loss": ["--training.loss=tests.layouts:smoothed_loss"]}
BFLOAT16 = {
    "bfloat16": ["--training.mixed_precision_param=bfloat16"],
    "bfloat16 moments": ["--optimizer.state_dtype=bfloat16"],
    "bfloat16 weights": [
        "--training.mixed_precision_param=bfloat16", "--training.dtype=bfloat16", "--optimizer.state_dtype=bfloat16",
    ],
}  # fmt: skip

FLOAT8 = {
    name: [f"--quantize.linear.float8.{it}" for it in ("enable", "emulate", "skip_small=false", *more)]
    for name, more in {"float8": [], "float8 gathered": ["enable_fsdp_float8_all_gather"]}.items()
}

ROUNDED = 2e-3
"""Largest relative difference of losses where tensors are rounded to fewer bits."""


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
    return train_step(
        run.model,
        batches,
        optimizer=run.optimizer,
        group=run.group,
        max_norm=1.0,
        loss_function=run.loss_function,
        targets=run.targets,
        decide=run.guard.decide,
    )


def trained(rank: int, world_size: int, config: Config) -> dict[str, Any]:
    run = train_on_this_rank(config, rank, world_size)
    return {name: whole(parameter).float().numpy() for name, parameter in run.model.named_parameters()}


def job(name: str, *layout: int) -> str:
    """Name of a run of some options on a layout."""
    return "-".join([*name.replace(",", "").split(), *map(str, layout)])


def trained_on(tiny: TinyRun, techniques: dict[str, list[str]], *layouts: tuple[int, ...], **options: Any) -> None:
    """Train with each technique on each layout; the runs are named `job(technique, *layout)`.

    Args:
        layouts: arguments of `degrees`.
        options: of `run_in_turn`.
    """
    sizes = {layout: math.prod(layout[:4]) for layout in layouts}
    for world_size in sorted({*sizes.values()}):
        configs = [
            tiny.config(*words, *degrees(*layout), f"--job.name={job(name, *layout)}", world_size=world_size)
            for layout in layouts
            if sizes[layout] == world_size
            for name, words in techniques.items()
        ]
        run_in_turn(trained, world_size, configs, **options)


def assert_same_curve(
    tiny: TinyRun, found: str, expected: str, *, steps: int = 20, loss: float = 1e-5, grad_norm: float = 1e-4
) -> None:
    """Compare the records of two runs: losses and gradient norms by a relative tolerance, the rest exactly.

    Validation losses are compared like training losses, where there are any.
    """
    reference, records = tiny.records(expected), tiny.records(found)
    assert len(reference) == steps
    for key, tolerance in (("loss", loss), ("grad_norm", grad_norm)):
        values = [record[key] for record in reference]
        assert [record[key] for record in records] == pytest.approx(values, rel=tolerance), (found, key)
    assert [it["samples"] for it in records] == [it["samples"] for it in reference], found
    if loss < ROUNDED:  # else some tokens go to other experts
        assert [it.get("busiest_expert") for it in records] == [it.get("busiest_expert") for it in reference], found
    if (tiny.folder / "outputs" / expected / "validation.jsonl").exists():
        runs = (tiny.records(name, file="validation.jsonl") for name in (found, expected))
        ends, wanted = ([it["loss"] for it in records] for records in runs)
        assert ends == pytest.approx(wanted, rel=loss), found


def compare_with_one(
    tiny: TinyRun, techniques: dict[str, list[str]], layouts: Sequence[tuple[int, ...]], *, steps: int = 20,
    loss: float = 1e-5,
) -> None:  # fmt: skip
    """Train on one process and on each layout, and compare losses, gradient norms and validation losses.

    Args:
        loss: relative tolerance of losses.
    """
    common = [f"--training.steps={steps}", "--validation.enable", f"--validation.freq={steps}"]
    common += [f"--validation.path={tiny.text}", "--checkpoint.enable=false"]
    trained_on(tiny, {name: [*words, *common] for name, words in techniques.items()}, (1, 1), *layouts)
    for name in techniques:
        for layout in layouts:
            assert_same_curve(tiny, job(name, *layout), job(name, 1, 1), steps=steps, loss=loss)


def compare_rounded(
    tiny: TinyRun, techniques: dict[str, list[str]], pairs: Sequence[tuple[tuple[int, ...], tuple[int, ...]]]
) -> None:
    """Train 20 steps, and compare the two layouts of each pair as near as rounding to fewer bits allows."""
    steps = "--training.steps=20"
    layouts = dict.fromkeys(layout for pair in pairs for layout in pair)
    trained_on(tiny, {name: [*words, steps] for name, words in techniques.items()}, *layouts)
    for name in techniques:
        for mine, theirs in pairs:
            assert_same_curve(tiny, job(name, *mine), job(name, *theirs), loss=ROUNDED, grad_norm=0.1)


def assert_same_health(tiny: TinyRun, found: str, expected: str) -> None:
    """Compare what two runs record of the health of layers."""
    mine, theirs = ([it["layers"] for it in tiny.records(name, file="layers.jsonl")] for name in (found, expected))
    assert len(mine) == len(theirs) > 0
    for ours, wanted in zip(mine, theirs, strict=True):
        assert ours.keys() == wanted.keys()
        for layer, kinds in wanted.items():
            for kind, values in kinds.items():
                assert ours[layer][kind] == pytest.approx(values, rel=1e-3, abs=1e-6), (layer, kind)


def on_one(function: Callable[..., Any], *configs: Config) -> list[Any]:
    """Return what the function returns for each config, in a process group of this process alone."""
    with one_process():
        return [function(0, 1, config) for config in configs]


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
        if world_size == 1:
            found = iter([[it] for it in on_one(function, *configs)])
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
