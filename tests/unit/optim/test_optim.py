"""Steps of optimizers: AdamW with stochastic rounding against PyTorch's, Newton-Schulz, steps that are skipped."""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import tomli
import torch
from torch import nn
from torch.optim._muon import _zeropower_via_newtonschulz
from torch.utils.flop_counter import FlopCounterMode

from tests.support.operators import OperatorNames, Operators
from titanlite.ops.cpu import CpuKernels
from titanlite.ops.hash_random import random_bits
from titanlite.optim import build_optimizer, update
from titanlite.optim.combined import optimizers_in
from titanlite.optim.muon import TOGETHER, Muon, newton_schulz, orthogonalized
from titanlite.optim.rounding import SlicedAdamW, round_stochastically
from titanlite.runtime.private_torch.tensors import LocalAdamW, fused_adamw_
from titanlite.schema import Optimizer
from titanlite.step import clip

STEPS = 5


def toy(dtype: torch.dtype = torch.float32) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(40, 30).to(dtype)


def gradients(model: nn.Module, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)


def test_bfloat16_follows_float32_on_average() -> None:
    """Each step is below half of bfloat16's resolution: rounded to nearest, nothing would ever move."""
    count, steps = 20_000, 200
    weight = nn.Parameter(torch.ones(count, 1, dtype=torch.bfloat16))
    optimizer = SlicedAdamW(
        [{"params": [weight]}], {"weight": weight}, state_dtype=torch.bfloat16, seed=0,
        lr=1e-4, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0,
    )  # fmt: skip
    for _ in range(steps):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
    assert (torch.ones(1, dtype=torch.bfloat16) - torch.tensor(1e-4, dtype=torch.bfloat16)).item() == 1
    moved = 1 - weight.float().mean().item()
    assert moved == pytest.approx(steps * 1e-4, rel=0.02)
    state = optimizer.state[weight]
    assert state["exp_avg"].dtype == state["exp_avg_sq"].dtype == torch.bfloat16
    assert state["exp_avg_sq"].float().mean().item() == pytest.approx(1 - 0.999**steps, rel=0.02)


def update_on_cpu(
    weight: torch.Tensor, gradient: torch.Tensor, exp_avg: torch.Tensor, exp_avg_sq: torch.Tensor, *,
    corrections: torch.Tensor, number: int, skip: torch.Tensor, salt: int, first: int, **options: Any,
) -> None:  # fmt: skip
    """Update one tensor as the Triton kernel does it, by PyTorch's operators."""
    step = corrections[0, number].clone()
    beta1, beta2 = options["betas"]
    assert torch.equal(corrections[1:, number], torch.stack([1 - beta1**step, (1 - beta2**step).sqrt()]))
    if skip:
        return
    weights, mean, square = kept = weight, exp_avg, exp_avg_sq
    new = [tensor.float() for tensor in (weights, gradient, mean, square)]
    fused_adamw_(*new, step=step, found_inf=None, **options)
    del new[1]
    bits = random_bits(step.long() + salt, torch.arange(first, first + len(weight)))
    for place, (old, value) in enumerate(zip(kept, new, strict=True)):
        old.copy_(round_stochastically(value, bits >> 16 * place) if old.dtype == torch.bfloat16 else value)


def test_a_kernel_gets_what_slices_are_computed_from() -> None:
    """Weights, moments and steps are the same bits, also after a skipped step and where a parameter has no gradient."""
    by_slices, by_kernel = toy(torch.bfloat16), toy(torch.bfloat16)
    config = section('lr = 0.1\nstate_dtype = "bfloat16"')
    sliced = build_optimizer(by_slices, config, seed=3)
    kernel = build_optimizer(by_kernel, config, seed=3, pick_kernel=lambda device: update_on_cpu)
    for step, skip in enumerate([False, True, False, False]):
        for model, optimizer in ((by_slices, sliced), (by_kernel, kernel)):
            gradients(model, step)
            model.bias.grad = None if step == 0 else model.bias.grad
            update(optimizer, skip=torch.tensor(skip))
    for one, two in zip(by_slices.parameters(), by_kernel.parameters(), strict=True):
        assert torch.equal(one, two)
        assert all(torch.equal(value, kernel.state[two][name]) for name, value in sliced.state[one].items())
    assert [kernel.state[parameter]["step"].item() for parameter in by_kernel.parameters()] == [3, 2]


MATRIX_BY_MUON = '{match = ["weight"], name = "Muon"}'
BIAS_BY_SGD = '{match = ["bias"], name = "SGD", args.momentum = 0.9}'
OPTIMIZERS = {
    "fused": ("", [LocalAdamW]),
    "rounding": ('state_dtype = "bfloat16"', [SlicedAdamW]),
    "plain": ('name = "SGD"\nargs.momentum = 0.9', [torch.optim.SGD]),
    "Muon and AdamW": (f'groups = [{MATRIX_BY_MUON}, {{match = ["bias"]}}]', [Muon, LocalAdamW]),
    "Muon and SGD": (f"groups = [{MATRIX_BY_MUON}, {BIAS_BY_SGD}]", [Muon, torch.optim.SGD]),
}


def section(text: str) -> Optimizer:
    return Optimizer.model_validate(tomli.loads(text))


@pytest.mark.parametrize("case", OPTIMIZERS)
def test_a_skipped_step_changes_nothing(case: str) -> None:
    text, classes = OPTIMIZERS[case]
    model = toy(torch.bfloat16 if case == "rounding" else torch.float32)
    optimizer = build_optimizer(model, section(f"lr = 0.1\n{text}"), seed=0)
    assert [type(part) for part in optimizers_in(optimizer)] == classes

    def everything() -> list[torch.Tensor]:
        states = [value for parameter in model.parameters() for value in optimizer.state[parameter].values()]
        return [tensor.detach().clone() for tensor in [*model.parameters(), *states] if tensor is not None]

    for step, skip in enumerate([False, False, True, False]):
        gradients(model, step)
        if skip:
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.grad[0] = torch.nan
        before = everything()
        update(optimizer, skip=torch.tensor(skip))
        after = everything()
        if step:  # before the first there is no state
            equal = [torch.equal(old, new) for old, new in zip(before, after, strict=True)]
            assert all(equal) if skip else not any(equal)
    assert all(tensor.isfinite().all() for tensor in everything())


COEFFICIENTS = (3.4445, -4.7750, 2.0315)
orthogonal = partial(newton_schulz, coefficients=COEFFICIENTS, steps=5, eps=1e-7)


@pytest.mark.parametrize("shape", [(6, 20), (20, 6), (8, 8), (9, 12)])
def test_newton_schulz(shape: tuple[int, int]) -> None:
    """A polynomial of the singular values; in bfloat16 the bits are those of torch. The float16 of GPUs is nearer."""
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    left, values, right = torch.linalg.svd(matrix.double(), full_matrices=False)
    values = values / values.square().sum().sqrt()
    for _ in range(5):
        values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
    exact = left @ values.diag() @ right
    assert (orthogonal(matrix.clone()) - exact).abs().max() < 1e-5
    theirs, ours = _zeropower_via_newtonschulz(matrix, COEFFICIENTS, 5, 1e-7), orthogonal(matrix.bfloat16())
    assert torch.equal(ours, theirs)
    assert 0.005 * exact.norm() < (theirs - exact).norm() < 0.03 * exact.norm()
    assert (orthogonal(matrix.half()) - exact).norm() < 0.01 * exact.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("smallest", [1e-2, 1e-6])
def test_newton_schulz_of_small_singular_values(dtype: torch.dtype, smallest: float) -> None:
    """The Gram matrix has their squares, which float16 rounds to less than 0: if it is not renewed, it diverges."""
    generator = torch.Generator().manual_seed(0)
    left, _, right = torch.linalg.svd(torch.randn(64, 256, generator=generator), full_matrices=False)
    found = orthogonal(((left * torch.logspace(0, math.log10(smallest), 64)) @ right).to(dtype))
    assert torch.linalg.matrix_norm(found.float(), ord=2) < 1.3


def test_long_matrices_take_fewer_operations_and_small_ones_fewer_operators() -> None:
    def counted(matrices: torch.Tensor) -> tuple[int, int]:
        """Return FLOPs and matrix products."""
        with FlopCounterMode(display=False) as counter, OperatorNames() as operators:
            orthogonalized(matrices, together=2**20, coefficients=COEFFICIENTS, steps=5, eps=1e-7)
        return counter.get_total_flops(), sum("mm" in name for name in operators.names)

    def of_torch(rows: int, columns: int) -> int:
        with FlopCounterMode(display=False) as counter:
            _zeropower_via_newtonschulz(torch.randn(rows, columns), COEFFICIENTS, 5, 1e-7)
        return counter.get_total_flops()

    cube = 64**3
    assert [counted(torch.randn(64, columns))[0] / cube for columns in (64, 256)] == [30, 60]
    assert [of_torch(64, columns) / cube for columns in (64, 256)] == [30, 90]
    assert counted(torch.randn(12, 64, 64)) == (12 * 30 * cube, 15)
    assert counted(torch.randn(12, 64, 256)) == (12 * 60 * cube, 18)


def test_reproducible_matrices_are_computed_by_themselves() -> None:
    config = section(OPTIMIZERS["Muon and SGD"][0])
    found = {}
    for reproducible in (False, True):
        [muon, _] = optimizers_in(build_optimizer(toy(), config, seed=0, reproducible=reproducible))
        assert isinstance(muon, Muon)
        found[reproducible] = muon.together
    assert found == {False: TOGETHER, True: 1}


@pytest.mark.parametrize("hardware", [False, True])
def test_matrices_are_multiplied_in_the_dtype_of_the_kernels(hardware: bool) -> None:
    """bfloat16 matmuls take ten times as long as float32 ones on a CPU without hardware for them."""

    def updated(args: dict[str, str], kernels: CpuKernels) -> tuple[torch.Tensor, set[torch.dtype]]:
        groups = [{"match": ["weight"], "name": "Muon", "args": args}, {"match": ["bias"], "name": "SGD"}]
        model = toy()
        optimizer = build_optimizer(model, Optimizer.model_validate({"groups": groups}), seed=0, kernels=kernels)
        gradients(model, 1)
        with Operators() as mode:
            optimizer.step()
        return model.weight, {x[0].dtype for func, x in mode.calls if "mm" in func.overloadpacket.__name__}

    found, dtypes = updated({}, CpuKernels(hardware_bfloat16=hardware))
    assert dtypes == {torch.bfloat16 if hardware else torch.float32}
    wide, _ = updated({"ns_dtype": "float32"}, CpuKernels(hardware_bfloat16=True))
    assert torch.equal(found, wide) is not hardware


def test_matrices_that_are_computed_together_are_those_that_are_not() -> None:
    """Also where a rest of one matrix is left, and where a stack has none."""
    stack = torch.randn(5, 6, 20, generator=torch.Generator().manual_seed(0))
    compute = partial(orthogonalized, coefficients=COEFFICIENTS, steps=5, eps=1e-7)
    expected = torch.stack([orthogonal(matrix.clone()) for matrix in stack])
    for together in (1, 240, 1000):
        assert (compute(stack.clone(), together=together) - expected).abs().max() < 1e-5
    assert compute(stack[:0].clone(), together=240).shape == (0, 6, 20)
    apart = compute(stack.clone(), together=1)
    assert torch.equal(apart, expected)


@pytest.mark.parametrize(
    "options",
    [
        {"weight_decay": 0.2, "adjust_lr_fn": "original"},
        {"nesterov": False, "momentum": 0.4, "ns_steps": 3, "adjust_lr_fn": "match_rms_adamw"},
    ],
)
def test_muon_is_that_of_torch(options: dict[str, Any]) -> None:
    """A stack of matrices is to torch's a parameter for each. On shards: tests/distributed/test_placements.py."""
    generator = torch.Generator().manual_seed(0)

    def drawn() -> list[torch.Tensor]:
        return [
            torch.randn(shape, generator=generator) for shape in ((7, 10), (7, 10), (10, 7), (9, 9), (9, 9), (3, 4, 5))
        ]

    def matrices(wholes: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [matrix.detach().clone() for whole in wholes for matrix in (whole if whole.ndim == 3 else [whole])]

    ours = [nn.Parameter(whole) for whole in drawn()]
    theirs = [nn.Parameter(matrix) for matrix in matrices(ours)]
    optimizers = Muon(ours, lr=0.05, **options), torch.optim.Muon(theirs, lr=0.05, **options)
    for _ in range(3):
        gradients = drawn()
        for parameters, values in ((ours, gradients), (theirs, matrices(gradients))):
            for parameter, value in zip(parameters, values, strict=True):
                parameter.grad = value
        for optimizer in optimizers:
            optimizer.step()
    for mine, other in zip(matrices(ours), theirs, strict=True):
        assert (mine - other).abs().max() <= 1e-5 * other.abs().max()


@pytest.mark.parametrize(("case", "expected"), [("fused", 0), ("Muon and AdamW", 0), ("Muon and SGD", 1), ("plain", 1)])
def test_an_update_waits_for_no_value_unless_it_must(case: str, expected: int) -> None:
    model = toy()
    optimizer = build_optimizer(model, section(OPTIMIZERS[case][0]), seed=0)
    gradients(model, 0)
    with OperatorNames() as operators:
        update(optimizer, skip=torch.tensor(False))
    assert operators.names.count("aten._local_scalar_dense.default") == expected


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_adamw_has_its_state_before_the_first_step(dtype: str) -> None:
    """PyTorch would allocate it between the gradients of the first step."""
    model = toy()
    optimizer = build_optimizer(model, section(f'state_dtype = "{dtype}"'), seed=0)
    before = {name: [*optimizer.state[parameter].values()] for name, parameter in model.named_parameters()}
    assert [(moment.dtype, moment.shape, moment.any().item()) for moment in before["weight"]] == [
        (torch.float32, (), False),
        *[(getattr(torch, dtype), (30, 40), False)] * 2,
    ]
    gradients(model, 0)
    update(optimizer, skip=torch.tensor(False))
    for name, parameter in model.named_parameters():
        after = [*optimizer.state[parameter].values()]
        assert all(one is other for one, other in zip(before[name], after, strict=True))
        assert after[0].item() == 1


@pytest.mark.parametrize("max_norm", [1e9, 3.0])
def test_a_gpu_clips_within_the_update(monkeypatch: pytest.MonkeyPatch, max_norm: float) -> None:
    """The CPU's fused kernel divides by a scale, too. Gradients below the norm keep their bits."""
    models = toy(), toy()
    for model, on_gpu in zip(models, (False, True), strict=True):
        monkeypatch.setattr("titanlite.optim.combined.is_on_gpu", lambda optimizer, on_gpu=on_gpu: on_gpu)
        optimizer = build_optimizer(model, Optimizer(), seed=0)
        assert isinstance(optimizer, LocalAdamW)
        for step, skip in enumerate([False, True, False]):
            gradients(model, step)
            of_all = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
            unclipped = [gradient.clone() for gradient in of_all]
            norm = torch.stack([gradient.norm() for gradient in of_all]).norm()
            clip(of_all, optimizer, norm=norm, max_norm=max_norm)
            assert all(map(torch.equal, of_all, unclipped)) == (on_gpu or max_norm > 3)
            update(optimizer, skip=torch.tensor(skip))
            optimizer.zero_grad()
        gradients(model, 3)
        update(optimizer, skip=torch.tensor(False))  # by a scale of its own step only
    for clipped, scaled in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(scaled, clipped, rtol=1e-6, atol=1e-8)
        assert max_norm < 1e9 or torch.equal(scaled, clipped)
