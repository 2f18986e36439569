"""Float8 layers that tensor parallelism splits.

A tensor with one scale is scaled by its largest value. Where ranks have parts of it, that is the largest value of all
ranks, as on one process. Scales of rows need no such care: they are powers of two, so that the scale of a part of a row
rounds its values as the scale of the row does.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torchao.float8 import Float8LinearConfig
from torchao.float8.config import CastConfig, ScalingGranularity
from torchao.float8.distributed_utils import tensor_already_casted_to_fp8
from torchao.float8.float8_linear import Float8Linear, matmul_with_hp_or_float8_args
from torchao.float8.float8_training_tensor import GemmInputRole, LinearMMConfig, hp_tensor_and_scale_to_float8
from torchao.float8.float8_utils import amax_to_scale, tensor_to_amax

from titanlite.runtime.private_torch.process_groups import all_reduce


class SplitFloat8Linear(Float8Linear):
    """Float8 layer of which each rank of a process group has a part of the weight [out, in]."""

    split_dim: int
    """Dimension of the weight along which ranks have parts: of the output too (0), or of the input (1)."""
    group_name: str
    sum_over_ranks: Callable[[Tensor], Tensor] | None = None
    """As that of `titanlite.models.layers.Linear`."""

    def forward(self, input: Tensor) -> Tensor:
        weight, config, matmul, group = self.weight, self.config, self.linear_mm_config, self.group_name
        has_one_scale = config.cast_config_input.scaling_granularity is ScalingGranularity.TENSORWISE
        if has_one_scale and not tensor_already_casted_to_fp8(weight):  # not one that FSDP gathered in float8
            weight = _cast(weight, config.cast_config_weight, GemmInputRole.WEIGHT, matmul, group)
        if has_one_scale and self.split_dim == 1:
            input = _cast(input, config.cast_config_input, GemmInputRole.INPUT, matmul, group)
        out = matmul_with_hp_or_float8_args.apply(input, weight.t(), matmul, config)
        if has_one_scale and self.split_dim == 0:
            out = _CastGradient.apply(out, config.cast_config_grad_output, matmul, group)
        out = out if self.sum_over_ranks is None else self.sum_over_ranks(out)
        return out if self.bias is None else out + self.bias.to(out.dtype)


def split_float8_linear(
    linear: nn.Linear, config: Float8LinearConfig, *, split_dim: int, group_name: str
) -> SplitFloat8Linear:
    """Return the float8 layer with the parameters of a linear layer, which are still whole."""
    new = SplitFloat8Linear.from_float(linear, config)
    new.split_dim, new.group_name = split_dim, group_name
    return new


def _cast(x: Tensor, cast: CastConfig, role: GemmInputRole, matmul: LinearMMConfig, group_name: str) -> Tensor:
    """Return a part of a tensor in float8."""
    assert cast.target_dtype is not None
    scale = amax_to_scale(all_reduce(tensor_to_amax(x), "max", group_name), cast.target_dtype)
    return hp_tensor_and_scale_to_float8(x, scale, cast.target_dtype, matmul, role)


@torch.compiler.allow_in_graph
class _CastGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cast: CastConfig, matmul: LinearMMConfig, group_name: str) -> Tensor:
        ctx.options = cast, GemmInputRole.GRAD_OUTPUT, matmul, group_name
        return x

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return _cast(gradients[0], *ctx.options), None, None, None
