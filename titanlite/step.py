"""One optimizer step: accumulate, clip, update. Returns tensors and never waits for the device."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from titanlite.data.loader import Batch
from titanlite.loss import IGNORE, cross_entropy_sum
from titanlite.models.layers import Documents


@dataclass(frozen=True)
class StepResult:
    """Scalars on the device."""

    loss: Tensor
    """This rank's part: the sum over ranks is the mean loss of the global batch's tokens, in nats."""
    grad_norm: Tensor
    """Global L2 norm of the gradients before clipping; equal on all ranks."""


def train_step(
    model: nn.Module,
    batches: Sequence[Batch],
    *,
    optimizer: torch.optim.Optimizer,
    group: dist.ProcessGroup,
    max_norm: float,
) -> StepResult:
    """Train on this rank's micro-batches of one global batch.

    Args:
        batches: tokens and labels [B, L] on the device, and with a document mask what `documents_of` reads.
        group: every process that reads other data.
        max_norm: largest global norm of the gradients; 0 leaves them.
    """
    valid_tokens = count_valid_tokens(batches, group)
    loss_sum = torch.zeros((), device=valid_tokens.device)
    for index, batch in enumerate(batches):
        if len(batches) > 1 and isinstance(model, FSDPModule):
            # Shards are reduced after each backward, replicas (HSDP) once, after the last.
            model.set_requires_all_reduce(index == len(batches) - 1)
        token_loss = partial(cross_entropy_sum, labels_BL=batch["labels"])
        loss = model(batch["tokens"], loss=token_loss, documents=documents_of(batch)) / valid_tokens
        (loss * group.size()).backward()  # FSDP averages gradients over the group; they are to be summed
        loss_sum += loss.detach()
    grad_norm = clip_gradients(model, max_norm)
    optimizer.step()
    optimizer.zero_grad()
    return StepResult(loss_sum, grad_norm)


def documents_of(batch: Batch) -> Documents | None:
    """Where documents are, if the batch says so: then attention stays within them."""
    if "boundaries" not in batch:
        return None
    return Documents(batch["positions"], batch["documents"], batch["boundaries"])


def count_valid_tokens(batches: Sequence[Batch], group: dist.ProcessGroup) -> Tensor:
    """Labels that count, over the whole global batch; at least 1, so that a batch without any has a loss of 0."""
    count = torch.stack([(batch["labels"] != IGNORE).sum() for batch in batches]).sum()
    dist.all_reduce(count, group=group)
    return count.clamp(min=1)


def clip_gradients(model: nn.Module, max_norm: float) -> Tensor:
    """Scale all gradients so that their global L2 norm is at most max_norm; returns the norm before."""
    parameters = [p for p in model.parameters() if p.grad is not None]
    norm = get_total_norm([p.grad for p in parameters if p.grad is not None])
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()
    if max_norm > 0:
        clip_grads_with_norm_(parameters, max_norm, norm)
    return norm
