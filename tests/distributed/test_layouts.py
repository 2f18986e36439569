"""Same config, any layout: same weights, same samples, same losses."""

from collections import Counter
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.support.helpers import THREE_BLOCKS, TinyRun, run_in_turn
from tests.support.layouts import LAYOUTS, built, degrees, each_on_every_layout, on_one, one_step, whole, with_loss
from titanlite.batch import IGNORE
from titanlite.loss import token_loss
from titanlite.metrics.run_summary import types_of
from titanlite.ops.cpu import CpuKernels
from titanlite.schema import Config


@dataclass(frozen=True)
class Found:
    """Values of a few steps on one rank."""

    initial: dict[str, Any]
    gradients: dict[str, Any]
    """Of the first step, before its update."""
    grad_norm: float
    losses: list[float]


def few_steps(rank: int, world_size: int, config: Config) -> Found:
    """Take three steps. Labels of the first are ignored unevenly, and nothing is clipped.

    On several ranks the loss takes 7 tokens at a time, on one rank all of them.
    """
    chunk_bytes = 4 * 259 * 7 if world_size > 1 else None
    loss_function = partial(token_loss, kernels=CpuKernels(chunk_bytes=chunk_bytes))
    run = built(rank, world_size, config)
    initial = {name: whole(parameter).numpy() for name, parameter in run.model.named_parameters()}
    gradients: dict[str, Any] = {}

    def keep(*_: Any) -> None:
        for name, parameter in run.model.named_parameters():
            assert parameter.grad is not None
            gradients.setdefault(name, whole(parameter.grad).numpy())

    run.optimizer.register_step_pre_hook(keep)
    results = []
    for step in range(3):
        batches = list(islice(run.batches, run.accumulation))
        for number, batch in enumerate(batches if step == 0 else []):
            for row, labels in enumerate(batch["labels"]):
                sample = rank * len(batches) * len(batch["labels"]) + number * len(batch["labels"]) + row
                labels[: 4 * sample] = IGNORE  # of 32: from none to all but four
        run.train_step.max_norm, run.train_step.loss_function = 0.0, loss_function
        results.append(run.train_step(batches))
    return Found(initial, gradients, float(results[0].grad_norm), [float(result.loss) for result in results])


Layouts = dict[tuple[int, int], list[Found]]


@pytest.fixture(scope="module")
def on_layouts(tmp_path_factory: pytest.TempPathFactory) -> list[Layouts]:
    """Steps of one micro-batch on one process; and on every layout, of as many as there are sequences."""
    tiny = TinyRun(tmp_path_factory.mktemp("layouts"))
    [reference] = on_one(few_steps, tiny.config("--training.local_batch_size=8", "--job.name=reference"))
    return [{(1, 1): [reference]}, *each_on_every_layout(few_steps, tiny, [["--training.local_batch_size=1"]])]


def test_initial_weights_are_bit_identical_on_every_layout(on_layouts: list[Layouts]) -> None:
    [expected] = [found.initial for found in on_layouts[0][1, 1]]
    for of_layouts in on_layouts:
        for layout, ranks in of_layouts.items():
            for found in ranks:
                assert found.initial.keys() == expected.keys()
                for name, weight in found.initial.items():
                    assert (weight == expected[name]).all(), (name, layout)
    rows = expected["layers.0.attention.wq.weight"]
    assert abs(rows.std() - 0.02) < 0.002
    assert (rows[:11] != rows[11:22]).all(), "shards must not repeat each other's draws"


def test_losses_are_equal_on_every_layout(on_layouts: list[Layouts]) -> None:
    expected = on_layouts[0][1, 1][0].losses
    assert expected[0] == pytest.approx(5.557, abs=0.1)  # ln 259: at the start all tokens are equally likely
    assert expected[-1] < expected[0] - 0.2
    for of_layouts in on_layouts:
        for layout, ranks in of_layouts.items():
            for found in ranks:
                assert found.losses == pytest.approx(expected, rel=1e-5), layout


def test_gradients_do_not_depend_on_layout_and_accumulation(on_layouts: list[Layouts]) -> None:
    reference, *others = (ranks[0] for of_layouts in on_layouts for ranks in of_layouts.values())
    assert len(others) >= len(LAYOUTS)
    squares = sum((gradient**2).sum() for gradient in reference.gradients.values())
    assert reference.grad_norm == pytest.approx(squares**0.5, rel=1e-5)
    for other in others:
        assert other.grad_norm == pytest.approx(reference.grad_norm, rel=1e-5)
        for name, gradient in reference.gradients.items():
            assert abs(other.gradients[name] - gradient).max() <= 1e-6 * max(1, abs(gradient).max()), name


class CollectiveCounter(TorchDispatchMode):
    """Count collectives by name, and keep the dtypes of tensors with more than 8 elements."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.dtypes: set[tuple[str, str]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional") and "wait" not in str(func):
            name = str(func).split(".")[1].strip("_")
            self.counts[name] += 1
            for tensor in tree_leaves(args[:2]):
                if isinstance(tensor, torch.Tensor) and tensor.numel() > 8:
                    self.dtypes.add((name, str(tensor.dtype)))
        return func(*args, **(kwargs or {}))


Collectives = tuple[Counter[str], Counter[str], set[tuple[str, str]]]


def collectives_of_a_step(rank: int, world_size: int, config: Config) -> Collectives:
    """Count the collectives of the second step, and of its forward passes alone; and return their dtypes.

    The loss takes 16 tokens at a time.
    """
    small_chunks = partial(token_loss, kernels=CpuKernels(chunk_bytes=4 * 259 * 16))
    run = with_loss(built(rank, world_size, config), small_chunks)
    one_step(run)
    forward: Counter[str] = Counter()
    with CollectiveCounter() as counter:

        def begin(*_: Any) -> None:
            forward.subtract(counter.counts)

        def end(*_: Any) -> None:
            forward.update(counter.counts)

        run.model.register_forward_pre_hook(begin, prepend=True)
        run.model.register_forward_hook(end)
        one_step(run)
    return counter.counts, +forward, counter.dtypes


COLLECTIVES = [
    # replicate, shard, options, units, all-gathers in forward and in backward
    (1, 2, "default", 5, 5, 3),  # blocks, embedding, head; in backward the blocks
    (1, 2, "always", 5, 5, 4),  # the embedding's backward does not need its weight
    (1, 2, "never", 5, 5, 0),
    (2, 1, "default", 5, 0, 0),
    (1, 2, "tied", 4, 4, 3),  # embedding and head are one unit, kept like a head
    (2, 2, "default", 5, 5, 3),
]


@pytest.mark.parametrize(
    "world_size", [pytest.param(2, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.nightly)]
)
def test_collectives_of_a_step(tiny: TinyRun, world_size: int) -> None:
    """Each FSDP unit has one all-gather in forward and, except for the head, one in backward.

    It has one reduce-scatter in backward; the head too, though its chunked loss uses the weight many times.
    Replicas are reduced once a step. On gloo a reduce-scatter is an all-to-all.
    """
    accumulation = 2
    cases = [case for case in COLLECTIVES if case[0] * case[1] == world_size]
    configs = [
        tiny.config(
            *degrees(replicate, shard),
            "--model.args.tied_head" if option == "tied" else f"--parallelism.fsdp_reshard_after_forward={option}",
            THREE_BLOCKS,
            f"--training.local_batch_size={8 // world_size // accumulation}",
            "--checkpoint.enable=false",
            world_size=world_size,
        )
        for replicate, shard, option, *_ in cases
    ]
    results = run_in_turn(collectives_of_a_step, world_size, configs)
    for (replicate, shard, option, units, forward, backward), ranks in zip(cases, results, strict=True):
        for counts, in_forward, _ in ranks:
            assert in_forward["allgather_base"] == forward * accumulation, option
            assert counts["allgather_base"] == (forward + backward) * accumulation, option
            assert counts["alltoall_base"] == (units * accumulation if shard > 1 else 0)
            # One more all-reduce counts the tokens, and one is of loss and norm.
            assert counts["allreduce"] == (units if replicate > 1 else 0) + 2
            assert not counts.keys() - {"allgather_base", "alltoall_base", "allreduce"}


def seen_dtypes(rank: int, world_size: int, config: Config) -> tuple[set[tuple[str, str]], dict[str, str]]:
    """Return dtypes as hooks see them in a step, and as the run prints them."""
    run = built(rank, world_size, config)
    seen: set[tuple[str, str]] = set()

    def watch(module: torch.nn.Module, inputs: Any, output: torch.Tensor) -> None:
        seen.add(("weight in compute", str(module.weight.dtype)))
        seen.add(("activation", str(output.dtype)))

    def see_gradients(*_: Any) -> None:
        gradients = [parameter.grad for parameter in run.model.parameters()]
        seen.update(("gradient", str(gradient.dtype)) for gradient in gradients if gradient is not None)

    for module in run.model.modules():
        if isinstance(module, torch.nn.Linear) and module.out_features != 259:
            module.register_forward_hook(watch)
    run.optimizer.register_step_pre_hook(see_gradients)
    with CollectiveCounter() as counter:
        one_step(run)
    seen |= {(name, dtype) for name, dtype in counter.dtypes if dtype != "torch.int64"}
    for parameter in run.model.parameters():
        seen.add(("weight", str(parameter.dtype)))
        seen.update(("moment", str(run.optimizer.state[parameter][name].dtype)) for name in ("exp_avg", "exp_avg_sq"))
    return seen, types_of(run.model, run.optimizer)


TYPES = {
    "default": ([], "float32", "float32", "float32"),
    "moments": (["--optimizer.state_dtype=bfloat16"], "float32", "bfloat16", "float32"),
    "full": (
        ["--training.dtype=bfloat16", "--optimizer.state_dtype=bfloat16", "--training.mixed_precision_reduce=bfloat16"],
        "bfloat16", "bfloat16", "bfloat16",
    ),
}  # fmt: skip


def expected_types(layout: tuple[int, int], weight: str, moment: str, reduction: str) -> set[tuple[str, str]]:
    replicate, shard = layout
    expected = {
        ("weight in compute", "torch.bfloat16"),
        ("activation", "torch.bfloat16"),
        ("gradient", f"torch.{weight}"),
        ("weight", f"torch.{weight}"),
        ("moment", f"torch.{moment}"),
    }
    if shard > 1:
        expected |= {("allgather_base", "torch.bfloat16"), ("alltoall_base", f"torch.{reduction}")}
    if replicate > 1:
        expected |= {("allreduce", f"torch.{reduction}")}
    return expected


@pytest.mark.nightly
def test_types_are_the_same_on_every_layout(tiny: TinyRun) -> None:
    """bfloat16 compute with float32 weights, moments and reduction, unless configured."""
    several = [[*options, "--training.mixed_precision_param=bfloat16"] for options, *_ in TYPES.values()]
    found = each_on_every_layout(seen_dtypes, tiny, several)
    for (name, (_, weight, moment, reduction)), layouts in zip(TYPES.items(), found, strict=True):
        for layout, ranks in layouts.items():
            for seen, printed in ranks:
                assert seen == expected_types(layout, weight, moment, reduction), (name, layout)
                assert printed.pop("compute").startswith("bfloat16")
                assert printed == {"weights": weight, "reduction": reduction, "moments": moment}
