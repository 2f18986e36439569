"""Variants of attention that families declare, against transformers' layers."""

from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.attention import _registry
from transformers.models.glm4_moe.configuration_glm4_moe import Glm4MoeConfig
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeAttention, Glm4MoeRotaryEmbedding
from transformers.models.gpt_oss.configuration_gpt_oss import GptOssConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssAttention, GptOssRotaryEmbedding

from tests.support import packed_kernel
from tests.support.families import built
from tests.support.helpers import mentions
from tests.support.models import documents
from tests.support.operators import Operators
from titanlite.models.layers import Attention, Linear, Rope, rope_cos_sin
from titanlite.ops import pick_kernels
from titanlite.ops.attention import Boundaries, Scores, SequencePart, additive_mask, chunk_boundaries
from titanlite.ops.cpu import CpuKernels
from titanlite.ops.functions import rotate
from titanlite.ops.kernels import FLASH_PACKAGES, Kernels
from titanlite.ops.sinks import attend_by_formula
from titanlite.parallelize.activation_checkpoint import apply_activation_checkpoint
from titanlite.runtime.errors import UserError
from titanlite.runtime.private_torch.tensors import ATTENTION_OPERATORS
from titanlite.techniques.lora.adapters import LoraLinear
from titanlite.tools.plan.gpu_kernels import GpuKernels

D, N, K, H, ROTATED, L = 32, 4, 2, 16, 8, 12
TOKENS = torch.arange(80).view(2, 40)
NAMES = {"wq": "q_proj", "wk": "k_proj", "wv": "v_proj", "wo": "o_proj"}


def drawn(**options: Any) -> Attention:
    torch.manual_seed(0)
    layer = Attention(D, N, K, H, **options)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    layer.kernels = CpuKernels()
    return layer


def renamed(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name.replace(name[:2], NAMES.get(name[:2], name[:2])): tensor for name, tensor in tensors.items()}


def mask_of(window: int | None) -> torch.Tensor:
    distance = torch.arange(L)[:, None] - torch.arange(L)
    return torch.zeros(1, 1, L, L).masked_fill_((distance < 0) | (distance >= (window or L)), -torch.inf)


def assert_same(ours: Attention, theirs: Any, their_tables: Any, tables: Any, *, window: int | None = None) -> None:
    """Compare outputs and all gradients."""
    theirs.load_state_dict(renamed(ours.state_dict()))
    theirs.zero_grad()
    x = torch.randn(2, L, D)
    their_tables = their_tables(x, torch.arange(L)[None])
    mask = None if window is None else mask_of(window)
    out, expected = ours(x, *tables, mask), theirs(x, their_tables, mask_of(window))[0]
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    weights, upstream = dict(ours.named_parameters()), torch.randn_like(out)
    found = dict(zip(weights, torch.autograd.grad(out, [*weights.values()], upstream), strict=True))
    expected.backward(upstream)
    for name, gradient in renamed(found).items():
        torch.testing.assert_close(gradient, theirs.get_parameter(name).grad, rtol=1e-4, atol=1e-4, msg=name)


@pytest.mark.parametrize("scale", [None, 0.7])
def test_biases_partial_rotation_and_scale_are_those_of_transformers(scale: float | None) -> None:
    rope = {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": ROTATED / H}
    config: Any = Glm4MoeConfig(
        hidden_size=D, num_attention_heads=N, num_key_value_heads=K, attention_bias=True, use_qk_norm=False,
        rope_parameters=rope,
    )  # fmt: skip
    config.head_dim, config._attn_implementation = H, "eager"
    theirs = Glm4MoeAttention(config, 0)
    theirs.scaling = scale or theirs.scaling
    tables = rope_cos_sin(ROTATED, L, Rope(theta=100.0))
    assert_same(drawn(biases="qkv", scale=scale), theirs, Glm4MoeRotaryEmbedding(config), tables)


def test_the_output_has_a_bias() -> None:
    plain, layer = drawn(biases="qkv"), drawn(biases="qkvo")
    layer.load_state_dict(plain.state_dict(), strict=False)
    x, tables = torch.randn(2, L, D), rope_cos_sin(H, L, Rope(theta=100.0))
    torch.testing.assert_close(layer(x, *tables), plain(x, *tables) + layer.wo.bias)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_partial_rotation_keeps_the_rest(dtype: torch.dtype) -> None:
    cos, sin = rope_cos_sin(ROTATED, L, Rope(theta=100.0))
    x = torch.randn(2, N, L, H, dtype=dtype, requires_grad=True)
    ours, alone = rotate(x, cos, sin), rotate(x[..., :ROTATED], cos, sin)
    assert torch.equal(ours, torch.cat([alone, x[..., ROTATED:]], dim=-1))
    compiled = torch.compile(rotate, backend="eager", fullgraph=True)(x, cos, sin)
    torch.testing.assert_close(compiled, ours)
    upstream = torch.randn_like(x)
    [gradient] = torch.autograd.grad(ours, x, upstream)
    [expected] = torch.autograd.grad(alone, x, upstream[..., :ROTATED])
    expected[..., ROTATED:] = upstream[..., ROTATED:]
    assert torch.equal(gradient, expected)


def test_linear_scaling_multiplies_all_wavelengths() -> None:
    plain, scaled = (
        rope_cos_sin(H, 4 * L, Rope(theta=100.0, factor=factor, scaling="linear")) for factor in (1.0, 4.0)
    )
    for wide, narrow in zip(scaled, plain, strict=True):
        torch.testing.assert_close(wide[::4], narrow[:L])


def test_an_adapter_keeps_the_bias_of_its_layer() -> None:
    layer, x = Linear(D, H, bias=True), torch.randn(2, D)
    adapted = LoraLinear(layer, rank=2, alpha=1.0)
    torch.nn.init.normal_(adapted.lora_a)
    torch.nn.init.zeros_(adapted.lora_b)
    assert torch.equal(adapted(x), layer(x))
    assert not torch.equal(layer(x), torch.nn.functional.linear(x, layer.weight))


class Formula(Kernels):
    """Kernels of a GPU without flash attention, where plain formulas compute attention with sinks."""

    def is_gpu(self, device: torch.device) -> bool:
        return True


@pytest.mark.parametrize("kernels", [CpuKernels(), Formula()])
@pytest.mark.parametrize("window", [None, 5])
def test_sinks_are_those_of_transformers(window: int | None, kernels: Kernels) -> None:
    rope = {"rope_type": "default", "rope_theta": 100.0}
    config: Any = GptOssConfig(
        hidden_size=D, num_attention_heads=N, num_key_value_heads=K, head_dim=H, rope_parameters=rope
    )
    config._attn_implementation = "eager"
    ours, tables = drawn(biases="qkvo", has_sinks=True), rope_cos_sin(H, L, Rope(theta=100.0))
    ours.kernels = kernels
    assert_same(ours, GptOssAttention(config, 0), GptOssRotaryEmbedding(config), tables, window=window)


def test_the_backend_of_attention_with_sinks() -> None:
    shape: dict[str, Any] = {"n_heads": N, "n_kv_heads": K, "head_dim": H, "seq_len": L, "device": torch.device("cpu")}
    for kernels, dtype, name in (
        (CpuKernels(), torch.float32, "flash"),
        (GpuKernels(), torch.bfloat16, "flash"),
        (GpuKernels(), torch.float32, "math"),
    ):
        assert kernels.attention_name(**shape, has_sinks=True, dtype=dtype) == name
    with pytest.raises(UserError, match=r"training\.attention_backend: cudnn\b.*\bauto\b"):
        GpuKernels(attention="cudnn").attention_name(**shape, has_sinks=True, dtype=torch.bfloat16)


def drawn_heads(tokens: int) -> list[torch.Tensor]:
    """Queries, keys, values of two sequences, and sinks."""
    shapes = (2, N, tokens, H), (2, K, tokens, H), (2, K, tokens, H), (N,)
    return [torch.randn(shape, requires_grad=True) for shape in shapes]


@pytest.mark.parametrize("window", [None, 3])
def test_packed_sinks_are_those_of_a_mask(window: int | None) -> None:
    """Whole sequences, and those that two ranks split."""
    *heads, sinks = drawn_heads(16)
    where = documents([[5, 1, 10], [16]])
    parts = [None, SequencePart(0, 2), SequencePart(1, 2)]
    for part in parts:
        chosen = torch.arange(16) if part is None else part.indices(16, sinks.device)
        q, (k, v) = heads[0][:, :, chosen], heads[1:]
        masks = (
            Boundaries(where.boundaries, window) if part is None else chunk_boundaries(where, part, window=window),
            additive_mask(where.ids_BS, sinks.dtype, part, window=window),
        )
        with packed_kernel.on_cpu():
            found, expected = (CpuKernels().attend(q, k, v, mask, scores=Scores(0.3, sinks)) for mask in masks)
            torch.testing.assert_close(found, expected)
            upstream = torch.randn_like(found)
            gradients = [
                torch.autograd.grad(output, [*heads, sinks], upstream, retain_graph=True)
                for output in (found, expected)
            ]
        torch.testing.assert_close(*gradients)


def test_sequences_without_a_mask_are_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v, sinks = drawn_heads(16)
    expected = CpuKernels().attend(q, k, v, None, scores=Scores(None, sinks))
    monkeypatch.setattr(Kernels, "has_packed_attention", lambda self, device, dtype, head_dim: True)
    with packed_kernel.on_cpu(), Operators() as mode:
        found = Kernels().attend(q, k, v, None, scores=Scores(None, sinks))
    assert [func.name() for func, _ in mode.calls if "varlen" in func.name()] == ["torch_attn::_varlen_attn"]
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sinks_keep_the_memory_and_the_dtype_of_attention(dtype: torch.dtype) -> None:
    q, k, v, sinks = (head.detach().to(dtype).requires_grad_() for head in drawn_heads(64))
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        out = CpuKernels().attend(q, k, v, None, scores=Scores(None, sinks))
    assert out.dtype == dtype
    assert (
        sum(tensor.nbytes for tensor in kept)
        == sum(tensor.nbytes for tensor in (q, k, v, sinks, out)) + 4 * q[..., 0].numel()
    )
    exact = attend_by_formula(q.float(), k.float(), v.float(), sinks.float(), None, None)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(out.float(), exact, rtol=tolerance, atol=tolerance)


def test_far_sinks() -> None:
    """A sink far below the scores is none, and one far above them takes all."""
    q, k, v, _ = drawn_heads(16)
    plain = CpuKernels().attend(q, k, v, None)
    low, high = (
        CpuKernels().attend(q, k, v, None, scores=Scores(None, torch.full((N,), sink))) for sink in (-80.0, 80.0)
    )
    torch.testing.assert_close(low, plain)
    assert not high.abs().max() > 1e-20


@pytest.mark.parametrize("policy", ["op", "full"])
def test_checkpointing_by_operations_keeps_attention_with_sinks(policy: Any) -> None:
    model = built("gpt_oss")
    expected = model(TOKENS).square().mean()
    gradients = torch.autograd.grad(expected, [*model.parameters()])
    apply_activation_checkpoint(model, [policy] * 4)
    with Operators() as mode:
        found = model(TOKENS).square().mean()
        others = torch.autograd.grad(found, [*model.parameters()])
    assert torch.equal(found, expected)
    assert all(map(torch.equal, others, gradients))
    assert sum(func in ATTENTION_OPERATORS for func, _ in mode.calls) == (4 if policy == "op" else 8)


@pytest.mark.long
def test_packed_sinks_are_compiled_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another number of documents recompiles nothing, and activation checkpointing keeps the kernel's output."""
    torch._dynamo.reset()
    monkeypatch.setattr(Kernels, "has_packed_attention", lambda self, device, dtype, head_dim: True)
    counter = CompileCounterWithBackend("aot_eager")
    models = built("gpt_oss", n_layers=1), built("gpt_oss", n_layers=1)
    apply_activation_checkpoint(models[1], ["op"], is_compiled=True)
    models[1].layers[0].compile(fullgraph=True, backend=counter)
    calls: list[str] = []

    def counted(function: Any) -> Any:
        def call(*operands: Any) -> Any:
            calls.append(function.__name__)
            return function(*operands)

        return call

    with packed_kernel.on_cpu(counted(packed_kernel.forward), counted(packed_kernel.backward)):
        for rows in ([[20, 20], [40]], [[1, 9, 30], [5, 35]]):
            results = []
            for model in models:
                calls.clear()
                out = model(TOKENS, documents=documents(rows))
                results.append((out, torch.autograd.grad(out.square().mean(), [*model.parameters()])))
                assert calls == ["forward", "backward"]
            torch.testing.assert_close(*results)
    assert counter.frame_count == 1


@pytest.mark.parametrize("name", ["fa3", "fa4"])
def test_flash_attention_of_a_package_is_used_by_name(name: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch registers the kernels of a package that is installed. CPUs have one kernel, and need none."""
    assert pick_kernels(torch.device("cpu"), attention_backend=name).attention == "auto"
    with pytest.raises(UserError) as missing:
        pick_kernels(torch.device("cuda"), attention_backend=name)
    assert mentions(str(missing.value), "training.attention_backend", name, FLASH_PACKAGES[name], "auto")
    used: list[str] = []
    monkeypatch.setitem(_registry._FLASH_ATTENTION_IMPLS, name.upper(), lambda: used.append(name))
    kernels = pick_kernels(torch.device("cuda"), attention_backend=name)
    assert (kernels.attention, used) == (name, [name])
    shape: dict[str, Any] = {"n_heads": N, "n_kv_heads": K, "head_dim": H, "seq_len": L, "device": torch.device("cuda")}
    with pytest.raises(UserError, match=r"attention_backend: fa[34]\b.*\bauto\b"):  # sinks were not tried with it
        GpuKernels(attention=name).attention_name(**shape, has_sinks=True, dtype=torch.bfloat16)
