"""Sequences in as many parts as the largest context degree has ranks, whichever process computes them.

A part has the tokens that one of `debug.reproducible_context_degree` ranks would have, see `SequencePart`. A process
with several of them has each as a sequence of its own: the first parts of a micro-batch, then the second ones. It calls
layers, attention and the loss once for each part, as the ranks of the largest degree would. Sums over parts are made in
the tree, whose lowest bits are the number of the part: gradients of parameters by `sums.copies`, those of keys and
values by `_GatherParts`, and losses as integers.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.func import functional_call

from titanlite.loss import LossFunction, TokenLoss
from titanlite.mesh import context_group
from titanlite.models.base import Model, head_of, unique_parameters
from titanlite.ops.attention import AttentionMask, Boundaries, Scores, SequencePart
from titanlite.ops.kernels import Kernels, set_key_source
from titanlite.runtime.errors import UserError
from titanlite.runtime.private_torch.process_groups import all_gather, exchange_rows
from titanlite.techniques.context.sequences import attend_to, by_rank, in_order, part_of
from titanlite.techniques.reproducible import sums
from titanlite.techniques.reproducible.sums import copies


def compute_by_parts(model: Model, mesh: DeviceMesh, *, parts: int, dtype: torch.dtype) -> None:
    """Let a model compute this rank's parts of each sequence one by one, in place.

    Args:
        parts: of a sequence, over all ranks.
        dtype: in which gradients are added, `training.mixed_precision_reduce`.
    """
    part = part_of(mesh, parts)
    set_key_source(model, KeysOfParts(part, context_group(mesh), dtype))
    for _, layer in layers_of_tokens(model):
        _split(layer, part.computed, dtype)


def layers_of_tokens(model: Model) -> Iterator[tuple[str, nn.Module]]:
    """Yield the largest modules with parameters that compute each token alone, by name. A head calls the loss, which is
    split by `loss_by_parts`, so that its layers are yielded."""
    head, found = head_of(model), tuple[str, ...]()
    for name, module in model.named_modules():
        is_within = any(name.startswith(f"{other}.") for other in found)
        if is_within or module is head or not any(True for _ in module.parameters()):
            continue
        if not any(child is head or hasattr(child, "key_source") for child in module.modules()):
            found += (name,)
            yield name, module


class _Own(nn.Module):
    """A layer with its own forward, which `functional_call` can give other parameters."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.whole = layer, layer.forward

    def forward(self, x: Tensor) -> Tensor:
        return self.whole(x)


def _split(layer: nn.Module, parts: int, dtype: torch.dtype) -> None:
    own = _Own(layer)

    def forward(x: Tensor) -> Tensor:
        if parts == 1:  # gradients of x are added within each layer first, as those of several parts are
            return own(x.view_as(x))
        each = {f"layer.{name}": copies(parameter, parts, dtype) for name, parameter in layer.named_parameters()}
        of_parts = ({name: copy[number] for name, copy in each.items()} for number in range(parts))
        return torch.cat([functional_call(own, *pair) for pair in zip(of_parts, x.chunk(parts), strict=True)])

    layer.forward = forward


@dataclass(frozen=True)
class KeysOfParts:
    """`KeySource` of the parts of sequences. The ranks of a process group split them; None: this process has all."""

    part: SequencePart
    group: dist.ProcessGroup | None
    dtype: torch.dtype

    def attend(
        self,
        kernels: Kernels,
        q_BNLH: Tensor,
        k_BKLH: Tensor,
        v_BKLH: Tensor,
        mask: AttentionMask | None,
        scores: Scores,
    ) -> Tensor:
        """Attend to the keys and values of whole sequences, one part after the other."""
        count = self.part.computed
        assert mask is not None, "parts of sequences have positions"
        assert not isinstance(mask, Tensor | Boundaries), "parts of sequences have a mask for each chunk"
        masks = [mask[2 * number : 2 * number + 2] for number in range(count)]
        sinks = [None] * count if scores.sinks_N is None else copies(scores.sinks_N, count, self.dtype)
        both = _GatherParts.apply(torch.cat([k_BKLH, v_BKLH], dim=1), self.part, self.group)
        each = zip(q_BNLH.chunk(count), both, masks, sinks, strict=True)
        return torch.cat([attend_to(kernels, q, keys, m, scores._replace(sinks_N=s)) for q, keys, m, s in each])


class _GatherParts(torch.autograd.Function):
    """Sequences of all parts in the order of tokens, once for each part of this rank. Their gradients are added in the
    tree, over the parts of a rank and over ranks."""

    @staticmethod
    def forward(ctx: Any, x_BJLH: Tensor, part: SequencePart, group: dist.ProcessGroup | None) -> tuple[Tensor, ...]:
        ctx.part, ctx.group = part, group
        if group:
            x_BJLH = all_gather(x_BJLH, group.size(), group.group_name)
        whole_BJSH = in_order(x_BJLH.unflatten(0, (part.ranks, -1)))
        return tuple(whole_BJSH.view_as(whole_BJSH) for _ in range(part.computed))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        total = by_rank(sums.add_in_tree(gradients), ctx.part.ranks).flatten(0, 1)
        if ctx.group:
            ranks = ctx.group.size()
            rows = [len(total) // ranks] * ranks
            total = sums.tree_sum(exchange_rows(total, rows, rows, ctx.group.group_name).unflatten(0, (ranks, -1)))
        return total, None, None


def loss_by_parts(loss: LossFunction, parts: int, dtype: torch.dtype) -> LossFunction:
    """Return a loss function whose sums are those of each part: float32 [parts]."""

    def by_parts(hidden_BLD: Tensor, weight_VD: Tensor, /, *, labels_BL: Tensor) -> TokenLoss:
        each = zip(hidden_BLD.chunk(parts), copies(weight_VD, parts, dtype), labels_BL.chunk(parts), strict=True)
        found = [loss(hidden, weight, labels_BL=labels) for hidden, weight, labels in each]
        metrics = {name: torch.stack([loss.metrics[name] for loss in found]) for name in found[0].metrics}
        total, cross_entropy = [loss.total for loss in found], [loss.cross_entropy for loss in found]
        return TokenLoss(torch.stack(total), torch.stack(cross_entropy), metrics)

    return by_parts


def check_parts(model: Model) -> None:
    """Check that the gradient of each parameter can be added over parts of sequences.

    Raises:
        UserError: it cannot.
    """
    owners: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owners.setdefault(parameter, []).append(name)
    refused = "is refused with debug.reproducible_context_degree above 1"
    if shared := next((names for names in owners.values() if len(names) > 1), None):
        raise UserError(f"{' and '.join(shared)}, one parameter of two layers, {refused}: set 1")
    added = {f"{layer}.{name}" for layer, module in layers_of_tokens(model) for name, _ in module.named_parameters()}
    added |= {f"{name}.sinks" for name, module in model.named_modules() if hasattr(module, "key_source")}
    added |= {
        name for name, parameter in model.named_parameters() if parameter is getattr(head_of(model), "weight", None)
    }
    if left := next((name for name, _ in unique_parameters(model) if name not in added), None):
        raise UserError(f"{left}, a parameter outside of layers that compute single tokens, {refused}: set 1")
