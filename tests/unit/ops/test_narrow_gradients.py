"""Gradients of the operators of a step on a CPU, in narrow dtypes, against float64: sums are float32, and rounded once.

PyTorch's CPU kernels add up some gradients in the dtype of the tensors, one value after the other: 4,096 ones are 256
in bfloat16. Neither the loss nor the norm of all gradients shows it.
"""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titanlite.loss import token_loss
from titanlite.models.pytorch_layers import use_kernels
from titanlite.ops.attention import Scores
from titanlite.ops.copies import Copies
from titanlite.ops.cpu import CpuKernels
from titanlite.ops.functions import clamped_swiglu, geglu, rotate, swiglu, with_gradient
from titanlite.ops.kernels import Kernels

T, D = 4096, 8
CPU = torch.device("cpu")
Function = Callable[[Kernels, Sequence[Tensor]], Any]


def tokens(high: int) -> Tensor:
    """Some come often, as those of a text."""
    return torch.randint(0, high, (T,), generator=torch.Generator().manual_seed(1)) ** 2 // high


COPIES = Copies.of(F.one_hot(tokens(4), 4).bool(), T)
ANGLES = torch.outer(torch.arange(512.0), torch.tensor([0.3, 0.01] * 2))
MASK = torch.zeros(1, 1, 512, 512).masked_fill_(torch.ones(512, 512).triu(1).bool(), -torch.inf)
X, TABLE, VECTOR = (T, D), (16, D), (D,)
HEADS = [(1, 4, 512, D), (1, 2, 512, D), (1, 2, 512, D)]


def of_module(make: Callable[[], nn.Module], *inputs: Tensor) -> Function:
    """Return the function of one of PyTorch's layers in a model of the user's own, whose parameters come last."""

    def compute(kernels: Kernels, x: Sequence[Tensor]) -> Tensor:
        layer = make()
        use_kernels(layer, kernels, CPU)
        names = [name for name, _ in layer.named_parameters()]
        rest = x[: len(x) - len(names)]
        return torch.func.functional_call(layer, dict(zip(names, x[len(rest) :], strict=True)), (*inputs, *rest))

    return compute


def attention(*, mask: Tensor | None = None, repeat: int = 1) -> Function:
    def compute(kernels: Kernels, x: Sequence[Tensor]) -> Tensor:
        q, k, v = (tensor.repeat(1, 1, repeat, 1) for tensor in x[:3])
        return kernels.attend(q, k, v, None if mask is None else mask.to(q.dtype), None, Scores(None, *x[3:]))

    return compute


def loss(kernels: Kernels, x: Sequence[Tensor]) -> Tensor:
    return token_loss(x[0].unsqueeze(0), x[1], labels_BL=tokens(16).unsqueeze(0), kernels=kernels).total / T


def with_row(kernels: Kernels, x: Sequence[Tensor]) -> Tensor:
    return with_gradient(x[0], x[1], torch.ones(D, dtype=x[0].dtype))


class Scaled(nn.Embedding):
    """Subclass, as transformers has some."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * 0.5


OPERATORS: dict[str, tuple[Function, list[tuple[int, ...]]]] = {
    "embedding, table smaller than batch": (lambda k, x: k.embedding(tokens(16), x[0]), [TABLE]),
    "embedding, table larger": (lambda k, x: k.embedding(tokens(6000), x[0]), [(6000, D)]),
    "embedding, some padding": (lambda k, x: k.embedding(tokens(16).view(2, -1), x[0], -16), [TABLE]),
    "nn.Embedding": (of_module(lambda: nn.Embedding(16, D, padding_idx=2), tokens(16)), [TABLE]),
    "subclass of nn.Embedding": (of_module(lambda: Scaled(16, D), tokens(16)), [TABLE]),
    "positions": (of_module(lambda: nn.Embedding(4, D), torch.arange(T) % 4), [(4, D)]),
    "nn.LayerNorm": (of_module(lambda: nn.LayerNorm(D)), [X, VECTOR, VECTOR]),
    "nn.LayerNorm without a bias": (of_module(lambda: nn.LayerNorm(D, bias=False)), [X, VECTOR]),
    "nn.Linear": (of_module(lambda: nn.Linear(D, 3)), [X, (3, D), (3,)]),
    "RMSNorm": (lambda k, x: k.rms_norm(x[0], x[1], 1e-5), [X, VECTOR]),
    "linear": (lambda k, x: k.linear(x[0], x[1]), [X, (3, D)]),
    "linear to one number": (lambda k, x: k.linear(x[0], x[1]), [X, (1, D)]),
    "linears": (lambda k, x: torch.cat(k.linears(x[0], x[1:]), dim=1), [X, (3, D), (2, D)]),
    "linears of a norm": (lambda k, x: k.linear(k.rms_norm(x[0], x[1], 1e-5), x[2]), [X, VECTOR, (3, D)]),
    "bias": (lambda k, x: x[0] + x[1], [X, VECTOR]),
    "grouped_mm": (lambda k, x: k.grouped_mm(x[0], x[1], COPIES.ends_N), [X, (4, D, 3)]),
    "weighted": (lambda k, x: k.weighted(swiglu, *x), [X, X, (T,)]),
    "weight of each": (lambda k, x: x[0] * x[1].sigmoid(), [X, (T, 1)]),
    "swiglu": (lambda k, x: swiglu(*x), [X, X]),
    "clamped_swiglu": (lambda k, x: clamped_swiglu(*x), [X, X]),
    "geglu": (lambda k, x: geglu(*x), [X, X]),
    "rotate": (lambda k, x: rotate(x[0], ANGLES.cos(), ANGLES.sin()), [HEADS[0]]),
    "copies": (lambda k, x: COPIES.take(x[0]), [X]),
    "sums of copies": (lambda k, x: COPIES.add_up(x[0]), [X]),
    "weights of copies": (lambda k, x: COPIES.values(x[0]), [(T, 4)]),
    "weights of experts": (lambda k, x: x[0].float().gather(1, tokens(4).unsqueeze(1)), [(T, 4)]),
    "scatter": (lambda k, x: x[0].new_zeros(T, 16).scatter(1, tokens(16).unsqueeze(1), x[0]), [(T, 1)]),
    "gradient known later": (with_row, [X, X]),
    "attention": (attention(), HEADS),
    "attention, longer": (attention(repeat=2), HEADS),
    "attention with a mask": (attention(mask=MASK), HEADS),
    "attention with sinks": (attention(), [*HEADS, (4,)]),
    "vectors of one": (lambda k, x: x[0].float().exp() * torch.ones(T, 1), [VECTOR]),
    "loss": (loss, [X, TABLE]),
}


@pytest.mark.parametrize("hardware", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", OPERATORS)
def test_they_are_added_up_in_float32(name: str, dtype: torch.dtype, hardware: bool) -> None:
    compute, shapes = OPERATORS[name]
    torch.manual_seed(0)
    narrow = [torch.randn(shape).to(dtype).requires_grad_() for shape in shapes]
    exact = [x.detach().double().requires_grad_() for x in narrow]
    kernels = CpuKernels(hardware_bfloat16=hardware)
    out, expected = compute(kernels, narrow), compute(kernels, exact)
    assert (out - expected).norm() < 2 * torch.finfo(dtype).eps * expected.norm()
    gradient = torch.rand(out.shape).to(out.dtype)  # of one sign, as sums of many tokens have
    out.backward(gradient)
    expected.backward(gradient.to(expected.dtype))
    for x, y in zip(narrow, exact, strict=True):
        assert x.grad is not None
        assert y.grad is not None
        assert (x.grad - y.grad).norm() < torch.finfo(dtype).eps * y.grad.norm(), "rounded more than a few times"
