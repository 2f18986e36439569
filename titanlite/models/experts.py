"""Layers with several experts, which several processes can compute together (`techniques/expert.py`).

Shape suffixes: as in `layers`; E experts, S tokens sorted by expert, each once for each of its experts.
"""

from collections.abc import Callable, Sequence
from typing import ClassVar, Protocol

from torch import Tensor, nn

ComputeExperts = Callable[[Tensor, Tensor, Sequence[Tensor]], Tensor]
"""(tokens [S, D], ends of the experts [E], stacks of their weights) -> [S, D]."""


class TokenExchange(Protocol):
    """Exchange of tokens between processes that have different experts."""

    def __call__(self, x_SD: Tensor, ends_E: Tensor, weights: Sequence[Tensor], compute: ComputeExperts) -> Tensor:
        """Compute each token where its expert is -> [S, D], in the order of x.

        Args:
            ends_E: int32. The tokens of expert e are from ends_E[e - 1] to ends_E[e].
            weights: stacks of the experts that this process has.
            compute: is called with the tokens of those experts, from all processes.
        """
        ...


class ExpertLayer(nn.Module):
    """Layer that sends each token through some of its experts."""

    stacks: ClassVar[tuple[str, ...]]
    """Names of the parameters that each expert has a part of: [E, ...]."""
    hidden_dims: ClassVar[tuple[int, ...]] = ()
    """Dim of each of `stacks` that is the hidden one of an expert. The output is a sum over it, so that tensor
    parallelism can split it. (): it is not split."""
    exchange: TokenExchange | None = None
    """None: this process has all experts. `parallelize.expert` sets it."""

    def pass_through_experts(self, x_SD: Tensor, ends_E: Tensor) -> Tensor:
        """Compute each token by its expert -> [S, D]; see `TokenExchange`."""
        weights = [getattr(self, name) for name in self.stacks]
        if self.exchange is None:
            return self.compute(x_SD, ends_E, weights)
        return self.exchange(x_SD, ends_E, weights, self.compute)

    def compute(self, x_SD: Tensor, ends_E: Tensor, weights: Sequence[Tensor]) -> Tensor:
        """Compute tokens by experts that are here -> [S, D].

        Args:
            weights: `stacks` of the experts whose ends these are.
        """
        raise NotImplementedError


def expert_layers(model: nn.Module) -> list[ExpertLayer]:
    return [module for module in model.modules() if isinstance(module, ExpertLayer)]


def exchanges_tokens(block: nn.Module) -> bool:
    """Return True if the experts of a block are on several processes."""
    return any(layer.exchange is not None for layer in expert_layers(block))
