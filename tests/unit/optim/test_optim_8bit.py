"""Moments in 8 and 4 bits (torchao.optim): training, sharding, saving, and their bytes."""

from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Placement, Shard, distribute_tensor

from tests.support.helpers import TinyRun, fake_mesh, mentions
from tests.support.layouts import whole
from tests.support.plans import profiled, shapes
from titanlite.checks.model import check_quantized_moments
from titanlite.checks.preflight import preflight
from titanlite.models.base import Model, build_on_meta
from titanlite.models.qwen3 import Qwen3, Qwen3Args
from titanlite.models.qwen3_moe import Qwen3Moe, Qwen3MoeArgs
from titanlite.optim import build_optimizer, set_learning_rate, update
from titanlite.optim.checks import check_optimizer
from titanlite.optim.quantized import MIN_ELEMENTS, block_size_of, check_shards, inner_tensors, is_quantized
from titanlite.optim.registry import find_optimizer_cls
from titanlite.optim.state_size import state_bytes
from titanlite.runtime.dtensor import from_local_like, slice_like
from titanlite.runtime.errors import ConfigError, UserError
from titanlite.runtime.private_torch.tensors import local_tensor
from titanlite.runtime.process_group import Ranks
from titanlite.schema import Config, Optimizer, OptimizerGroup, Parallelism

pytest.importorskip("torchao.optim")

CLASSES = {"AdamW8bit": (256, 1 + 4 / 256), "AdamW4bit": (128, 0.5 + 4 / 128), "AdamWFp8": (256, 1 + 4 / 256)}
"""Elements of a block, and bytes of one element of a moment, by class."""


def named(class_name: str) -> str:
    return f"torchao.optim.{class_name}"


@pytest.fixture(autouse=True)
def _eager() -> Any:
    """Run updates without the compiler, which takes minutes: the operations are the same."""
    with torch.compiler.set_stance("force_eager"):
        yield


@pytest.mark.parametrize("class_name", CLASSES)
def test_bytes_are_counted(class_name: str) -> None:
    model = nn.Linear(128, 64)
    expected = 2 * CLASSES[class_name][1] * (128 * 64 + 64)
    config = Optimizer(name=named(class_name))
    assert check_optimizer(config, model, dtype="float32") == []
    assert state_bytes(config, model, dtype="float32") == int(expected)
    optimizer = build_optimizer(model, config, seed=0)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    kept = [piece for value in (optimizer.state[model.weight][key] for key in ("exp_avg", "exp_avg_sq"))
            for piece in inner_tensors(value).values()]  # fmt: skip
    assert sum(piece.nbytes for piece in kept) == 2 * CLASSES[class_name][1] * 128 * 64


@pytest.mark.parametrize("class_name", CLASSES)
def test_minimum_and_block_size_are_those_of_torchao(class_name: str) -> None:
    block = CLASSES[class_name][0]
    assert block_size_of(find_optimizer_cls(named(class_name)), {}) == block
    assert block_size_of(find_optimizer_cls(named(class_name)), {"block_size": 64}) == 64
    assert block_size_of(torch.optim.AdamW, {}) is None
    for size in (MIN_ELEMENTS - block, MIN_ELEMENTS, MIN_ELEMENTS + 1, MIN_ELEMENTS + block):
        weight = nn.Parameter(torch.ones(size))
        weight.grad = torch.ones_like(weight)
        optimizer = build_optimizer(nn.ParameterList([weight]), Optimizer(name=named(class_name)), seed=0)
        optimizer.step()
        assert is_quantized(optimizer.state[weight]["exp_avg"]) == (size >= MIN_ELEMENTS and size % block == 0), size


def first_moment(parameter: Tensor, gradient: Tensor, class_name: str) -> dict[str, Tensor]:
    """Inner tensors of the first moment after one step."""
    weight = nn.Parameter(parameter)
    weight.grad = from_local_like(slice_like(gradient, weight), weight)
    optimizer = build_optimizer(nn.ParameterList([weight]), Optimizer(name=named(class_name)), seed=0)
    optimizer.step()
    return inner_tensors(optimizer.state[weight]["exp_avg"])


@pytest.mark.parametrize("class_name", CLASSES)
@pytest.mark.parametrize("shape", [(256, 64), (4, 16, 256), (68, 256)], ids=str)
def test_codes_and_scales_of_a_part_are_that_part_of_the_wholes(class_name: str, shape: tuple[int, ...]) -> None:
    """Blocks are shorter and longer than rows, and two axes of the mesh shard the same dimension."""
    ones, gradient = torch.ones(shape), torch.randn(shape, generator=torch.Generator().manual_seed(0))
    expected = first_moment(ones.clone(), gradient, class_name)
    for rank in range(4):
        with fake_mesh(rank, (2, 2)) as mesh:
            placed = distribute_tensor(ones, mesh, [Shard(0), Shard(0)], src_data_rank=None)
            found = first_moment(placed, gradient, class_name)
            assert found.keys() == expected.keys() == {"codes", "scale"}
            for key, tensor in found.items():
                assert tensor.shape == expected[key].shape
                assert torch.equal(local_tensor(tensor), slice_like(expected[key], tensor)), (rank, key)


@pytest.mark.long
def test_the_plan_counts_inner_tensors() -> None:
    """Matrices have codes, scales and a table; norms, and 64 x 32 of keys and values, have float32 moments."""
    one_block = "--model.args.n_layers=1"
    found = profiled(f"--optimizer.name={named('AdamW8bit')}", one_block)
    sizes = [shape.numel() for shape in shapes(one_block)]
    assert {size >= MIN_ELEMENTS for size in sizes} == {True, False}
    moments = sum(size + 4 * size // 256 + 4 * 256 if size >= MIN_ELEMENTS else 4 * size for size in sizes)
    steps = 4 * len(sizes)
    assert found.most("optimizer") == 2 * moments + steps


def test_weights_in_bfloat16_must_be_rounded_stochastically() -> None:
    model = nn.Linear(64, 64)
    [problem] = check_optimizer(Optimizer(name=named("AdamW8bit")), model, dtype="bfloat16")
    assert "bf16_stochastic_round = true" in problem.message
    rounding = Optimizer(name=named("AdamW8bit"), args={"bf16_stochastic_round": True})
    assert check_optimizer(rounding, model, dtype="bfloat16") == []


@pytest.mark.long
def test_another_learning_rate_does_not_recompile(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(64, 64, bias=False)
    optimizer = build_optimizer(model, Optimizer(name=named("AdamW8bit"), lr=0.1), seed=0)
    rates = [group["lr"] for group in optimizer.param_groups]
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    moved = []
    with torch.compiler.set_stance("default"):
        for step in range(4):
            set_learning_rate(optimizer, 0.1 * step)
            model.weight.grad = torch.ones_like(model.weight)
            before = model.weight.detach().clone()
            optimizer.step()
            moved.append(float((model.weight - before).abs().mean()))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert all(one is two for one, two in zip(rates, (g["lr"] for g in optimizer.param_groups), strict=True))
    assert moved[0] == 0
    assert 0 < 1.5 * moved[1] < 1.2 * moved[2] < moved[3]


def updated(class_name: str) -> Tensor:
    """Return a sharded weight after two steps with quantized moments."""
    torch.manual_seed(0)
    model = nn.Linear(64, 128, bias=False)
    fully_shard(model)
    optimizer = build_optimizer(model, Optimizer(name=named(class_name), lr=0.1), seed=0)
    for _ in range(2):
        model.weight.grad = torch.randn_like(model.weight)
        update(optimizer, skip=torch.tensor(False))
    assert is_quantized(optimizer.state[model.weight]["exp_avg"])
    return whole(model.weight)


@pytest.mark.nightly
@pytest.mark.usefixtures("single_process_group")
def test_compiled_code_of_one_class_is_not_used_for_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Uses the real compiler. Its cache of traced code confuses DTensors of the same shape."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    for class_name in ("AdamW8bit", "AdamW4bit"):
        expected = updated(class_name)
        torch._dynamo.reset()
        with torch.compiler.set_stance("default"):
            assert torch.allclose(updated(class_name), expected, rtol=1e-3, atol=1e-3), class_name


@pytest.mark.parametrize(
    ("shape", "placements", "words"),
    [
        ((64, 256), [Shard(1)], ["4 shards", "dimension 1"]),
        ((63, 256), [Shard(0)], ["4 shards", "3,840", "4,096 elements", "at least 4,096"]),
        ((62, 384), [Shard(0)], ["4 shards", "62 rows", "256 elements"]),
    ],
    ids=["columns", "too small", "uneven"],
)
def test_other_shards_are_refused(shape: tuple[int, ...], placements: list[Placement], words: list[str]) -> None:
    with fake_mesh(0, (4,)) as mesh:
        weight = distribute_tensor(torch.ones(shape), mesh, placements, src_data_rank=None)
        with pytest.raises(UserError) as error:
            check_shards("weight", weight, 256)
    assert mentions(str(error.value), f"weight {[*shape]}", *words)


ARGS: dict[str, Any] = {"dim": 128, "n_layers": 1, "n_heads": 2, "n_kv_heads": 2, "hidden_dim": 128, "vocab_size": 256}
QWEN = build_on_meta(Qwen3, Qwen3Args(**ARGS))
MOE = build_on_meta(Qwen3Moe, Qwen3MoeArgs(**ARGS, n_experts=4, n_active_experts=2))


@pytest.mark.parametrize(
    ("model", "degrees", "world_size", "groups", "parameter"),
    [
        (QWEN, {"tensor": 2}, 2, [], "wo.weight"),
        (QWEN, {"tensor": 2}, 4, ["layers*"], "tok_embeddings.weight"),
        (QWEN, {"tensor": 2}, 2, ["layers*"], None),  # rows alone
        (QWEN, {"context": 2}, 4, [], None),
        (MOE, {"expert": 2}, 4, [], "feed_forward.w1"),
    ],
)
def test_axes_that_shard_by_columns_are_refused_at_the_check(
    model: Model, degrees: dict[str, int], world_size: int, groups: list[str], parameter: str | None
) -> None:
    """groups: parameters with another optimizer."""
    parallelism = Parallelism.model_validate({f"{axis}_parallel_degree": degree for axis, degree in degrees.items()})
    rest = [name for name, _ in model.named_parameters() if not any(fnmatchcase(name, pattern) for pattern in groups)]
    given = [OptimizerGroup(match=groups, name="AdamW"), OptimizerGroup(match=rest)] if groups else []
    config = Config(optimizer=Optimizer(name=named("AdamW8bit"), groups=given), parallelism=parallelism)
    if parameter is None:
        check_quantized_moments(model, config, world_size)
        return
    with pytest.raises(UserError) as error:
        check_quantized_moments(model, config, world_size)
    options = [f"parallelism.{axis}_parallel_degree" for axis in degrees]
    assert mentions(str(error.value), "AdamW8bit", parameter, *options)


def test_the_check_names_the_option(tiny: TinyRun) -> None:
    sizes = {"dim": 128, "n_heads": 2, "n_kv_heads": 2, "hidden_dim": 128, "vocab_size": 260}
    options = [f"--model.args.{name}={value}" for name, value in sizes.items()]
    options += [f"--optimizer.name={named('AdamW8bit')}", "--parallelism.tensor_parallel_degree=2"]
    config = tiny.config(*options, world_size=2)
    with pytest.raises(ConfigError, match=r"^optimizer\.name: AdamW8bit .*layers\.0\.attention\.wo"):
        preflight(config, Ranks(0, 2, 0, 2), torch.device("cpu"))
