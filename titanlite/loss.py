"""The loss: summed over tokens here, divided by the global count of tokens in `step`, so that every token of the global
batch weighs the same whatever the layout and the accumulation."""

import torch.nn.functional as F
from torch import Tensor

IGNORE = -100
"""A label that does not count."""


def cross_entropy_sum(hidden_BLD: Tensor, weight_VD: Tensor, *, labels_BL: Tensor) -> Tensor:
    """Sum over valid tokens of the cross entropy, in nats; fp32 scalar."""
    logits_BLV = F.linear(hidden_BLD, weight_VD).float()
    return F.cross_entropy(logits_BLV.flatten(0, 1), labels_BL.flatten(), ignore_index=IGNORE, reduction="sum")
