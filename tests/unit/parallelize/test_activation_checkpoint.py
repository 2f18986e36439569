"""Recomputation of blocks that draw random numbers, and of those that declare that they draw none."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.kept_matmuls import KeptMatmuls
from tests.support.operators import OperatorNames
from titanlite.models.base import ExpertLayer, Model, ModelArgs
from titanlite.models.llama3 import Llama3, Llama3Args
from titanlite.ops.functions import loop_over_groups
from titanlite.parallelize.activation_checkpoint import apply_activation_checkpoint, recompute_policies
from titanlite.schema import ActivationCheckpoint


@pytest.mark.parametrize(
    ("options", "policies"),
    [
        ({"mode": "none"}, ["none", "none", "none", "none"]),
        ({"mode": "full"}, ["full", "full", "full", "full"]),
        ({"mode": "selective"}, ["op", "op", "op", "op"]),
        ({"mode": "selective", "selective_ac_option": 1}, ["full", "full", "full", "full"]),
        ({"mode": "selective", "selective_ac_option": 3}, ["full", "none", "none", "full"]),
    ],
)
def test_policies_of_the_modes(options: dict[str, Any], policies: list[str]) -> None:
    assert recompute_policies(ActivationCheckpoint(**options), 4) == policies


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(64))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(x * self.weight, 0.5)


class Own(Model):
    """Model of a user that does not declare anything."""

    def __init__(self) -> None:
        super().__init__(ModelArgs(vocab_size=8, max_seq_len=8))
        self.layers = nn.ModuleList(Dropping() for _ in range(2))

    def forward(self, x: Tensor, *_: Any, **__: Any) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        for layer in self.layers:
            x = layer(x)
        return x


class Declared(Own):
    draws_random = False


class Derived(Declared):
    """Subclass that may have added dropout."""


def gradients(model: Model) -> list[Tensor]:
    torch.manual_seed(0)
    model(torch.arange(1.0, 65.0)).sum().backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.parametrize(("model_cls", "is_right"), [(Own, True), (Derived, True), (Declared, False)])
def test_random_numbers_are_drawn_again_unless_the_class_itself_declares_none(
    model_cls: type[Own], is_right: bool
) -> None:
    expected = gradients(model_cls())
    model = model_cls()
    apply_activation_checkpoint(model, ["full", "full"])
    assert all(map(torch.equal, gradients(model), expected)) == is_right


class Matmuls(nn.Module):
    """Block of some matmuls in a row, added to its input."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for linear in self.linears:
            y = linear(y.sin())
        return x + y


@pytest.mark.parametrize(("count", "kept"), [(4, [1, 3]), (7, [2, 4, 6]), (8, [1, 3, 5, 7])])
def test_op_keeps_every_second_matmul_but_never_the_last(count: int, kept: list[int]) -> None:
    """Backward has no use for the last one, which would cost as much memory as the block's input."""
    model = Own()
    model.layers = nn.ModuleList([Matmuls(count)])
    apply_activation_checkpoint(model, ["op"])
    x = torch.randn(3, 4, requires_grad=True)
    with KeptMatmuls() as mode:
        out = model(x)
    assert mode.places() == kept
    out.sum().backward()
    [plain] = torch.autograd.grad(Matmuls.forward(model.layers[0], x).sum(), x)  # pyright: ignore[reportArgumentType]
    assert x.grad is not None
    assert torch.equal(plain, x.grad)


@pytest.mark.parametrize(("is_compiled", "kept"), [(False, [4, 6]), (True, [1, 5, 7])])
def test_op_recomputes_keys_and_values_that_heads_share(is_compiled: bool, kept: list[int]) -> None:
    """Matmuls: queries, keys, values, attention's output, w1, w3, w2. The compiler drops the last by itself."""
    args = Llama3Args(
        vocab_size=8, max_seq_len=8, dim=64, n_layers=1, n_heads=4, n_kv_heads=1, hidden_dim=96, rope_theta=1e4,
        rope_scaling_factor=1.0,
    )  # fmt: skip
    model = Llama3(args)
    model.init_buffers()
    apply_activation_checkpoint(model, ["op"], is_compiled=is_compiled)
    with KeptMatmuls() as mode:
        _ = model(torch.zeros(1, 8, dtype=torch.int64))
    assert [place for place in mode.places() if place <= 7] == kept


class Experts(ExpertLayer):
    """Layer with one matmul by an expert, and one before and behind it."""

    stacks = ("weight",)

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1, 4, 4))

    def forward(self, x: Tensor) -> Tensor:
        ends, first = torch.tensor([len(x)], dtype=torch.int32), self.weight[0]
        return loop_over_groups(x @ first, self.weight, ends, torch.float32) @ first


@pytest.mark.parametrize(("is_exchanged", "kept"), [(False, [1, 2]), (True, [])])
def test_matmuls_of_compiled_parts_around_an_exchange_are_not_kept(is_exchanged: bool, kept: list[int]) -> None:
    """The compiler's own memory cannot be kept, and the plan must not count it. Matmuls of experts can."""
    model, layer = Own(), Experts()
    exchange: Any = object()
    layer.exchange = exchange if is_exchanged else None
    model.layers = nn.ModuleList([layer])
    apply_activation_checkpoint(model, ["op"], is_compiled=True)
    with KeptMatmuls() as mode:
        total = model(torch.randn(3, 4, requires_grad=True)).sum()
    assert mode.places() == kept
    total.backward()


ATTENTION = torch.ops.aten
BACKENDS = {
    "flash": (ATTENTION._scaled_dot_product_flash_attention, (0.0, True, False)),
    "efficient": (ATTENTION._scaled_dot_product_efficient_attention, (None, True, 0.0, True)),
    "cudnn": (ATTENTION._scaled_dot_product_cudnn_attention, (None, True, 0.0, True, False)),
}


class Attending(nn.Module):
    """Block that calls one of a GPU's attention operators, on tensors without values."""

    def __init__(self, backend: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(64, 64, device="meta", dtype=torch.bfloat16))
        self.backend = backend

    def forward(self, x_BNLH: Tensor) -> Tensor:
        operator, options = BACKENDS[self.backend]
        q_BNLH = x_BNLH @ self.weight
        return operator(q_BNLH, q_BNLH, q_BNLH, *options)[0]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("policy", "calls"), [("op", 1), ("full", 2)])
def test_policy_op_keeps_attention_of_every_backend(backend: str, policy: Any, calls: int) -> None:
    model = Own()
    model.layers = nn.ModuleList([Attending(backend)])
    apply_activation_checkpoint(model, [policy])
    with OperatorNames() as seen:
        out = model.layers[0](torch.empty(1, 2, 16, 64, device="meta", dtype=torch.bfloat16, requires_grad=True))
        out.sum().backward()
    names = [name for name in seen.names if name.startswith(f"aten._scaled_dot_product_{backend}_attention.")]
    assert len(names) == calls
    assert f"aten._scaled_dot_product_{backend}_attention_backward.default" in seen.names
