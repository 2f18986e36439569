# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false
"""One optimizer step: accumulate, clip, update. Returns tensors and never waits for the device."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import InitVar, dataclass, field
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from titanlite.batch import IGNORE, Batch
from titanlite.loss import LossFunction, Targets, TokenLoss, build_loss, token_loss
from titanlite.mesh import loss_group, ranks_of_stage, shard_degree_of, world_group
from titanlite.models.base import Model
from titanlite.observer import OnPhase, Phase
from titanlite.ops.attention import document_arguments
from titanlite.ops.kernels import Kernels
from titanlite.optim import scales_gradients, update
from titanlite.optim.norm import count_parameter_replicas, flat_views, gradient_norms, sums_of_squares
from titanlite.runtime.errors import UserError
from titanlite.runtime.private_torch.tensors import local_tensor, scale_in_place
from titanlite.runtime.ranks import reduce_over_ranks
from titanlite.schema import Config
from titanlite.state import Updates

if TYPE_CHECKING:
    from titanlite.techniques.technique import Parts


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
    model_metrics: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    """Metrics of the model's own, and of the loss. Global."""
    stop_flags: Tensor = field(default_factory=lambda: torch.zeros(0))
    """[1]: above 0 if any rank asks to stop after this step; empty if the step got no flag. Global."""


def never_skip(loss: Tensor, grad_norm: Tensor, overflows: Tensor | None = None) -> Tensor:
    """Decide that the optimizer makes its step."""
    return torch.zeros_like(loss)


def is_not_finite(losses: Tensor) -> Tensor:
    """Return whether a loss is not finite."""
    return ~losses.isfinite().all()


def no_observer(phase: Phase) -> None:
    """Do nothing at the beginning of a phase."""


@dataclass(kw_only=True, eq=False)
class Step:
    """One optimizer step. A run makes it once, and calls it with this rank's micro-batches of each global batch.

    A technique may do a part of it otherwise, in a subclass that overrides the method; see `Parts.step_cls`.
    """

    config: Config
    model: Model
    """Parallelized, with memory."""
    optimizer: torch.optim.Optimizer
    mesh: DeviceMesh
    loss_function: LossFunction = token_loss
    targets: Targets | None = None
    """Further arguments of the loss function."""
    state: InitVar[Mapping[str, Any]] = MappingProxyType({})
    """Its part of the checkpoint that the run resumes from; see `checkpoint_state`."""
    should_skip: Callable[[Tensor], Tensor] = is_not_finite
    """Decides before backward whether to update at all, where updates are made in backward: `StepGuard.should_skip`."""
    updates: Updates | None = None
    """Thread that updates parameters which are in host memory."""

    def __post_init__(self, state: Mapping[str, Any]) -> None:
        self.group = loss_group(self.mesh)
        """Ranks that compute the loss of different tokens."""
        self.world = world_group(self.mesh)
        of_stage = ranks_of_stage(self.mesh)
        self.replicas = count_parameter_replicas(self.model, of_stage)
        """For each parameter, the number of ranks that hold the same shard."""
        self.duplicates = of_stage // self.group.size()
        """Number of ranks that report the loss of the same tokens."""
        self.max_norm = self.config.training.max_norm
        self.reduces_once = reduces_once(self.config, self.mesh)
        """Whether gradients are reduced over shards after the last micro-batch, not after each."""
        self._reduces = True
        """What `set_reduces` chose last. FSDP begins with reductions after each backward pass."""
        self.resume(state)

    def __call__(
        self,
        batches: Sequence[Batch],
        *,
        decide: Callable[..., Tensor] = never_skip,
        stop_flag: Tensor | None = None,
        on_phase: OnPhase = no_observer,
        leaves_updates: bool = False,
    ) -> StepResult:
        """Train on the micro-batches.

        Args:
            batches: tokens and labels [B, L] on the device; with a document mask also what `document_arguments` reads.
            decide: (loss, grad_norm[, whether float16 has overflown]) -> 0 if the optimizer is to make its step, else
                a skip reason; see `StepGuard.decide`.
            stop_flag: [1], above 0 if this rank asks to stop. It is summed over all ranks with the other values.
            on_phase: is called when a phase begins.
            leaves_updates: return before `updates` has ended. Only the forward pass of the next step, or what calls
                `finish_updates` first, may read parameters and states of the optimizer.
        """
        model = self.model
        losses = self.accumulate(batches, on_phase)
        parameters = [parameter for parameter in model.parameters() if parameter.grad is not None]
        gradients = [local_tensor(parameter.grad) for parameter in parameters if parameter.grad is not None]
        self.unscale(gradients, micro_batches=len(batches))
        on_phase(Phase.UPDATE)
        local_square, square = sums_of_squares(self.norms(parameters, gradients), self.replicas)
        flags = losses.total.new_zeros(0) if stop_flag is None else stop_flag
        sums, square, stop_flags = self.sum_over_ranks(losses, square, flags, gradients)
        norm = square.sqrt()
        metrics = {**sums.metrics, **self.metrics()}
        skip_reason = self.ask(decide, sums.cross_entropy, norm)
        self.update(gradients, norm=norm, skip=skip_reason != 0)
        if not leaves_updates:
            self.finish_updates()
        metrics |= model.end_step(skip_reason == 0)  # biases of routers move, counters begin anew
        micro_losses = losses.cross_entropy
        return StepResult(
            loss=sums.cross_entropy,
            added_loss=sums.total - sums.cross_entropy,
            grad_norm=norm,
            skip_reason=skip_reason,
            micro_losses=micro_losses.sum(dim=1) if micro_losses.dim() > 1 else micro_losses,
            shard_grad_norm=local_square.to(micro_losses.device).sqrt(),
            model_metrics=metrics,
            stop_flags=stop_flags,
        )

    def accumulate(self, batches: Sequence[Batch], on_phase: OnPhase) -> TokenLoss:
        """Add up the gradients of this rank's micro-batches in the parameters, reduced over the ranks.

        Returns:
            losses and metrics of each micro-batch / valid tokens of the global batch, each [micro-batches], or
            [micro-batches, parts] for a loss of several parts of sequences.
        """
        valid_tokens = count_valid_tokens(batches, self.group)
        parts: list[MeanParts] = []
        for index, batch in enumerate(batches):
            tokens, arguments = model_arguments(
                batch, self.loss_function, self.targets(batch, on_phase) if self.targets else {}
            )
            on_phase(Phase.FORWARD)
            is_last = index == len(batches) - 1
            self.set_reduces(is_last)
            loss = checked_loss(self.model(tokens, **arguments))
            del arguments  # with the targets
            parts.append(MeanParts.of(loss, valid_tokens))
            self.before_backward(parts[-1].losses)
            on_phase(Phase.BACKWARD)
            factor = self.loss_factor(valid_tokens, micro_batches=len(batches))
            self.model.before_backward(factor, valid_tokens, partial(dist.all_reduce, group=self.group))
            try:
                total = loss.total * factor
                (total.sum() if total.dim() else total).backward()  # of parts of sequences
            except BaseException:
                finish_reductions(self.model)
                raise
            self.after_backward(index, is_last=is_last)
        return stacked(parts)

    def set_reduces(self, is_last: bool) -> None:
        """Choose whether FSDP reduces gradients after the next backward pass."""
        if not isinstance(self.model, FSDPModule) or self._reduces == is_last:
            return  # each change visits every module
        self._reduces = is_last
        if self.reduces_once:  # over shards and replicas, after the last micro-batch
            self.model.set_requires_gradient_sync(is_last)
        else:  # over shards after each micro-batch, over replicas (HSDP) after the last
            self.model.set_requires_all_reduce(is_last)

    def loss_factor(self, valid_tokens: Tensor, *, micro_batches: int) -> Tensor:
        """Return the factor of a micro-batch's loss before backward: gradients must be added over ranks, which FSDP
        averages.

        Args:
            valid_tokens: of the global batch.
        """
        return self.group.size() / valid_tokens

    def before_backward(self, losses: Tensor) -> None:
        """Prepare for a backward pass of a micro-batch.

        Args:
            losses: its `MeanParts.losses`.
        """
        self.finish_updates()  # forward has waited for all that it used

    def after_backward(self, micro_batch: int, *, is_last: bool) -> None:
        """Receive the gradients in the parameters after the backward pass of a micro-batch, as sums in a tree do.

        Args:
            micro_batch: its number in the step on this rank.
        """

    def partial_sums(self, micro_batches: int) -> int:
        """Return how many gradients of each parameter `after_backward` keeps while the last micro-batch is computed."""
        return 0

    def unscale(self, gradients: Sequence[Tensor], *, micro_batches: int) -> None:
        """Undo a further factor of the loss in this rank's parts of the gradients after the last backward, in place."""

    def norms(self, parameters: Sequence[nn.Parameter], gradients: Sequence[Tensor]) -> dict[nn.Parameter, Tensor]:
        """Return the `gradient_norms` of the step.

        Args:
            parameters: those with a gradient now.
            gradients: of them, this rank's parts.
        """
        return dict(zip(parameters, gradient_norms(gradients), strict=True))

    def sum_over_ranks(
        self, losses: TokenLoss, square: Tensor, flags: Tensor, gradients: Sequence[Tensor]
    ) -> tuple[TokenLoss, Tensor, Tensor]:
        """Add up values over all ranks, and the model's counters in place -> losses, square, and flags.

        Args:
            losses: as `accumulate` returns them. They become scalars.
            square: this rank's share of the squared norm of the gradients.
            flags: [any number].
            gradients: this rank's parts.
        """
        values = [losses.total, losses.cross_entropy, *losses.metrics.values()]
        sums, square = reduce_over_ranks(
            [*(value.sum() for value in values), *flags],
            square.to(losses.total.device),
            self.model.counters(),
            duplicates=self.duplicates,
            world=self.world,
        )
        total, cross_entropy, *metrics = sums[: len(values)]
        summed = TokenLoss(total, cross_entropy, dict(zip(losses.metrics, metrics, strict=True)))
        return summed, square, sums[len(values) :]

    def metrics(self) -> dict[str, Tensor]:
        """Return what a record of the step has beside the usual metrics. Read before the decision."""
        return {}

    def ask(self, decide: Callable[..., Tensor], loss: Tensor, grad_norm: Tensor) -> Tensor:
        """Return the decision about the step, 0 or a skip reason."""
        return decide(loss, grad_norm)

    def update(self, gradients: Sequence[Tensor], *, norm: Tensor, skip: Tensor) -> None:
        """Clip the gradients by their norm, make the step of the optimizer unless `skip`, and drop the gradients."""
        if self.updates is not None:
            norm = norm.cpu()
            clips = self.max_norm > 0 and bool(clip_factor(norm, max_norm=self.max_norm) != 1)
            change = partial(clip, optimizer=self.optimizer, norm=norm, max_norm=self.max_norm)
            self.updates.start(change if clips else None, skip=skip)
            return
        if self.max_norm > 0:
            clip(gradients, self.optimizer, norm=norm, max_norm=self.max_norm)
        update(self.optimizer, skip=skip)
        self.optimizer.zero_grad()

    def finish_updates(self) -> None:
        """Return when parameters and states of the optimizer are those after the last step."""
        if self.updates is not None:
            self.updates.finish()

    def checkpoint_state(self) -> dict[str, Any]:
        """Return the state for a checkpoint, as JSON values. Reading it may wait for the device."""
        return {}

    def resume(self, state: Mapping[str, Any]) -> None:
        """Begin with the state of a checkpoint, at the start and after a rollback."""


def build_step(
    config: Config,
    model: Model,
    optimizer: torch.optim.Optimizer,
    *,
    mesh: DeviceMesh,
    kernels: Kernels,
    parts: "Parts",
    targets: Targets | None = None,
    state: Mapping[str, Any] = MappingProxyType({}),
    should_skip: Callable[[Tensor], Tensor] = is_not_finite,
    updates: Updates | None = None,
) -> Step:
    """Return the optimizer step of a config, with the parts of its techniques.

    Args: as of `Step`.

    Raises:
        UserError: there is no such loss function.
    """
    loss = build_loss(config.training, kernels, targets, vocabulary=parts.vocabulary)
    return (parts.step_cls or Step)(
        config=config,
        model=model,
        optimizer=optimizer,
        mesh=mesh,
        loss_function=parts.loss(loss),
        targets=targets,
        state=state,
        should_skip=should_skip,
        updates=updates,
    )


def reduces_once(config: Config, mesh: DeviceMesh) -> bool:
    """Return True if gradients are reduced over shards after the last micro-batch of a step alone.

    `parallelism.fsdp_reduce_gradients` asks for it. Ranks that hold whole parameters do it too, because it takes no
    memory there, and FSDP would copy each gradient twice a micro-batch; but not where the sums would have other bits
    (FSDP adds up unreduced gradients in the dtype of the reduction, and reduced ones in that of the parameters), nor
    with reproducible layouts, nor with parameters on the host.
    """
    training = config.training
    if config.parallelism.fsdp_reduce_gradients == "last":
        return True
    is_converted = training.mixed_precision_reduce != training.dtype
    others = config.debug.reproducible_layouts or training.enable_cpu_offload
    return shard_degree_of(mesh) == 1 and not (is_converted or others)


class MeanParts(NamedTuple):
    """A micro-batch's parts of the means over the global batch's tokens, without gradients."""

    losses: Tensor
    """[2], or [2, parts] for a loss of several parts of sequences: what is minimized, and the cross entropy."""
    metrics: Mapping[str, Tensor]

    @staticmethod
    def of(loss: TokenLoss, valid_tokens: Tensor) -> "MeanParts":
        losses = torch.stack([loss.total.detach(), loss.cross_entropy.detach()]) / valid_tokens
        return MeanParts(losses, {name: value.detach() / valid_tokens for name, value in loss.metrics.items()})


def stacked(parts: Sequence[MeanParts]) -> TokenLoss:
    """Return the losses and metrics of micro-batches, each with a first dimension of micro-batches."""
    total, cross_entropy = torch.stack([part.losses for part in parts], dim=1)
    metrics: dict[str, list[Tensor]] = {}
    for part in parts:
        for name, value in part.metrics.items():
            metrics.setdefault(name, []).append(value)
    return TokenLoss(total, cross_entropy, {name: torch.stack(values) for name, values in metrics.items()})


def model_arguments(
    batch: Batch, loss_function: LossFunction, targets: Mapping[str, Any]
) -> tuple[Tensor, dict[str, Any]]:
    """Return the tokens of a micro-batch, and the further arguments of the model's forward.

    Args:
        targets: further arguments of the loss function. They are of the next token, and None for the one after it.
    """
    loss = partial(loss_function, labels_BL=batch["labels"], **targets)
    arguments: dict[str, Any] = {"loss": loss, **document_arguments(batch)}
    arguments |= {name: batch[name] for name in ("draws", "padding") if name in batch}
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


def clip(gradients: Sequence[Tensor], optimizer: torch.optim.Optimizer, *, norm: Tensor, max_norm: float) -> None:
    """Scale gradients of a global L2 norm, so that the norm is at most max_norm: in place, or in the next update where
    its kernel does it on the way."""
    factor = clip_factor(norm, max_norm=max_norm)
    if not scales_gradients(optimizer, factor):
        scale_in_place(flat_views(gradients), factor.to(gradients[0].device))


def clip_factor(norm: Tensor, *, max_norm: float) -> Tensor:
    """Return the factor by which `clip` scales gradients: 1 if it changes nothing."""
    return (max_norm / (norm + 1e-6)).clamp(max=1.0)


def finish_reductions(model: Any) -> None:
    """Let the compute stream wait for all reductions of a backward pass that raised, before anything frees gradients.

    FSDP waits at the end of backward only. Gradients in the pool of the compute stream would be used again at once,
    while their reductions still write them. The model can then go on with another step.
    """
    if isinstance(model, FSDPModule) and hasattr(model, "reset_iter_state"):  # since torch 2.13
        model.reset_iter_state()
