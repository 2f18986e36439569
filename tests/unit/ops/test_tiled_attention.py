"""Attention of CPUs to short sequences, against PyTorch's own in float64."""

from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support.families import built
from tests.support.operators import OperatorNames, peak_bytes
from titanlite.ops import tiled_attention
from titanlite.ops.attention import Scores
from titanlite.ops.cpu import CpuKernels
from titanlite.ops.kernels import set_kernels
from titanlite.ops.tiled_attention import attend_in_tiles
from titanlite.parallelize.activation_checkpoint import apply_activation_checkpoint

TILES = "titanlite.attend_in_tiles.default"


def inputs(
    batch: int, heads: int, key_heads: int, length: int, *, value_dim: int = 16, dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    """Queries, keys, values and the gradient of the output, as layers have them: heads of a token side by side."""
    generator = torch.Generator().manual_seed(length)
    shapes = (heads, 16), (key_heads, 16), (key_heads, value_dim), (heads, value_dim)
    return [torch.randn(batch, length, *shape, generator=generator).to(dtype).transpose(1, 2) for shape in shapes]


def mask_of_documents(batch: int, length: int, dtype: torch.dtype) -> Tensor:
    ids_BL = (torch.rand(batch, length, generator=torch.Generator().manual_seed(0)) < 0.1).cumsum(1)
    is_seen = (ids_BL[:, :, None] == ids_BL[:, None, :]) & torch.ones(length, length, dtype=torch.bool).tril()
    return torch.zeros(batch, 1, length, length, dtype=dtype).masked_fill_(~is_seen[:, None], -torch.inf)


def results(attend: Any, tensors: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Output, and gradients of queries, keys and values."""
    *qkv, gradient = (tensor.to(dtype) for tensor in tensors)
    leaves = [tensor.detach().requires_grad_() for tensor in qkv]
    out = attend(*leaves)
    return [out, *torch.autograd.grad(out, leaves, gradient)]


@pytest.mark.parametrize("is_masked", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("shape", "tiles"), [((2, 4, 2, 96), 3), ((1, 3, 3, 32), 1), ((3, 6, 1, 256), 4), ((1, 4, 2, 256), 1)]
)
@pytest.mark.parametrize("scale", [None, 0.7])
def test_outputs_and_gradients(
    shape: tuple[int, int, int, int],
    tiles: int,
    dtype: torch.dtype,
    is_masked: bool,
    scale: float | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    weights = Mock(wraps=tiled_attention._weights)
    monkeypatch.setattr(tiled_attention, "_weights", weights)
    tensors, mask = inputs(*shape, value_dim=24 if scale else 16, dtype=dtype), None
    if is_masked:
        mask = mask_of_documents(shape[0], shape[-1], torch.float64)

    def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return CpuKernels(by_onednn=True).attend(
            q, k, v, None if mask is None else mask.to(dtype), scores=Scores(scale)
        )

    def exact(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=True, scale=scale
        )

    with OperatorNames() as operators:
        found = results(ours, tensors, dtype)
    assert operators.names.count(TILES) == 1
    assert weights.call_count == 2 * tiles
    limit = 2e-6 if dtype == torch.float32 else 1.5e-2
    for value, expected in zip(found, results(exact, tensors, torch.float64), strict=True):
        assert value.dtype == dtype
        assert (value - expected).abs().max() < limit * expected.abs().max()


@pytest.mark.parametrize(("length", "dtype"), [(48, torch.float32), (544, torch.float32), (64, torch.float64)])
def test_other_shapes_take_pytorchs_kernel(length: int, dtype: torch.dtype) -> None:
    tensors = inputs(1, 2, 2, length)
    with OperatorNames() as operators:
        results(lambda q, k, v: CpuKernels(by_onednn=True).attend(q, k, v, None), tensors, dtype)
    assert operators.names.count(TILES) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("batch", [1, 2])
def test_the_compiler_knows_its_operators(batch: int, is_transposed: bool, dtype: torch.dtype) -> None:
    q, k, v, _ = inputs(batch, 4, 2, 64, value_dim=24, dtype=dtype)
    tensors = [tensor if is_transposed else tensor.contiguous() for tensor in (q, k, v)]
    arguments = *(tensor.requires_grad_() for tensor in tensors), None, 0.25
    torch.library.opcheck(torch.ops.titanlite.attend_in_tiles.default, arguments)
    gradient = torch.randn(batch, 64, 4, 24).to(dtype).transpose(1, 2)
    arguments = gradient, *(tensor.detach() for tensor in tensors), None, 0.25
    torch.library.opcheck(torch.ops.titanlite.attend_in_tiles_backward.default, arguments)


@pytest.mark.parametrize(("in_parts", "name"), [(False, "tiles"), (True, "flash")])
def test_its_name_is_that_of_whole_sequences(in_parts: bool, name: str) -> None:
    shape: dict[str, Any] = {"n_heads": 4, "n_kv_heads": 2, "head_dim": 16, "seq_len": 64, "dtype": torch.float32}
    assert CpuKernels(by_onednn=True).attention_name(**shape, device=torch.device("cpu"), in_parts=in_parts) == name


@pytest.mark.parametrize(
    ("by_onednn", "dtype", "longest"),
    [(True, torch.float32, 512), (False, torch.float32, 128), (False, torch.bfloat16, 512), (True, torch.float16, 0)],
)
def test_sequences_are_in_tiles_where_flash_attention_is_slower(
    by_onednn: bool, dtype: torch.dtype, longest: int
) -> None:
    kernels = CpuKernels(by_onednn=by_onednn)
    lengths = [64, 128, 256, 512, 1024]
    assert [length for length in lengths if kernels.own_attention(length, dtype)] == [
        n for n in lengths if n <= longest
    ]


def test_it_copies_the_queries_of_a_tile_at_a_time() -> None:
    *qkv, gradient = inputs(16, 4, 2, 128, value_dim=128)
    q, k, v = (torch.randn(*tensor.shape[:3], 128, requires_grad=True) for tensor in qkv)
    scores = 32 * 64 * 128 * 4
    copies = 2 * k.nbytes + q.nbytes // 4
    assert peak_bytes(lambda: attend_in_tiles(q, k, v, None, None)) < q.nbytes + copies + 2 * scores + 2**16
    out = attend_in_tiles(q, k, v, None, None)
    gradients = q.nbytes + 2 * k.nbytes
    used = peak_bytes(lambda: torch.autograd.grad(out, [q, k, v], gradient))
    assert used < gradients + copies + 2 * q.nbytes // 4 + 3 * scores + 2**16


def test_a_token_does_not_depend_on_later_ones() -> None:
    q, k, v, _ = inputs(2, 4, 2, 64)
    before = CpuKernels(by_onednn=True).attend(q, k, v, None)
    for leaf in (q, k, v):
        leaf[:, :, 40:] = 7.0
    assert torch.equal(CpuKernels(by_onednn=True).attend(q, k, v, None)[:, :, :40], before[:, :, :40])


@pytest.mark.parametrize(("policy", "calls"), [("op", 1), ("full", 2)])
def test_checkpointing_by_operations_keeps_it(policy: Any, calls: int) -> None:
    model = built("smollm3")
    set_kernels(model, CpuKernels(by_onednn=True))
    apply_activation_checkpoint(model, [policy] * len(model.layers))
    with OperatorNames() as operators:
        model(torch.arange(64).view(2, 32)).square().mean().backward()
    assert operators.names.count(TILES) == calls * len(model.layers)
