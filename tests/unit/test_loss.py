"""The chunked loss against plain cross entropy, and what it holds in memory."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from titanlite import loss as loss_module
from titanlite.batch import IGNORE
from titanlite.cpu.kernels import CpuKernels
from titanlite.loss import TokenLoss, token_loss

VOCABULARY, TOKENS, DIM = 301, 66, 48


def inputs(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states and weight with gradients, and labels, some of which do not count."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(2, TOKENS // 2, DIM, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(VOCABULARY, DIM, generator=generator).to(dtype).requires_grad_()
    labels = torch.randint(0, VOCABULARY, (2, TOKENS // 2), generator=generator)
    labels[0, :9] = IGNORE
    return hidden, weight, labels


def plain(hidden: Tensor, weight: Tensor, labels: Tensor, z_loss: float) -> TokenLoss:
    logits = F.linear(hidden.float(), weight.float()).flatten(0, 1)
    nats = F.cross_entropy(logits, labels.flatten(), ignore_index=IGNORE, reduction="sum")
    penalty = z_loss * (logits.logsumexp(1).square() * (labels.flatten() != IGNORE)).sum()
    return TokenLoss(nats + penalty, nats.detach())


@pytest.mark.parametrize("chunk", [1, 7, 66, 1000])
@pytest.mark.parametrize("z_loss", [0.0, 1e-2])
@pytest.mark.parametrize(
    ("dtype", "hardware_bfloat16"), [(torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True)]
)
def test_it_is_cross_entropy(
    monkeypatch: pytest.MonkeyPatch, chunk: int, z_loss: float, dtype: torch.dtype, hardware_bfloat16: bool
) -> None:
    monkeypatch.setattr(loss_module, "CHUNK_BYTES", 4 * VOCABULARY * chunk)
    hidden, weight, labels = inputs(dtype)
    expected = plain(hidden, weight, labels, z_loss)
    expected_gradients = torch.autograd.grad(0.1 * expected.total, [hidden, weight])
    kernels = CpuKernels(hardware_bfloat16=hardware_bfloat16)
    found = token_loss(hidden, weight, labels_BL=labels, z_loss=z_loss, kernels=kernels)
    gradients = torch.autograd.grad(0.1 * found.total, [hidden, weight])
    assert found.total.dtype == found.cross_entropy.dtype == torch.float32
    assert found.total.tolist() == pytest.approx(expected.total.tolist(), rel=1e-6)
    assert found.cross_entropy.tolist() == pytest.approx(expected.cross_entropy.tolist(), rel=1e-6)
    assert (found.total > found.cross_entropy).item() == (z_loss > 0)
    for gradient, other in zip(gradients, expected_gradients, strict=True):
        assert gradient.dtype == dtype
        # In bfloat16, each is rounded twice: when it is computed, and when it is scaled.
        assert (gradient - other).norm() < (1e-6 if dtype == torch.float32 else 2**-8) * other.norm()


class DtypesOfMatmuls(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[torch.dtype] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.mm.default:
            self.seen.append(args[0].dtype)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("hardware_bfloat16", [False, True])
def test_logits_are_float32_and_their_gradients_use_hardware_bfloat16(hardware_bfloat16: bool) -> None:
    hidden, weight, labels = inputs(torch.bfloat16)
    with DtypesOfMatmuls() as matmuls:
        token_loss(hidden, weight, labels_BL=labels, kernels=CpuKernels(hardware_bfloat16=hardware_bfloat16))
    assert matmuls.seen == [torch.float32, *[torch.bfloat16 if hardware_bfloat16 else torch.float32] * 2]


def test_without_gradients_none_are_computed() -> None:
    hidden, weight, labels = inputs()
    with torch.no_grad(), LargestTensor() as seen:
        found = token_loss(hidden, weight, labels_BL=labels)
    assert found.cross_entropy.tolist() == pytest.approx(plain(hidden, weight, labels, 0).cross_entropy.tolist())
    assert seen.matmuls == 1


class LargestTensor(TorchDispatchMode):
    """The largest tensor that an operator makes, and the number of matmuls."""

    def __init__(self, *, but: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.but = but
        self.numel = 0
        self.matmuls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.matmuls += func in (torch.ops.aten.mm.default, torch.ops.aten.addmm_.default)
        sizes = [
            t.numel() for t in tree_leaves(result) if isinstance(t, Tensor) and sorted(t.shape) != sorted(self.but)
        ]
        self.numel = max(self.numel, *sizes, 0)
        return result


@pytest.mark.parametrize("vocabulary", [1000, 4000, 16000])
def test_logits_take_the_same_memory_whatever_the_vocabulary(monkeypatch: pytest.MonkeyPatch, vocabulary: int) -> None:
    monkeypatch.setattr(loss_module, "CHUNK_BYTES", 4 * 32_000)
    hidden = torch.randn(1, 64, 16, requires_grad=True)
    weight = torch.randn(vocabulary, 16, requires_grad=True)
    with LargestTensor(but=(vocabulary, 16)) as seen:
        token_loss(hidden, weight, labels_BL=torch.randint(0, vocabulary, (1, 64))).total.backward()
    assert seen.numel == 32_000
    assert seen.matmuls == 3 * 64 * vocabulary / 32_000  # as many as the plain loss has, for each chunk
