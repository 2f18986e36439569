"""One optimizer step: accumulate, clip, update. Returns tensors and never waits for the device."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from titanlite.batch import IGNORE, Batch
from titanlite.loss import LossFunction, token_loss
from titanlite.models.base import Model
from titanlite.models.layers import Documents
from titanlite.optim import update
from titanlite.optim.in_backward import InBackward
from titanlite.optim.norm import gradient_norms
from titanlite.runtime.dtensor import count_replicas
from titanlite.runtime.private_torch import local_tensor


@dataclass(frozen=True)
class StepResult:
    """Scalars on the device, but for one. What is global has the same bits on all ranks."""

    loss: Tensor
    """Global: mean cross entropy of the global batch's tokens, in nats."""
    added_loss: Tensor
    """Global: what is minimized beyond that."""
    grad_norm: Tensor
    """Global: L2 norm of the gradients before clipping."""
    skip_reason: Tensor
    """Global: 0 if the step was taken; see `guard`."""
    micro_losses: Tensor
    """[micro-batches], this rank's: loss sum / valid tokens of the global batch."""
    shard_grad_norm: Tensor
    """This rank's: norm of its part of the gradients."""
    model_metrics: dict[str, Tensor] = field(default_factory=dict)
    """Global: what the model tells of the step."""


def take_every_step(loss: Tensor, grad_norm: Tensor) -> Tensor:
    return torch.zeros_like(loss)


def train_step(
    model: Model,
    batches: Sequence[Batch],
    *,
    optimizer: torch.optim.Optimizer,
    group: dist.ProcessGroup,
    max_norm: float,
    loss_function: LossFunction = token_loss,
    judge: Callable[[Tensor, Tensor], Tensor] = take_every_step,
    in_backward: InBackward | None = None,
) -> StepResult:
    """Train on this rank's micro-batches of one global batch.

    Args:
        batches: tokens and labels [B, L] on the device, and with a document mask what `document_arguments` reads.
        group: every process that reads other data.
        max_norm: largest global norm of the gradients; 0 leaves them.
        judge: (loss, grad_norm) -> 0 if the optimizer is to make its step.
        in_backward: makes that step within backward. Then there is one micro-batch, and nothing is clipped.
    """
    assert in_backward is None or (len(batches) == 1 and not max_norm)
    valid_tokens = count_valid_tokens(batches, group)
    losses = []
    for index, batch in enumerate(batches):
        if len(batches) > 1 and isinstance(model, FSDPModule):
            # Shards are reduced after each backward, replicas (HSDP) once, after the last.
            model.set_requires_all_reduce(index == len(batches) - 1)
        loss = model(
            batch["tokens"],
            loss=partial(loss_function, labels_BL=batch["labels"]),
            **document_arguments(batch),
        )
        losses.append(torch.stack([loss.cross_entropy.detach(), loss.total.detach()]) / valid_tokens)
        if in_backward:
            in_backward.begin(losses[-1], group)
        # FSDP averages gradients over the group; they are to be summed.
        (loss.total * (group.size() / valid_tokens)).backward()
    micro_losses, totals = torch.stack(losses, dim=1)
    gradients = [local_tensor(parameter.grad) for parameter in model.parameters() if parameter.grad is not None]
    square = sum_of_squares(gradients, in_backward).to(valid_tokens.device)
    copies = count_replicas(next(model.parameters()), group)
    # One message with all that the ranks must agree on, to the last bit.
    counters = model.counters()
    figures = torch.cat(
        [torch.stack([micro_losses.sum(), totals.sum(), square / copies]), *(counter.flatten() for counter in counters)]
    )
    dist.all_reduce(figures, group=group)
    loss, total, norm = figures[0], figures[1], figures[2].sqrt()
    for counter, whole in zip(counters, figures[3:].split([counter.numel() for counter in counters]), strict=True):
        counter.copy_(whole.view_as(counter))
    if max_norm > 0:
        clip(gradients, norm=norm, max_norm=max_norm)
    skip_reason = judge(loss, norm)
    if not in_backward:
        update(optimizer, skip=skip_reason != 0)
        optimizer.zero_grad()
    figures_of_model = model.end_step(skip_reason == 0)
    return StepResult(loss, total - loss, norm, skip_reason, micro_losses, square.sqrt(), figures_of_model)


def document_arguments(batch: Batch) -> dict[str, Documents]:
    """Return the argument `documents` of the model's forward for a batch with a document mask, else nothing."""
    if "boundaries" not in batch:
        return {}
    return {"documents": Documents(batch["positions"], batch["documents"], batch["boundaries"])}


def count_valid_tokens(batches: Sequence[Batch], group: dist.ProcessGroup) -> Tensor:
    """Labels that count, over the whole global batch; at least 1, so that a batch without any has a loss of 0."""
    count = torch.stack([(batch["labels"] != IGNORE).sum() for batch in batches]).sum()
    dist.all_reduce(count, group=group)
    return count.clamp(min=1)


def sum_of_squares(gradients: Sequence[Tensor], in_backward: InBackward | None) -> Tensor:
    """Of all elements, accurate to float32."""
    norms = [*in_backward.end().values()] if in_backward else gradient_norms(gradients)
    return torch.cat([norm.flatten() for norm in norms]).square().sum()


def clip(gradients: Sequence[Tensor], *, norm: Tensor, max_norm: float) -> None:
    """Scale gradients whose global L2 norm is `norm` so that it is at most max_norm."""
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    torch._foreach_mul_(list(gradients), factor.to(gradients[0].device))
