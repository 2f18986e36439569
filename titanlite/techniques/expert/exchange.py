"""Expert parallelism: neighbouring ranks have different experts, and send each other tokens (arXiv:2006.16668).

Each layer has three all-to-alls in forward, and as many in backward: the weights that tokens have for experts, the
tokens, and the results. A token is sent once to each rank that has some of its experts, which adds their outputs up and
sends the sum back (as DeepEP does, github.com/deepseek-ai/DeepEP). No token is dropped. How many tokens each rank sends
follows from the weights, and the host waits for the numbers, since they are sizes of tensors. Recomputation knows them.
A shared expert is computed while tokens are sent, and its gradients while theirs are.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from titanlite.models.base import NOT_CHOSEN, ComputeExperts, Model, TokenExchange, expert_layers
from titanlite.ops.copies import Copies, places
from titanlite.ops.kernels import Kernels
from titanlite.runtime.dtensor import sharded_axes
from titanlite.runtime.errors import UserError
from titanlite.runtime.private_torch.process_groups import exchange_rows, send_rows, wait_for_rows
from titanlite.runtime.recomputation import computed_once


@dataclass(frozen=True)
class SeparateUnits:
    """Modules whose parameters are sharded over other ranks than those of the units around them."""

    modules: Sequence[nn.Module]
    parameters: set[nn.Parameter]
    """Those of the modules. The modules may have further ones, which belong to the units around them."""
    mesh: DeviceMesh
    """For `fully_shard`."""
    placement: Callable[[Tensor], Shard]

    def shard(
        self, reshard_after_forward: bool, *, precision: MixedPrecisionPolicy, offload: OffloadPolicy
    ) -> list[FSDPModule]:
        """Make each module an FSDP unit, after the units around them."""
        return [
            fully_shard(
                module,
                mesh=self.mesh,
                reshard_after_forward=reshard_after_forward,
                shard_placement_fn=self.placement,
                mp_policy=precision,
                offload_policy=offload,
                ignored_params={*module.parameters()} - self.parameters,
            )
            for module in self.modules
        ]


def distribute_experts(
    model: nn.Module,
    *,
    mesh: DeviceMesh,
    parts: DeviceMesh,
    kernels: Kernels,
    is_compiled: bool,
    exchange: "Callable[[dist.ProcessGroup, Kernels], AllToAllExchange] | None" = None,
) -> SeparateUnits:
    """Give each rank its experts, in place: weights become DTensors, and layers exchange tokens.

    Args:
        mesh: for `fully_shard`: the ranks that have the same experts.
        parts: the axis of the ranks that have different ones, then that of ranks that split layers, if there is one.
        is_compiled: blocks are compiled afterwards. The exchange is not, as sizes of its tensors are values.
        exchange: makes it. Default: `AllToAllExchange`.

    Returns:
        the experts, which are yet to be sharded.
    """
    token_exchange: TokenExchange = (exchange or AllToAllExchange)(parts.get_group(0), kernels)
    if is_compiled:
        token_exchange = _Uncompiled(*map(torch.compiler.disable, (token_exchange.send, token_exchange.compute)))
    layers = expert_layers(model)
    for layer in layers:
        layer.exchange = token_exchange
        layer.drops_padding = exchange is None
        for name in layer.stacks:
            old = layer.get_parameter(name)
            placements = [Shard(0), *(old.placements if isinstance(old, DTensor) else ())]
            whole = torch.empty(old.shape, dtype=old.dtype, device="meta")
            part = distribute_tensor(whole, parts, placements, src_data_rank=None)
            layer.register_parameter(name, nn.Parameter(part, requires_grad=old.requires_grad))

    def placement(weight: Tensor) -> Shard:
        free = free_dims(weight.shape, taken=sharded_axes(weight).values(), ranks=parts.size(-1))
        return Shard(next(dim for dim, size in free.items() if size % mesh.size(-1) == 0))

    weights = {layer.get_parameter(name) for layer in layers for name in layer.stacks}
    return SeparateUnits(layers, weights, mesh, placement)


def free_dims(shape: torch.Size, *, taken: Collection[int | None], ranks: int) -> dict[int, int]:
    """Return the dims of a stack of experts that further ranks can shard, and the size of a rank's part along each.

    Args:
        taken: dims that other ranks shard. Only a stack of vectors is sharded twice along one dim.
        ranks: number of those, along each of these dims.
    """
    return {dim: size for dim, size in enumerate(shape) if dim and dim not in taken} or {1: shape[1] // ranks}


@dataclass
class _Uncompiled:
    """The functions of a `TokenExchange`, which the compiler leaves as they are."""

    send: Any
    compute: Any


@dataclass
class OnTheWay:
    """What `AllToAllExchange` goes on with. The compiler would look into a tuple, and compile for each number in it."""

    x: Tensor
    """Tokens of the experts of this rank, which are on their way."""
    gradients: list[Tensor]
    """Of the tokens, on their way back in backward."""
    weights: Tensor
    """Those of the tokens."""
    to_others: list[int]
    from_others: list[int]
    sent: Copies
    """Of the tokens of this rank, for other ranks."""
    copies: Any
    """Of the tokens that come, for experts."""


class AllToAllExchange:
    """Token exchange by plain all-to-alls; see `TokenExchange`.

    Args:
        group: ranks that have different experts, each as many, in the order of ranks.
    """

    def __init__(self, group: dist.ProcessGroup, kernels: Kernels) -> None:
        self.group = group
        self.kernels = kernels

    def send(self, x_TD: Tensor, weights_TE: Tensor, active: int) -> OnTheWay:
        weights_RTX = self.exchange_weights(weights_TE)  # R ranks, X experts of this one

        def find_places() -> tuple[list[int], list[int], Tensor, Copies, Copies]:
            is_sent_TR = (weights_TE != NOT_CHOSEN).unflatten(1, (len(weights_RTX), -1)).any(dim=2)
            is_chosen_RTX = weights_RTX != NOT_CHOSEN
            is_here_RT = is_chosen_RTX.any(dim=2)
            to_others, from_others, copies = self.kernels.read_counts(
                is_sent_TR.sum(dim=0), is_here_RT.sum(dim=1), is_chosen_RTX.sum(),
                tokens=len(x_TD), experts=weights_TE.shape[1], active=active,
            )  # fmt: skip
            here_U = places(is_here_RT.flatten(), sum(from_others))
            of_experts = Copies.of(is_chosen_RTX.flatten(0, 1).index_select(0, here_U), copies)
            return to_others, from_others, here_U, Copies.of(is_sent_TR, sum(to_others)), of_experts

        to_others, from_others, here_U, sent, copies = computed_once(find_places)
        weights_UX = weights_RTX.flatten(0, 1).index_select(0, here_U)
        return self.begin(sent.take(x_TD), weights_UX, to_others, from_others, sent, copies)

    def compute(self, sent: OnTheWay, stacks: Sequence[Tensor], compute: ComputeExperts) -> Tensor:
        x_UD, copies = self.end(sent), sent.copies
        own = [_own_experts(stack, self.group.size()) for stack in stacks]
        out_SD = compute(copies.take(x_UD), copies.values(sent.weights), copies.ends_N, own)
        return self.back(copies.add_up(out_SD), sent)

    def begin(self, x: Tensor, weights: Tensor, to_others: list[int], from_others: list[int], *copies: Any) -> OnTheWay:
        """Begin to send tokens; arguments as of `OnTheWay`."""
        gradients: list[Tensor] = []
        x = _Send.apply(x, to_others, from_others, self.group.group_name, gradients)
        return OnTheWay(x, gradients, weights, to_others, from_others, *copies)

    def end(self, sent: OnTheWay) -> Tensor:
        """Return the tokens of the experts of this rank, when they are here."""
        return _Wait.apply(sent.x, sent.to_others, sent.from_others, self.group.group_name, sent.gradients)

    def back(self, out: Tensor, sent: OnTheWay) -> Tensor:
        """Send results back, and return the sum of those of each token of this rank."""
        return sent.sent.add_up(exchange(out, sent.from_others, sent.to_others, self.group.group_name))

    def exchange_weights(self, weights_TE: Tensor) -> Tensor:
        """Return the weights [R, T, X] that the tokens of all ranks have for the experts of this one."""
        ranks = self.group.size()
        weights_RTX = weights_TE.unflatten(1, (ranks, -1)).transpose(0, 1)
        return exchange(weights_RTX, [1] * ranks, [1] * ranks, self.group.group_name)


def _own_experts(weight: Tensor, ranks: int) -> Tensor:
    """Return the weights of this rank's experts, with the gradient as FSDP averages it.

    The gradient has the tokens of several ranks already. FSDP divides by the number of ranks that it adds up, which is
    smaller by that factor than for other parameters.
    """
    own = weight.to_local() if isinstance(weight, DTensor) else weight.view_as(weight)
    if own.requires_grad:
        own.register_hook(lambda gradient: gradient * (1 / ranks))
    return own


def exchange(x: Tensor, to_others: list[int], from_others: list[int], name: str) -> Tensor:
    """`exchange_rows`, whose backward sends gradients back."""
    return _Exchange.apply(x, to_others, from_others, name)


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, to_others: list[int], from_others: list[int], name: str) -> Tensor:
        ctx.back = from_others, to_others, name
        return exchange_rows(x, to_others, from_others, name)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return exchange_rows(gradients[0], *ctx.back), None, None, None


class _Send(torch.autograd.Function):
    """Begins to send rows. Backward waits for the gradients that `_Wait` has begun to send.

    Autograd takes functions in reverse: what forward computes between the two, backward computes between them, too.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, to_others: list[int], from_others: list[int], name: str, gradients: list[Tensor]
    ) -> Tensor:
        ctx.gradients = gradients
        return send_rows(x, to_others, from_others, name)

    @staticmethod
    def backward(ctx: Any, *unsent: Tensor) -> tuple[Tensor | None, ...]:
        return wait_for_rows(ctx.gradients.pop()), None, None, None, None


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, received: Tensor, to_others: list[int], from_others: list[int], name: str, gradients: list[Tensor]
    ) -> Tensor:
        ctx.back, ctx.gradients = (from_others, to_others, name), gradients
        return wait_for_rows(received)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        ctx.gradients.append(send_rows(gradients[0], *ctx.back))
        return gradients[0], None, None, None, None


def check_experts(model: Model, degree: int, sharded: int, *, tensor: int = 1) -> None:
    """Check that several processes can have different experts of a model.

    Args:
        degree: divides `sharded`.
        sharded: processes that a replica's parameters are sharded over.
        tensor: processes that split the hidden dims of experts.

    Raises:
        UserError: they cannot.
    """
    layers = expert_layers(model)
    if not layers:
        raise UserError(f"needs a model with experts, and {type(model).__name__} has none: set 1")
    for layer in layers:
        hidden = layer.hidden_dims if tensor > 1 else ()
        for name, dim in zip_longest(layer.stacks, hidden):
            shape = layer.get_parameter(name).shape
            if shape[0] % degree:
                raise UserError(
                    f"{degree} does not divide the {shape[0]} experts of a layer: set a divisor of {shape[0]}"
                )
            sizes = free_dims(shape, taken={dim}, ranks=tensor).values()
            if all(size % (sharded // degree) for size in sizes):
                raise UserError(
                    f"{degree} leaves {sharded // degree} processes to share each expert, and no dim of "
                    f"{sorted(sizes)} is a multiple of that: set a higher degree"
                )
