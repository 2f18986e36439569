"""The contract of a model.

A model is plain single-device PyTorch. It is built on the meta device, sharded and compiled by `parallelize`, and only
then given memory and values. So `__init__` gives shapes, `init_weight` defines every value, and the model never
asks which device or rank it is on.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from inspect import signature
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from titanlite.ops.kernels import DEFAULT_KERNELS, Kernels
from titanlite.models.added import AddsParameters
from titanlite.ops.attention import Documents
from titanlite.models.formats import Formats
from titanlite.models.initial import InitialValues
from titanlite.models.layers import Loss
from titanlite.models.tensor_plan import TensorPlan
from titanlite.runtime.errors import UserError


@dataclass(frozen=True, kw_only=True)
class ModelArgs:
    """The shape of a model; each model family extends it."""

    vocab_size: int
    max_seq_len: int


class Model(nn.Module):
    """Base class of all models.

    Sharding, checkpointing and compiling treat each block of `layers` on its own. Every other direct child that has
    parameters is sharded as one unit: an embedding before the layers, a head as the last child.
    """

    flavors: ClassVar[dict[str, ModelArgs]] = {}
    """Named shapes: `[model] flavor` picks one, `[model.args]` changes fields of it."""

    kernels: Kernels = DEFAULT_KERNELS
    """Operations whose best form depends on the device; `attention_mask` for one. Training sets it."""

    draws_random: ClassVar[bool] = True
    """Random numbers in blocks, as dropout draws them: recomputation draws the same ones again. A class whose blocks
    draw none sets False, which saves copies of the random state in each block. Subclasses do not inherit it."""

    formats: ClassVar[Formats] = Formats()
    """Tables of the names and layouts in which weights are imported and exported. Optional."""

    tensor_plan: ClassVar[TensorPlan] = {}
    """Roles of modules in tensor parallelism, by patterns of their names. Optional."""

    layers: nn.ModuleList

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

    def end_step(self, taken: Tensor) -> dict[str, Tensor]:
        """Act on the counters after the optimizer's step, and set them to zero.

        Args:
            taken: bool on the device, whether the optimizer made its step. The guard can skip one.

        Returns:
            scalars on the device for the metrics, by name.
        """
        return {}

    def flops_per_token(self, seq_len: int, *, causal: bool = False) -> float:
        """Floating point operations of forward and backward for one token of a sequence of seq_len tokens.

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
