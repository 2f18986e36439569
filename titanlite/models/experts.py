"""Layers of experts, of which a router picks a few for each token, and the decoders that have them.

A family declares its router and its experts by `ExpertOptions`. Experts are kept equally busy without an auxiliary loss
(arXiv:2408.15664): each has a bias that counts only when experts are picked, and after each step it goes up if the
expert had less than its share of the global batch, else down. So the loss stays what it is, and the balance does not
depend on how the batch is split.

A balance loss (arXiv:2101.03961) may join it, of each layer over the global batch. It is linear in the probabilities,
so that the tokens of a layer have the same gradient: a vector that follows from counts, which are summed between
forward and backward.

Padding counts in neither: its tokens are all alike, so that they would push real ones away from the experts they go to.

Shape suffixes: as in `layers`; E experts, K those of one token, S = T * K, G groups.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titanlite.models.base import (
    BRANCHES_OF_DECODER,
    DECODER_OF_EXPERTS,
    NOT_CHOSEN,
    ExpertLayer,
    Roles,
    TensorPlan,
    TensorRole,
)
from titanlite.models.decoder import Decoder, DecoderArgs
from titanlite.models.initial import Constant, InitialValues, Normal
from titanlite.models.layers import Documents, FeedForward
from titanlite.ops.functions import Activation, swiglu, with_gradient
from titanlite.ops.kernels import DEFAULT_KERNELS, Kernels
from titanlite.runtime.private_torch.tensors import is_in_backward, reshape_result
from titanlite.runtime.recomputation import computed_once


@dataclass(frozen=True, kw_only=True)
class ExpertOptions:
    """Variants of the router and the experts of a family."""

    scores: Literal["softmax", "sigmoid"] = "softmax"
    """Weights of the experts, from the router's logits. The bias of balance is added to the logits with softmax, and to
    the scores with sigmoid, as `e_score_correction_bias` of DeepSeek-V3 (arXiv:2412.19437)."""
    normalized: bool = True
    """Scale the weights of a token's experts to a sum of 1. With softmax, that is a softmax over their logits."""
    scale: float = 1.0
    """Factor of the weights after that."""
    n_groups: int = 1
    """Groups of neighbouring experts, for sigmoid. A group's score is the sum of its two highest biased scores."""
    n_active_groups: int = 1
    """Groups with the highest scores, of which the experts of a token are."""
    router_has_bias: bool = False
    """The router has a trained bias."""
    shared_dim: int = 0
    """Hidden dim of a SwiGLU layer that each token passes, too. 0: there is none."""
    shared_has_gate: bool = False
    """The output of that layer is multiplied by the sigmoid of a number for each token."""
    have_biases: bool = False
    """Each expert has biases."""
    activation: Activation = swiglu
    """Activation of an expert."""
    n_dense_layers: int = 0
    """First layers of the model that have no experts."""
    dense_dim: int = 0
    """Hidden dim of those."""


@dataclass(frozen=True, kw_only=True)
class ExpertArgs(DecoderArgs):
    """hidden_dim is that of one expert."""

    n_experts: int
    n_active_experts: int
    balance_rate: float
    """Change of an expert's bias in a step, in the unit of what it is added to; 0 turns balancing off."""
    balance_loss: float = 0.0
    """Weight of the balance loss, E * sum over experts of (tokens of the expert / all tokens) * mean probability, over
    the tokens of a layer in the global batch (arXiv:2101.03961), as the mean over layers; 0.001 is usual. Sigmoid
    scores become probabilities by their sum."""

    @property
    def experts(self) -> ExpertOptions:
        return ExpertOptions()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.balance_loss < 0:
            raise ValueError(f"balance_loss must be at least 0, got {self.balance_loss}")
        options, n_experts, n_active = self.experts, self.n_experts, self.n_active_experts
        if not 1 <= n_active <= n_experts:
            raise ValueError(f"n_active_experts must be between 1 and n_experts ({n_experts}), got {n_active}")
        if n_active == 1 and options.normalized:
            raise ValueError(
                "n_active_experts = 1 never trains the router: the weight of one expert, scaled to a sum of 1, is 1 "
                "always, and its gradient 0. Use 2 or more"
            )
        groups, chosen = options.n_groups, options.n_active_groups
        if groups < 1 or n_experts % groups or (groups > 1 and n_experts < 2 * groups):
            raise ValueError(f"n_groups must divide n_experts ({n_experts}) into groups of 2 or more, got {groups}")
        if not 1 <= chosen <= groups or n_active > chosen * (n_experts // groups):
            raise ValueError(
                f"n_active_groups must be between 1 and n_groups ({groups}), and have n_active_experts ({n_active}), "
                f"got {chosen}"
            )
        assert groups == 1 or options.scores == "sigmoid"
        if not 0 <= options.n_dense_layers <= self.n_layers:
            raise ValueError(
                f"n_dense_layers must be between 0 and n_layers ({self.n_layers}), got {options.n_dense_layers}"
            )
        if options.n_dense_layers and options.dense_dim < 1:
            raise ValueError(f"dense_hidden_dim must be at least 1, got {options.dense_dim}")
        if options.shared_dim < 0:
            raise ValueError(f"the hidden dim of shared experts must be at least 0, got {options.shared_dim}")


@dataclass(frozen=True, kw_only=True)
class GroupedExpertArgs(ExpertArgs):
    """The experts of DeepSeek-V3 (arXiv:2412.19437), which other families have too."""

    balance_rate: float = 1e-3
    """Change of an expert's bias in a step, in units of the sigmoid's scores; 0 turns balancing off."""
    n_groups: int = 1
    """Groups of neighbouring experts."""
    n_active_groups: int = 1
    """Groups that the experts of a token are of."""
    routed_scaling_factor: float = 1.0
    """Factor of the output of a token's experts, but for the shared one."""
    n_shared_experts: int = 1
    """Hidden dim of the shared expert, in hidden_dims."""
    n_dense_layers: int = 1
    """First layers without experts."""
    dense_hidden_dim: int

    @property
    def experts(self) -> ExpertOptions:
        return ExpertOptions(
            scores="sigmoid",
            scale=self.routed_scaling_factor,
            n_groups=self.n_groups,
            n_active_groups=self.n_active_groups,
            shared_dim=self.n_shared_experts * self.hidden_dim,
            n_dense_layers=self.n_dense_layers,
            dense_dim=self.dense_hidden_dim,
        )


class Experts(ExpertLayer):
    """Feed-forward layers with a gate, each token through the K that the router weighs most."""

    kernels: Kernels = DEFAULT_KERNELS
    stacks = ("w1", "w2", "w3")
    hidden_dims = (2, 1, 2)
    rows_of_vectors = 8
    bias_E: Tensor
    load_E: Tensor
    probability_E: Tensor
    """Sum over tokens, as `load_E`."""
    balance_E: Tensor | None
    """Gradient of the balance loss with respect to each token's probabilities. None, as `probability_E`: there is no
    such loss."""

    def __init__(self, args: ExpertArgs) -> None:
        super().__init__()
        self.n_active, self.options = args.n_active_experts, args.experts
        E, D, F_ = args.n_experts, args.dim, args.hidden_dim
        self.router = nn.Parameter(torch.empty(E, D))
        self.router_bias = nn.Parameter(torch.empty(E)) if self.options.router_has_bias else None
        self.w1 = nn.Parameter(torch.empty(E, D, F_))
        self.w2 = nn.Parameter(torch.empty(E, F_, D))
        self.w3 = nn.Parameter(torch.empty(E, D, F_))
        if self.options.have_biases:
            self.stacks, self.hidden_dims = (*self.stacks, "b1", "b2", "b3"), (*self.hidden_dims, 1, None, 1)
            self.b1 = nn.Parameter(torch.empty(E, F_))
            self.b2 = nn.Parameter(torch.empty(E, D))
            self.b3 = nn.Parameter(torch.empty(E, F_))
        self.shared = FeedForward(D, self.options.shared_dim) if self.options.shared_dim else None
        self.shared_gate = nn.Parameter(torch.empty(1, D)) if self.options.shared_has_gate else None
        self.register_buffer("bias_E", torch.zeros(E))
        self.register_buffer("load_E", torch.zeros(E), persistent=False)
        for name in ("probability_E", "balance_E"):
            self.register_buffer(name, torch.zeros(E) if args.balance_loss else None, persistent=False)

    def forward(self, x_BLD: Tensor, padding_BL: Tensor | None = None) -> Tensor:
        """Return the sum of the outputs of each token's experts.

        Args:
            padding_BL: whether a token is padding, which is not counted. None: there is none.
        """
        x_TD = x_BLD.flatten(0, 1)
        padding_T1 = None if padding_BL is None else padding_BL.flatten().unsqueeze(1)
        weights_TK, chosen_TK = self.route(x_TD, padding_T1)
        others_TE = weights_TK.new_full((len(x_TD), len(self.bias_E)), NOT_CHOSEN, dtype=x_TD.dtype)
        weights_TE = others_TE.scatter(1, chosen_TK, weights_TK.to(x_TD.dtype))
        of_tokens_TE = weights_TE if padding_T1 is None else weights_TE.masked_fill(padding_T1, NOT_CHOSEN)
        if self._counts():
            self.load_E.add_((of_tokens_TE != NOT_CHOSEN).sum(dim=0))
        if self.drops_padding:
            weights_TE = of_tokens_TE
        sent = self.send(x_TD, weights_TE, self.n_active)
        # While tokens are sent. Recomputation ends before the last matmul of the experts, as nothing behind it is kept.
        shared_BLD = None if self.shared is None else self.shared(x_BLD)
        if shared_BLD is not None and self.shared_gate is not None:
            shared_BLD = shared_BLD * F.linear(x_BLD, self.shared_gate).sigmoid()
        out_BLD = reshape_result(self.receive(sent), x_BLD.shape)
        return out_BLD if shared_BLD is None else out_BLD + shared_BLD

    def _counts(self) -> bool:
        """Return whether the tokens of this pass are counted.

        They are not again where backward recomputes the block, which pipelines may do twice, of some micro-batches. A
        compiled block counts all of its recomputations, which changes no expert's share.
        """
        is_recomputed = not torch.compiler.is_compiling() and is_in_backward()
        return self.training and torch.is_grad_enabled() and not is_recomputed

    def route(self, x_TD: Tensor, padding_T1: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the float32 weights [T, K] and the int64 numbers [T, K] of the experts of each token."""
        options, bias_E = self.options, self.router_bias
        logits_TE = F.linear(x_TD.float(), self.router.float(), None if bias_E is None else bias_E.float())
        if self.balance_E is not None and self.training and torch.is_grad_enabled():
            logits_TE = self._balanced(logits_TE, self.balance_E, padding_T1)
        scores_TE = logits_TE.sigmoid() if options.scores == "sigmoid" else logits_TE
        chosen_TK = computed_once(lambda: self._choose(scores_TE + self.bias_E))
        if options.scores == "softmax" and not options.normalized:
            scores_TE = logits_TE.softmax(dim=-1)
        weights_TK = scores_TE.gather(-1, chosen_TK)
        if options.normalized and options.scores == "softmax":
            weights_TK = weights_TK.softmax(dim=-1)
        elif options.normalized:
            weights_TK = weights_TK / (weights_TK.sum(dim=-1, keepdim=True) + 1e-20)  # all may be 0 in float32
        return (weights_TK if options.scale == 1 else weights_TK * options.scale), chosen_TK

    def _balanced(self, logits_TE: Tensor, gradient_E: Tensor, padding_T1: Tensor | None) -> Tensor:
        """Return the logits, which get a gradient for the probabilities of their experts, too."""
        if self.options.scores == "sigmoid":  # as in the loss of a sequence of DeepSeek-V3
            probabilities_TE = F.normalize(logits_TE.sigmoid(), p=1.0, dim=-1)
        else:
            probabilities_TE = logits_TE.softmax(dim=-1)
        if padding_T1 is not None:
            probabilities_TE = probabilities_TE.masked_fill(padding_T1, 0.0)
        if self._counts():
            self.probability_E.add_(probabilities_TE.detach().sum(dim=0))
        return with_gradient(logits_TE, probabilities_TE, gradient_E)

    def _choose(self, scores_TE: Tensor) -> Tensor:
        """Return the numbers [T, K] of the experts with the highest scores, of a token's best groups."""
        return self._without_other_groups(scores_TE).topk(self.n_active, dim=-1).indices

    def _without_other_groups(self, scores_TE: Tensor) -> Tensor:
        """Return the scores with -inf for experts outside of each token's groups."""
        options = self.options
        if options.n_active_groups == options.n_groups:
            return scores_TE
        scores_TGX = scores_TE.unflatten(-1, (options.n_groups, -1))
        groups_TG = scores_TGX.topk(2, dim=-1).values.sum(dim=-1)
        best_TG = groups_TG.topk(options.n_active_groups, dim=-1).indices
        is_other_TG = torch.ones_like(groups_TG, dtype=torch.bool).scatter(-1, best_TG, value=False)
        return scores_TGX.masked_fill(is_other_TG.unsqueeze(-1), -torch.inf).flatten(-2)

    def compute(self, x_SD: Tensor, weights_S: Tensor, ends_E: Tensor, stacks: Sequence[Tensor]) -> Tensor:
        w1_EDF, w2_EFD, w3_EDF, *biases = stacks
        b1_EF, b2_ED, b3_EF = biases or (None, None, None)
        gate_SF, up_SF = self._linear(x_SD, w1_EDF, b1_EF, ends_E), self._linear(x_SD, w3_EDF, b3_EF, ends_E)
        b2_ED = None if b2_ED is None else b2_ED * self.share_of_unsplit
        # Hidden dims are fewer than those of the output, which backward would need otherwise.
        hidden_SF = self.kernels.weighted(self.options.activation, gate_SF, up_SF, weights_S)
        return self._linear(hidden_SF, w2_EFD, b2_ED, ends_E, weights_S)

    def _linear(
        self, x_SD: Tensor, weight_EDF: Tensor, bias_EF: Tensor | None, ends_E: Tensor, scale_S: Tensor | None = None
    ) -> Tensor:
        """Return x times the weight of each token's expert, plus `scale_S` times its bias."""
        out_SF = self.kernels.grouped_mm(x_SD, weight_EDF, ends_E)
        if bias_EF is None:
            return out_SF
        # A matmul of ones adds up the bias' gradient in float32 and in a fixed order. Its kernels need 8 columns.
        more = self.rows_of_vectors - 1
        scale_S = x_SD.new_ones(len(x_SD)) if scale_S is None else scale_S
        scale_S8, bias_E8F = F.pad(scale_S.unsqueeze(1), (0, more)), F.pad(bias_EF.unsqueeze(1), (0, 0, 0, more))
        return out_SF + self.kernels.grouped_mm(scale_S8, bias_E8F, ends_E)


class DecoderOfExperts(Decoder):
    """Decoder whose feed-forward layers are `Experts`, after the first dense ones. It must be a family's first base."""

    counts_tokens = True
    roles: ClassVar[Roles] = {
        "layers.*.feed_forward.router": "output",
        "layers.*.feed_forward.shared_gate": "output",
        "layers.*.feed_forward.b2": "residual",
        "layers.*.feed_forward.shared.w2.weight": "residual",
        **BRANCHES_OF_DECODER,
    }

    args: ExpertArgs  # pyright: ignore[reportIncompatibleVariableOverride]

    @property
    def tensor_plan(self) -> TensorPlan:  # pyright: ignore[reportIncompatibleVariableOverride]
        options, plan = self.args.experts, dict[str, TensorRole]()
        for layer in range(options.n_dense_layers):
            plan[f"layers.{layer}.feed_forward"] = "split"
        if options.n_dense_layers or options.shared_dim:  # linear layers; experts are parameters
            plan |= {"layers.*.feed_forward.*w[13]": "columns", "layers.*.feed_forward.*w2": "rows"}
        return {**plan, **DECODER_OF_EXPERTS}

    def build_feed_forward(self, layer: int) -> nn.Module:
        options = self.args.experts
        return FeedForward(self.args.dim, options.dense_dim) if layer < options.n_dense_layers else Experts(self.args)

    def block_inputs(
        self, x_BLD: Tensor, documents: Documents | None, padding: Tensor | None = None
    ) -> list[tuple[Any, ...]]:
        inputs, dense = super().block_inputs(x_BLD, documents), self.args.experts.n_dense_layers
        if padding is None:
            return inputs
        return [*inputs[:dense], *((*of_block, None, padding) for of_block in inputs[dense:])]

    def feed_forward_weights(self, layer: int) -> int:
        args, options = self.args, self.args.experts
        if layer < options.n_dense_layers:
            return 3 * args.dim * options.dense_dim
        of_router = args.n_experts + options.shared_has_gate
        return args.dim * (3 * (args.n_active_experts * args.hidden_dim + options.shared_dim) + of_router)

    def share_of_experts(self) -> float:
        return self.args.n_active_experts / self.args.n_experts

    def init_weight(self, name: str, shape: torch.Size) -> InitialValues:
        match name.rpartition(".")[2]:
            case "router" | "shared_gate":
                return Normal(std=0.02)
            case "router_bias" | "b1" | "b2" | "b3":
                return Constant(0.0)
            case "w1" | "w2" | "w3":  # stacks of matrices: as FeedForward's
                return super().init_weight(f"{name}.weight", shape)
            case _:
                return super().init_weight(name, shape)

    def init_buffers(self) -> None:
        super().init_buffers()
        for experts in self.experts():  # new ones: with offload, the old ones are where parameters are
            size = self.args.n_experts
            experts.bias_E, experts.load_E = torch.zeros(size), torch.zeros(size)
            if experts.balance_E is not None:
                experts.probability_E, experts.balance_E = torch.zeros(size), torch.zeros(size)

    def experts(self) -> list[Experts]:
        layers = (block.feed_forward for block in self.layers)
        return [layer for layer in layers if isinstance(layer, Experts)]

    def counters(self) -> list[Tensor]:
        layers = self.experts()
        probabilities = [layer.probability_E for layer in layers if layer.balance_E is not None]
        return [*(layer.load_E for layer in layers), *probabilities]

    @torch.no_grad()
    def before_backward(
        self, factor: Tensor, valid_tokens: Tensor, add_over_processes: Callable[[Tensor], object]
    ) -> None:
        layers, weight = self.experts(), self.args.balance_loss
        if not (layers and weight):
            return
        load_NE = torch.stack([layer.load_E for layer in layers])  # of N layers
        add_over_processes(load_NE)
        gradient_NE = self._balance_gradient(load_NE) * (weight * factor * valid_tokens)
        for layer, gradient_E in zip(layers, gradient_NE, strict=True):
            assert layer.balance_E is not None
            # Processes that split the layer add up the gradients of its router.
            layer.balance_E.data.copy_(gradient_E * layer.share_of_unsplit)

    def _balance_gradient(self, load_NE: Tensor) -> Tensor:
        """Return the gradient [N, E] of the mean balance loss of N layers with respect to the sums of probabilities."""
        tokens_N1 = load_NE.sum(dim=1, keepdim=True) / self.args.n_active_experts
        return load_NE * (self.args.n_experts / len(load_NE) / tokens_N1.square())

    @torch.no_grad()
    def end_step(self, taken: Tensor) -> dict[str, Tensor]:
        """Return `busiest_expert`: its tokens over an even share of them, in the layer where that is most; and the
        `balance_loss` of the step, without its weight, if the model has one."""
        layers = self.experts()
        if not layers:
            return {}
        load_NE = torch.stack([layer.load_E for layer in layers])
        mean_N1 = load_NE.mean(dim=1, keepdim=True)
        metrics = {"busiest_expert": (load_NE / mean_N1).max()}
        if self.args.balance_loss:
            probability_NE = torch.stack([layer.probability_E for layer in layers])
            metrics["balance_loss"] = (self._balance_gradient(load_NE) * probability_NE).sum()
        for layer, change_E in zip(layers, torch.sign(mean_N1 - load_NE), strict=True):
            if layer.router.requires_grad:  # the bias of a frozen router is frozen, too
                layer.bias_E += self.args.balance_rate * change_E * taken
        for counter in self.counters():
            counter.zero_()
        return metrics
