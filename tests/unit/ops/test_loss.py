"""The chunked loss against plain cross entropy, and what it holds in memory."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.support.operators import LargestTensor, OperatorNames, Operators, peak_bytes
from titanlite.batch import IGNORE
from titanlite.loss import TokenLoss, token_loss
from titanlite.ops.cpu import CpuKernels
from titanlite.ops.cross_entropy import label_softmax, label_softmax_in_place
from titanlite.ops.kernels import GPU_CHUNK_BYTES, Kernels, LossChunks
from titanlite.runtime.private_torch.tracing import FakeTensorMode
from titanlite.tools.plan.gpu_kernels import GpuKernels

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
def test_it_is_cross_entropy(chunk: int, z_loss: float, dtype: torch.dtype, hardware_bfloat16: bool) -> None:
    hidden, weight, labels = inputs(dtype)
    expected = plain(hidden, weight, labels, z_loss)
    expected_gradients = torch.autograd.grad(0.1 * expected.total, [hidden, weight])
    kernels = CpuKernels(hardware_bfloat16=hardware_bfloat16, chunk_bytes=4 * VOCABULARY * chunk)
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


@pytest.mark.parametrize("z_loss", [0.0, 1e-2])
def test_gradients_of_several_chunks_are_multiplied_at_once(z_loss: float) -> None:
    """Chunks of 7 tokens in groups of 21: of the 66 tokens, the last group has 3."""

    class Grouped(Kernels):
        def loss_chunks(
            self, tokens: int, vocabulary: int, device: torch.device, *, groups: bool = False
        ) -> LossChunks:
            assert (tokens, vocabulary, groups) == (TOKENS, VOCABULARY, True)
            return LossChunks(7, 21)

    hidden, weight, labels = inputs(torch.bfloat16)
    expected = plain(hidden, weight, labels, z_loss)
    expected_gradients = torch.autograd.grad(0.1 * expected.total, [hidden, weight])
    with Operators() as mode:
        found = token_loss(hidden, weight, labels_BL=labels, z_loss=z_loss, kernels=Grouped())
    rows = [args[0].shape[0] for func, args in mode.calls if func.overloadpacket is torch.ops.aten.mm]
    of_weight = [VOCABULARY]  # of each group
    assert rows == [7, 7, 7, 21, *of_weight] * 3 + [3, 3, *of_weight]
    assert found.total.tolist() == pytest.approx(expected.total.tolist(), rel=1e-6)
    assert found.cross_entropy.tolist() == pytest.approx(expected.cross_entropy.tolist(), rel=1e-6)
    for gradient, other in zip(
        torch.autograd.grad(0.1 * found.total, [hidden, weight]), expected_gradients, strict=True
    ):
        assert (gradient - other).norm() < 2**-8 * other.norm()


@pytest.mark.parametrize("hardware_bfloat16", [False, True])
def test_logits_are_float32_and_their_gradients_use_hardware_bfloat16(hardware_bfloat16: bool) -> None:
    hidden, weight, labels = inputs(torch.bfloat16)
    with Operators() as mode:
        token_loss(hidden, weight, labels_BL=labels, kernels=CpuKernels(hardware_bfloat16=hardware_bfloat16))
    matmuls = [args[0].dtype for func, args in mode.calls if func.overloadpacket is torch.ops.aten.mm]
    assert matmuls == [torch.float32, *[torch.bfloat16 if hardware_bfloat16 else torch.float32] * 2]


def test_without_gradients_none_are_computed() -> None:
    hidden, weight, labels = inputs()
    with torch.no_grad(), LargestTensor() as seen:
        found = token_loss(hidden, weight, labels_BL=labels)
    assert found.cross_entropy.tolist() == pytest.approx(plain(hidden, weight, labels, 0).cross_entropy.tolist())
    assert seen.matmuls == 1


@pytest.mark.parametrize("vocabulary", [1000, 4000, 16000])
def test_logits_take_the_same_memory_whatever_the_vocabulary(vocabulary: int) -> None:
    kernels = CpuKernels(chunk_bytes=4 * 32_000)
    hidden = torch.randn(1, 64, 16, requires_grad=True)
    weight = torch.randn(vocabulary, 16, requires_grad=True)
    with LargestTensor(but=[(vocabulary, 16)]) as seen:
        labels = torch.randint(0, vocabulary, (1, 64))
        token_loss(hidden, weight, labels_BL=labels, kernels=kernels).total.backward()
    assert seen.numel == 32_000
    assert seen.matmuls == 3 * 64 * vocabulary / 32_000  # as many as the plain loss has, for each chunk


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_cpu_makes_the_gradient_of_logits_without_a_further_copy(dtype: torch.dtype) -> None:
    logits, labels, valid = torch.randn(64, 1024), torch.arange(64), torch.ones(64)
    options: Any = {"z_loss": 0.0, "dtype": dtype}
    plain = Kernels().label_softmax(logits.clone(), labels, valid, **options)
    found = CpuKernels().label_softmax(logits.clone(), labels, valid, **options)
    torch.testing.assert_close(tuple(found), tuple(plain), rtol=0, atol=0)
    of_rows = 64 * 64 * 4
    result = 0 if dtype == torch.float32 else logits.nbytes // 2
    assert result <= peak_bytes(lambda: CpuKernels().label_softmax(logits, labels, valid, **options)) < result + of_rows


# Softmax and gradient of a chunk


def chunk_inputs() -> tuple[Tensor, Tensor, Tensor]:
    """Logits of 9 tokens, far from uniform; labels, the last of the vocabulary among them; two do not count."""
    generator = torch.Generator().manual_seed(0)
    logits = 4 * torch.randn(9, VOCABULARY, generator=generator)
    labels = torch.randint(0, VOCABULARY, (9,), generator=generator)
    labels[-1] = VOCABULARY - 1
    return logits, labels, torch.tensor([1.0, 0, 1, 1, 1, 0, 1, 1, 1])


def in_float64(logits: Tensor, labels: Tensor, valid: Tensor, z_loss: float) -> tuple[Tensor, Tensor, Tensor]:
    wide = logits.double().requires_grad_()
    log_z, label_logit = wide.logsumexp(1), wide[range(len(labels)), labels]
    (((log_z - label_logit) + z_loss * log_z.square()) * valid).sum().backward()
    assert wide.grad is not None
    return log_z.detach(), label_logit.detach(), wide.grad


@pytest.mark.long
@pytest.mark.parametrize(
    ("backend", "z_loss", "dtype", "has_memory"),
    [
        *(("", z_loss, dtype, False) for z_loss in (0.0, 1e-2) for dtype in (torch.float32, torch.bfloat16, None)),
        ("", 1e-2, torch.bfloat16, True),
        *(("aot_eager", 1e-2, torch.bfloat16, has_memory) for has_memory in (False, True)),
        *(pytest.param("inductor", 1e-2, dtype, False, marks=pytest.mark.nightly) for dtype in (torch.float32, None)),
        pytest.param("inductor", 1e-2, torch.bfloat16, True, marks=pytest.mark.nightly),
    ],
    ids=str,
)
def test_softmax_and_gradient_of_a_chunk(
    backend: str, z_loss: float, dtype: torch.dtype | None, has_memory: bool
) -> None:
    """Run the operators of eager training, and the function of which the compiler makes a GPU's kernel."""
    logits, labels, valid = chunk_inputs()
    expected = in_float64(logits, labels, valid, z_loss)
    function = label_softmax_in_place
    if backend:
        function = torch.compile(label_softmax, fullgraph=True, dynamic=False, backend=backend)
    memory = torch.full((16, VOCABULARY), 7.0, dtype=dtype)
    out = memory[4:13] if has_memory else None
    found = function(logits, labels, valid, z_loss=z_loss, dtype=dtype, out=out)
    log_z_C = found.largest_C + found.sum_C.log()
    torch.testing.assert_close(log_z_C, expected[0].float(), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(found.label_logit_C, expected[1].float(), rtol=0, atol=0)
    if dtype is None:
        assert found.d_logits_CV is None
        return
    assert found.d_logits_CV is not None
    assert found.d_logits_CV.dtype == dtype
    assert (found.d_logits_CV is logits) == (dtype == torch.float32) or backend
    assert (found.d_logits_CV.data_ptr() == logits.data_ptr()) == (dtype == torch.float32)
    if has_memory:
        assert found.d_logits_CV.data_ptr() == memory[4].data_ptr()
        assert (memory[:4] == 7).all()
        assert (memory[13:] == 7).all()
    rtol, atol = (1e-5, 1e-7) if dtype == torch.float32 else (2**-8, 1e-7)
    torch.testing.assert_close(found.d_logits_CV.double(), expected[2], rtol=rtol, atol=atol)


def test_a_certain_label_keeps_its_gradient_in_bfloat16() -> None:
    """softmax - 1 is rounded once. Rounded softmax would be 1, and the gradient 0."""
    logits = torch.tensor([[7.0, 0.0, 0.0]])
    expected = -2 / (torch.tensor(7.0).exp() + 2)
    for function in (label_softmax_in_place, label_softmax):
        found = function(logits.clone(), torch.tensor([0]), torch.ones(1), z_loss=0.0, dtype=torch.bfloat16)
        assert found.d_logits_CV is not None
        assert found.d_logits_CV[0, 0].item() == pytest.approx(expected.item(), rel=2**-8)


# On a GPU


@pytest.mark.parametrize(
    ("tokens", "vocabulary", "chunk", "grouped"),
    [
        (8192, 128_256, 2048, (1024, 4096)),  # at most 2092 tokens have 1 GiB of logits
        (8192, 151_936, 1664, (768, 3072)),  # 5 chunks of at most 1664; 3 groups of at most 3072
        (4096, 128_256, 2048, (1024, 4096)),
        (4096, 151_936, 1408, (1024, 2048)),  # the memory of 1,766 tokens has room for more than a quarter of 2,048
        (4096, 262_144, 1024, (512, 2048)),
        (4096, 2**21, 128, (128, 128)),  # four chunks of a tile would be too large
        (8192, 32_000, 8192, (8192, 8192)),  # all at once
        (100, 32_000, 128, (128, 128)),
    ],
)
def test_chunks_of_a_gpu_are_even_and_multiples_of_a_tile(
    tokens: int, vocabulary: int, chunk: int, grouped: tuple[int, int]
) -> None:
    gpu, cpu, kernels = torch.device("cuda"), torch.device("cpu"), Kernels()
    assert kernels.loss_chunks(tokens, vocabulary, gpu) == (chunk, chunk)
    assert kernels.loss_chunks(tokens, vocabulary, gpu, groups=True) == grouped
    for groups in (False, True):
        assert kernels.loss_chunks(tokens, vocabulary, cpu, groups=groups).group == (
            512 if vocabulary < 2**17 else 2**26 // vocabulary
        )


@pytest.mark.parametrize("vocabulary", [32_000, 50_304, 128_256, 262_144])
@pytest.mark.parametrize("tokens", [4096, 8192, 12_288, 16_384, 65_536])
def test_groups_of_chunks_take_no_more_memory(tokens: int, vocabulary: int) -> None:
    """Float32 logits of a chunk and bfloat16 gradients of a group, against the largest chunk with its gradients."""
    for compiles in (False, True):
        kernels = Kernels(compiles=compiles)
        chunk, group = kernels.loss_chunks(tokens, vocabulary, torch.device("cuda"), groups=True)
        assert (4 * chunk + 2 * group) * vocabulary <= 1.5 * GPU_CHUNK_BYTES[compiles]


def test_a_gpu_adds_to_the_gradient_of_the_weight_in_one_matmul() -> None:
    """A matmul for the logits of each chunk, and two for each group: the first writes the gradient of the hidden
    states in bfloat16, and the second adds to the float32 sum of the groups before."""
    with FakeTensorMode(), OperatorNames() as operators:
        hidden = torch.empty(1, 1024, 64, dtype=torch.bfloat16, requires_grad=True)
        weight = torch.empty(999, 64, dtype=torch.bfloat16, requires_grad=True)
        labels = torch.zeros(1, 1024, dtype=torch.int64)
        kernels = GpuKernels(compiles=False, chunk_bytes=4 * 999 * 256)
        token_loss(hidden, weight, labels_BL=labels, kernels=kernels)
    assert operators.names.count("aten.mm.dtype_out") == 8
    assert operators.names.count("aten.mm.dtype") == 1
    assert operators.names.count("aten.mm.out") == 2
    assert operators.names.count("aten.addmm.dtype_out") == 1
    assert not [name for name in operators.names if name.startswith("aten.mm.default")]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_matmul_is_added_in_pieces_where_no_kernel_adds(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(size, generator=generator).to(dtype) for size in ((300, 20), (20, 16)))
    total = torch.ones(300, 16)
    with LargestTensor(but=[(300, 16)]) as seen:
        Kernels(chunk_bytes=4 * 16 * 128).add_matmul(total, a, b)
    assert seen.matmuls == (1 if dtype == torch.float32 else 3)
    torch.testing.assert_close(total, 1 + (a @ b).float(), rtol=1e-5, atol=1e-4)
