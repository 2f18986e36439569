"""Each technique has its effect: one that silently does nothing would pass every test of equality."""

from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.utils._python_dispatch import TorchDispatchMode

from tests.helpers import THREE_BLOCKS, TinyRun, run_in_turn, run_ranks
from tests.layouts import built, degrees, one_step
from titanlite.models.registry import resolve_model
from titanlite.ops import pick_kernels
from titanlite.parallelize import build_mesh, materialize, parallelize
from titanlite.runtime.private_torch.tracing import fake_process_group
from titanlite.schema import Config
from titanlite.train import Run


class OperatorCounter(TorchDispatchMode):
    """Count operators; all-gathers by the size of their group."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        if name.startswith("c10d._allgather_base_"):
            name = f"all-gather over {dist.ProcessGroup.unbox(args[2]).size()}"  # pyright: ignore
        self.counts[name] += 1
        return func(*args, **(kwargs or {}))


def operators_of_a_step(run: Run) -> Counter[str]:
    one_step(run)
    with OperatorCounter() as counter:
        one_step(run)
    return counter.counts


def operators_with(rank: int, world_size: int, config: Config) -> Counter[str]:
    return operators_of_a_step(built(rank, world_size, config))


# A block has 7 matmuls with weights, the head 1; each has 1 in forward and 2 in backward.
FORWARD, BACKWARD = 7 * 3 + 1, 2 * (7 * 3 + 1)


# options, recomputed matmuls, attentions in all
CHECKPOINTING = [
    (["none"], 0, 3),
    (["full"], 7 * 3 - 1 * 3, 6),  # the last matmul's result is not needed again
    (["selective", "2"], (7 - 1) * 2, 5),  # blocks 0 and 2
    (["selective", "op"], 3 * 3, 3),  # 3 of the first 6 matmuls in each block
]


def test_activation_checkpointing_recomputes(tiny: TinyRun) -> None:
    names = ["mode", "selective_ac_option"]
    configs = [
        tiny.config(
            THREE_BLOCKS,
            *(f"--activation_checkpoint.{name}={value}" for name, value in zip(names, options, strict=False)),
        )
        for options, _, _ in CHECKPOINTING
    ]
    results = run_in_turn(operators_with, 1, configs)
    for (options, recomputed, attention), [counts] in zip(CHECKPOINTING, results, strict=True):
        # The head adds its weight's gradients up, and writes those of the hidden states in place.
        matmuls = sum(counts[f"aten.{name}"] for name in ("mm.default", "mm.out", "addmm_.default"))
        assert matmuls == FORWARD + BACKWARD + recomputed, options
        assert counts["titanlite.attend_in_tiles.default"] == attention, options


def test_backward_gathers_within_the_smaller_group(tiny: TinyRun) -> None:
    """ZeRO++ hpZ: after forward a 1/2 shard stays, so that backward gathers over 2 processes instead of 4.

    The other ranks are not there: what is gathered has no values, and is counted.
    """
    config = tiny.config("--parallelism.fsdp_reshard_after_forward=2", THREE_BLOCKS, world_size=4)
    model_cls, args = resolve_model("llama3", None, config.model.args)
    device = torch.device("cpu")
    with fake_process_group(4):
        mesh = build_mesh(config.parallelism, world_size=4, device_type="cpu")
        with torch.device("meta"):
            model = model_cls(args)
        parallelize(model, config, mesh=mesh, kernels=pick_kernels(device))
        materialize(model, device=device, dtype=torch.float32, seed=0)
        with OperatorCounter() as counter:
            model(torch.zeros(1, 32, dtype=torch.long)).sum().backward()
    counts = counter.counts
    assert counts["all-gather over 4"] == 5
    assert counts["all-gather over 2"] == 4  # blocks and head; the embedding needs none


def prefetched(model: nn.Module) -> dict[str, tuple[list[str], list[str]]]:
    names = {module: name for name, module in model.named_modules()}
    found = {}
    for module, name in names.items():
        if isinstance(module, FSDPModule) and name:
            state = module._get_fsdp_state()
            ahead = [[names[s._modules[0]] for s in states] for states in (
                state._states_to_forward_prefetch, state._states_to_backward_prefetch)]  # fmt: skip
            found[name] = (ahead[0], ahead[1])
    return found


def sizes_of_a_rank(run: Run) -> tuple[int, int, int]:
    """Elements of a rank's parameters and moments, and of the whole model."""
    parameters = list(run.model.parameters())
    local = sum(parameter.to_local().numel() for parameter in parameters)  # pyright: ignore
    moments = sum(run.optimizer.state[parameter]["exp_avg"].to_local().numel() for parameter in parameters)
    return local, moments, sum(parameter.numel() for parameter in parameters)


@dataclass(frozen=True)
class OfTwo:
    """What one of two ranks sees, in one process group."""

    operators: Counter[str]
    prefetched: dict[str, tuple[list[str], list[str]]]
    sizes: dict[tuple[int, int], tuple[int, int, int]]


def see(rank: int, world_size: int, tiny: TinyRun) -> OfTwo:
    def run(*options: str) -> Run:
        return built(rank, world_size, tiny.config(THREE_BLOCKS, *options, world_size=world_size))

    replicated = run("--training.local_batch_size=2", *degrees(2, 1))
    prefetch = "--parallelism.fsdp_forward_prefetch=2", "--parallelism.fsdp_backward_prefetch=1"
    sharded = run(*prefetch, *degrees(1, 2), "--job.name=sharded")
    return OfTwo(
        operators_of_a_step(replicated),
        prefetched(sharded.model),
        {(2, 1): sizes_of_a_rank(replicated), (1, 2): sizes_of_a_rank(sharded)},
    )


@pytest.fixture(scope="module")
def of_two(tmp_path_factory: pytest.TempPathFactory) -> list[OfTwo]:
    return run_ranks(see, 2, TinyRun(tmp_path_factory.mktemp("two")))


def test_a_step_never_waits_for_the_device(of_two: list[OfTwo]) -> None:
    """`.item()` and the like all end in this operator; on a GPU it would stop the host."""
    for seen in of_two:
        assert seen.operators["aten.mm.default"] > 0
        assert seen.operators["aten._local_scalar_dense.default"] == 0


def test_prefetch_depth_is_the_configured_one(of_two: list[OfTwo]) -> None:
    found = of_two[0].prefetched
    assert found["tok_embeddings"] == (["layers.0", "layers.1"], [])
    assert found["layers.0"] == (["layers.1", "layers.2"], ["tok_embeddings"])
    assert found["layers.2"] == (["head"], ["layers.1"])
    assert found["head"] == ([], ["layers.2"])


def test_parameters_and_states_are_really_sharded(of_two: list[OfTwo]) -> None:
    for replicate, shard in ((1, 2), (2, 1)):
        sizes = [seen.sizes[replicate, shard] for seen in of_two]
        for local, moments, whole in sizes:
            assert moments == local == pytest.approx(whole / shard, rel=0.1)
        assert sum(local for local, _, _ in sizes) == replicate * sizes[0][2]
