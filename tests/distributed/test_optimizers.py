"""Optimizers on sharded parameters: the weights are those of one process, also after a resume."""

from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor

from tests.helpers import TinyRun, run_ranks
from tests.layouts import degrees, on_every_layout, optimizer_moments, trained, whole
from titanlite.mesh import build_mesh, sharding_mesh
from titanlite.optim import muon, update
from titanlite.parallelize.fsdp import fully_shard
from titanlite.runtime.errors import UserError
from titanlite.runtime.private_torch.tensors import local_tensor
from titanlite.schema import Config, Parallelism

SHAPES = [(7, 10), (10, 7), (3, 8), (9, 9), (9, 9), (1, 4), (6, 5, 8), (3, 4, 4)]
"""Matrices with uneven rows, with fewer rows than ranks, and stacks of matrices, one of them smaller than the ranks."""
STEPS, SKIPPED = 4, 2
LAYOUTS = [(1, 4), (2, 2), (4, 1)]
OPTIONS: list[dict[str, Any]] = [
    {"lr": 0.05, "weight_decay": 0.2, "adjust_lr_fn": "original"},
    {"lr": 0.05, "nesterov": False, "momentum": 0.4, "ns_steps": 3, "adjust_lr_fn": "match_rms_adamw"},
    {"lr": 0.05, "nesterov": False, "ns_dtype": "float32"},
]
CASES = [(layout, options) for layout in LAYOUTS for options in (OPTIONS if layout == (1, 4) else OPTIONS[:1])]
"""Options are of one matrix, which one rank computes on any layout."""


def draw(seed: int, step: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * seed + step)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


class Matrices(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.all = torch.nn.ParameterList(draw(0, 0))


def everything(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [whole(tensor) for p, state in optimizer.state.items() for tensor in (p, *state.values())]


@dataclass(frozen=True)
class Updates:
    """Weights after some steps with given gradients, and the work of one rank in each step."""

    weights: list[np.ndarray]
    orthogonalized: Counter[tuple[int, ...]]
    """Shapes of matrices."""
    sent: int
    """Elements, to other ranks."""


@dataclass(frozen=True)
class OnFour:
    """Results of the runs on four ranks."""

    tiny: TinyRun
    by_rank: list[list[dict[str, Any]]]


def updated(mesh: DeviceMesh, options: dict[str, Any]) -> Updates:
    model, seen, sent = Matrices(), Counter[tuple[int, ...]](), Counter[torch.dtype]()
    fully_shard(model, mesh=sharding_mesh(mesh))
    parameters = [*model.parameters()]
    optimizer = muon.Muon(parameters, **options)
    compute, send = muon.newton_schulz, dist.all_to_all_single

    def counted(matrix: torch.Tensor, **settings: Any) -> torch.Tensor:
        seen[tuple(matrix.shape)] += 1
        return compute(matrix, **settings)

    def measured(out: Any, rows: torch.Tensor, back: Any, to: list[int], group: dist.ProcessGroup) -> None:
        sent[rows.dtype] += sum(to) - to[group.rank()]
        send(out, rows, back, to, group=group)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(muon, "newton_schulz", counted)
        patch.setattr(dist, "all_to_all_single", measured)
        for step in range(STEPS):
            for parameter, gradient in zip(parameters, draw(1, step), strict=True):
                assert isinstance(parameter, DTensor)
                gradient = gradient * torch.nan if step == SKIPPED else gradient
                parameter.grad = distribute_tensor(gradient, parameter.device_mesh, parameter.placements)
            before = everything(optimizer) if step == SKIPPED else []
            update(optimizer, skip=torch.tensor(step == SKIPPED))
            if step == SKIPPED:
                assert all(map(torch.equal, before, everything(optimizer)))
    for parameter in parameters:
        assert isinstance(parameter, DTensor)
        buffer = optimizer.state[parameter]["momentum_buffer"]
        assert buffer.placements == parameter.placements
        assert local_tensor(buffer).shape == local_tensor(parameter).shape
    assert set(sent) <= {torch.float32 if "ns_dtype" in options else torch.bfloat16}
    assert all(count % STEPS == 0 for count in seen.values())
    in_a_step = Counter({shape: count // STEPS for shape, count in seen.items()})
    return Updates([whole(parameter).numpy() for parameter in parameters], in_a_step, sent.total() // STEPS)


def muon_on_each_layout(rank: int, world_size: int) -> list[Updates]:
    meshes = {
        (replicate, shard): build_mesh(
            Parallelism(data_parallel_replicate_degree=replicate), world_size=4, device_type="cpu"
        )
        for replicate, shard in LAYOUTS
    }
    return [updated(meshes[layout], options) for layout, options in CASES]


def of_one_process(options: dict[str, Any]) -> list[torch.Tensor]:
    """Return the weights by torch.optim.Muon, to which each matrix of a stack is a parameter. In float32, which it
    lacks, they are by ours on plain tensors."""
    wholes = draw(0, 0)
    matrices = [m for tensor in wholes for m in (tensor if tensor.ndim == 3 else [tensor])]
    parameters = [torch.nn.Parameter(matrix.clone()) for matrix in matrices]
    optimizer = (muon.Muon if "ns_dtype" in options else torch.optim.Muon)(parameters, **options)
    for step in (step for step in range(STEPS) if step != SKIPPED):
        gradients = [m for tensor in draw(1, step) for m in (tensor if tensor.ndim == 3 else [tensor])]
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        optimizer.step()
    left = iter(parameters)
    return [torch.stack([next(left) for _ in it]) if it.ndim == 3 else next(left) for it in wholes]


@pytest.mark.slow
def test_muon_is_that_of_torch_on_every_layout() -> None:
    by_rank: list[list[Updates]] = run_ranks(muon_on_each_layout, 4)
    matrices = Counter(shape[-2:] for shape in SHAPES for _ in range(shape[0] if len(shape) == 3 else 1))
    for number, ((replicate, shard), options) in enumerate(CASES):
        ranks = [results[number] for results in by_rank]
        for rank in ranks:
            for mine, theirs, first in zip(rank.weights, of_one_process(options), draw(0, 0), strict=True):
                theirs = theirs.detach()
                assert abs(mine - theirs.numpy()).max() <= 1e-5 * theirs.abs().max()
                assert (theirs - first).abs().max() > 0.01
        for replica in range(replicate):
            seen = [ranks[replica * shard + member].orthogonalized for member in range(shard)]
            assert sum(seen, Counter()) == matrices, "each matrix once in each replica of the model"
        if shard == 4:  # 6 single matrices: each rank computes one or two, of stacks those that are its own
            stacked = {(5, 8), (4, 4)}
            single = [sum(n for it, n in rank.orthogonalized.items() if it not in stacked) for rank in ranks]
            assert single == [2, 2, 1, 1]
            assert sum(it.sent for it in ranks) == total_sent()
        if shard == 1:
            assert [it.sent for it in ranks] == [0] * 4


def total_sent() -> int:
    """Count the elements that 4 ranks send in a step, both ways: all rows of each matrix but those of its owner."""
    owners = sorted((shape for shape in SHAPES if len(shape) == 2), key=lambda s: (s[0] * s[1], *s))
    total = 0
    for number, (rows, columns) in enumerate(owners):
        chunks = [len(part) for part in torch.arange(rows).chunk(4)] + [0] * 4
        total += 2 * (rows - chunks[number % 4]) * columns
    return total


MIX = (
    '--optimizer.groups=[{match = ["layers.*.w?.weight"], name = "Muon", args.ns_dtype = "float32"}, '
    '{match = ["tok*", "head.output*"]}, '
    '{match = ["*norm*"], name = "SGD", lr = 0.03, args = {momentum = 0.9}}]'
)
MOMENTUM = [
    "--optimizer.name=SGD",
    "--optimizer.args.momentum=0.9",
    "--optimizer.lr=0.3",
    "--optimizer.weight_decay=0.0",
]
HALFWAY = "--checkpoint.load_step=3"
RUNS: dict[str, list[str]] = {"mix": [MIX], "SGD": MOMENTUM}


def config_of(tiny: TinyRun, name: str, layout: tuple[int, int], *options: str) -> Config:
    all_options = (f"--job.name={name}", *RUNS[name], *degrees(*layout), *options)
    return tiny.config(*all_options, world_size=layout[0] * layout[1])


def on_four(rank: int, world_size: int, tiny: TinyRun) -> list[dict[str, Any]]:
    return [
        trained(rank, world_size, config_of(tiny, "mix", (1, 4), "--checkpoint.interval=3")),
        trained(rank, world_size, config_of(tiny, "mix", (1, 4), HALFWAY)),
        optimizer_moments(rank, world_size, config_of(tiny, "mix", (1, 4), HALFWAY)),
        optimizer_moments(rank, world_size, config_of(tiny, "mix", (2, 2), HALFWAY)),
        trained(rank, world_size, config_of(tiny, "SGD", (1, 4))),
    ]


@pytest.fixture(scope="module")
def of_four(tmp_path_factory: pytest.TempPathFactory) -> OnFour:
    """The runs on four ranks, together: to start them takes longer."""
    tiny = TinyRun(tmp_path_factory.mktemp("four"))
    return OnFour(tiny, run_ranks(on_four, 4, tiny))


@pytest.mark.usefixtures("single_process_group")
@pytest.mark.nightly
def test_runs_are_equal_on_every_layout_and_after_a_resume(of_four: OnFour) -> None:
    tiny, (unbroken, resumed, *moments, _) = of_four.tiny, of_four.by_rank[0]
    for name, value in unbroken.items():
        assert (resumed[name] == value).all(), name
    expected = tiny.losses("mix")
    assert len(expected) == 6
    assert expected[-1] < expected[0] - 1
    moments.append(optimizer_moments(0, 1, config_of(tiny, "mix", (1, 1), HALFWAY)))
    for found in moments:
        assert found.keys() == moments[0].keys()
        assert {name.rpartition(".")[2] for name in found} == {"step", "exp_avg", "exp_avg_sq", "momentum_buffer"}
        for name, value in found.items():
            assert (value == moments[0][name]).all(), name
    trained(0, 1, config_of(tiny, "mix", (1, 1), HALFWAY))
    assert tiny.losses("mix") == pytest.approx(expected, rel=1e-5)
    trained(0, 1, config_of(tiny, "mix", (1, 1), f"--job.dump_folder={tiny.folder}/alone"))
    assert tiny.losses("mix", "alone") == pytest.approx(expected, rel=1e-5)


@pytest.mark.usefixtures("single_process_group")
def test_sgd_trains_the_same_on_every_layout(of_four: OnFour) -> None:
    tiny, (*_, on_four_ranks) = of_four.tiny, of_four.by_rank[0]
    alone = trained(0, 1, config_of(tiny, "SGD", (1, 1), f"--job.dump_folder={tiny.folder}/alone"))
    assert tiny.losses("SGD", "alone") == pytest.approx(tiny.losses("SGD"), rel=1e-5)
    assert tiny.losses("SGD")[-1] < tiny.losses("SGD")[0] - 0.5
    for name, value in alone.items():
        assert abs(on_four_ranks[name] - value).max() < 1e-5, name


@pytest.mark.usefixtures("single_process_group")
def test_another_optimizer_does_not_resume(of_four: OnFour) -> None:
    with pytest.raises(UserError, match="is of another optimizer") as error:
        trained(0, 1, of_four.tiny.config("--job.name=mix"))
    assert "missing     optimizer.state.layers.0.attention.wq.weight.exp_avg [42, 42]" in str(error.value)
    assert "Restore [optimizer], or give the new run another job.name" in str(error.value)


LOW = ["--training.dtype=bfloat16", "--optimizer.state_dtype=bfloat16", "--training.mixed_precision_param=bfloat16"]


@pytest.mark.slow
def test_bfloat16_runs_are_equal_on_every_layout_and_after_a_resume(tiny: TinyRun) -> None:
    results = on_every_layout(trained, tiny, *LOW)
    reference = tiny.losses("run-1-1")
    assert reference[-1] < 4.5
    for replicate, shard in results:
        assert tiny.losses(f"run-{replicate}-{shard}") == pytest.approx(reference, rel=2e-3)
    [whole] = results[1, 1]
    run_ranks(trained, 1, tiny.config("--job.name=halves", "--training.steps=3", *LOW))
    [resumed] = run_ranks(trained, 1, tiny.config("--job.name=halves", *LOW))
    assert all((resumed[name] == value).all() for name, value in whole.items())
