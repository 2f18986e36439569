"""Layers against what PyTorch, or plain arithmetic, makes of the same."""

from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.support.operators import OperatorNames, Operators, kept_tensors
from titanlite.models.layers import FeedForward, Linear, RMSNorm, Rope, linear_of_each, rope_cos_sin
from titanlite.models.pytorch_layers import use_kernels
from titanlite.ops.attention import attend
from titanlite.ops.cpu import CpuKernels
from titanlite.ops.functions import linears, rotate, swiglu
from titanlite.ops.kernels import Kernels, set_kernels
from titanlite.runtime.private_torch.tensors import ATTENTION_OPERATORS
from titanlite.schema import AttentionBackend
from titanlite.tools.plan.gpu_kernels import GpuKernels

B, L, N, H, D = 2, 5, 3, 8, 24


def gradients(out: torch.Tensor, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(1)
    # what bfloat16 can hold
    upstream = torch.randn(out.shape, generator=generator).to(torch.bfloat16)
    return torch.autograd.grad(out, inputs, upstream.type_as(out))


def rotated_by_autograd(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    x1, x2 = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-x2, x1), dim=-1) * sin


@pytest.mark.parametrize("by_position", [False, True], ids=["one table", "a table a row"])
def test_rotation_and_the_way_back(by_position: bool) -> None:
    x = torch.randn(B, N, L, H, requires_grad=True)
    cos, sin = rope_cos_sin(H, L, Rope(theta=100.0))
    if by_position:
        positions = torch.stack([torch.arange(L), torch.tensor([0, 1, 0, 1, 2])])
        cos, sin = cos[positions].unsqueeze(1), sin[positions].unsqueeze(1)
    ours, plain = rotate(x, cos, sin), rotated_by_autograd(x, cos, sin)
    torch.testing.assert_close(ours, plain)
    torch.testing.assert_close(gradients(ours, x), gradients(plain, x))
    torch.testing.assert_close(ours.square().sum(-1), x.square().sum(-1))  # it is a rotation


def test_rotation_keeps_the_type_and_nothing_of_its_input() -> None:
    cos, sin = rope_cos_sin(H, L, Rope(theta=100.0))
    kept: list[torch.Tensor] = []
    x = torch.randn(B, N, L, H, dtype=torch.bfloat16, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        out = rotate(x, cos, sin)
    assert out.dtype == torch.bfloat16
    assert [tuple(tensor.shape) for tensor in kept] == [(L, H), (L, H)]
    assert gradients(out, x)[0].dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norm_on_a_cpu_is_pytorchs(dtype: torch.dtype) -> None:
    norm = RMSNorm(D, eps=1e-3).to(dtype)
    set_kernels(norm, CpuKernels())
    torch.nn.init.normal_(norm.weight, mean=1.0)
    x = torch.randn(B, L, D, dtype=dtype, requires_grad=True)
    ours, plain = norm(x), F.rms_norm(x, (D,), norm.weight, 1e-3)
    torch.testing.assert_close(ours, plain)
    torch.testing.assert_close(gradients(ours, x, norm.weight), gradients(plain, x, norm.weight))


@pytest.mark.parametrize("is_changed", [True, False])
@pytest.mark.parametrize("is_norm", [True, False])
def test_what_was_changed_before_a_matmul_is_not_recomputed(is_norm: bool, is_changed: bool) -> None:
    """Backward of a linear layer makes the result of a norm or SwiGLU again, unless it has another value by then."""
    kernels = CpuKernels()
    x, weight = torch.randn(B, L, D, requires_grad=True), torch.randn(H, D, requires_grad=True)
    hidden = kernels.rms_norm(x, torch.ones(D), 1e-3) if is_norm else swiglu(x, x)
    with torch.no_grad():
        hidden.mul_(2) if is_changed else None
    value = hidden.detach().clone()
    with OperatorNames() as seen:
        [found] = gradients(kernels.linear(hidden, weight), weight)
    [expected] = gradients(F.linear(value, weight), weight)
    torch.testing.assert_close(found, expected)
    again = "aten.mul_.Tensor" if is_norm else "aten.mul.Tensor"
    assert (again in seen.names) is not is_changed, "what makes it again"


def test_bfloat16_matmul_on_a_cpu_without_hardware_bfloat16() -> None:
    linear = Linear(D, 6).to(torch.bfloat16)
    set_kernels(linear, CpuKernels(hardware_bfloat16=False))
    x = torch.randn(B, L, D, dtype=torch.bfloat16, requires_grad=True)
    ours = linear(x)
    wide_x, wide_weight = x.detach().float().requires_grad_(), linear.weight.detach().float().requires_grad_()
    wide = F.linear(wide_x, wide_weight)
    torch.testing.assert_close(ours, wide.to(torch.bfloat16), rtol=0, atol=0)
    narrow = [gradient.to(torch.bfloat16) for gradient in gradients(wide, wide_x, wide_weight)]
    torch.testing.assert_close(list(gradients(ours, x, linear.weight)), narrow, rtol=0, atol=0)


def test_layers_compile_to_one_graph() -> None:
    """The graph has no autograd function: the compiler would not cache it."""
    dtype = torch.bfloat16
    linear, norm = Linear(H, H).to(dtype), RMSNorm(H, eps=1e-3).to(dtype)
    for layer in (linear, norm):
        set_kernels(layer, CpuKernels(hardware_bfloat16=False))
    cos, sin = rope_cos_sin(H, L, Rope(theta=100.0))
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, _: object) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    def all_of_them(x: torch.Tensor) -> torch.Tensor:
        return rotate(norm(linear(x)), cos, sin)

    x = torch.randn(B, N, L, H, dtype=dtype, requires_grad=True)
    compiled = torch.compile(all_of_them, fullgraph=True, backend=keep)(x)
    torch.testing.assert_close(compiled, all_of_them(x))
    torch.compiler.reset()
    [graph] = graphs
    assert not [node for node in graph.graph.nodes if "autograd_function" in str(node.target)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_swiglu_is_the_formula_and_keeps_two_tensors(dtype: torch.dtype) -> None:
    gate, up = (torch.randn(B, L, D, dtype=dtype, requires_grad=True) for _ in range(2))
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        ours = swiglu(gate, up)
    assert [tensor.data_ptr() for tensor in kept] == [gate.data_ptr(), up.data_ptr()]
    plain = F.silu(gate) * up
    torch.testing.assert_close(ours, plain, rtol=0, atol=0)
    torch.testing.assert_close(gradients(ours, gate, up), gradients(plain, gate, up), rtol=0, atol=0)


# Attention of GPUs


@pytest.mark.parametrize(
    ("dtype", "attention", "masked", "repeats"),
    [
        (torch.float32, "auto", False, True),
        (torch.float32, "efficient", False, True),
        (torch.bfloat16, "efficient", False, True),
        (torch.bfloat16, "auto", True, True),
        (torch.bfloat16, "auto", False, False),
        (torch.bfloat16, "flash", False, False),
    ],
)
def test_keys_are_repeated_where_a_gpus_kernel_knows_no_groups(
    dtype: torch.dtype, attention: AttentionBackend, masked: bool, repeats: bool
) -> None:
    """PyTorch would hold the scores of plain formulas: 8 GiB a block in float32 at 8,192 tokens and 32 heads."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(B, n, L, H, generator=generator).to(dtype).requires_grad_() for n in (6, 2, 2))
    mask = torch.full((L, L), -torch.inf, dtype=dtype).triu_(1).expand(B, 1, L, L) if masked else None
    with Operators() as mode:
        found = GpuKernels(compiles=False, attention=attention).attend(q, k, v, mask)
        CpuKernels().attend(q, k, v, mask)
    heads = [args[1].shape[1] for func, args in mode.calls if func in ATTENTION_OPERATORS]
    assert heads == [6 if repeats else 2, 2]
    expected = attend(q, k, v, None)
    torch.testing.assert_close(found, expected)
    tolerance = 1e-6 if dtype == torch.float32 else 2**-5
    for gradient, other in zip(gradients(found, q, k, v), gradients(expected, q, k, v), strict=True):
        assert (gradient - other).norm() < tolerance * other.norm()


@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize(
    ("dtype", "hardware"), [(torch.float32, True), (torch.bfloat16, True), (torch.bfloat16, False)], ids=str
)
def test_a_cpu_makes_the_inputs_of_matmuls_again(dtype: torch.dtype, hardware: bool, trained: bool) -> None:
    """The input of the norm, gate and up are kept. The norm's output and their product are not, if they can be made
    again, and the bits are those of layers that keep them."""
    layers = torch.nn.Sequential(RMSNorm(D, eps=1e-3), FeedForward(D, 16)).to(dtype)
    set_kernels(layers, CpuKernels(hardware_bfloat16=hardware))
    layers[1].requires_grad_(trained)
    x = torch.randn(B, L, D, dtype=dtype, requires_grad=True)
    inputs = [x, *(parameter for parameter in layers.parameters() if parameter.requires_grad)]
    out = layers(x)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
        plain = layers(x)
    assert torch.equal(out, plain)
    weights = {parameter.data_ptr() for parameter in layers.parameters()}

    def kept(out: torch.Tensor) -> list[int]:
        sizes = {tensor.data_ptr(): tensor.numel() for tensor in kept_tensors(out) if tensor.numel() >= B * L * 16}
        return sorted(size for address, size in sizes.items() if address not in weights)

    assert kept(out) == [B * L * 16, B * L * 16, B * L * D]
    if trained:
        assert kept(plain) == [*[B * L * 16] * 3, *[B * L * D] * 2]
    for _ in range(2):
        assert all(map(torch.equal, gradients_of_ones(out, inputs), gradients_of_ones(plain, inputs)))


def gradients_of_ones(out: torch.Tensor, inputs: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    return torch.autograd.grad(out, inputs, torch.ones_like(out), retain_graph=True)


def test_a_checkpoint_keeps_what_it_recomputes() -> None:
    """Recomputation ends before the last matmul, whose result backward does not need."""
    layers = torch.nn.Sequential(RMSNorm(D, eps=1e-3), FeedForward(D, 16))
    set_kernels(layers, CpuKernels())
    x = torch.randn(B, L, D, requires_grad=True)
    inputs = [x, *layers.parameters()]
    out = checkpoint(layers, x, use_reentrant=False)
    expected = gradients_of_ones(layers(x), inputs)
    with OperatorNames() as seen:
        found = torch.autograd.grad(out, inputs, torch.ones_like(out))
    assert all(map(torch.equal, found, expected))
    assert seen.names.count("aten.mm.default") == 2 + 3 * 2


@pytest.mark.parametrize(
    ("attention", "packed"), [("auto", True), ("flash", True), ("cudnn", False), ("efficient", False)]
)
def test_documents_are_packed_for_flash_attention_only(attention: AttentionBackend, packed: bool) -> None:
    kernels = GpuKernels(compiles=False, attention=attention)
    assert kernels.has_packed_attention(torch.device("cuda"), torch.bfloat16, 64) == packed


def test_layers_of_one_input_have_the_gradients_of_separate_ones() -> None:
    x = torch.randn(B, L, D, dtype=torch.float64, requires_grad=True)
    weights = [torch.randn(size, D, dtype=torch.float64, requires_grad=True) for size in (6, 2, 2)]
    together, apart = linears(x, weights), [F.linear(x, weight) for weight in weights]
    upstream = [torch.randn_like(out) for out in apart]
    expected = torch.autograd.grad(apart, [x, *weights], upstream)
    for found, other in zip(together, apart, strict=True):
        assert torch.equal(found, other)
    with OperatorNames() as seen:
        found = torch.autograd.grad(together, [x, *weights], upstream)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    assert [name for name in seen.names if "mm" in name or "add" in name] == [
        *("aten.mm.default", "aten.mm.default", "aten.addmm_.default"),
        *("aten.mm.default", "aten.addmm_.default", "aten.mm.default"),
    ]


class Doubled(Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


@pytest.mark.parametrize("kernels", [Kernels(), GpuKernels()])
def test_replaced_and_hooked_layers_are_called(kernels: Kernels) -> None:
    first, second = Linear(D, 4), Linear(D, 2)
    for layer in (first, second):
        layer.kernels = kernels
    x = torch.randn(B, L, D, requires_grad=True)
    plain = linear_of_each(x, first, second)
    assert {type(out.grad_fn).__name__ for out in plain} == (
        {"_CommonInputBackward"} if isinstance(kernels, GpuKernels) else {"UnsafeViewBackward0"}
    )
    doubled = Doubled(D, 4)
    doubled.weight = first.weight
    assert torch.equal(linear_of_each(x, doubled, second)[0], 2 * plain[0])
    seen: list[Any] = []
    second.register_forward_hook(lambda module, inputs, out: seen.append(out))
    outs = linear_of_each(x, first, second)
    assert outs[1] is seen[0]
    assert all(map(torch.equal, outs, plain))


def test_layers_of_one_class_get_one_class() -> None:
    """A compiler would compile each block again whose layers are of another class."""

    class Own(torch.nn.Linear):
        pass

    model = torch.nn.ModuleList([Own(2, 2), Own(2, 2), torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)])
    use_kernels(model, CpuKernels(), torch.device("cpu"))
    first, second, plain, other = map(type, model)
    assert first is second
    assert plain is other
    assert issubclass(first, Own)
    assert first not in (Own, plain)
