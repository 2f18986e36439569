"""Same config, any layout: same weights, same samples, same losses."""

from collections import Counter
from itertools import islice
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.helpers import TinyRun, run_ranks, train_on_this_rank
from titanlite.config.schema import Config
from titanlite.job import Ranks
from titanlite.preflight import preflight
from titanlite.step import StepResult, train_step
from titanlite.train import Run, build

# (replicate, shard)
LAYOUTS = [(1, 1), (4, 1), (1, 4), (2, 2)]


def degrees(replicate: int, shard: int) -> list[str]:
    return [
        f"--parallelism.data_parallel_replicate_degree={replicate}",
        f"--parallelism.data_parallel_shard_degree={shard}",
    ]


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def built(rank: int, world_size: int, config: Config) -> Run:
    ranks, device = Ranks(rank, world_size, rank, world_size), torch.device("cpu")
    return build(config, preflight(config, ranks, device), ranks=ranks, device=device)


def one_step(run: Run) -> StepResult:
    batches = list(islice(run.batches, run.accumulation))
    return train_step(
        run.model,
        batches,
        optimizer=run.optimizer,
        group=run.metrics.group,
        max_norm=1.0,
        z_loss=run.config.training.z_loss,
        judge=run.guard.judge,
    )


def initial_weights(rank: int, world_size: int, configs: list[Config]) -> list[dict[str, Any]]:
    runs = (built(rank, world_size, config) for config in configs)
    return [{name: whole(parameter).numpy() for name, parameter in run.model.named_parameters()} for run in runs]


def trained(rank: int, world_size: int, config: Config) -> dict[str, Any]:
    run = train_on_this_rank(config, rank, world_size)
    return {name: whole(parameter).float().numpy() for name, parameter in run.model.named_parameters()}


def trained_in_turn(rank: int, world_size: int, configs: list[Config]) -> list[dict[str, Any]]:
    """Several runs, one after the other, in one process group: starting one takes longer than a tiny run."""
    return [trained(rank, world_size, config) for config in configs]


def test_initial_weights_are_bit_identical_on_every_layout(tiny: TinyRun) -> None:
    expected: dict[str, Any] = {}
    for option in ("--model.args.tied_head=true", "--training.enable_cpu_offload=true", "--model.args.tied_head=false"):
        expected = {}
        for world_size in (1, 4):
            layouts = [layout for layout in LAYOUTS if layout[0] * layout[1] == world_size]
            configs = [
                tiny.config(*degrees(*layout), option, f"--job.name={layout[0]}-{layout[1]}", world_size=world_size)
                for layout in layouts
            ]
            for found in run_ranks(initial_weights, world_size, configs):
                for layout, weights in zip(layouts, found, strict=True):
                    expected = expected or weights
                    assert weights.keys() == expected.keys()
                    for name, weight in weights.items():
                        assert (weight == expected[name]).all(), (name, layout, option)
    rows = expected["layers.0.attention.wq.weight"]
    assert abs(rows.std() - 0.02) < 0.002
    assert (rows[:11] != rows[11:22]).all(), "shards must not repeat each other's draws"


@pytest.mark.parametrize(
    "model",
    [
        pytest.param([], id="untied"),
        pytest.param(["--model.args.tied_head"], id="tied", marks=pytest.mark.slow),
    ],
)
def test_losses_are_equal_on_every_layout(tiny: TinyRun, model: list[str]) -> None:
    losses = {}
    for world_size in (1, 4):
        names = {layout: f"run-{layout[0]}-{layout[1]}" for layout in LAYOUTS if layout[0] * layout[1] == world_size}
        fixed = [*model, "--training.steps=20"]
        configs = [
            tiny.config(*degrees(*layout), *fixed, f"--job.name={name}", world_size=world_size)
            for layout, name in names.items()
        ]
        run_ranks(trained_in_turn, world_size, configs)
        losses |= {name: tiny.losses(name) for name in names.values()}
    assert all(len(found) == 20 for found in losses.values())
    reference = losses["run-1-1"]
    assert reference[0] == pytest.approx(5.557, abs=0.1)  # ln 259: the model starts without an opinion
    assert reference[-1] < 3
    for name, other in losses.items():
        assert other == pytest.approx(reference, rel=1e-4 if model else 1e-5), name


EXACT = [
    ["--activation_checkpoint.mode=full"],
    ["--activation_checkpoint.mode=selective"],
    ["--activation_checkpoint.mode=selective", "--activation_checkpoint.selective_ac_option=2"],
    ["--parallelism.fsdp_reshard_after_forward=always"],
    ["--parallelism.fsdp_reshard_after_forward=never"],
    ["--parallelism.fsdp_reshard_after_forward=2"],
    ["--parallelism.fsdp_forward_prefetch=2", "--parallelism.fsdp_backward_prefetch=2"],
    ["--training.enable_cpu_offload"],
    ["--data.num_workers=2"],
]


@pytest.mark.slow
def test_what_only_trades_memory_for_time_changes_no_bit(tiny: TinyRun) -> None:
    configs = [tiny.config(f"--job.name=exact-{i}", *options, world_size=4) for i, options in enumerate(EXACT)]
    configs = [tiny.config("--job.name=reference", world_size=4), *configs]
    reference, *others = run_ranks(trained_in_turn, 4, configs, timeout=240)[0]
    for index, (options, weights) in enumerate(zip(EXACT, others, strict=True)):
        name = f"exact-{index}"
        assert tiny.losses(name) == tiny.losses("reference"), options
        for parameter, value in weights.items():
            assert (value == reference[parameter]).all(), (options, parameter)


@pytest.mark.parametrize(("replicate", "shard"), LAYOUTS)
@pytest.mark.parametrize(
    "options",
    [
        pytest.param([], id="fp32"),
        pytest.param(["--training.mixed_precision_reduce=bfloat16"], id="bf16 reduce", marks=pytest.mark.slow),
    ],
)
def test_accumulation_gives_the_same_losses(tiny: TinyRun, replicate: int, shard: int, options: list[str]) -> None:
    world_size, layout = replicate * shard, [*degrees(replicate, shard), *options]
    run_ranks(trained, world_size, tiny.config("--job.name=whole", *layout, world_size=world_size))
    split = tiny.config("--job.name=split", "--training.local_batch_size=1", *layout, world_size=world_size)
    run_ranks(trained, world_size, split)
    assert tiny.losses("split") == pytest.approx(tiny.losses("whole"), rel=1e-2 if options else 2e-6)


class CollectiveCounter(TorchDispatchMode):
    """Counts what reaches torch's communication operators, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional") and "wait" not in str(func):
            self.counts[str(func).split(".")[1].strip("_")] += 1
        return func(*args, **(kwargs or {}))


def count_collectives(rank: int, world_size: int, config: Config) -> Counter[str]:
    """Collectives of the second training step."""
    run = built(rank, world_size, config)
    one_step(run)
    with CollectiveCounter() as counter:
        one_step(run)
    return counter.counts


@pytest.mark.parametrize(
    ("replicate", "shard", "policy", "gathers_per_pass"),
    [
        (1, 4, "default", 2 * 5 - 2),  # 3 blocks, embedding, head: forward, and blocks again in backward
        (1, 4, "always", 2 * 5 - 1),  # the embedding's backward does not need its weight
        (1, 4, "never", 5),
        (2, 2, "default", 2 * 5 - 2),
        (4, 1, "default", 0),
    ],
)
def test_collectives_of_a_step(tiny: TinyRun, replicate: int, shard: int, policy: str, gathers_per_pass: int) -> None:
    options = [*degrees(replicate, shard), f"--parallelism.fsdp_reshard_after_forward={policy}"]
    config = tiny.config(*options, "--training.local_batch_size=1", world_size=4)
    counts = run_ranks(count_collectives, 4, config)[0]
    units, accumulation = 5, 2
    assert counts["allgather_base"] == gathers_per_pass * accumulation
    assert counts["reduce_scatter_base"] == (units * accumulation if shard > 1 else 0)
    # Replicas are reduced once a step and unit; one more all-reduce counts the tokens, one is of loss and norm.
    assert counts["allreduce"] == (units if replicate > 1 else 0) + 2


def seen_dtypes(rank: int, world_size: int, config: Config) -> set[tuple[str, str]]:
    run = built(rank, world_size, config)
    seen: set[tuple[str, str]] = set()

    def watch(module: torch.nn.Module, inputs: Any, output: torch.Tensor) -> None:
        seen.add(("weight in compute", str(module.weight.dtype)))
        seen.add(("activation", str(output.dtype)))

    for module in run.model.modules():
        if isinstance(module, torch.nn.Linear) and module.out_features != 259:
            module.register_forward_hook(watch)
    one_step(run)
    for parameter in run.model.parameters():
        seen.add(("master weight", str(parameter.dtype)))
        seen.update(("moment", str(run.optimizer.state[parameter][name].dtype)) for name in ("exp_avg", "exp_avg_sq"))
    return seen


@pytest.mark.parametrize(("replicate", "shard"), LAYOUTS)
def test_mixed_precision_is_the_same_on_every_layout(tiny: TinyRun, replicate: int, shard: int) -> None:
    options = [*degrees(replicate, shard), "--training.mixed_precision_param=bfloat16"]
    config = tiny.config(*options, world_size=replicate * shard)
    for seen in run_ranks(seen_dtypes, replicate * shard, config):
        assert seen == {
            ("weight in compute", "torch.bfloat16"),
            ("activation", "torch.bfloat16"),
            ("master weight", "torch.float32"),
            ("moment", "torch.float32"),
        }
