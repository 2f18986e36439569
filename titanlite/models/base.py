"""The contract of a model.

A model is plain single-device PyTorch. It is built on the meta device, sharded and compiled by `parallelize`, and only
then given memory and values. So `__init__` gives shapes, `init_weight` defines every value, and the model never
asks which device or rank it is on.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from inspect import signature
from typing import Any, ClassVar, Literal, Protocol

import torch
from torch import Tensor, nn

from titanlite.models.formats import Formats, Renaming
from titanlite.models.initial import InitialValues
from titanlite.models.layers import Loss
from titanlite.ops.attention import Documents
from titanlite.ops.kernels import DEFAULT_KERNELS, Kernels, KeySource
from titanlite.runtime.errors import UserError

# Roles of modules in tensor parallelism, and the table of the decoders here. `techniques/tensor/` applies them.


TensorRole = Literal["tokens", "split", "columns", "rows", "norm", "experts", "vocabulary"]
"""tokens: the list of blocks, which outside of split modules compute single tokens. Each rank has some of the tokens.

split: a module whose input is the same on all ranks, and inside of which each rank computes its part.

columns, rows: linear layers in it whose outputs, or inputs, are split. The outputs of rows are summed over ranks, but
for those in experts, whose sum is that of the whole layer.
norm: an `RMSNorm` of the outputs of columns, over all of them.
experts: an `ExpertLayer`. Each of its experts is split by `hidden_dims`, and its output is summed over ranks.
vocabulary: an embedding, or the linear layer of the head, whose tokens are split. No split module is around it.
"""

TensorPlan = Mapping[str, TensorRole]
"""Roles by patterns of modules' names, as of `fnmatch`. The first pattern that matches counts."""

ALL_BUT_FEED_FORWARD: TensorPlan = {
    "layers": "tokens",
    "tok_embeddings": "vocabulary",
    "layers.*.attention": "split",
    "layers.*.attention.w[qkv]*": "columns",
    "layers.*.attention.wo": "rows",
    "head.output": "vocabulary",
}
DECODER: TensorPlan = {
    **ALL_BUT_FEED_FORWARD,
    "layers.*.feed_forward": "split",
    "layers.*.feed_forward.w[13]": "columns",
    "layers.*.feed_forward.w2": "rows",
}
DECODER_OF_EXPERTS: TensorPlan = {**ALL_BUT_FEED_FORWARD, "layers.*.feed_forward": "experts"}


NOT_CHOSEN = -1.0
"""Stands in place of a weight, for an expert that a token does not go to."""

ComputeExperts = Callable[[Tensor, Tensor, Tensor, Sequence[Tensor]], Tensor]
"""(tokens [S, D], their weights [S], ends of the experts [E], stacks) -> [S, D]."""


class TokenExchange(Protocol):
    """Exchange of tokens between processes that have different experts."""

    def send(self, x_TD: Tensor, weights_TE: Tensor, active: int) -> Any:
        """Begin to send tokens to their experts. Return an argument for `compute`; see `ExpertLayer.send`. Each process
        has as many tokens."""
        ...

    def compute(self, sent: Any, stacks: Sequence[Tensor], compute: ComputeExperts) -> Tensor:
        """Return the sum of the outputs of each token's experts, computed where those are -> [T, D].

        Args:
            stacks: of the experts that this process has.
            compute: is called with the tokens of those experts, from all processes.
        """
        ...


class ExpertLayer(nn.Module):
    """Layer that sends each token through some of its experts."""

    stacks: tuple[str, ...]
    """Names of the parameters that each expert has a part of: [E, ...]."""
    hidden_dims: tuple[int | None, ...] = ()
    """Dim of each of `stacks` that is the hidden one of an expert. The output is a sum over it, so that tensor
    parallelism can split it. None: the stack has no such dim. (): experts are not split."""
    rows_of_vectors: int = 1
    """Rows, all but the first of them 0, of the matrices that `compute` makes of stacks of vectors for a matmul."""
    share_of_unsplit: float = 1.0
    """Factor for stacks without a hidden dim, since outputs of the ranks that split the others are summed. Tensor
    parallelism sets it."""
    exchange: TokenExchange | None = None
    """None: this process has all experts. `techniques.expert` sets it."""
    drops_padding: bool = False
    """Whether padding goes to no expert. Where a process has all experts it does, since the number of tokens is known
    before the step then. `techniques.expert` sets it."""

    def send(self, x_TD: Tensor, weights_TE: Tensor, active: int) -> Any:
        """Begin to send tokens to their experts. Return an argument for `receive`.

        Processes with different experts send while a model computes what it computes between the two calls, such as a
        shared expert.

        Args:
            weights_TE: of experts in the sum, at least 0 or NaN; `NOT_CHOSEN` for others.
            active: experts of a token. With `drops_padding`, some may have none.
        """
        if self.exchange is not None:
            return self.exchange.send(x_TD, weights_TE, active)
        from titanlite.ops.copies import Copies
        from titanlite.runtime.recomputation import computed_once

        return x_TD, weights_TE, computed_once(lambda: Copies.of(weights_TE != NOT_CHOSEN, len(x_TD) * active))

    def receive(self, sent: Any) -> Tensor:
        """Return the sum of the outputs of each token's experts -> [T, D]."""
        stacks = [getattr(self, name) for name in self.stacks]
        if self.exchange is not None:
            return self.exchange.compute(sent, stacks, self.compute)
        x_TD, weights_TE, copies = sent
        return copies.add_up(self.compute(copies.take(x_TD), copies.values(weights_TE), copies.ends_N, stacks))

    def compute(self, x_SD: Tensor, weights_S: Tensor, ends_E: Tensor, stacks: Sequence[Tensor]) -> Tensor:
        """Compute tokens by experts that are here, each times its weight -> [S, D].

        Args:
            ends_E: int32. The tokens of expert e are from ends_E[e - 1] to ends_E[e].
            stacks: of these experts.
        """
        raise NotImplementedError


def expert_layers(model: nn.Module) -> list[ExpertLayer]:
    """Return the layers of a model that have several experts."""
    return [module for module in model.modules() if isinstance(module, ExpertLayer)]


def vector_names(model: nn.Module) -> set[str]:
    """Return the names of parameters with fewer than two dimensions, or with fewer for each expert, and of those that
    a module names in `vectors`: they are a vector for each channel."""
    declared = {
        f"{prefix}.{vector}" for prefix, module in model.named_modules() for vector in getattr(module, "vectors", ())
    }
    stacks = {
        f"{prefix}.{name}"
        for prefix, layer in model.named_modules()
        if isinstance(layer, ExpertLayer)
        for name in layer.stacks
    }
    return {
        name
        for name, parameter in unique_parameters(model)
        if parameter.ndim - (name in stacks) < 2 or name in declared
    }


def exchanges_tokens(block: nn.Module) -> bool:
    """Return True if the experts of a block are on several processes."""
    return any(layer.exchange is not None for layer in expert_layers(block))


# Parameters that a technique adds to a model: their initial values, and how they are found.


class AddsParameters(nn.Module):
    """Layer that a technique has put in place of a model's own, with parameters that the model's author does not know.

    It defines their initial values. Weights that a run begins with need not have them.
    """

    added: ClassVar[tuple[str, ...]]
    """Names of these parameters in the layer."""

    def added_values(self, name: str) -> InitialValues:
        """Return the initial values of one of these parameters."""
        raise NotImplementedError


def added_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that techniques have added, by name."""
    return {
        f"{prefix}.{name}": module.get_parameter(name)
        for prefix, module in model.named_modules()
        if isinstance(module, AddsParameters)
        for name in module.added
    }


# Width and depth transfer: roles of parameters, and the table of the decoders here. `techniques/parametrization.py`
# applies them.

Role = Literal["input", "hidden", "residual", "output", "vector"]
"""input: a matrix whose outputs grow with the width of the model and whose inputs do not, as an embedding.
hidden: both grow. output: only its inputs grow, as the head's or a router's. vector: a norm's weight, or a bias.

residual: the last parameters of a branch that is added to the residual stream: hidden matrices, and biases.
"""

Roles = Mapping[str, Role]
"""Roles by patterns of parameters' names, as of `fnmatch`. The first pattern that matches counts."""

BRANCHES_OF_DECODER: Roles = {"layers.*.attention.wo.*": "residual", "layers.*.feed_forward.w2*": "residual"}


@dataclass(frozen=True, kw_only=True)
class Scaling:
    """Scaling of a parameter from the base size, at which the options were tuned, to the size of its model."""

    role: Role
    is_matrix: bool
    """Whether it has two dimensions or more."""
    in_layers: bool
    width: float
    """Width of the model / base width."""
    depth: float
    """Layers of the model / base layers; 1 where the parametrization does not depend on the depth."""
    initial: InitialValues


@dataclass(frozen=True, kw_only=True)
class ModelArgs:
    """The shape of a model; each model family extends it."""

    vocab_size: int
    max_seq_len: int

    def resized(self, *, width: int, depth: int) -> "ModelArgs":
        """Return the shape of another width and depth, for width and depth transfer.

        `dim` becomes the width and `n_layers` the depth. `n_heads` and `n_kv_heads` are in proportion to the width, so
        that heads keep their size, and so are fields that end in `hidden_dim`, rounded. Shapes with other fields
        override this.

        Raises:
            ValueError: there is no such shape.
        """
        old = asdict(self)
        if missing := [name for name in ("dim", "n_layers") if name not in old]:
            raise ValueError(f"{type(self).__name__} has no {missing[0]}: define resized (docs/add_a_model.md)")
        heads = [old[name] for name in ("n_heads", "n_kv_heads") if name in old]
        step = old["dim"] // math.gcd(old["dim"], *heads) if heads else 1
        if width % step:
            raise ValueError(
                f"heads of the same size need a multiple of {step}, for dim {old['dim']} and {heads} heads"
            )
        new = {"dim": width, "n_layers": depth}
        new |= {name: old[name] * width // old["dim"] for name in ("n_heads", "n_kv_heads") if name in old}
        new |= {name: round(old[name] * width / old["dim"]) for name in old if name.endswith("hidden_dim")}
        return replace(self, **new)


class Model(nn.Module):
    """Base class of all models.

    Sharding, checkpointing and compiling treat each block of `layers` on its own. Every other direct child that has
    parameters is sharded as one unit: an embedding before the layers, a head as the last child.
    """

    flavors: ClassVar[dict[str, ModelArgs]] = {}
    """Named shapes: `[model] flavor` picks one, `[model.args]` changes fields of it."""

    kernels: Kernels = DEFAULT_KERNELS
    """Operations whose best form depends on the device; `attention_mask` for one. Training sets it."""

    key_source: KeySource | None = None
    """Where attention gets keys and values of tokens that a forward pass does not compute: of other processes with
    context parallelism, of earlier passes when text is generated. Each module that attends or makes masks has one."""

    draws_random: ClassVar[bool] = True
    """Random numbers in blocks, as dropout draws them: recomputation draws the same ones again. A class whose blocks
    draw none sets False, which saves copies of the random state in each block. Subclasses do not inherit it."""

    counts_tokens: ClassVar[bool] = False
    """Whether `forward` takes `padding` in training, bool [B, L]: tokens that it must not count, as routers do."""

    formats: ClassVar[Formats] = Formats()
    """Tables of the names and layouts in which weights are imported and exported. Optional."""

    tensor_plan: ClassVar[TensorPlan] = {}
    """Roles of modules in tensor parallelism, by patterns of their names. Optional."""

    roles: ClassVar[Roles] = {}
    """Roles of parameters in width and depth transfer, where its defaults are others. Optional."""

    scaling: Mapping[str, Scaling] = {}
    """Scaling of each parameter by name; empty in the standard parametrization. `techniques/parametrization.py` sets
    it."""

    layers: nn.ModuleList

    stages: Sequence[nn.Module] = ()
    """Modules that compute the stages of a pipeline which this process has. `techniques/pipeline` sets it."""

    kept_on_host: Any = None
    """Moves what blocks keep for backward to host memory. `techniques/activations/host.py` sets it."""

    args: Any
    """Arguments that the model was built with."""

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.args = args

    def forward(self, tokens: Tensor, loss: Loss | None = None, *, documents: Documents | None = None) -> Any:
        """Return logits [B, L, V] of tokens [B, L] int64; with `loss`, what it returns for the final hidden states.
        With `documents`, the logits of each document are those that it has alone."""
        raise NotImplementedError

    def init_weight(self, name: str, shape: torch.Size) -> InitialValues:
        """Return the initial values of the parameter `name`, such as Normal(std=0.02).

        Args:
            shape: of the whole parameter, for a distribution that depends on it.
        """
        raise NotImplementedError

    def init_buffers(self) -> None:
        """Give all buffers their first values, on the current default device. A checkpoint restores persistent ones."""

    def counters(self) -> list[Tensor]:
        """Return float32 buffers that forward adds to in training, such as the tokens of each expert.

        The step turns them into sums over the global batch. It does so in an all-reduce that it needs anyway.
        """
        return []

    def before_backward(
        self, factor: Tensor, valid_tokens: Tensor, add_over_processes: Callable[[Tensor], object]
    ) -> None:
        """Prepare gradients that depend on counters of the whole global batch, in a step of one micro-batch.

        Args:
            factor: by which the step multiplies the sum of its tokens' losses before backward.
            valid_tokens: of the global batch: what is added to their mean is multiplied by the product of both.
            add_over_processes: adds up a tensor in place, over the processes with other tokens.
        """

    def end_step(self, taken: Tensor) -> dict[str, Tensor]:
        """Act on the counters after the optimizer's step, and set them to zero.

        Args:
            taken: bool on the device, whether the optimizer made its step. The guard can skip one.

        Returns:
            scalars on the device for the metrics, by name.
        """
        return {}

    def renaming(self) -> Renaming | None:
        """Return further names of files of this model, on top of those in `formats`; None if there are none."""
        return None

    def flops_per_token(self, seq_len: int, *, causal: bool = False) -> float:
        """Return the floating point operations of forward and backward for one token of a sequence of seq_len tokens.

        Args:
            causal: count of attention only what a causal mask leaves. Else attention counts in full, as in most
                published numbers. Documents are ignored: the same step does not cost less with another text.
        """
        raise NotImplementedError


def unique_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Iterate over (fully qualified name, parameter). A shared parameter comes once. On meta models this costs no
    memory."""
    return model.named_parameters(remove_duplicate=True)


def trainable_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that are not frozen, by name."""
    return {name: parameter for name, parameter in unique_parameters(model) if parameter.requires_grad}


def initial_values(model: Model, name: str, shape: torch.Size) -> InitialValues:
    """Ask a model, or the layer that a technique has put in, for the initial values of a parameter.

    Raises:
        UserError: `init_weight` fails, returns something else, or has the arguments of older versions.
    """
    place, _, attribute = name.rpartition(".")
    layer = model.get_submodule(place)
    if isinstance(layer, AddsParameters) and attribute in layer.added:
        return layer.added_values(attribute)
    if name in model.scaling:
        return model.scaling[name].initial
    where = f"{type(model).__name__}.init_weight"
    advice = "return a distribution such as Normal(std=0.02) (docs/add_a_model.md)"
    if "generator" in signature(model.init_weight).parameters:
        raise UserError(f"{where} has the arguments of an older version: take (self, name, shape) and {advice}")
    try:
        values = model.init_weight(name, shape)
    except Exception as error:  # code of the user's own may raise anything
        raise UserError(f"{where} fails for parameter {name}: {type(error).__name__}: {error}") from error
    if not isinstance(values, InitialValues):
        raise UserError(f"{where} returns {values!r:.80} for parameter {name}: {advice}")
    return values


def build_on_meta(model_cls: type[Model], args: ModelArgs) -> Model:
    """Return a model on the meta device: shapes without memory."""
    with torch.device("meta"):
        return model_cls(args)


def head_of(model: nn.Module) -> nn.Module:
    """Return the head: by contract, the last direct child of a model."""
    return list(model.children())[-1]
