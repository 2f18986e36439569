"""The loss with what a cache holds of a teacher: against autograd of the plain formulas over K + 1 outcomes."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.distillation import KINDS, VOCABULARY, Given, divergence, inputs, plain
from tests.operators import LargestTensor
from titanlite.batch import IGNORE
from titanlite.ops.cpu import CpuKernels
from titanlite.ops.divergence import top_k_divergence
from titanlite.schema import Distill
from titanlite.techniques.distill.divergence import TopK, distilled_loss


def top_k(teacher: Given, k: int, temperature: float, dtype: torch.dtype = torch.float32) -> TopK:
    """Return what a cache of k tokens holds of a teacher, computed in float64."""
    logits = teacher.hidden_BLD.double() @ teacher.weight_VD.double().t()
    log_q, ids = (logits / temperature).log_softmax(-1).sort(dim=-1, descending=True)
    return TopK(ids[..., :k].int(), log_q[..., :k].to(dtype), log_q[..., k:].logsumexp(-1).float())


def outcomes(logits: Tensor, ids: Tensor) -> Tensor:
    """Logarithms of the probabilities of some tokens, and of 1 minus their sum, from logits in float64."""
    known = logits.softmax(-1).gather(-1, ids.long())
    return torch.cat([known, 1 - known.sum(-1, keepdim=True)], dim=-1).log()


def of_outcomes(logits: Tensor, stored: TopK, distill: Distill) -> Tensor:
    """T^2 D of the K + 1 outcomes of each token, by the formulas in float64, from the student's logits."""
    log_p = outcomes(logits.double() / distill.temperature, stored.ids_BLK)
    log_q = torch.cat([stored.log_probs_BLK, stored.log_tail_BL[..., None]], dim=-1).double()
    return distill.temperature**2 * divergence(log_p, log_q, distill.kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("ratio", "temperature", "z_loss"), [(1.0, 1.0, 0.0), (0.4, 2.5, 1e-2)])
@pytest.mark.parametrize("k", [1, 20, VOCABULARY - 1])
def test_gradients_are_those_of_the_divergence_of_the_outcomes(
    kind: Any, ratio: float, temperature: float, z_loss: float, k: int
) -> None:
    """The student's tail is 1 minus the sum of its probabilities of the teacher's k tokens."""
    hidden, weight, labels, teacher = inputs()
    stored, distill = top_k(teacher, k, temperature), Distill(ratio=ratio, temperature=temperature, kind=kind)
    logits = hidden.double() @ weight.double().t()
    distilled = (of_outcomes(logits, stored, distill) * (labels != IGNORE)).sum()
    own = plain(hidden, weight, labels, teacher, Distill(ratio=0.0), z_loss)[0]
    expected = (1 - ratio) * own + ratio * distilled
    expected_gradients = torch.autograd.grad(expected, [hidden, weight])
    kernels = CpuKernels(chunk_bytes=8 * VOCABULARY * 7)
    found = distilled_loss(
        hidden, weight, labels_BL=labels, z_loss=z_loss, kernels=kernels, teacher=stored, distill=distill
    )
    assert found.metrics["distill_loss"].item() == pytest.approx(distilled.item(), rel=1e-6)
    assert found.total.item() == pytest.approx(expected.item(), rel=1e-6)
    gradients = torch.autograd.grad(found.total, [hidden, weight])
    for gradient, other in zip(gradients, expected_gradients, strict=True):
        # Terms of a small reverse KL cancel each other, after they were rounded to float32.
        assert (gradient - other).norm() < (2e-6 if kind == "reverse_kl" else 1e-6) * other.norm()
    assert not gradients[0][0, :9].any(), "labels that do not count"


@pytest.mark.parametrize("kind", KINDS)
def test_tails_of_almost_no_probability_have_finite_numbers(kind: Any) -> None:
    """Probabilities below the smallest float32, on both sides."""
    logits = torch.zeros(2, 6)
    logits[:, 1] = 300.0
    ids = torch.tensor([[1, 2], [3, 4]])
    log_q, log_tail = torch.tensor([[0.0, -200.0], [-1e-3, -8.0]]), torch.tensor([-250.0, -8.0])
    found = top_k_divergence(logits, ids, log_q, log_tail, kind=kind, temperature=1.0, weight_C=torch.ones(2))
    assert found.d_logits_CV is not None
    assert found.value_C.isfinite().all()
    assert found.d_logits_CV.isfinite().all()
    assert found.value_C[0].item() == pytest.approx(0.0, abs=1e-6)
    torch.testing.assert_close(found.d_logits_CV.sum(1), torch.zeros(2), rtol=0, atol=1e-6)


@pytest.mark.long
def test_memory_does_not_grow_with_the_vocabulary() -> None:
    """As much as with the other divergences, of which tests/unit/test_distill.py has a larger vocabulary, too."""
    vocabulary = 4_000
    kernels = CpuKernels(chunk_bytes=4 * 128_000)
    hidden, weight = torch.randn(1, 64, 8, requires_grad=True), torch.randn(vocabulary, 8, requires_grad=True)
    output = TopK(torch.arange(20).int().expand(1, 64, 20), torch.full((1, 64, 20), -4.0), torch.full((1, 64), -1.0))
    labels = torch.randint(0, vocabulary, (1, 64))
    with LargestTensor(but=[(vocabulary, 8)]) as seen:
        distill = Distill(ratio=0.5)
        found = distilled_loss(hidden, weight, labels_BL=labels, kernels=kernels, teacher=output, distill=distill)
        found.total.backward()
    assert seen.numel == 64_000
    assert seen.matmuls == 3 * (64 * vocabulary // 64_000), "no matmul of a teacher"
