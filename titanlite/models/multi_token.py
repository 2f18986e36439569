"""Prediction of the token after the next (arXiv:2412.19437, section 2.2, with one module).

Shape suffixes: as in `layers`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titanlite.batch import IGNORE, Batch
from titanlite.models.layers import Documents, Linear, Loss, RMSNorm

if TYPE_CHECKING:
    from titanlite.models.decoder import Decoder


class FurtherToken(nn.Module):
    """Block that predicts the token after the next, from the final hidden states and the embeddings of the next tokens.

    It is the last of a decoder's `layers`, so that it is sharded, checkpointed and compiled as the others are.
    """

    in_every_pass = False
    whole_inputs = 2
    """First arguments that are of all tokens where processes split those between blocks, since the head gives them."""

    def __init__(self, block: nn.Module, dim: int, norm_eps: float) -> None:
        super().__init__()
        self.next_norm = RMSNorm(dim, eps=norm_eps)
        self.hidden_norm = RMSNorm(dim, eps=norm_eps)
        self.join = Linear(2 * dim, dim)
        self.block = block

    @property
    def feed_forward(self) -> nn.Module:
        """Layer of the block, as other blocks have it."""
        return self.block.feed_forward  # pyright: ignore[reportReturnType]

    def forward(self, hidden_BLD: Tensor, next_BLD: Tensor, *inputs: Any) -> Tensor:
        """Return hidden states [B, L, D], which the head normalizes.

        Args:
            inputs: further ones of the block.
        """
        both = torch.cat([self.next_norm(next_BLD), self.hidden_norm(hidden_BLD)], dim=-1)
        return self.block(self.join(both), *inputs)


def look_ahead(batch: Batch) -> Batch:
    """Return a batch of whole sequences with `next_tokens` and `next_labels`. What has no next label has none after it.

    The last token of a sequence has the first one as the next, of which no other token sees anything.
    """
    labels_BL = batch["labels"]
    after_BL = F.pad(labels_BL[:, 1:], (0, 1), value=IGNORE).masked_fill(labels_BL == IGNORE, IGNORE)
    return batch | {"next_tokens": batch["tokens"].roll(-1, dims=1), "next_labels": after_BL}


@dataclass(frozen=True)
class LossOfTwo:
    """Loss of the next token, and of the one after it."""

    own: Loss
    after: Loss
    predict: Callable[[Tensor, Tensor], Tensor]
    """Returns the normalized hidden states of a `FurtherToken` for the final ones and the embeddings of next tokens."""
    next_BLD: Tensor
    """These embeddings. Stages of a pipeline pass them on to the last one, which has the `FurtherToken`."""
    weight: float
    """Of the loss of the token after the next."""

    def __call__(self, hidden_BLD: Tensor, weight_VD: Tensor) -> Any:
        own = self.own(hidden_BLD, weight_VD)
        if not hasattr(own, "_replace"):  # of a loss of the user's own; the step says what is wrong
            return own
        further = self.after(self.predict(hidden_BLD, self.next_BLD), weight_VD)
        metrics = {**own.metrics, "multi_token_loss": further.cross_entropy}
        return own._replace(total=own.total + self.weight * further.total, metrics=metrics)


def forward_of_pairs(
    decoder: "Decoder",
    pairs_BLTD: Tensor,
    loss: Loss | None,
    further: Loss,
    documents: Documents | None,
    padding: Tensor | None = None,
) -> Any:
    """Return what a decoder's forward returns for tokens with their next ones.

    Args:
        pairs_BLTD: embeddings [B, L, 2, D] of tokens and of their next ones.
        further: loss of the tokens after the next.
    """
    x_BLD, next_BLD = (part.contiguous() for part in pairs_BLTD.unbind(2))  # compiled blocks get one layout of memory
    inputs = decoder.block_inputs(x_BLD, documents, padding)

    def predict(hidden_BLD: Tensor, next_BLD: Tensor) -> Tensor:
        return decoder.head.further_norm(decoder.layers[-1](hidden_BLD, next_BLD, *inputs[-1]))

    both = LossOfTwo(loss, further, predict, next_BLD, weight=decoder.further_weight) if loss else None
    return decoder.head(decoder.through_blocks(x_BLD, inputs), both)
