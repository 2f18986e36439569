"""Moments in 8 and 4 bits (torchao.optim): training, sharding, saving, and their bytes."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor

from tests.helpers import TinyRun, fake_mesh, run_in_turn, run_ranks
from tests.layouts import built, trained, whole
from tests.plans import profiled, shapes
from titanlite.config.schema import Config, Optimizer
from titanlite.models.base import unique_parameters
from titanlite.optim import build_optimizer, check_optimizer, set_learning_rate, update
from titanlite.optim.quantized import MIN_ELEMENTS, block_size_of, check_shards, inner_tensors, is_quantized
from titanlite.optim.registry import find_optimizer_cls
from titanlite.optim.state_size import state_bytes, state_dtypes
from titanlite.runtime.errors import UserError

pytest.importorskip("torchao.optim")

CLASSES = {"AdamW8bit": (256, 1 + 4 / 256), "AdamW4bit": (128, 0.5 + 4 / 128), "AdamWFp8": (256, 1 + 4 / 256)}
"""Elements of a block, and bytes of one element of a moment, by class."""
SHAPE = ["--model.args.dim=128", "--model.args.n_heads=2", "--model.args.hidden_dim=128", "--model.args.n_layers=2"]
"""Sizes whose matrices are quantized whole and in halves."""


def named(class_name: str) -> str:
    return f"torchao.optim.{class_name}"


@pytest.fixture(autouse=True)
def _eager() -> Any:
    """Run updates without the compiler, which takes minutes: the operations are the same."""
    with torch.compiler.set_stance("force_eager"):
        yield


def moments(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, np.ndarray]:
    """Return all state, gathered; of quantized moments their inner tensors."""
    found: dict[str, Tensor] = {}
    for name, parameter in unique_parameters(model):
        for key, value in optimizer.state[parameter].items():
            quantized = inner_tensors(value) if is_quantized(value) else {"": value}
            found |= {f"{name}.{key}.{piece}": whole(tensor.float()) for piece, tensor in quantized.items()}
    return {name: tensor.numpy() for name, tensor in found.items()}


def eager(rank: int, world_size: int, config: Config) -> dict[str, np.ndarray]:
    """Train without the compiler, and return the weights."""
    torch.compiler.set_stance("force_eager")
    return trained(rank, world_size, config)


def restored(rank: int, world_size: int, config: Config) -> dict[str, np.ndarray]:
    """Return the moments that a start loads from a checkpoint."""
    torch.compiler.set_stance("force_eager")
    run = built(rank, world_size, config)
    assert run.progress.step == 6
    return moments(run.model, run.optimizer)


@pytest.mark.parametrize("class_name", CLASSES)
def test_bytes_are_counted(class_name: str) -> None:
    model = nn.Linear(512, 256)
    expected = 2 * CLASSES[class_name][1] * (512 * 256 + 256)
    config = Optimizer(name=named(class_name))
    assert check_optimizer(config, model, dtype="float32") == []
    assert state_bytes(config, model, dtype="float32") == int(expected)
    optimizer = build_optimizer(model, config, seed=0)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    kept = [piece for value in (optimizer.state[model.weight][key] for key in ("exp_avg", "exp_avg_sq"))
            for piece in inner_tensors(value).values()]  # fmt: skip
    assert sum(piece.nbytes for piece in kept) == 2 * CLASSES[class_name][1] * 512 * 256


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


@pytest.mark.parametrize(("class_name", "codes"), [("AdamW8bit", torch.uint8), ("AdamWFp8", torch.float8_e4m3fn)])
def test_state_dtypes_are_those_of_codes(class_name: str, codes: torch.dtype) -> None:
    assert state_dtypes(build_optimizer(nn.Linear(64, 64), Optimizer(name=named(class_name)), seed=0)) == {codes}


def test_the_plan_counts_inner_tensors() -> None:
    """Matrices have codes, scales and a table; norms, and 64 x 32 of keys and values, have float32 moments."""
    found = profiled(f"--optimizer.name={named('AdamW8bit')}")
    sizes = [shape.numel() for shape in shapes()]
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


@pytest.mark.slow
def test_losses_are_near_those_of_adamw(tiny: TinyRun) -> None:
    """After 30 steps, on a text that is nearly known by heart then; and not the same, or nothing was quantized."""
    options = [*SHAPE, "--training.steps=30", "--optimizer.lr=3e-3", "--checkpoint.enable=false"]
    names = {"AdamW": "AdamW", "AdamW8bit": named("AdamW8bit")}
    run_in_turn(
        eager, 1, [tiny.config(*options, f"--job.name={it}", f"--optimizer.name={of}") for it, of in names.items()]
    )
    expected, found = (tiny.losses(name)[-1] for name in names)
    assert expected < 0.5
    assert found != expected
    assert found == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize(
    ("class_name", "shape"),
    [
        # 259 rows, each of one block: uneven shards
        pytest.param("AdamW8bit", "--model.args.dim=256", marks=pytest.mark.slow),
        pytest.param("AdamW4bit", "--model.args.vocab_size=260", marks=pytest.mark.nightly),
        pytest.param("AdamWFp8", "--model.args.vocab_size=260", marks=pytest.mark.nightly),
    ],
)
def test_a_run_resumes_bit_for_bit(tiny: TinyRun, class_name: str, shape: str) -> None:
    """A run on two shards resumes there bit for bit; its moments are the same on one shard."""
    options = [*SHAPE, shape, f"--optimizer.name={named(class_name)}"]
    configs = [
        tiny.config(*options, f"--job.name={name}", f"--training.steps={steps}", world_size=2)
        for name, steps in (("whole", 6), ("parts", 3), ("parts", 6))
    ]
    expected, _, found = run_in_turn(eager, 2, configs)
    assert tiny.losses("parts") == tiny.losses("whole")
    for name, value in expected[0].items():
        assert (found[0][name] == value).all(), name
    alone = tiny.config(*options, "--job.name=parts", "--training.steps=6")
    [on_two, _], [on_one] = run_ranks(restored, 2, configs[2]), run_ranks(restored, 1, alone)
    assert on_one.keys() == on_two.keys()
    assert sum(name.endswith("codes") for name in on_one) == 2 * (2 + 2 * 7)
    for name, value in on_two.items():
        assert value.any()
        assert np.array_equal(on_one[name], value), name


REFUSED: dict[str, tuple[tuple[int, ...], list[Placement]]] = {
    "[64, 256] cannot have quantized moments on 4 shards: it is sharded by dimension 1, and": ((64, 256), [Shard(1)]),
    "on 4 shards: shards have 3,840 to 4,096 elements, and torchao quantizes only those with at least 4,096": (
        (63, 256), [Shard(0)]
    ),
    "on 4 shards: 62 rows do not divide evenly, and rows are not whole blocks of 256 elements": (
        (62, 384), [Shard(0)]
    ),
}  # fmt: skip


@pytest.mark.parametrize("message", REFUSED)
def test_other_shards_are_refused(message: str) -> None:
    shape, placements = REFUSED[message]
    with fake_mesh(0, (4,)) as mesh:
        weight = distribute_tensor(torch.ones(shape), mesh, placements, src_data_rank=None)
        with pytest.raises(UserError) as error:
            check_shards("weight", weight, 256)
    assert message in str(error.value)
    assert str(error.value).startswith(f"weight {[*shape]} cannot have quantized moments")


@pytest.mark.parametrize(("shape", "placement"), [((63, 64), Shard(1)), ((256, 256), Replicate()), ((3, 8), Shard(0))])
def test_shards_that_are_alike_are_not_refused(shape: tuple[int, ...], placement: Placement) -> None:
    with fake_mesh(0, (4,)) as mesh:
        check_shards("weight", distribute_tensor(torch.ones(shape), mesh, [placement], src_data_rank=None), 256)
    check_shards("weight", torch.ones(shape), 256)


def refused(rank: int, world_size: int, config: Config) -> str:
    torch.compiler.set_stance("force_eager")
    with pytest.raises(UserError) as error:
        built(rank, world_size, config)
    return str(error.value)


def test_a_run_and_a_checkpoint_with_other_shards_are_refused(tiny: TinyRun) -> None:
    """Rows do not divide, or shards of a checkpoint were large enough for blocks."""
    name = f"--optimizer.name={named('AdamW8bit')}"
    even = [
        *SHAPE,
        name,
        "--model.args.vocab_size=260",
        "--model.args.hidden_dim=48",
        "--training.steps=1",
        "--lr_scheduler.warmup_steps=1",
    ]
    run_ranks(eager, 1, tiny.config(*even))
    configs = [
        tiny.config(*SHAPE, name, "--job.name=uneven", world_size=2),
        tiny.config(*even, "--training.steps=2", world_size=2),
    ]
    (uneven, _), (small, _) = run_in_turn(refused, 2, configs)
    assert "tok_embeddings.weight [259, 128] cannot have quantized moments on 2 shards" in uneven
    assert "layers.0.feed_forward.w1.weight.exp_avg.codes" in small
    assert "of another optimizer" not in small
    assert "Shards below 4,096 elements keep float32 moments" in small
    assert "Use the number that saved it (replicate 1 x shard 1)" in small
