"""A frozen model that runs beside the one that is trained, with weights from elsewhere."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from titanlite.models.base import Model
from titanlite.models.decoder import DecoderArgs
from titanlite.models.registry import ModelSpec


class ModelWeights(NamedTuple):
    """Weights, and the model that they are of."""

    spec: ModelSpec
    tokenizer: Any
    """`Tokenizer` of the weights; None if it is not known."""
    where: str
    """Path or URL of the weights, for errors."""
    identity: str
    """Text that differs for other weights."""
    reader: Any
    """`StorageReader` of DCP."""


OpenModel = Callable[[str, str | None, str], ModelWeights]
"""(path, config, section): opens weights, as `titanlite.tools.convert.source.open_model` does. It raises UserError if
there are none, or if they do not describe their model."""


@dataclass(frozen=True)
class FrozenModel:
    """Model, and how its parameters are kept."""

    section: str
    """Section of the config that names its weights, as `path`, and its place, as `enable_cpu_offload`."""
    spec: ModelSpec
    weights: ModelWeights | None
    """None in a plan."""
    dtype: str
    """Dtype of its parameters and of its compute."""
    is_on_host: bool
    """Whether its shards are in host memory."""

    def build(self, seq_len: int) -> Model:
        """Return the model on the meta device.

        Args:
            seq_len: of training, for which tables of positions are made.
        """
        spec = self.spec
        if isinstance(spec.args, DecoderArgs):  # others may have parameters for each position
            spec = spec._replace(args=replace(spec.args, max_seq_len=seq_len))
        return spec.build().requires_grad_(False)

    def flops_per_token(self, seq_len: int, *, causal: bool = False) -> float:
        """Return the floating point operations of the forward pass for one token: a third of those of training it."""
        return self.build(seq_len).requires_grad_(True).flops_per_token(seq_len, causal=causal) / 3
