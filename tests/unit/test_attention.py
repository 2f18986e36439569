"""Variants of attention that families declare, against transformers' layers."""

from typing import Any

import pytest
import torch
from transformers.models.glm4_moe.configuration_glm4_moe import Glm4MoeConfig
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeAttention, Glm4MoeRotaryEmbedding

from titanlite.models.layers import Attention, Linear, Rope, rope_cos_sin
from titanlite.ops.cpu import CpuKernels
from titanlite.ops.functions import rotate
from titanlite.techniques.lora.adapters import LoraLinear

D, N, K, H, ROTATED, L = 32, 4, 2, 16, 8, 12
NAMES = {"wq": "q_proj", "wk": "k_proj", "wv": "v_proj", "wo": "o_proj"}


def drawn(**options: Any) -> Attention:
    torch.manual_seed(0)
    layer = Attention(D, N, K, H, **options)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    layer.kernels = CpuKernels()
    return layer


def renamed(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name.replace(name[:2], NAMES[name[:2]]): tensor for name, tensor in tensors.items()}


@pytest.mark.parametrize("scale", [None, 0.7])
def test_biases_partial_rotation_and_scale_are_those_of_transformers(scale: float | None) -> None:
    rope = {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": ROTATED / H}
    config: Any = Glm4MoeConfig(
        hidden_size=D, num_attention_heads=N, num_key_value_heads=K, attention_bias=True, use_qk_norm=False,
        rope_parameters=rope,
    )  # fmt: skip
    config.head_dim, config._attn_implementation = H, "eager"
    ours, theirs = drawn(biases="qkv", scale=scale), Glm4MoeAttention(config, 0)
    theirs.scaling = scale or theirs.scaling
    theirs.load_state_dict(renamed(ours.state_dict()))
    x = torch.randn(2, L, D)
    mask = torch.full((L, L), -torch.inf).triu(1)[None, None]
    tables = Glm4MoeRotaryEmbedding(config)(x, torch.arange(L)[None])
    out, expected = ours(x, *rope_cos_sin(ROTATED, L, Rope(theta=100.0))), theirs(x, tables, mask)[0]
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    weights, upstream = dict(ours.named_parameters()), torch.randn_like(out)
    found = dict(zip(weights, torch.autograd.grad(out, [*weights.values()], upstream), strict=True))
    expected.backward(upstream)
    for name, gradient in renamed(found).items():
        torch.testing.assert_close(gradient, theirs.get_parameter(name).grad, rtol=1e-4, atol=1e-4, msg=name)


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
