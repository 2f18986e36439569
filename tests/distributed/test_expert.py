"""Expert parallelism: runs whose ranks have different experts equal runs of one process."""

import shutil
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from tests.helpers import TinyRun, run_in_turn, run_ranks, train_on_this_rank
from tests.layouts import CountOperators, built, degrees, one_step, optimizer_moments, trained, whole
from titanlite.config.schema import Config
from titanlite.kernels import Kernels
from titanlite.parallelize.expert import AllToAllExchange

MOE = [
    "--model={name='qwen3_moe', flavor='debug', args={dim=32, n_layers=2, n_heads=2, n_kv_heads=1, head_dim=16, "
    "hidden_dim=24, vocab_size=259}}",
    "--training.steps=20",
]
SPLIT = ["--model.args.n_kv_heads=2", "--model.args.vocab_size=260"]
"""Sizes that two ranks can split."""
MUON = ["--optimizer.name=Muon", "--optimizer.args.ns_dtype=float32"]
FURTHER = {
    "plain": [],
    "AC full": ["--activation_checkpoint.mode=full"],
    "accumulation": ["--training.local_batch_size=1"],
    "reduced once": ["--training.local_batch_size=1", "--parallelism.fsdp_reduce_gradients=last"],
    "always": ["--parallelism.fsdp_reshard_after_forward=always"],
    "never": ["--parallelism.fsdp_reshard_after_forward=never"],
    "prefetch": ["--parallelism.fsdp_forward_prefetch=2", "--parallelism.fsdp_backward_prefetch=2"],
    "in backward": ["--optimizer.in_backward", "--training.max_norm=0"],
    "offload": ["--training.enable_cpu_offload"],
    "disk": ["--training.enable_cpu_offload", "--offload.parameters=disk", "--offload.optimizer=disk"],
    "frozen": ["--freeze.parameters=['layers.0.feed_forward.w?', 'layers.1.feed_forward.router']"],
    "compile": ["--compile.enable"],
    "compile, AC op": ["--compile.enable", "--activation_checkpoint.mode=selective"],
    "Muon": MUON,
}


def expert(degree: int, *layout: int) -> list[str]:
    return [f"--parallelism.expert_parallel_degree={degree}", *degrees(*layout)]


def job(name: str) -> str:
    return f"--job.name={name.replace(',', '').replace(' ', '-')}"


def compare(tiny: TinyRun, name: str, reference: str) -> None:
    """Compare the records of two runs."""
    found, expected = (tiny.records(it.replace(",", "").replace(" ", "-")) for it in (name, reference))
    assert len(expected) == 20
    for key, tolerance in (("loss", 1e-5), ("grad_norm", 1e-4)):
        values = [record[key] for record in expected]
        assert [record[key] for record in found] == pytest.approx(values, rel=tolerance), (name, key)
    for key in ("samples", "busiest_expert"):
        assert [record[key] for record in found] == [record[key] for record in expected], (name, key)


def times_weight(x_SD: Tensor, ends_E: Tensor, weights: Any) -> Tensor:
    """Multiply the tokens of each expert by its weight [E, 1]."""
    sizes = ends_E.diff(prepend=ends_E.new_zeros(1))
    return x_SD * weights[0].repeat_interleave(sizes, dim=0)


def exchanged(counts: list[list[int]]) -> list[tuple[Any, Any]]:
    """Return the results and the gradients of this rank's tokens.

    Args:
        counts: for each rank, its tokens for each of four experts.
    """
    group = dist.group.WORLD
    assert group is not None
    rank = group.rank()
    tokens = torch.arange(1.0, sum(counts[rank]) + 1)[:, None] + 100 * rank
    whole_weight = torch.tensor([[1.0], [10.0], [100.0], [1000.0]])
    ends_E = torch.tensor(counts[rank]).cumsum(0).int()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("expert",))
    weight = distribute_tensor(whole_weight, mesh, [Shard(0)], src_data_rank=None).requires_grad_()
    exchange = AllToAllExchange(group, Kernels()).compute
    found = []
    for compute, its_weight in (
        (lambda x: exchange(x, ends_E, [weight], times_weight), weight),
        (lambda x: times_weight(x, ends_E, [plain]), plain := whole_weight.clone().requires_grad_()),
    ):
        x_SD = tokens.clone().requires_grad_()
        out_SD = compute(x_SD)
        (out_SD * tokens).sum().backward()
        gradient = its_weight.grad
        assert gradient is not None
        if isinstance(gradient, DTensor):
            gradient = 2 * gradient.full_tensor()  # what FSDP averages over half of the ranks
        else:
            dist.all_reduce(gradient)
        assert x_SD.grad is not None
        found.append((out_SD.detach(), x_SD.grad, gradient))
    return [tuple(it.flatten().tolist() for it in results) for results in found]


def two_ranks(rank: int, world_size: int, built_only: Config, config: Config) -> dict[str, Any]:
    """Everything about two ranks that one process group can show."""
    run = built(rank, world_size, built_only)
    weight = run.model.get_parameter("layers.0.feed_forward.w1")
    assert isinstance(weight, DTensor)
    found: dict[str, Any] = {
        "part": [*weight.to_local().shape],
        "initial": {name: whole(parameter).numpy() for name, parameter in run.model.named_parameters()},
    }
    with CountOperators("_c10d_functional.all_to_all_single") as operators:
        one_step(run)
    found["all-to-alls"] = operators.count
    # Rank 1 sends nothing. Expert 1 gets nothing. Rank 0 has experts without any token.
    for name, counts in (("empty", [[1, 0, 2, 3], [0, 0, 0, 0]]), ("other", [[0, 0, 2, 1], [0, 0, 3, 0]])):
        found[name] = exchanged(counts)
    run = train_on_this_rank(config, rank, world_size)
    found["moments"] = {
        f"{name}.{key}": whole(value).numpy()
        for name, parameter in run.model.named_parameters()
        for key, value in run.optimizer.state[parameter].items()
    }
    return found


def one_process(rank: int, world_size: int, built_only: Config, config: Config, loaded: Config) -> list[dict[str, Any]]:
    """Return initial weights, and the moments that two ranks saved."""
    run = built(rank, world_size, built_only)
    initial = {name: whole(parameter).numpy() for name, parameter in run.model.named_parameters()}
    train_on_this_rank(config, rank, world_size)
    return [initial, optimizer_moments(rank, world_size, loaded)]


def test_two_ranks_with_different_experts_train_as_one(tiny: TinyRun) -> None:
    options = [*MOE, "--activation_checkpoint.mode=selective", "--data.document_mask"]
    two = [tiny.config(*options, *expert(2, 1, 2), job(name), world_size=2) for name in ("two built", "two")]
    one = [tiny.config(*options, job(name)) for name in ("one built", "one", "two")]
    found = run_ranks(two_ranks, 2, *two)
    [[initial, loaded]] = run_ranks(one_process, 1, *one)
    compare(tiny, "two", "one")
    for rank in (0, 1):
        assert found[rank]["part"] == [4, 32, 24], "four of eight experts"
        assert found[rank]["all-to-alls"] == 2 * (3 + 3 + 2), "counts, tokens and results; recomputed; gradients"
        for name, value in initial.items():
            assert (found[rank]["initial"][name] == value).all(), name
        assert found[rank]["moments"].keys() == loaded.keys()
        for name, value in loaded.items():
            assert (found[rank]["moments"][name] == value).all(), name
        for name in ("empty", "other"):
            assert found[rank][name][0] == found[rank][name][1], name


@pytest.mark.nightly
def test_further_techniques(tiny: TinyRun) -> None:
    run_in_turn(trained, 1, [tiny.config(*MOE, *more, job(f"{name} one")) for name, more in FURTHER.items()])
    two = [tiny.config(*MOE, *more, *expert(2, 1, 2), job(name), world_size=2) for name, more in FURTHER.items()]
    run_in_turn(trained, 2, two, timeout=300)
    for name in FURTHER:
        compare(tiny, name, f"{name} one")


@pytest.mark.nightly
def test_four_ranks(tiny: TinyRun) -> None:
    layouts = {
        "expert 4": expert(4, 1, 4),
        "shard 2, expert 2": expert(2, 1, 4),
        "replicate 2, expert 2": expert(2, 2, 2),
        "context 2, expert 2": expert(2, 1, 2, 2),
        "context 2, expert 4": expert(4, 1, 2, 2),
    }
    techniques = {"": [], "Muon": MUON}
    run_in_turn(trained, 1, [tiny.config(*MOE, *more, job(f"one {name}")) for name, more in techniques.items()])
    four = [
        tiny.config(*MOE, *more, *options, job(f"{layout} {name}"), world_size=4)
        for layout, options in layouts.items()
        for name, more in techniques.items()
    ]
    run_in_turn(trained, 4, four, timeout=300)
    for layout in layouts:
        for name in techniques:
            compare(tiny, f"{layout} {name}", f"one {name}")


@pytest.mark.nightly
def test_saved_by_ranks_with_different_experts_loads_anywhere(tiny: TinyRun) -> None:
    outputs = tiny.folder / "outputs"
    places = {
        "4": expert(4, 1, 4),
        "2": expert(2, 1, 4),
        "1-1": degrees(1, 1),
        "4-1": degrees(4, 1),
        "1-4": degrees(1, 4),
    }
    run_ranks(trained, 1, tiny.config(*MOE, "--training.steps=6", "--job.name=whole"))
    for first in ("4", "1-4"):
        options = [*MOE, *places[first], f"--job.name=saved-{first}"]
        run_ranks(trained, 4, tiny.config(*options, "--training.steps=3", world_size=4))
        expected = run_ranks(optimizer_moments, 4, tiny.config(*options, world_size=4))
        for name, place in places.items():
            world_size = 1 if name == "1-1" else 4
            new = f"from-{first}-on-{name}"
            shutil.copytree(outputs / f"saved-{first}", outputs / new)
            config = tiny.config(*MOE, *place, "--training.steps=6", f"--job.name={new}", world_size=world_size)
            [moments] = run_in_turn(optimizer_moments, world_size, [config])
            for key, value in expected[0].items():
                assert (moments[0][key] == value).all(), (first, name, key)
            run_ranks(trained, world_size, config)
            assert tiny.losses(new) == pytest.approx(tiny.losses("whole"), rel=1e-5), (first, name)
            assert [it["samples"] for it in tiny.records(new)] == [it["samples"] for it in tiny.records("whole")]


@pytest.mark.nightly
def test_experts_whose_hidden_dims_ranks_split(tiny: TinyRun) -> None:
    """Experts and tensor parallelism, alone and together, whole and shared by other ranks."""
    layouts = {
        "tensor 2": (2, degrees(1, 1, 1, 2)),
        "shard 2, tensor 2": (4, degrees(1, 2, 1, 2)),
        "context 2, tensor 2": (4, degrees(1, 1, 2, 2)),
        "expert 2, tensor 2": (4, expert(2, 1, 2, 1, 2)),
    }
    techniques = {
        "plain": [],
        "mask, AC op": ["--activation_checkpoint.mode=selective", "--data.document_mask"],
        "AC full": ["--activation_checkpoint.mode=full"],
        "compile": ["--compile.enable"],
        "Muon": MUON,
        "in backward": ["--optimizer.in_backward", "--training.max_norm=0"],
    }
    moe = [*MOE, *SPLIT]
    run_in_turn(trained, 1, [tiny.config(*moe, *more, job(f"one {name}")) for name, more in techniques.items()])
    for world_size in (2, 4):
        configs = [
            tiny.config(*moe, *more, *options, job(f"{layout} {name}"), world_size=world_size)
            for layout, (ranks, options) in layouts.items()
            for name, more in techniques.items()
            if ranks == world_size
        ]
        run_in_turn(trained, world_size, configs, timeout=300)
    for layout in layouts:
        for name in techniques:
            compare(tiny, f"{layout} {name}", f"one {name}")
