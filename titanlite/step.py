"""One optimizer step: accumulate, clip, update. Returns tensors and never waits for the device."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from titanlite.batch import IGNORE, Batch
from titanlite.loss import LossFunction, Targets, TokenLoss, token_loss
from titanlite.models.base import Model
from titanlite.observer import Phase, StepObserver
from titanlite.ops.attention import document_arguments
from titanlite.optim import update
from titanlite.optim.norm import count_parameter_replicas, gradient_norms, joined, sums_of_squares
from titanlite.runtime.errors import UserError
from titanlite.runtime.private_torch.tensors import local_tensor, scale_in_place
from titanlite.runtime.ranks import reduce_over_ranks


@dataclass(frozen=True)
class StepResult:
    """Results of one step: device tensors, scalar except micro_losses. Global values are the same on all ranks."""

    loss: Tensor
    """Mean cross entropy of the global batch's tokens, in nats. Global."""
    added_loss: Tensor
    """Minimized sum beyond the cross entropy, as a mean over tokens. Global."""
    grad_norm: Tensor
    """L2 norm of the gradients before clipping. Global."""
    skip_reason: Tensor
    """0 if the optimizer made its step, else a `guard.SkipReason`. Global."""
    micro_losses: Tensor
    """[micro-batches]: loss sum / valid tokens of the global batch. Of this rank."""
    shard_grad_norm: Tensor
    """L2 norm of this rank's part of the gradients."""
    model_metrics: dict[str, Tensor] = field(default_factory=dict)
    """Metrics of the model's own, and of the loss. Global."""
    stop_flags: Tensor = field(default_factory=lambda: torch.zeros(0))
    """[1]: above 0 if any rank asks to stop after this step; empty if the step got no flag. Global."""


class Gradients:
    """What a step does with gradients, from the loss to the update. A technique may do otherwise, in a subclass."""

    def scale(self, valid_tokens: Tensor, *, ranks: int, micro_batches: int) -> Tensor:
        """Return the factor of a micro-batch's loss before backward: gradients must be added over ranks, which FSDP
        averages.

        Args:
            valid_tokens: of the global batch.
            ranks: those that compute the loss of different tokens.
        """
        return ranks / valid_tokens

    def unscale(self, gradients: Sequence[Tensor], *, micro_batches: int) -> None:
        """Undo a further scale of the loss, in place, after the last backward."""

    def begin(self, losses: Tensor, group: dist.ProcessGroup) -> None:
        """Prepare for a backward pass.

        Args:
            losses: of the micro-batch, this rank's part of those of the global batch.
            group: ranks that compute the loss of different tokens.
        """

    def collect(self, micro_batch: int, *, is_last: bool) -> None:
        """Do something with the gradients in the parameters after the backward pass of a micro-batch.

        Args:
            micro_batch: its number in the step on this rank.
            is_last: whether it is the last.
        """

    def partial_sums(self, micro_batches: int) -> int:
        """Return how many gradients of each parameter `collect` keeps while the last micro-batch is computed."""
        return 0

    def norms(self, parameters: Sequence[nn.Parameter], gradients: Sequence[Tensor]) -> dict[nn.Parameter, Tensor]:
        """Return the `gradient_norms` of the step.

        Args:
            parameters: those with a gradient now.
            gradients: of them, this rank's parts.
        """
        return dict(zip(parameters, gradient_norms(gradients), strict=True))

    def exact_sums(self, of_tokens: Sequence[Tensor], gradients: Sequence[Tensor]) -> list[Tensor]:
        """Return sums over all ranks that replace the usual ones: of each of `of_tokens`, and of the squared gradients.
        Empty: those stay."""
        return []

    def decide(self, decide: Callable[..., Tensor], loss: Tensor, grad_norm: Tensor) -> Tensor:
        """Return the decision about the step."""
        return decide(loss, grad_norm)

    def update(self, optimizer: torch.optim.Optimizer, *, skip: Tensor) -> None:
        """Make the step of the optimizer unless `skip`, and drop the gradients."""
        update(optimizer, skip=skip)
        optimizer.zero_grad()

    def metrics(self) -> dict[str, Tensor]:
        """Return what a record of the step has beside the usual metrics. Asked before `decide`."""
        return {}

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint, as JSON values. Reading it may wait for the device."""
        return {}


def never_skip(loss: Tensor, grad_norm: Tensor, overflows: Tensor | None = None) -> Tensor:
    """Decide that the optimizer makes its step."""
    return torch.zeros_like(loss)


@dataclass(frozen=True, kw_only=True)
class Step:
    """One optimizer step. A run makes it once, and calls it with this rank's micro-batches of each global batch."""

    model: Model
    optimizer: torch.optim.Optimizer
    group: dist.ProcessGroup
    """Ranks that compute the loss of different tokens."""
    max_norm: float
    """Largest global norm of the gradients; 0 leaves them."""
    world: dist.ProcessGroup | None = None
    """Ranks that hold parts or replicas of the parameters. Default: group."""
    copies: int | None = None
    """Ranks of world that report the loss of the same tokens. Default: as many as world has for each of group."""
    replicas: Mapping[nn.Parameter, int] | None = None
    """For each parameter, the number of those ranks that hold the same shard. Default: asked of each parameter."""
    loss_function: LossFunction = token_loss
    targets: Targets = field(default_factory=Targets)
    """Further arguments of the loss function. Default: none."""
    gradients: Gradients = field(default_factory=Gradients)
    """What is done with gradients. Default: they are added up, clipped and used once."""
    reduce_once: bool = False
    """Whether gradients are reduced over shards after the last micro-batch, not after each."""
    passes: "Passes | None" = None
    """Makes the forward and backward passes. Default: `accumulate`, one micro-batch after the other."""

    def __call__(
        self,
        batches: Sequence[Batch],
        *,
        decide: Callable[..., Tensor] = never_skip,
        stop_flag: Tensor | None = None,
        observer: StepObserver | None = None,
    ) -> StepResult:
        """Train on the micro-batches.

        Args:
            batches: tokens and labels [B, L] on the device; with a document mask also what `document_arguments` reads.
            decide: (loss, grad_norm) -> 0 if the optimizer is to make its step, else a skip reason. See
                `StepGuard.decide`.
            stop_flag: [1], above 0 if this rank asks to stop. It is summed over all ranks with the other values.
        """
        model, gradients, observer = self.model, self.gradients, observer or StepObserver()
        world = self.world or self.group
        micro_losses, totals, loss_metrics = (self.passes or accumulate)(self, batches, observer)
        parameters = [parameter for parameter in model.parameters() if parameter.grad is not None]
        parts = [local_tensor(parameter.grad) for parameter in parameters if parameter.grad is not None]
        gradients.unscale(parts, micro_batches=len(batches))
        observer.phase(Phase.UPDATE)
        replicas = self.replicas or count_parameter_replicas(model, world.size())
        local_square, square = sums_of_squares(gradients.norms(parameters, parts), replicas)
        of_tokens = [micro_losses, totals, *loss_metrics.values()]
        sums, square = reduce_over_ranks(
            [*(values.sum() for values in of_tokens), *([] if stop_flag is None else stop_flag)],
            square.to(micro_losses.device),
            model.counters(),
            duplicates=self.copies or world.size() // self.group.size(),
            world=world,
        )
        (loss, total, *measured), stop_flags = sums[: 2 + len(loss_metrics)], sums[2 + len(loss_metrics) :]
        if exact := gradients.exact_sums(of_tokens, parts):
            loss, total, *measured, square = exact
        norm = square.sqrt()
        if self.max_norm > 0:
            clip(parts, norm=norm, max_norm=self.max_norm)
        metrics = dict(zip(loss_metrics, measured, strict=True)) | gradients.metrics()
        skip_reason = gradients.decide(decide, loss, norm)
        gradients.update(self.optimizer, skip=skip_reason != 0)
        metrics |= model.end_step(skip_reason == 0)
        local_norm = local_square.to(micro_losses.device).sqrt()
        micro_losses = micro_losses.sum(dim=1) if micro_losses.dim() > 1 else micro_losses
        return StepResult(loss, total - loss, norm, skip_reason, micro_losses, local_norm, metrics, stop_flags)


Passes = Callable[[Step, Sequence[Batch], StepObserver], tuple[Tensor, Tensor, dict[str, Tensor]]]
"""Function that adds up the gradients of micro-batches, with the arguments and results of `accumulate`."""


def accumulate(
    step: Step, batches: Sequence[Batch], observer: StepObserver
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Add up the gradients of this rank's micro-batches in the parameters, reduced over the ranks.

    Returns:
        cross entropy and minimized sum of each micro-batch / valid tokens of the global batch, each [micro-batches], or
        [micro-batches, parts] for a loss of several parts of sequences;
        and the loss's metrics, in the same form.
    """
    valid_tokens = count_valid_tokens(batches, step.group)
    model, gradients = step.model, step.gradients
    losses, metrics = [], dict[str, list[Tensor]]()
    for index, batch in enumerate(batches):
        tokens, arguments = model_arguments(batch, step.loss_function, step.targets(batch, observer))
        observer.phase(Phase.FORWARD)
        if len(batches) > 1 and isinstance(model, FSDPModule):
            # Shards are reduced after each backward or once, after the last; replicas (HSDP) always once.
            set_reduces = model.set_requires_gradient_sync if step.reduce_once else model.set_requires_all_reduce
            set_reduces(index == len(batches) - 1)
        loss = checked_loss(model(tokens, **arguments))
        del arguments  # with the targets
        losses.append(torch.stack([loss.cross_entropy.detach(), loss.total.detach()]) / valid_tokens)
        for name, value in loss.metrics.items():
            metrics.setdefault(name, []).append(value.detach() / valid_tokens)
        gradients.begin(losses[-1], step.group)
        observer.phase(Phase.BACKWARD)
        factor = gradients.scale(valid_tokens, ranks=step.group.size(), micro_batches=len(batches))
        try:
            total = loss.total * factor
            (total.sum() if total.dim() else total).backward()  # of parts of sequences
        except BaseException:
            finish_reductions(model)
            raise
        gradients.collect(index, is_last=index == len(batches) - 1)
    micro_losses, totals = torch.stack(losses, dim=1)
    return micro_losses, totals, {name: torch.stack(values) for name, values in metrics.items()}


def model_arguments(
    batch: Batch, loss_function: LossFunction, targets: Mapping[str, Any]
) -> tuple[Tensor, dict[str, Any]]:
    """Return the tokens of a micro-batch, and the further arguments of the model's forward.

    Args:
        targets: further arguments of the loss function. They are of the next token, and None for the one after it.
    """
    loss = partial(loss_function, labels_BL=batch["labels"], **targets)
    arguments = {"loss": loss, **document_arguments(batch)}
    if "next_tokens" not in batch:
        return batch["tokens"], arguments
    after = partial(loss_function, labels_BL=batch["next_labels"], **dict.fromkeys(targets))
    return torch.stack([batch["tokens"], batch["next_tokens"]], dim=-1), arguments | {"further": after}


def checked_loss(returned: Any) -> TokenLoss:
    """Return what a model's forward has returned, which must be a loss.

    Raises:
        UserError: it is not.
    """
    if isinstance(returned, TokenLoss):
        return returned
    raise UserError(
        "the model's forward must return what loss(hidden, weight) returns, a TokenLoss, and returned "
        f"{'None' if returned is None else 'something else'} (docs/add_a_model.md, docs/extend.md)"
    )


def count_valid_tokens(batches: Sequence[Batch], group: dist.ProcessGroup) -> Tensor:
    """Count the labels that are not IGNORE, over the global batch. At least 1, so that the loss of no labels is 0."""
    count = torch.stack([(batch["labels"] != IGNORE).sum() for batch in batches]).sum()
    dist.all_reduce(count, group=group)
    return count.clamp(min=1)


def clip(gradients: Sequence[Tensor], *, norm: Tensor, max_norm: float) -> None:
    """Scale gradients of a global L2 norm in place, so that the norm is at most max_norm."""
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    scale_in_place(joined(gradients), factor.to(gradients[0].device))


def finish_reductions(model: Any) -> None:
    """Let the compute stream wait for all reductions of a backward pass that raised, before anything frees gradients.

    FSDP waits at the end of backward only. Gradients in the pool of the compute stream would be used again at once,
    while their reductions still write them. The model can then go on with another step.
    """
    if isinstance(model, FSDPModule) and hasattr(model, "reset_iter_state"):  # since torch 2.13
        model.reset_iter_state()
