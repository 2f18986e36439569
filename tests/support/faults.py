"""Mistakes of parallel training that other programs had, planted in ours: each must turn a cell of the matrix red.

The kinds are those of NVIDIA/Megatron-LM#7452 and of its neighbours: sums over a part of the vocabulary, means over a
process's own tokens, gradients that are not summed or twice, norms that count a parameter not at all or twice, data of
other processes in recomputation, and buffers that a resume does not bring back.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from pkgutil import resolve_name
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support.planted import HalfGradient
from titanlite.batch import IGNORE, Batch
from titanlite.models.multi_token import LossOfTwo, look_ahead
from titanlite.runtime.private_torch.tensors import is_in_backward, local_tensor
from titanlite.step import Step


class Fault(NamedTuple):
    """Args:
    cell: of the matrix, which it turns red: a row and a layout.
    place: of what is replaced.
    wrong: makes what stands for it, given what is right.
    """

    cell: tuple[str, str]
    place: str
    wrong: Callable[[Any], Any]

    def planted(self) -> AbstractContextManager[Any]:
        return patch(self.place, self.wrong(resolve_name(self.place)))


def softmax(total: Callable[[Any, Tensor], Tensor]) -> Callable[[Any], Any]:
    """Sum [what each token's softmax divides by, the logits of labels] over the parts of the vocabulary in this way."""

    def wrong(right: Any) -> Any:
        def compute(*args: Any, vocabulary: Any = None, **options: Any) -> Any:
            other = vocabulary and SimpleNamespace(
                place=vocabulary.place, largest=vocabulary.largest, total=lambda x: total(vocabulary, x)
            )
            return right(*args, vocabulary=other, **options)

        return compute

    return wrong


def counted(replicas: int, *names: str) -> Callable[[Any], Any]:
    """Count parameters of these names as if so many processes had each part, in the norm of gradients."""

    def wrong(right: Any) -> Any:
        return lambda model, ranks: (
            right(model, ranks)
            | {parameter: replicas for name, parameter in model.named_parameters() if name.endswith(names)}
        )

    return wrong


def batches(change: Callable[[Batch], Batch], *, after: bool = True) -> Callable[[Any], Any]:
    """Change the batches of processes that split sequences, after or before they are split."""
    if after:
        return lambda right: lambda batch, part: change(right(batch, part))
    return lambda right: lambda batch, part: right(change(batch), part)


def from_zero(batch: Batch) -> Batch:
    return batch | {"positions": torch.arange(batch["tokens"].shape[1]).expand_as(batch["positions"])}


def without_ends(batch: Batch) -> Batch:
    labels = batch["labels"].clone()
    labels[:, [labels.shape[1] // 2 - 1, -1]] = IGNORE
    return batch | {"labels": labels}


def without_documents(batch: Batch) -> Batch:
    return {name: batch[name] for name in ("tokens", "labels")}


def own_tokens(right: Any) -> Any:
    return lambda batches, group: sum((batch["labels"] != IGNORE).sum() for batch in batches) * group.size()


def exchanged_chunks(right: Any) -> Any:
    def in_order(ranks_RBJLH: Tensor) -> Tensor:
        found = right(ranks_RBJLH)
        return found.flip(2) if is_in_backward() else found

    return in_order


def halved(right: Any) -> Any:
    def route(self: Any, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        weights_TK, chosen_TK = right(self, *inputs)
        return HalfGradient.apply(weights_TK), chosen_TK

    return route


def own_balance(right: Any) -> Any:
    def before(self: Any, factor: Tensor, valid_tokens: Tensor, add: Any) -> None:
        right(self, factor, valid_tokens, lambda sums: sums.mul_(add.keywords["group"].size()))

    return before


def balanced_by_each(right: Any) -> Any:
    def before(self: Any, *args: Any) -> None:
        right(self, *args)
        for layer in self.experts():
            layer.balance_E.data.div_(layer.share_of_unsplit)

    return before


def own_norm(right: Any) -> Any:
    def clip(gradients: Any, optimizer: Any, *, norm: Tensor, max_norm: float) -> None:
        own = torch.stack([gradient.norm() for gradient in gradients]).norm()
        right(gradients, optimizer, norm=own, max_norm=max_norm)

    return clip


def new_buffers(right: Any) -> Any:
    def load(self: Any) -> Any:
        progress = right(self)
        self.state.model.init_buffers()
        return progress

    return load


def begun_anew(right: Any) -> Any:
    def begin(self: Any) -> None:
        self.tensors["begun"].zero_()
        right(self)

    return begin


def on_rank_0_only(right: Any) -> Any:
    return lambda progress, *rest: progress if torch.distributed.get_rank() else right(progress, *rest)


def summed_again(right: Any) -> Any:
    joins = []

    def change_first(change: Any, count: int = 1) -> Any:
        joins.extend([change] * (change.__name__ == "join"))
        is_of_further = len(joins) == 2 and change is joins[-1]  # the first one is of the head
        return right(change.__self__.gather if is_of_further else change, count)

    return change_first


def detached(right: Any) -> Any:
    def forward(self: Any, hidden: Tensor, loss: Any = None) -> Tensor:
        of_two = isinstance(loss, LossOfTwo)
        return right(self, hidden, replace(loss, next_BLD=loss.next_BLD.detach()) if of_two else loss)

    return forward


def used_twice(right: Any) -> Any:
    def forward(self: Any, stage: Any, hidden: Any) -> Any:
        if self.begun[stage.number] == 1:
            self.inputs = [self.inputs[0], self.inputs[0], *self.inputs[2:]]
        return right(self, stage, hidden)

    return forward


def in_the_order_of_ranks(right: Any) -> Any:
    def swap(x: Tensor, to_sequences: bool, size: int, name: str) -> Tensor:
        order = [chunk for rank in range(size) for chunk in (rank, 2 * size - 1 - rank)]
        if to_sequences:
            return right(x, True, size, name).unflatten(2, (2 * size, -1))[:, :, order].flatten(2, 3)
        inverse = sorted(range(2 * size), key=order.__getitem__)
        return right(x.unflatten(2, (2 * size, -1))[:, :, inverse].flatten(2, 3), False, size, name)

    return swap


def in_another_order(right: Any) -> Any:
    def kept(*args: Any) -> Any:
        *first, size, _, offset = args
        return right(*first, size, torch.empty(size, device="meta").stride(), offset)

    return kept


def one_document(documents: Any, part: Any) -> Any:
    ids_BS = documents.ids_BS
    return documents._replace(positions_BL=torch.arange(ids_BS.shape[1]).expand_as(ids_BS))


MOE, NEXT, FURTHER, TENSOR, CONTEXT, EXPERT = (
    "Qwen3-MoE",
    "Qwen3-Next",
    "DeepSeek-V3, two predicted tokens",
    *(f"titanlite.techniques.{module}." for module in ("tensor.layers", "context.sequences", "expert.exchange")),
)
FAULTS = {
    "the softmax divides by the sum of a process's own part of the vocabulary": Fault(
        ("OLMo 3", "t2"), "titanlite.ops.kernels.label_softmax_in_place",
        softmax(lambda ranks, x: torch.stack([x[0], ranks.total(x)[1]])),
    ),
    "each part of the vocabulary counts as often as there are processes: the loss has a logarithm more": Fault(
        ("OLMo 3", "t2"), "titanlite.ops.kernels.label_softmax_in_place",
        softmax(lambda ranks, x: ranks.total(x) * torch.tensor([2.0, 1.0]).view(2, 1, 1)),
    ),
    "the loss is a mean of means over each process's own tokens": Fault(
        ("Llama 3", "s2"), "titanlite.step.count_valid_tokens", own_tokens
    ),
    "recomputation reads the keys of other tokens": Fault(
        ("every block recomputed", "c2"), f"{CONTEXT}in_order", exchanged_chunks
    ),
    "gradients are reduced over shards and not over replicas": Fault(
        ("health of layers", "r2 s2"), "titanlite.parallelize.fsdp.sharding_mesh",
        lambda right: lambda mesh, **_: right(mesh, with_replicas=False),
    ),
    "gradients of sinks are left out of the norm": Fault(
        ("gpt-oss, all frozen but sinks", "t2"), "titanlite.step.count_parameter_replicas",
        counted(10**9, "sinks"),
    ),
    "the norm counts the experts of one process only": Fault(
        (MOE, "s2 e2"), "titanlite.step.count_parameter_replicas", counted(2, "w1", "w2", "w3")
    ),
    "the norm counts a whole parameter once for each process": Fault(
        ("OLMo 3", "t2"), "titanlite.step.count_parameter_replicas", counted(1, "norm.weight")
    ),
    "gradients of whole parameters are those of a process's own heads and tokens": Fault(
        ("OLMo 3", "t2"), f"{TENSOR}gather_local_parts", lambda right: lambda unit, gradient_hooks: right(
            unit, gradient_hooks={}
        ),
    ),
    "gradients of the router are scaled by the size of an axis": Fault(
        (MOE, "s2 e2"), "titanlite.models.experts.Experts.route", halved
    ),
    "gradients of experts are averaged over too few processes": Fault(
        (MOE, "s2 e2"), f"{EXPERT}_own_experts", lambda right: lambda weight, ranks: right(weight, 1)
    ),
    "experts are balanced by the tokens of a process": Fault(
        (MOE, "s2 e2"), "titanlite.step.reduce_over_ranks", lambda right: lambda *args, **options: right(
            *args[:2], [tensor.clone() for tensor in args[2]], **options
        ),
    ),
    "the balance loss is a mean of those of each process's own tokens": Fault(
        ("balance loss", "s2 e2"), "titanlite.models.experts.DecoderOfExperts.before_backward", own_balance
    ),
    "the gradient of the balance loss is added by each process of a layer": Fault(
        ("balance loss", "t2"), "titanlite.models.experts.DecoderOfExperts.before_backward", balanced_by_each
    ),
    "a tied weight has the gradient of the head alone": Fault(
        ("tied head", "s2"), "titanlite.models.layers.Embedding.forward",
        lambda right: lambda self, tokens: F.embedding(tokens, self.weight.detach()),
    ),
    "gradients are clipped by the norm of a process's own part": Fault(
        ("Llama 3", "s2"), "titanlite.step.clip", own_norm
    ),
    "each process numbers the tokens for dropout anew": Fault(
        ("dropout", "s2"), "titanlite.ops.dropout.draws_of_blocks",
        lambda right: lambda draws_BL, blocks: right(draws_BL - draws_BL.min(), blocks),
    ),
    "positions begin anew in the part of each process": Fault(
        ("Llama 3", "c2"), f"{CONTEXT}split_batch", batches(from_zero)
    ),
    "documents are forgotten where sequences are split": Fault(
        ("Llama 3", "c2"), f"{CONTEXT}split_batch", batches(without_documents, after=False)
    ),
    "channels of convolutions are those of a neighbour": Fault(
        (NEXT, "t2"), f"{TENSOR}TensorRanks.own_rows", lambda right: lambda self, x: right(self, x.roll(1, 1))
    ),
    "convolutions are those of another process's heads": Fault(
        (NEXT, "t2"), f"{TENSOR}TensorRanks.own_rows", lambda right: lambda self, x: right(self, x.flip(0))
    ),
    "a state goes through the chunks in the order of processes": Fault(
        (NEXT, "c2"), f"{CONTEXT}_swap", in_the_order_of_ranks
    ),
    "queries meet the keys of another group of heads": Fault(
        ("heads for tokens, SmolLM3", "c4"), f"{CONTEXT}repeat_heads",
        lambda right: lambda x, n_heads: x.repeat(1, n_heads // x.shape[1], 1, 1),
    ),
    "heads are in the order of another process": Fault(
        ("heads for tokens", "c2"), f"{CONTEXT}_swap", in_the_order_of_ranks
    ),
    "what comes back from the host is read in another order": Fault(
        ("activations on the host", "s2"), "titanlite.techniques.activations.host.Kept", in_another_order
    ),
    "a state goes on in the next document where sequences are split": Fault(
        (NEXT, "c2"), "titanlite.models.decoder.of_whole_sequences", lambda right: one_document
    ),
    "the last token of a chunk has no label": Fault(
        ("Llama 3", "c2"), f"{CONTEXT}split_batch", batches(without_ends)
    ),
    "the token after the next is looked for in a process's own chunks": Fault(
        (FURTHER, "c2"), f"{CONTEXT}split_batch", batches(look_ahead)
    ),
    "gradients of the token after the next are counted by each process of a layer": Fault(
        (FURTHER, "t2"), f"{TENSOR}_first_arguments", summed_again
    ),
    "the norm leaves out what joins the next token": Fault(
        (FURTHER, "t2"), "titanlite.step.count_parameter_replicas", counted(10**9, "join.weight")
    ),
    "stages pass on next tokens without their gradients": Fault(
        (FURTHER, "p2"), "titanlite.techniques.pipeline.stages.Passed.forward", detached
    ),
    "initial values follow the place in a process's own part": Fault(
        ("Llama 3", "s2"), "titanlite.parallelize.materialize.GlobalIndices",
        lambda right: lambda parameter: right(local_tensor(parameter)),
    ),
    "a resume makes buffers anew": Fault(
        ("stopped and resumed, experts", "s2 e2"), "titanlite.checkpoint.manager.CheckpointManager.load", new_buffers
    ),
    "a resume begins a round of the outer optimizer anew": Fault(
        ("an outer optimizer, stopped and resumed", "s2"), "titanlite.techniques.outer.optimizer.OuterOptimizer.begin",
        begun_anew,
    ),
    "a worker keeps its own weights": Fault(
        ("rounds of two workers", "r2 s2"),
        "titanlite.techniques.outer.optimizer.OuterOptimizer._mean_over_workers",
        lambda right: lambda self, weight: weight.float(),
    ),
    "a worker clips by the norm of all": Fault(
        ("rounds of two workers", "r2 s2"), "titanlite.techniques.outer.worker.WorkerStep.update",
        lambda right: Step.update,
    ),
    "a resume gives all workers the moments of one": Fault(
        ("rounds of two workers, stopped and resumed", "r2"), "titanlite.state.TrainingState.as_saved",
        lambda right: lambda self, state: state,
    ),
    "a process reads the sequences before a spike again": Fault(
        ("back over spikes", "s2"), "titanlite.rollback.after_rollbacks", on_rank_0_only
    ),
    "a stage reads a micro-batch twice": Fault(
        ("schedule 1F1B", "p2"), "titanlite.techniques.pipeline.passes.PipelineStep.forward", used_twice
    ),
}  # fmt: skip
