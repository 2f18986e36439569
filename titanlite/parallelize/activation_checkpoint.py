# pyright: reportUnknownVariableType=false
"""Activation checkpointing (arXiv:1604.06174): recompute activations in backward instead of keeping them."""

from collections.abc import Collection, Iterator, Sequence
from functools import partial
from typing import Any, Literal

from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from titanlite.models.base import Model, added_parameters, exchanges_tokens, expert_layers, vector_names
from titanlite.runtime.private_torch.tensors import ATTENTION_OPERATORS, local_tensor
from titanlite.schema import ActivationCheckpoint

RecomputePolicy = Literal["none", "op", "full"]
"""Part of a block that backward recomputes: nothing; all but attention and every other matmul; or all."""
FURTHER_ATTENTION = {"torch_attn::_varlen_attn", "titanlite::attend_in_tiles"}
"""Further operators of attention by name. They exist once something imports them."""
MATMUL_OPS = {"aten::mm", "aten::_scaled_mm", "aten::_grouped_mm", "titanlite::grouped_mm"}


def recompute_policies(config: ActivationCheckpoint, blocks: int) -> list[RecomputePolicy]:
    """Return the policy of each block, in the order of the model."""
    if config.mode != "selective":
        return [config.mode] * blocks
    if (every_nth := config.selective_ac_option) == "op":
        return ["op"] * blocks
    return ["none" if index % every_nth else "full" for index in range(blocks)]


def apply_activation_checkpoint(
    model: Model, policies: Sequence[RecomputePolicy], *, is_compiled: bool = False
) -> None:
    """Checkpoint the blocks, in place, each by its policy.

    Args:
        is_compiled: the blocks are compiled afterwards.
    """
    draws_random = vars(type(model)).get("draws_random", True)  # of a base class, a subclass may have added dropout
    for block, policy in zip(model.layers, policies, strict=True):
        if policy == "none":
            continue
        contexts, exchanges = None, exchanges_tokens(block)
        if policy == "op":
            adapters, vectors = added_parameters(block), vector_names(block)
            own = [
                local_tensor(parameter)
                for name, parameter in block.named_parameters()
                if name not in {*adapters, *vectors}
            ]
            wide = sum(not _is_narrow(weight.mT if weight.ndim == 2 else weight) for weight in own)
            contexts = partial(
                _save_expensive_ops,
                saves_first=is_compiled or wide % 2 == 0,
                cheap={*(tuple(adapter.mT.shape) for adapter in adapters.values()), *_shapes_of_vectors(block)},
                in_parts=is_compiled and exchanges,
            )
        # Blocks that exchange tokens are compiled in parts, and not around these contexts.
        if exchanges or (expert_layers(block) and not is_compiled):
            from titanlite.runtime.recomputation import remembering

            contexts = partial(remembering, contexts)
        _checkpoint(block, preserve_rng_state=draws_random, **({"context_fn": contexts} if contexts else {}))


def _checkpoint(block: nn.Module, **options: Any) -> None:
    """Checkpoint a block by its own forward, so that no wrapper shows in parameter names.

    The new forward is a function and not a `partial`: the compiler starts at `forward`, and would skip `checkpoint`.
    """
    whole_forward = block.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(whole_forward, *args, use_reentrant=False, **options, **kwargs)

    block.forward = forward


def _save_expensive_ops(**options: Any) -> Any:
    return create_selective_checkpoint_contexts(_SaveExpensiveOps(**options))


def _is_narrow(weight: Tensor) -> bool:
    """Return True if the outputs of a weight [..., in, out] have at most a quarter of its inputs' size."""
    return 4 * weight.shape[-1] <= weight.shape[-2]


def _shapes_of_vectors(block: nn.Module) -> Iterator[tuple[int, ...]]:
    """Yield the shapes of the matrices that experts make of stacks of vectors."""
    for layer in expert_layers(block):
        for stack in (local_tensor(layer.get_parameter(name)) for name in layer.stacks):
            if stack.ndim == 2:
                yield len(stack), layer.rows_of_vectors, stack.shape[1]


class _SaveExpensiveOps:
    """Policy of `op`: keep attention and every other wide matmul, and recompute the rest.

    Attention is expensive and keeps little. Of the wide matmuls, every second one is a fair trade, as in torchtitan.
    The narrow ones are those of keys and values that query heads share: small kernels to recompute. Backward does not
    need a block's last matmul, which is added to the residual stream. The compiler does not keep it; without one, the
    counting starts so that it is not kept. Forward and recomputation count separately, so that both decide alike.

    Args:
        saves_first: keep the first wide matmul, and so the last of an odd number.
        cheap: shapes of adapters [in, out], and of experts' biases. Their matmuls are recomputed, and not counted.
        in_parts: parts of the block are compiled, whose own matmuls cannot be kept, and are not counted.
    """

    def __init__(self, *, saves_first: bool, cheap: Collection[tuple[int, ...]] = (), in_parts: bool = False) -> None:
        self.cheap = cheap
        self.ops = MATMUL_OPS - {"aten::mm", "aten::_scaled_mm"} if in_parts else MATMUL_OPS
        self.matmuls = dict.fromkeys((False, True), 0 if saves_first else 1)

    def __call__(self, ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if op in ATTENTION_OPERATORS or op.name() in FURTHER_ATTENTION:
            return CheckpointPolicy.MUST_SAVE
        if op.name() in self.ops and not _is_narrow(args[1]) and tuple(args[1].shape) not in self.cheap:
            self.matmuls[ctx.is_recompute] += 1
            if self.matmuls[ctx.is_recompute] % 2:
                return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE
