"""Dropout (Srivastava et al., 2014) whose mask is a hash, and needs no generator: each rank draws what one process
would, and recomputation draws the same again."""

from dataclasses import dataclass

import torch
from torch import Tensor

from titanlite.ops.hash_random import BITS, random_bits, salt

LEVELS = 256
"""Probabilities are multiples of 1 / LEVELS, because a byte is drawn for each value."""
PLACES = 2
"""Places in a block. The embedding is one of a block of its own."""


@dataclass(frozen=True)
class Dropout:
    dropped: int
    """Values of LEVELS that become 0."""
    salt: int

    @staticmethod
    def of(probability: float, *, seed: int) -> "Dropout":
        return Dropout(round(probability * LEVELS), salt(f"{seed}/dropout"))

    def __call__(self, x_BLD: Tensor, draws_BL: Tensor, place: int = 0) -> Tensor:
        """Return the hidden states with some values set to 0, and the others scaled by 1 / (1 - probability).

        Args:
            draws_BL: int64, the number of each token in the run; for a block, see `draws_of_blocks`.
        """
        dim = x_BLD.shape[-1]
        groups = -(-dim // (BITS // 8))
        first_BL1 = ((draws_BL * PLACES + place) * groups).unsqueeze(-1)
        bits_BLG = random_bits(self.salt, first_BL1 + torch.arange(groups, device=draws_BL.device))
        bytes_BLD = bits_BLG.view(torch.uint8).unflatten(-1, (groups, 8))[..., : BITS // 8].flatten(-2)[..., :dim]
        return torch.where(bytes_BLD >= self.dropped, x_BLD * (LEVELS / (LEVELS - self.dropped)), 0)


def draws_of_blocks(draws_BL: Tensor, blocks: int) -> list[Tensor]:
    """Return the draws of the embedding, then of each block."""
    return [draws_BL * (blocks + 1) + number for number in range(blocks + 1)]
