"""Choice of the next token from its logits."""

from dataclasses import dataclass, field

import torch
from torch import Tensor


def token_probabilities(logits_V: Tensor, *, temperature: float, top_p: float) -> Tensor:
    """Return the probabilities from which the next token is drawn: float32 [V], sum 1.

    Args:
        temperature: above 0. Logits are divided by it.
        top_p: probability kept (arXiv:1904.09751). The fewest tokens that together have at least that are kept, the
            most probable first. Tokens of equal probability are kept in the order of their ids.
    """
    probabilities_V = (logits_V.float() / temperature).softmax(dim=-1)
    if top_p >= 1:
        return probabilities_V
    sorted_V, order_V = probabilities_V.sort(descending=True, stable=True)
    before_V = sorted_V.cumsum(-1) - sorted_V
    kept_V = torch.zeros_like(probabilities_V).scatter(-1, order_V, sorted_V.masked_fill(before_V >= top_p, 0.0))
    return kept_V / kept_V.sum()


@dataclass
class Sampler:
    """Draws tokens. The same seed draws the same tokens from the same probabilities, on every device."""

    temperature: float = 0.0
    """0 takes the most probable token; of several, that with the lowest id."""
    top_p: float = 1.0
    seed: int = 0
    _generator: torch.Generator = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._generator = torch.Generator().manual_seed(self.seed)

    def draw(self, logits_V: Tensor) -> int:
        """Return the id of a token."""
        if self.temperature == 0:
            return int(logits_V.argmax())
        probabilities_V = token_probabilities(logits_V, temperature=self.temperature, top_p=self.top_p)
        uniform = torch.rand((), generator=self._generator, dtype=torch.float64).item()
        ends_V = probabilities_V.double().cumsum(-1)
        # The last end is not exactly 1. `right` passes by tokens of probability 0, whose end is that of the one before.
        return int(torch.searchsorted(ends_V, ends_V[-1] * uniform, right=True))
