"""The format of a batch: what data/ makes, and what step, loss and validation read. Imports no torch."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

IGNORE = -100
"""Label of a token that does not count in the loss."""

Batch = dict[str, "Tensor"]
"""Tensors of B sequences of L tokens, by name:

- `tokens` [B, L] int64: token ids.
- `labels` [B, L] int64: for each token the next one of its document, or IGNORE.

Only with a document mask (`data.document_mask = true`):

- `positions` [B, L] int64: position of each token in its document, from 0.
- `documents` [B, L] int32: number of the token's document within its sequence, ascending from 0.
- `boundaries` [documents + 1] int32: start of each document among the B * L tokens, then B * L.

Where several ranks split sequences (`parallelism.context_parallel_degree`), a batch has these as well, `documents` and
`boundaries` for all tokens of a sequence, the others for this rank's.

Only with multi-token prediction (`training.multi_token_weight`), made before sequences are split:

- `next_tokens` [B, L] int64: for each token the next one of its sequence.
- `next_labels` [B, L] int64: the label after the next, or IGNORE.

Only with dropout (`training.dropout`), in training:

- `draws` [B, L] int64: number of each token in the run.

Only in training, where sequences can have padding (`data.packing = "best_fit"`) and the model counts tokens:

- `padding` [B, L] bool: whether the token is padding.
"""
