"""The declared layer of experts against transformers' layers, with planted mistakes, and on two ranks."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Config, DeepseekV3MoE
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeConfig, Glm4MoeMoE
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssConfig, GptOssMLP
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeConfig, Qwen3MoeSparseMoeBlock
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextConfig, Qwen3NextSparseMoeBlock

from tests.support.operators import OperatorNames
from tests.support.own_models import Variants
from titanlite.models.base import NOT_CHOSEN, build_on_meta
from titanlite.models.experts import ExpertArgs, ExpertOptions, Experts
from titanlite.ops.copies import Copies
from titanlite.ops.cpu import CpuKernels
from titanlite.ops.functions import Activation, clamped_swiglu, swiglu
from titanlite.ops.kernels import DEFAULT_KERNELS
from titanlite.optim.groups import parameter_groups
from titanlite.parallelize.activation_checkpoint import apply_activation_checkpoint
from titanlite.runtime.errors import UserError
from titanlite.schema import Optimizer
from titanlite.techniques.expert.exchange import check_experts
from titanlite.techniques.parametrization import find_scaling

SIGMOID = ExpertOptions(scores="sigmoid", scale=2.5, n_groups=4, n_active_groups=2, shared_dim=48)


@dataclass(frozen=True, kw_only=True)
class Args(ExpertArgs):
    options: ExpertOptions

    @property
    def experts(self) -> ExpertOptions:
        return self.options


def args_of(options: ExpertOptions, **changes: Any) -> Args:
    shape = {
        "dim": 32, "n_layers": 2, "n_heads": 2, "n_kv_heads": 2, "hidden_dim": 24, "vocab_size": 9, "max_seq_len": 8,
        "norm_eps": 1e-5, "rope_theta": 1e4, "n_experts": 8, "n_active_experts": 3, "balance_rate": 1e-3,
    }  # fmt: skip
    return Args(**(shape | changes), options=options)


def built(options: ExpertOptions, **changes: Any) -> Experts:
    """Return a layer with random weights and biases, whose router is far from uniform."""
    layer = Experts(args_of(options, **changes))
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(generator=draw)
        layer.bias_E.normal_(std=0.3, generator=draw)
    for module in layer.modules():
        if hasattr(module, "kernels"):
            module.kernels = CpuKernels()  # pyright: ignore[reportAttributeAccessIssue, reportArgumentType]
    return layer


def gated(layer: Experts, tensor: Callable[[str], Any]) -> dict[str, Tensor]:
    """Return weights of the layer, or their gradients, by the names of most families."""
    found = {
        "gate.weight": tensor("router"),
        "experts.gate_up_proj": torch.cat([tensor("w1"), tensor("w3")], dim=2).transpose(1, 2),
        "experts.down_proj": tensor("w2").transpose(1, 2),
    }
    names = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"} if layer.shared else {}
    return found | {
        f"shared_experts.{theirs}.weight": tensor(f"shared.{ours}.weight") for ours, theirs in names.items()
    }


def with_gate(layer: Experts, tensor: Callable[[str], Any]) -> dict[str, Tensor]:
    found = {name.replace("shared_experts", "shared_expert"): value for name, value in gated(layer, tensor).items()}
    return {**found, "shared_expert_gate.weight": tensor("shared_gate")}


def clamped(layer: Experts, tensor: Callable[[str], Any]) -> dict[str, Tensor]:
    return {
        "router.weight": tensor("router"),
        "router.bias": tensor("router_bias"),
        "experts.gate_up_proj": torch.stack([tensor("w1"), tensor("w3")], dim=-1).flatten(-2),
        "experts.gate_up_proj_bias": torch.stack([tensor("b1"), tensor("b3")], dim=-1).flatten(-2),
        "experts.down_proj": tensor("w2"),
        "experts.down_proj_bias": tensor("b2"),
    }


SIZES: dict[str, Any] = {"hidden_size": 32, "moe_intermediate_size": 24, "num_experts_per_tok": 3}
GROUPS: dict[str, Any] = {"n_routed_experts": 8, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5}
ONE_GROUP: dict[str, Any] = {**GROUPS, "n_group": 1, "topk_group": 1}


@dataclass(frozen=True)
class Case:
    options: ExpertOptions
    theirs: Callable[[], nn.Module]
    names: Callable[[Experts, Callable[[str], Any]], dict[str, Tensor]] = gated
    has_balance: bool = False
    """Its router has the bias of balance."""


def qwen(normalized: bool) -> nn.Module:
    return Qwen3MoeSparseMoeBlock(Qwen3MoeConfig(**SIZES, num_experts=8, norm_topk_prob=normalized))


CASES = {
    "softmax of the chosen": Case(ExpertOptions(), lambda: qwen(True)),
    "softmax": Case(ExpertOptions(normalized=False), lambda: qwen(False)),
    "DeepSeek-V3": Case(
        SIGMOID, lambda: DeepseekV3MoE(DeepseekV3Config(**SIZES, **GROUPS, n_shared_experts=2)), has_balance=True
    ),
    "GLM-4.5": Case(
        replace(SIGMOID, n_groups=1, n_active_groups=1, normalized=False, shared_dim=24),
        lambda: Glm4MoeMoE(Glm4MoeConfig(**SIZES, **ONE_GROUP, norm_topk_prob=False)),
        has_balance=True,
    ),
    "Qwen3-Next": Case(
        ExpertOptions(shared_dim=40, shared_has_gate=True),
        lambda: Qwen3NextSparseMoeBlock(
            Qwen3NextConfig(**SIZES, num_experts=8, shared_expert_intermediate_size=40, num_hidden_layers=1)
        ),
        with_gate,
    ),
    "gpt-oss": Case(
        ExpertOptions(router_has_bias=True, have_biases=True, activation=clamped_swiglu),
        lambda: GptOssMLP(
            GptOssConfig(hidden_size=32, intermediate_size=24, num_local_experts=8, num_experts_per_tok=3)
        ),
        clamped,
    ),
}  # fmt: skip


def pair(name: str) -> tuple[Experts, nn.Module]:
    """Return our layer and that of transformers, with the same weights."""
    case = CASES[name]
    layer, other = built(case.options), case.theirs().float()
    balance = {"gate.e_score_correction_bias": layer.bias_E} if case.has_balance else {}
    if not case.has_balance:
        layer.bias_E.zero_()
    other.load_state_dict({**case.names(layer, layer.get_parameter), **balance})
    return layer, other


X = 2 * torch.randn(2, 20, 32, generator=torch.Generator().manual_seed(1))


def apart(layer: Experts, other: nn.Module) -> float:
    """Return the largest difference of the outputs, over the largest output."""
    with torch.no_grad():
        found, expected = layer(X), other(X)
    expected = expected[0] if isinstance(expected, tuple) else expected
    return float((found - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("name", CASES)
def test_outputs_and_gradients_equal_those_of_transformers(name: str) -> None:
    layer, other = pair(name)
    assert apart(layer, other) < 1e-5
    inputs: list[Any] = []
    for moe in (layer, other):
        inputs.append(X.clone().requires_grad_())
        out = moe(inputs[-1])
        (out[0] if isinstance(out, tuple) else out).square().sum().backward()
    gradients: dict[str, Any] = {name: parameter.grad for name, parameter in layer.named_parameters()}
    assert None not in gradients.values()
    found = CASES[name].names(layer, gradients.__getitem__) | {"": inputs[0].grad}
    assert len(found) == len([*other.parameters()]) + 1
    for their_name, gradient in found.items():
        expected: Any = other.get_parameter(their_name).grad if their_name else inputs[1].grad
        assert (gradient - expected).abs().max() < 1e-4 * expected.abs().max(), their_name


def test_gradients_of_biases_are_summed_in_float32() -> None:
    """Of all tokens, the last bias of an expert has the sum of its weights. A sum in bfloat16 stops growing at 256."""
    layer = built(CASES["gpt-oss"].options).bfloat16()
    x_BLD = torch.randn(1, 4000, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    weights_TK, chosen_TK = layer.route(x_BLD[0])
    expected_E = torch.zeros(8).index_add(0, chosen_TK.flatten(), weights_TK.flatten())
    layer(x_BLD).sum().backward()
    assert layer.b2.grad is not None
    assert torch.allclose(layer.b2.grad[:, 0].float(), expected_E, rtol=0.01)
    assert expected_E.max() > 500


def planted(layer: Experts, **changes: Any) -> None:
    layer.options = replace(layer.options, **changes)


def scale_shared(layer: Experts) -> None:
    assert layer.shared is not None
    layer.shared.w2.weight.data *= layer.options.scale


def weight_by_biased_scores(layer: Experts) -> None:
    route = layer.route

    def biased(x_TD: Tensor, padding_T1: Tensor | None = None) -> tuple[Tensor, Tensor]:
        _, chosen_TK = route(x_TD, padding_T1)
        weights_TK = (F.linear(x_TD, layer.router).sigmoid() + layer.bias_E).gather(-1, chosen_TK)
        return 2.5 * weights_TK / weights_TK.sum(dim=-1, keepdim=True), chosen_TK

    layer.route = biased


PLANTED: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "shared experts are scaled": ("DeepSeek-V3", scale_shared),
    "the bias of balance weighs": ("DeepSeek-V3", weight_by_biased_scores),
    "the bias of balance is left out": ("DeepSeek-V3", lambda layer: layer.bias_E.zero_()),
    "groups are ignored": ("DeepSeek-V3", lambda layer: planted(layer, n_active_groups=4)),
    "weights are not scaled to 1": ("DeepSeek-V3", lambda layer: planted(layer, normalized=False)),
    "weights are not scaled": ("GLM-4.5", lambda layer: planted(layer, scale=1.0)),
    "softmax for sigmoid": ("GLM-4.5", lambda layer: planted(layer, scores="softmax")),
    "the shared expert has no gate": ("Qwen3-Next", lambda layer: setattr(layer, "shared_gate", None)),
    "softmax over all": ("gpt-oss", lambda layer: planted(layer, normalized=False)),
    "no clamp": ("gpt-oss", lambda layer: planted(layer, activation=lambda g, u: (u + 1) * g * (1.702 * g).sigmoid())),
    "the last bias is counted twice": ("gpt-oss", lambda layer: setattr(layer, "share_of_unsplit", 2.0)),
    "the router's bias is left out": ("gpt-oss", lambda layer: layer.router_bias.data.zero_()),
}  # fmt: skip


@pytest.mark.parametrize("mistake", PLANTED)
def test_planted_mistakes_show(mistake: str) -> None:
    name, plant = PLANTED[mistake]
    layer, other = pair(name)
    with torch.no_grad():
        plant(layer)
        assert apart(layer, other) > 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
def test_copies_of_rows_and_their_sums(dtype: torch.dtype, share: float) -> None:
    """Sums of bfloat16 are rounded once: to within half of the distance between values, whichever of two is even."""
    draw = torch.Generator().manual_seed(0)
    is_copied_TN = torch.rand(24, 5, generator=draw) < share
    is_copied_TN[3], is_copied_TN[:, 2] = False, False
    column_S, row_S = is_copied_TN.t().nonzero().unbind(1)
    copies = Copies.of(is_copied_TN, len(row_S))
    x_TD = torch.randn(24, 8, generator=draw).to(dtype).requires_grad_()
    assert copies.take(x_TD).equal(x_TD[row_S])
    assert copies.ends_N.equal(is_copied_TN.sum(dim=0).cumsum(0).int())
    values_TN = torch.randn(24, 5, generator=draw)
    assert copies.values(values_TN).equal(values_TN[row_S, column_S])
    y_SD = torch.randn(len(row_S), 8, generator=draw).to(dtype).requires_grad_()
    sums_TD = torch.zeros(24, 8).index_add(0, row_S, y_SD.float())
    for found_TD in (copies.add_up(y_SD), *torch.autograd.grad(copies.take(x_TD), x_TD, y_SD)):
        assert ((found_TD.float() - sums_TD).abs() <= torch.finfo(dtype).eps / 2 * sums_TD.abs()).all()
    (found_SD,) = torch.autograd.grad(copies.add_up(y_SD), y_SD, x_TD)
    assert found_SD.equal(x_TD[row_S])
    for operator in (torch.ops.titanlite.take_copies, torch.ops.titanlite.add_copies):
        torch.library.opcheck(operator, (x_TD if "take" in str(operator) else y_SD, *copies[1:4]))
    torch.library.opcheck(torch.ops.titanlite.places_of_copies, (is_copied_TN, len(row_S)))


def checkpointed(layer: Experts) -> Callable[..., Tensor]:
    return lambda *inputs: checkpoint(layer, *inputs, use_reentrant=False)


def compiled(call: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Compile with inductor's choice of what backward keeps."""
    return torch.compile(call, backend="aot_eager_decomp_partition", fullgraph=True)


WAYS: dict[str, Callable[[Experts], Callable[..., Tensor]]] = {
    "recomputed": checkpointed,
    "compiled": compiled,
    "compiled, recomputed": lambda layer: compiled(checkpointed(layer)),
}
ROWS = torch.randn(2, 8, generator=torch.Generator().manual_seed(2))


def in_two_steps(layer: Experts, call: Callable[[Tensor], Tensor], probabilities_E: Tensor) -> list[Tensor]:
    """Return the gradients of the input and of all weights, for a balance loss whose gradient is known after forward.

    Args:
        probabilities_E: sums over tokens, that forward must find.
    """
    x = X.clone().requires_grad_()
    for row_E in ROWS:
        out = call(x)
        assert layer.load_E.sum() == 40 * 3
        assert layer.probability_E.allclose(probabilities_E)
        assert layer.balance_E is not None
        layer.balance_E.data.copy_(row_E)
        out.square().mean().backward()
        layer.load_E.zero_()
        layer.probability_E.zero_()
    gradients: list[Any] = [tensor.grad for tensor in (x, *layer.parameters())]
    return gradients


@pytest.mark.long
@pytest.mark.parametrize("options", [ExpertOptions(), ExpertOptions(normalized=False), SIGMOID])
def test_the_gradient_of_a_balance_loss_is_known_after_forward(options: ExpertOptions) -> None:
    torch._dynamo.reset()
    plain, x = built(options), X.clone().requires_grad_()
    logits_TE = F.linear(x.flatten(0, 1), plain.router)
    scores_TE = logits_TE.softmax(dim=-1) if options.scores == "softmax" else logits_TE.sigmoid()
    probabilities_TE = scores_TE / scores_TE.sum(dim=-1, keepdim=True)
    (2 * plain(x).square().mean() + (probabilities_TE * ROWS.sum(dim=0)).sum()).backward()
    expected: list[Any] = [tensor.grad for tensor in (x, *plain.parameters())]
    sums_E = probabilities_TE.detach().sum(dim=0)
    layer = built(options, balance_loss=0.5)
    found = in_two_steps(layer, layer, sums_E)
    for gradient, wanted in zip(found, expected, strict=True):
        assert gradient.allclose(wanted, rtol=1e-4, atol=1e-5 * float(wanted.abs().max()))
    for name, way in WAYS.items():
        other = built(options, balance_loss=0.5)
        for gradient, wanted in zip(in_two_steps(other, way(other), sums_E), found, strict=True):
            near = torch.allclose(gradient, wanted, rtol=1e-5, atol=1e-6 * float(wanted.abs().max()))
            assert torch.equal(gradient, wanted) if name == "recomputed" else near, name


PADDING_BL = torch.arange(20) >= torch.tensor([[13], [20]])
"""The last tokens of the first sequence of X are padding."""


@pytest.mark.parametrize("way", ["", *WAYS])
@pytest.mark.parametrize("options", [ExpertOptions(), SIGMOID])
def test_padding_is_not_counted(options: ExpertOptions, way: str) -> None:
    """Counts, the gradients of a balance loss, and all others of a loss of real tokens, are those of them alone."""
    torch._dynamo.reset()
    x = torch.where(PADDING_BL.unsqueeze(2), 3 * X[0, 0], X)  # padding is alike, and goes to the same experts
    alone, padded = (built(options, balance_loss=0.5) for _ in range(2))
    call = WAYS[way](padded) if way else padded
    is_real_T = ~PADDING_BL.flatten()
    for layer, out in (
        (alone, alone(x.flatten(0, 1)[is_real_T][None])[0]),
        (padded, call(x, PADDING_BL).flatten(0, 1)[is_real_T]),
    ):
        assert layer.load_E.sum() == 33 * 3
        assert layer.balance_E is not None
        layer.balance_E.data.copy_(ROWS[0])
        out.square().mean().backward()
    assert padded.probability_E.allclose(alone.probability_E)
    for name, parameter in padded.named_parameters():
        expected: Any = alone.get_parameter(name).grad
        assert parameter.grad is not None
        assert parameter.grad.allclose(expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max())), name


def test_padding_is_sent_to_no_expert() -> None:
    sent: list[Tensor] = []

    class Kept:
        def send(self, x_TD: Tensor, weights_TE: Tensor, active: int) -> Tensor:
            sent.append(weights_TE)
            return x_TD

        def compute(self, sent: Tensor, stacks: Any, compute: Any) -> Tensor:
            return sent

    layer = built(SIGMOID)
    layer.exchange, layer.drops_padding = Kept(), True
    layer(X, PADDING_BL)
    assert (sent[0] != NOT_CHOSEN).sum(dim=1).tolist() == [3] * 13 + [0] * 7 + [3] * 20


def test_operators_of_a_gradient_that_is_known_after_forward() -> None:
    x_TD, source_TE, row_E = torch.randn(5, 3, requires_grad=True), torch.randn(5, 3, requires_grad=True), torch.ones(3)
    torch.library.opcheck(torch.ops.titanlite.with_gradient, (x_TD, source_TE, row_E))
    torch.library.opcheck(torch.ops.titanlite.repeated_row, (row_E, x_TD.detach()))
    for rows in (0, 1):
        assert torch.ops.titanlite.repeated_row(row_E, torch.empty(rows, 3)).shape == (rows, 3)


@pytest.mark.parametrize("activation", [swiglu, clamped_swiglu])
def test_weighted_hidden_values_keep_their_inputs_only(activation: Activation) -> None:
    draw = torch.Generator().manual_seed(0)
    gate, up = (torch.randn(20, 6, generator=draw, dtype=torch.float64).requires_grad_() for _ in range(2))
    weights = torch.rand(20, generator=draw, dtype=torch.float64).requires_grad_()
    kept: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: kept.append(tensor.numel()) or tensor, lambda tensor: tensor
    ):
        found = DEFAULT_KERNELS.weighted(activation, gate, up, weights)
    assert kept == [120, 120, 20]
    expected = activation(gate, up) * weights[:, None]
    assert found.equal(expected)
    ours, theirs = (torch.autograd.grad(output.square().sum(), (gate, up, weights)) for output in (found, expected))
    assert all(map(torch.allclose, ours, theirs))


def test_clamped_swiglu_has_the_gradient_of_autograd() -> None:
    draw = torch.Generator().manual_seed(0)
    gate, up = (5 * torch.randn(200, generator=draw, dtype=torch.float64) for _ in range(2))
    leaves = gate.requires_grad_(), up.requires_grad_()
    limited = gate.clamp(max=7)
    expected = (up.clamp(-7, 7) + 1) * limited * torch.sigmoid(1.702 * limited)
    assert torch.allclose(clamped_swiglu(gate, up), expected, rtol=1e-12)
    weights = torch.randn(200, generator=draw, dtype=torch.float64)
    ours, theirs = (torch.autograd.grad(output, leaves, weights) for output in (clamped_swiglu(*leaves), expected))
    for found, wanted in zip(ours, theirs, strict=True):
        assert torch.allclose(found, wanted, rtol=1e-12)


@pytest.mark.parametrize(
    ("options", "changes", "named"),
    [
        (replace(SIGMOID, n_groups=3), {}, r"n_groups .* n_experts \(8\).*got 3"),
        (replace(SIGMOID, n_groups=8), {}, "n_groups"),
        (replace(SIGMOID, n_active_groups=5), {}, "n_active_groups"),
        (replace(SIGMOID, n_active_groups=1), {}, "n_active_groups"),
        (SIGMOID, {"n_active_experts": 9}, r"n_active_experts .* n_experts \(8\), got 9"),
        (SIGMOID, {"n_active_experts": 1}, "never trains the router"),
        (replace(SIGMOID, n_dense_layers=3), {}, r"n_dense_layers .* n_layers \(2\), got 3"),
        (replace(SIGMOID, n_dense_layers=1), {}, "dense_hidden_dim"),
    ],
)
def test_impossible_shapes_are_explained(options: ExpertOptions, changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        args_of(options, **changes)
    args_of(replace(options, normalized=False, n_groups=1, n_active_groups=1, n_dense_layers=0), n_active_experts=1)


def test_biases_of_experts_are_vectors() -> None:
    """They have no weight decay, Muon leaves them to AdamW, and `op` does not count their matmuls."""
    model = build_on_meta(Variants, Variants.flavors["debug"])
    biases = {f"layers.1.feed_forward.{name}" for name in ("b1", "b2", "b3", "router_bias")}
    norms = {name for name, _ in model.named_parameters() if name.endswith("norm.weight")}
    [_, vectors] = parameter_groups(Optimizer(), model)
    assert {*vectors.parameters} == biases | norms
    assert vectors.weight_decay == 0
    [muon, *_] = parameter_groups(Optimizer(name="Muon"), model)
    assert {name for name in muon.parameters if name.startswith("layers.1.feed_forward.")} == {
        f"layers.1.feed_forward.{name}"
        for name in ("router", "w1", "w2", "w3", *(f"shared.w{number}.weight" for number in (1, 2, 3)))
    }
    found = find_scaling(model, Optimizer(parametrization="completep", base_width=16, base_depth=2))
    assert {name: (scaling.role, scaling.is_matrix) for name, scaling in found.items() if name in biases} == {
        name: ("residual" if name.endswith("b2") else "vector", False) for name in biases
    }


def recomputed(options: ExpertOptions) -> int:
    """Return how many grouped matmuls `op` recomputes."""
    counts = []
    for policy in ("none", "op"):
        model = nn.Module()
        model.layers = nn.ModuleList([built(options)])
        apply_activation_checkpoint(model, [policy])  # pyright: ignore[reportArgumentType]
        with OperatorNames() as operators:
            model.layers[0](X.clone().requires_grad_()).sum().backward()
        counts.append(operators.names.count("titanlite.grouped_mm.default"))
    return counts[1] - counts[0]


def test_op_keeps_the_same_matmuls_with_biases() -> None:
    """Of w1, w3 and w2 it keeps that of w3, and those of all three biases are recomputed."""
    assert recomputed(ExpertOptions()) == 2
    assert recomputed(ExpertOptions(have_biases=True)) == 2 + 3


def test_ranks_that_cannot_shard_biases_are_refused() -> None:
    """Of 24 hidden dims, tensor parallelism leaves 12 to each of two ranks, which 8 others cannot shard."""
    model = build_on_meta(Variants, Variants.flavors["debug"])
    check_experts(model, 2, 8, tensor=2)
    check_experts(model, 2, 16)
    with pytest.raises(UserError, match=r"^2 .* 8 processes .*\[12\]"):
        check_experts(model, 2, 16, tensor=2)
