"""Forward and backward passes of the micro-batches of a step through the stages of a pipeline.

`torch.distributed.pipelining` orders them, and sends hidden states and their gradients. Each rank reads the same
micro-batches: the first stage takes the tokens, the last the labels, and all the boundaries of documents. FSDP reduces
gradients once, after the last backward pass of a stage.
"""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

from titanlite.batch import Batch
from titanlite.loss import TokenLoss
from titanlite.mesh import pipeline_mesh
from titanlite.observer import OnPhase, Phase
from titanlite.runtime.dtypes import torch_dtype
from titanlite.step import MeanParts, Step, checked_loss, count_valid_tokens, model_arguments, stacked
from titanlite.techniques.pipeline.stages import Stage, rank_of_stage
from titanlite.techniques.tensor.layers import split_blocks, tensor_ranks

logger = logging.getLogger(__name__)

YES = SimpleNamespace(item=lambda: 1)
"""Stands for a tensor, which has no value in a plan."""


class _Stage(PipelineStage):
    """A stage as the schedule calls it, with one micro-batch after the other."""

    compute: Callable[[Any, Tensor], Tensor]
    is_alone: bool

    def _warmup_forward_vote(self, *args: Any, **options: Any) -> Any:
        """Agree with the other ranks that shapes are known."""
        return YES if self.is_alone else super()._warmup_forward_vote(*args, **options)

    def _warmup_backward_result(self, *args: Any, **options: Any) -> Any:
        return YES if self.is_alone else super()._warmup_backward_result(*args, **options)

    def _output_slot_is_releasable(self, output: Any) -> Any:
        """Return whether what was sent is freed before backward. PyTorch 2.15 asks, and denies it to fake tensors."""
        if self.is_alone:
            return not self.is_last, ""
        return super()._output_slot_is_releasable(output)  # pyright: ignore[reportAttributeAccessIssue]

    def forward_maybe_with_nosync(self, *args: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self.compute(self.submod, args[0])


@dataclass(kw_only=True, eq=False)
class PipelineStep(Step):
    """Step through the stages that this rank has. Validation calls the model, whose forward then goes through all
    stages. The model is cut to the stages of this rank."""

    def __post_init__(self, state: Mapping[str, Any]) -> None:
        super().__post_init__(state)
        model, config, axis = self.model, self.config, pipeline_mesh(self.mesh)
        assert axis is not None, "the mesh has no pipeline axis"
        self.stages = [stage for stage in model.stages if isinstance(stage, Stage)]
        self.dim, self.device, self.sizes = model.args.dim, torch.device(self.mesh.device_type), self.stages[0].sizes
        self.stage_group, self.stage_rank = axis.get_group(), axis.get_local_rank()
        self.dtype = torch_dtype(config.training.mixed_precision_param)
        self.schedule = get_schedule_class(config.parallelism.pipeline_parallel_schedule)
        self.rank_of = partial(rank_of_stage, parallelism=config.parallelism)
        self.last_rank = self.rank_of(len(self.sizes) - 1)
        self.has_metrics = config.training.loss is not None or config.training.multi_token_weight > 0
        """Whether the loss has metrics that only the last stage knows."""
        self.is_alone = dist.get_backend(self.stage_group) == "fake"
        """Whether the other ranks do not exist, as in a plan."""
        logger.info(f"stages   of {', '.join(map(str, self.sizes))} blocks")
        self.tensor_ranks = tensor_ranks(self.mesh) if split_blocks(model) else None
        """Ranks that have different tokens between blocks."""
        self.own_counters, self.end_own_step = model.counters, model.end_step
        model.counters, model.end_step = self.counters, self.end_step
        model.forward = self.evaluate  # pyright: ignore[reportAttributeAccessIssue]

    def accumulate(self, batches: Sequence[Batch], on_phase: OnPhase) -> TokenLoss:
        """Add up the gradients of the micro-batches. Ranks without the last stage return zeros."""
        self.valid_tokens, self.on_phase = count_valid_tokens(batches, self.group), on_phase
        # A teacher is refused.
        self.inputs = [model_arguments(batch, self.loss_function, {}) for batch in batches]
        self.factor = self.loss_factor(self.valid_tokens, micro_batches=len(batches))
        self.means: list[MeanParts] = []
        self.begun = {stage.number: 0 for stage in self.stages}
        places = torch.empty(len(batches))  # of what is split: each stage knows which micro-batch is next
        first = (places,) if self.rank_of(0) == self.stage_rank else ()
        schedule = self._schedule(len(batches), *self.inputs[0][0].shape)
        try:
            schedule.step(*first, target=places, return_outputs=False)
        except RuntimeError as error:  # the schedule wraps what a stage raises
            raise error.__cause__ or error from None
        self.finish_updates()
        zeros = torch.zeros(2, device=self.device)
        nothing = MeanParts(zeros, dict.fromkeys(self._names_of_metrics(), zeros[0]))
        return stacked(self.means or [nothing] * len(batches))

    @cache  # noqa: B019 (as long as the run)
    def _names_of_metrics(self) -> list[str]:
        """Return the names of the metrics of the loss, which the first step knows where the last stage is."""
        names = [[*self.means[0].metrics] if self.means else []]
        if self.has_metrics and not self.is_alone:
            dist.broadcast_object_list(names, group=self.stage_group, group_src=self.last_rank, device=self.device)
        return names[0]

    def counters(self) -> list[Tensor]:
        """Return the counters of the whole model, which ranks add up: zeros where other ranks have the blocks."""
        own = iter(self.own_counters())
        return [
            next(own) if is_own else torch.zeros(shape, device=self.device) for shape, is_own in self.stages[0].counters
        ]

    def end_step(self, taken: Tensor) -> dict[str, Tensor]:
        """See `Model.end_step`. Of each metric, all ranks return the largest value of a stage."""
        own, names = self.end_own_step(taken), self.stages[0].metrics
        if not names:
            return {}
        least = torch.full((), -math.inf, device=self.device)
        values = torch.stack([own.get(name, least) for name in names])
        dist.all_reduce(values, dist.ReduceOp.MAX, group=self.stage_group)
        return dict(zip(names, values, strict=True))

    @cache  # noqa: B019 (as long as the run)
    def _schedule(self, micro_batches: int, *shape: int) -> Any:
        """Return the schedule for micro-batches whose tokens have a shape."""
        hidden = self._empty_hidden(*shape, device=torch.device("meta")).requires_grad_()
        place, loss = torch.empty(1, device="meta"), torch.empty((), device="meta", requires_grad=True)
        stages = []
        for module in self.stages:
            stage = _Stage(
                module, module.number, len(self.sizes), self.device, group=self.stage_group,
                input_args=hidden if module.number else place,
                output_args=hidden if not module.is_last else loss,
                dw_builder=_full_backward if module.is_last else None,
            )  # fmt: skip
            stage.compute, stage.is_alone = self.forward, self.is_alone
            stages.append(stage)
        made_of: Any = stages[0] if issubclass(self.schedule, PipelineScheduleSingle) else stages
        return self.schedule(made_of, micro_batches, loss_fn=lambda loss, _: loss, scale_grads=False)

    def _empty_hidden(self, size: int, length: int, *pair: int, device: torch.device) -> Tensor:
        """Return hidden states as they are sent, without values; with embeddings of next tokens if tokens are pairs."""
        part = length // (self.tensor_ranks.ranks if self.tensor_ranks else 1)
        return torch.empty(size, part, *pair, self.dim, dtype=self.dtype, device=device)

    def forward(self, stage: Stage, hidden_BLD: Tensor) -> Tensor:
        """Return the hidden states of the next micro-batch behind a stage; of the last one, its loss for backward."""
        number = self.begun[stage.number]
        self.begun[stage.number] += 1
        tokens, arguments = self.inputs[number]
        self.on_phase(Phase.FORWARD)
        out = stage(self._whole_tokens(hidden_BLD) if stage.number else tokens, **arguments)
        if stage.is_last:
            loss = checked_loss(out)
            self.means.append(MeanParts.of(loss, self.valid_tokens))
            out = loss.total * self.factor
        if out.requires_grad:  # not if all up to here is frozen
            out.register_hook(lambda _: self.on_phase(Phase.BACKWARD))
        return out

    def _whole_tokens(self, hidden_BLD: Tensor) -> Tensor:
        """Return the hidden states of all tokens, of which the first block takes this rank's part again."""
        return self.tensor_ranks.join(hidden_BLD) if self.tensor_ranks else hidden_BLD

    def evaluate(self, tokens: Tensor, **arguments: Any) -> Any:
        """Forward of the model without gradients: through all stages -> the result of the last one, on every rank."""
        out, result = tokens, [None]
        for stage in self.stages:
            if stage.number and (source := self.rank_of(stage.number - 1)) != self.stage_rank:
                out = self._empty_hidden(*tokens.shape, device=self.device)
                dist.recv(out, group=self.stage_group, group_src=source)
            out = stage(self._whole_tokens(out) if stage.number else tokens, **arguments)
            if stage.is_last:
                result = [_each(out, Tensor.cpu)]
            elif (target := self.rank_of(stage.number + 1)) != self.stage_rank:
                dist.send(out.contiguous(), group=self.stage_group, group_dst=target)
        dist.broadcast_object_list(result, group=self.stage_group, group_src=self.last_rank, device=self.device)
        return _each(result[0], lambda tensor: tensor.to(self.device))


def _each(result: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return the result of a head, a tensor or a `TokenLoss`, with each tensor changed."""
    if isinstance(result, Tensor):
        return change(result)
    metrics = {name: change(metric) for name, metric in result.metrics.items()}
    return TokenLoss(change(result.total), change(result.cross_entropy), metrics)


def _full_backward() -> Callable[[], None]:
    """Compute gradients of weights with those of hidden states, and nothing later: the loss has both at once."""
    return lambda: None
