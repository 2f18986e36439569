"""Tensor parallelism: several ranks compute one layer (Megatron-LM, arXiv:1909.08053).

A model's `tensor_plan` gives layers their roles. Weights become DTensors on the mesh's axis `tensor`, so that FSDP,
optimizers and checkpoints know the whole weight. The model itself computes with this rank's part of each weight, as
plain tensors: FSDP gathers those. Hooks of modules communicate activations. Between split modules each rank has a part
of the tokens (arXiv:2205.05198), or all of them, the same to the bit. Weights that are not split are the same, too.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Protocol, get_args, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, Shard

from titanlite.mesh import tensor_mesh
from titanlite.models.base import ExpertLayer, Model, TensorRole, head_of
from titanlite.models.layers import LayerOfHeads, Linear, RMSNorm
from titanlite.runtime.errors import UserError
from titanlite.runtime.private_torch.fsdp import gather_local_parts
from titanlite.runtime.private_torch.process_groups import all_gather, all_reduce, reduce_scatter

SPLIT_DIM: dict[TensorRole | None, int] = {"columns": 0, "rows": 1, "norm": 0, "vocabulary": 0}
"""Dimension of a weight [out, in] or [out] that a role splits."""


@dataclass(frozen=True)
class TensorRanks:
    """`SplitVocabulary`, and what else the ranks of a layer communicate."""

    rank: int
    ranks: int
    group_name: str

    def enter(self, x: Tensor) -> Tensor:
        """Return x, which is the same on all ranks. Its gradient is summed, since each rank has a part of it."""
        return _Communicate.apply(x, "keep", "total", self)

    def total(self, x: Tensor) -> Tensor:
        """Sum over ranks. The gradient of the sum is the same on all ranks, and passes unchanged."""
        return _Communicate.apply(x, "total", "keep", self)

    def mean(self, x: Tensor) -> Tensor:
        """Mean over ranks, which each rank uses for its part of what follows."""
        return self.enter(self.total(x)) / self.ranks

    def gather(self, x_BLD: Tensor) -> Tensor:
        """Return the tokens of all ranks. The gradient is summed, of this rank's tokens."""
        return _Communicate.apply(x_BLD, "gather", "sum", self)

    def sum_own(self, x_BLD: Tensor) -> Tensor:
        """Sum over ranks, of this rank's tokens. The gradient is gathered."""
        return _Communicate.apply(x_BLD, "sum", "gather", self)

    def own(self, x_BLD: Tensor) -> Tensor:
        """Return this rank's part of tokens that are the same on all ranks. The gradient is gathered."""
        return _Communicate.apply(x_BLD, "own", "gather", self)

    def join(self, x_BLD: Tensor) -> Tensor:
        """Return the tokens of all ranks, for what computes the same on each. The gradient is the same, too."""
        return _Communicate.apply(x_BLD, "gather", "own", self)

    def own_rows(self, x: Tensor) -> Tensor:
        """Return this rank's part of dim 0."""
        return x.chunk(self.ranks)[self.rank]

    def communicate(self, x: Tensor, what: str) -> Tensor:
        """Keep a tensor, or add it over ranks (total). Of tokens [B, L, D], gather those of all ranks, sum this rank's
        over ranks, or take this rank's own."""
        if what in ("keep", "total"):
            return x.view_as(x) if what == "keep" else all_reduce(x, "sum", self.group_name)
        if what == "own":
            return x.chunk(self.ranks, dim=1)[self.rank].contiguous()
        collective = all_gather if what == "gather" else reduce_scatter
        return collective(x.transpose(0, 1), self.ranks, self.group_name).transpose(0, 1).contiguous()

    def largest(self, x: Tensor) -> Tensor:
        """Return the largest values of any rank."""
        return all_reduce(x, "max", self.group_name)

    def place(self, tokens: Tensor, size: int) -> tuple[Tensor, Tensor]:
        """Return the places of tokens among this rank's `size` tokens of the vocabulary, and whether they are there.

        The place of any other token is 0.
        """
        local = tokens - self.rank * size
        is_here = (local >= 0) & (local < size)
        return local * is_here, is_here


class _Communicate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: str, backward: str, ranks: TensorRanks) -> Tensor:
        ctx.backward_with = ranks, backward
        return ranks.communicate(x, forward)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        ranks, backward = ctx.backward_with
        return ranks.communicate(gradients[0], backward), None, None, None


def tensor_ranks(mesh: DeviceMesh) -> TensorRanks | None:
    """Return the ranks that compute a layer together; None where each rank computes whole layers."""
    axis = tensor_mesh(mesh)
    return TensorRanks(axis.get_local_rank(), axis.size(), axis.get_group().group_name) if axis else None


def split_layers(model: Model, mesh: DeviceMesh) -> None:
    """Split the weights of a meta model by its plan, and let its modules communicate, in place.

    Other parameters become replicas on the axis. `use_local_parts` must follow `fully_shard`.
    """
    axis, ranks = tensor_mesh(mesh), tensor_ranks(mesh)
    if axis is None or ranks is None:
        return
    roles = roles_of(model)
    if blocks := split_blocks(model):
        take_own_tokens(blocks[0], ranks)
        for block in blocks:
            if count := getattr(block, "whole_inputs", 0):
                block.register_forward_pre_hook(_first_arguments(ranks.own, count))
        head = head_of(model)
        for module in filter(None, (head, getattr(head, "further_norm", None))):
            module.register_forward_pre_hook(_first_arguments(ranks.join))
    new: dict[nn.Parameter, nn.Parameter] = {}
    for name, module in model.named_modules():
        role, has_part = roles.get(name), _has_part_of_tokens(name, roles)
        dims = split_dims(module, role)
        for attribute, parameter in module.named_parameters(recurse=False):
            if parameter not in new:
                part = _part_of(parameter, axis, dims.get(attribute))
                new[parameter] = nn.Parameter(part, requires_grad=parameter.requires_grad)
            module.register_parameter(attribute, new[parameter])
        if role in ("split", "experts", "vocabulary") and not isinstance(module, nn.Embedding):
            module.register_forward_pre_hook(_first_arguments(ranks.gather if has_part else ranks.enter))
        total = ranks.sum_own if has_part else ranks.total
        if isinstance(module, ExpertLayer) and role == "experts":
            module.share_of_unsplit = 1 / ranks.ranks
        elif isinstance(module, LayerOfHeads) and role == "split":
            module.own_heads = ranks.own_rows
        if role == "rows" and _is_in(name, roles, "experts"):
            continue  # the output of the experts is summed
        if role == "rows" and isinstance(module, _AddsBias):
            module.sum_over_ranks = total
        elif role in ("rows", "experts"):
            module.register_forward_hook(_result(total))
        elif isinstance(module, RMSNorm) and role == "norm":
            module.mean_over_ranks = ranks.mean
        elif isinstance(module, nn.Embedding) and role == "vocabulary":
            _look_up_part(module, ranks)
        elif role == "vocabulary":  # for logits; the loss takes the weight alone
            module.register_forward_hook(_whole_logits(ranks))


@runtime_checkable
class _AddsBias(Protocol):
    """Layer that adds its bias after the sum over ranks."""

    sum_over_ranks: Callable[[Tensor], Tensor] | None


def take_own_tokens(block: nn.Module, ranks: TensorRanks) -> None:
    """Let a block that gets all tokens compute this rank's part of them."""
    block.register_forward_pre_hook(_first_arguments(ranks.own))


def _part_of(parameter: Tensor, axis: DeviceMesh, dim: int | None) -> DTensor:
    placement = Replicate() if dim is None else Shard(dim)
    part = parameter if dim is None else parameter.chunk(axis.size(), dim)[0].contiguous()
    assert parameter.is_meta
    return DTensor.from_local(
        part.detach(), axis, [placement], run_check=False, shape=parameter.shape, stride=parameter.stride()
    )


def _first_arguments(change: Callable[[Tensor], Tensor], count: int = 1) -> Callable[..., Any]:
    return lambda _module, args: (*map(change, args[:count]), *args[count:])


def _result(change: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
    return lambda _module, _args, out: change(out)


def _look_up_part(embedding: nn.Embedding, ranks: TensorRanks) -> None:
    """Let an embedding look up the tokens that this rank has. The sum over ranks has one term that is not 0."""
    size = embedding.num_embeddings // ranks.ranks
    found: list[Tensor] = []
    """Whether each token of the present call is here."""

    def before(_module: nn.Module, args: Any) -> Tensor:
        place, is_here = ranks.place(args[0], size)
        found[:] = [is_here]
        return place

    def after(_module: nn.Module, _args: Any, out: Tensor) -> Tensor:
        return ranks.total(out.masked_fill(~found.pop()[..., None], 0))

    embedding.register_forward_pre_hook(before)
    embedding.register_forward_hook(after)


def _whole_logits(ranks: TensorRanks) -> Callable[..., Tensor]:
    def hook(_module: nn.Module, _args: Any, logits: Tensor) -> Tensor:
        size = logits.shape[-1]
        return ranks.total(F.pad(logits, (ranks.rank * size, (ranks.ranks - 1 - ranks.rank) * size)))

    return hook


def use_local_parts(model: Model, mesh: DeviceMesh) -> None:
    """Let the modules of a model that FSDP shards compute with plain tensors, in place.

    Weights that are not split get gradients of each rank's part: of heads in a split module, of tokens elsewhere in a
    block. These are summed over the axis. The bias of rows without parts of tokens has the same gradient on each rank.
    """
    if (ranks := tensor_ranks(mesh)) is None:
        return
    roles = roles_of(model)
    summed: dict[tuple[nn.Module, str], Callable[[Tensor], Tensor]] = {
        (module, attribute): ranks.total
        for name, module in model.named_modules()
        if _has_part_of_tokens(name, roles) or (is_in_split(name, roles) and roles.get(name) != "rows")
        for attribute, _ in module.named_parameters(recurse=False)
        if attribute not in split_dims(module, roles.get(name))
    }
    for unit in model.modules():
        if isinstance(unit, FSDPModule):
            gather_local_parts(unit, gradient_hooks=summed)


def roles_of(model: Model) -> dict[str, TensorRole]:
    """Return the roles of modules by name: of each, that of the first pattern of the plan that matches."""
    found = ((name, pattern) for name, _ in model.named_modules() for pattern in model.tensor_plan)
    roles: dict[str, TensorRole] = {}
    for name, pattern in found:
        if fnmatchcase(name, pattern):
            roles.setdefault(name, model.tensor_plan[pattern])
    return roles


def split_dims(module: nn.Module, role: TensorRole | None) -> dict[str, int]:
    """Return the dimension that a role splits of each of a module's own parameters, for those that it splits."""
    if isinstance(module, ExpertLayer) and role == "experts":
        dims = zip(module.stacks, module.hidden_dims, strict=True)
        return {stack: dim for stack, dim in dims if dim is not None}
    parameters = module.named_parameters(recurse=False)
    if isinstance(module, LayerOfHeads) and role == "split":
        return {name: 0 for name, _ in parameters if name in module.of_heads}
    dim = SPLIT_DIM.get(role)
    return {} if dim is None else {name: dim for name, parameter in parameters if dim < parameter.ndim}


def column_shards(model: Model, sharded: int) -> Iterator[str]:
    """Yield the names of parameters that the ranks of a layer split by columns, or whose columns FSDP then shards.

    Args:
        sharded: ranks that FSDP shards over.
    """
    modules = dict(model.named_modules())
    for name, role in roles_of(model).items():
        for attribute, dim in split_dims(modules[name], role).items():
            shape = modules[name].get_parameter(attribute).shape
            if dim or (sharded > 1 and len(shape) > 1 and shape[1] % sharded == 0):
                yield f"{name}.{attribute}"


def split_blocks(model: Model) -> list[nn.Module]:
    """Return the blocks between whose split modules the ranks of a layer have different tokens: all, or none."""
    return [*model.layers] if "tokens" in roles_of(model).values() else []


def count_output_replicas(model: Model, mesh: DeviceMesh) -> dict[nn.Module, int]:
    """Return how many ranks compute the same output, for each module where there are several."""
    axis = tensor_mesh(mesh)
    return dict.fromkeys({*model.modules()} - {*split_blocks(model)}, axis.size()) if axis else {}


def _has_part_of_tokens(name: str, roles: dict[str, TensorRole]) -> bool:
    """Return whether a module is in a list of blocks whose tokens are split."""
    return any(role == "tokens" and name.startswith(f"{blocks}.") for blocks, role in roles.items())


def is_in_split(name: str, roles: dict[str, TensorRole]) -> bool:
    """Return whether a module is a split one, or is inside of one."""
    return _is_in(name, roles, "split", "experts")


def _is_in(name: str, roles: dict[str, TensorRole], *around: TensorRole) -> bool:
    """Return whether a module, or one around it, has one of some roles."""
    parts = name.split(".")
    return any(roles.get(".".join(parts[:end])) in around for end in range(1, len(parts) + 1))


# Checks of a model's table for tensor parallelism, and of the sizes that ranks split.


ROLES: tuple[str, ...] = get_args(TensorRole)
VOCABULARY = "tokens of the vocabulary"


def check_tensor(model: Model, degree: int, *, seq_len: int = 0) -> None:
    """Check that ranks can split the layers of a model on the meta device.

    Args:
        seq_len: tokens of a sequence that a rank computes.

    Raises:
        UserError: they cannot.
    """
    cls, name = type(model), type(model).__name__
    if not model.tensor_plan:
        raise UserError(f"needs a model with a tensor_plan, and {name} has none (docs/add_a_model.md): set 1")
    if vars(cls).get("draws_random", True):
        raise UserError(
            f"the blocks of {name} may draw random numbers, which ranks would draw differently: set draws_random = "
            "False in the class if they draw none, or set 1"
        )
    if (problem := next(_problems(model), None)) is not None:
        raise UserError(f"{name}.tensor_plan: {problem}")
    if split_blocks(model) and seq_len % degree:
        raise UserError(f"{degree} does not divide the {seq_len:,} tokens of a sequence: set another training.seq_len")
    for what, size in _sizes(model):
        if size % degree:
            near = max(other for other in range(1, degree + 1) if size % other == 0)
            fix = f"set model.args.vocab_size = {-(-size // degree) * degree}" if what == VOCABULARY else f"set {near}"
            raise UserError(f"{degree} does not divide the {size:,} {what}: {fix}")


def _sizes(model: Model) -> Iterator[tuple[str, int]]:
    """Yield what is split, and into how many pieces at most."""
    for name, role in roles_of(model).items():
        module = model.get_submodule(name)
        if role == "split" and isinstance(module, LayerOfHeads):
            yield from ((f"{kind} heads of {name}", number) for kind, number in module.heads().items())
        elif role == "vocabulary":
            yield VOCABULARY, next(module.parameters()).shape[0]
        elif isinstance(module, ExpertLayer):
            for stack, dim in split_dims(module, role).items():
                yield f"hidden dims of the experts of {name}", module.get_parameter(stack).shape[dim]
        elif isinstance(module, nn.Linear):
            yield f"{role} of {name}", module.out_features if role == "columns" else module.in_features


def _problems(model: Model) -> Iterator[str]:
    """Yield the mistakes of a plan."""
    roles = roles_of(model)
    for pattern, role in model.tensor_plan.items():
        if role not in ROLES:
            yield f"{pattern} has the unknown role {role!r}: choose {', '.join(ROLES[:-1])} or {ROLES[-1]}"
        if not any(fnmatchcase(name, pattern) for name, _ in model.named_modules()):
            yield f"{pattern} matches no module"
    in_head = {*head_of(model).modules()}
    if not any(role == "vocabulary" and model.get_submodule(name) in in_head for name, role in roles.items()):
        yield "no layer of the head, the last child, is vocabulary"
    for name, role in roles.items():
        module = model.get_submodule(name)
        if isinstance(module, nn.Embedding) and role == "vocabulary":
            if module.padding_idx is not None or module.max_norm is not None:
                yield f"{name} has a padding_idx or max_norm, which cannot be split"
        elif role == "tokens":
            if module is not model.layers:
                yield f"{name} is not the model's layers, whose tokens alone can be split"
        elif role == "experts":
            if not isinstance(module, ExpertLayer) or len(module.hidden_dims) != len(module.stacks):
                yield f"{name} is no ExpertLayer with a dim in hidden_dims for each of its stacks"
        elif role == "norm":
            if not isinstance(module, RMSNorm):
                yield f"{name} is a {type(module).__name__}, and norm is for titanlite.models.layers.RMSNorm"
        elif role != "split" and not isinstance(module, nn.Linear):
            yield f"{name} is a {type(module).__name__}, and {role} is for linear layers"
        elif role == "rows" and not isinstance(module, Linear) and module.bias is not None:
            yield f"{name} has a bias, which each rank would add: use titanlite.models.layers.Linear"
        elif role == "rows" and module.bias is not None and _is_in(name, roles, "experts"):
            yield f"{name} has a bias, which each rank would add: leave it out in experts"
        if role in ("columns", "rows", "norm") and not is_in_split(name, roles):
            yield f"{name} is in no module that is split, so that gradients would be wrong: add the module around it"
