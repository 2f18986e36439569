"""Tensor parallelism: several ranks compute one layer (Megatron-LM, arXiv:1909.08053).

A model's `tensor_plan` gives layers their roles. Weights become DTensors on the mesh's axis `tensor`, so that FSDP,
optimizers and checkpoints know the whole weight. The model itself computes with this rank's part of each weight, as
plain tensors: FSDP gathers those. Hooks of modules communicate activations. The residual stream is the same on every
rank of the axis, to the bit, and so are the weights that are not split.
"""

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, Shard

from titanlite.kernels import Kernels
from titanlite.models.base import Model, head_of
from titanlite.models.experts import ExpertLayer
from titanlite.models.layers import Attention
from titanlite.models.tensor_plan import TensorRole
from titanlite.parallelize.mesh import shard_degree_of, tensor_mesh
from titanlite.runtime.dtensor import sharded_axes
from titanlite.runtime.errors import UserError
from titanlite.runtime.private_torch.collectives import all_reduce
from titanlite.runtime.private_torch.fsdp import gather_local_parts

SPLIT_DIM: dict[TensorRole | None, int] = {"columns": 0, "rows": 1, "vocabulary": 0}
"""Dimension of a weight [out, in] that a role splits."""
ROLES = "split", "columns", "rows", "experts", "vocabulary"
VOCABULARY = "tokens of the vocabulary"


@dataclass(frozen=True)
class TensorRanks:
    """`SplitVocabulary`, and what else the ranks of a layer communicate."""

    rank: int
    ranks: int
    group_name: str

    def enter(self, x: Tensor) -> Tensor:
        """Return x, which is the same on all ranks. Its gradient is summed, since each rank has a part of it."""
        return _Enter.apply(x, self.group_name)

    def total(self, x: Tensor) -> Tensor:
        """Sum over ranks. The gradient of the sum is the same on all ranks, and passes unchanged."""
        return _Total.apply(x, self.group_name)

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


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group_name: str) -> Tensor:
        ctx.group_name = group_name
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return all_reduce(gradients[0], "sum", ctx.group_name), None


class _Total(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group_name: str) -> Tensor:
        return all_reduce(x, "sum", group_name)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return gradients[0], None


def tensor_ranks(mesh: DeviceMesh) -> TensorRanks | None:
    """Return the ranks that compute a layer together; None where each rank computes whole layers."""
    axis = tensor_mesh(mesh)
    return TensorRanks(axis.get_local_rank(), axis.size(), axis.get_group().group_name) if axis else None


def split_vocabulary(kernels: Kernels, mesh: DeviceMesh) -> Kernels:
    """Return kernels whose loss gets a part of the vocabulary, where ranks of the mesh split it."""
    if (ranks := tensor_ranks(mesh)) is not None:
        kernels = copy.copy(kernels)
        kernels.vocabulary = ranks
    return kernels


def split_layers(model: Model, mesh: DeviceMesh) -> None:
    """Split the weights of a meta model by its plan, and let its modules communicate, in place.

    Other parameters become replicas on the axis. `use_local_parts` must follow `fully_shard`.
    """
    axis, ranks = tensor_mesh(mesh), tensor_ranks(mesh)
    if axis is None or ranks is None:
        return
    roles = roles_of(model)
    new: dict[nn.Parameter, nn.Parameter] = {}
    for name, module in model.named_modules():
        role = roles.get(name)
        dims = split_dims(module, role)
        for attribute, parameter in module.named_parameters(recurse=False):
            if parameter not in new:
                part = _part_of(parameter, axis, dims.get(attribute))
                new[parameter] = nn.Parameter(part, requires_grad=parameter.requires_grad)
            module.register_parameter(attribute, new[parameter])
        if role in ("split", "experts", "vocabulary") and not isinstance(module, nn.Embedding):
            module.register_forward_pre_hook(_entering(ranks))
        if role in ("rows", "experts"):
            module.register_forward_hook(lambda _module, _args, out: ranks.total(out))
        elif isinstance(module, nn.Embedding) and role == "vocabulary":
            module.forward = _lookup(module.forward, ranks, module.num_embeddings // ranks.ranks)
        elif role == "vocabulary":  # for logits; the loss takes the weight alone
            module.register_forward_hook(_whole_logits(ranks))


def _part_of(parameter: Tensor, axis: DeviceMesh, dim: int | None) -> DTensor:
    placement = Replicate() if dim is None else Shard(dim)
    part = parameter if dim is None else parameter.chunk(axis.size(), dim)[0].contiguous()
    assert parameter.is_meta
    return DTensor.from_local(
        part.detach(), axis, [placement], run_check=False, shape=parameter.shape, stride=parameter.stride()
    )


def _entering(ranks: TensorRanks) -> Callable[..., Any]:
    return lambda _module, args: (ranks.enter(args[0]), *args[1:])


def _lookup(whole: Callable[[Tensor], Tensor], ranks: TensorRanks, size: int) -> Any:
    """Return the forward of an embedding that has `size` tokens on this rank. The sum has one term that is not 0."""

    def forward(tokens: Tensor) -> Tensor:
        place, is_here = ranks.place(tokens, size)
        return ranks.total(whole(place).masked_fill(~is_here[..., None], 0))

    return forward


def _whole_logits(ranks: TensorRanks) -> Callable[..., Tensor]:
    def hook(_module: nn.Module, _args: Any, logits: Tensor) -> Tensor:
        size = logits.shape[-1]
        return ranks.total(F.pad(logits, (ranks.rank * size, (ranks.ranks - 1 - ranks.rank) * size)))

    return hook


def placement_of(mesh: DeviceMesh) -> Callable[[Tensor], Shard | None]:
    """Return a function from a parameter to the dimension that FSDP shards; None for the first.

    A weight whose rows are split over ranks is sharded by columns. Two axes on one dimension would give each rank rows
    of several places. FSDP shards columns evenly only.
    """
    shard_degree = shard_degree_of(mesh)

    def placement(parameter: Tensor) -> Shard | None:
        has_split_rows = 0 in sharded_axes(parameter).values()
        by_columns = has_split_rows and parameter.ndim > 1 and parameter.shape[1] % shard_degree == 0
        return Shard(1) if by_columns else None

    return placement


def use_local_parts(model: Model, mesh: DeviceMesh) -> None:
    """Let the modules of a model that FSDP shards compute with plain tensors, in place.

    Weights that are not split and belong to a split module, such as those of norms of heads, get gradients of each
    rank's heads. They are summed over the axis.
    """
    if (ranks := tensor_ranks(mesh)) is None:
        return
    roles = roles_of(model)
    summed: dict[tuple[nn.Module, str], Callable[[Tensor], Tensor]] = {
        (module, attribute): ranks.total
        for name, module in model.named_modules()
        if _is_in_split(name, roles)
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


def split_parameters(model: Model) -> set[str]:
    """Return the names of the parameters that the plan splits."""
    modules = dict(model.named_modules())
    return {f"{name}.{it}" for name, role in roles_of(model).items() for it in split_dims(modules[name], role)}


def split_dims(module: nn.Module, role: TensorRole | None) -> dict[str, int]:
    """Return the dimension that a role splits of each of a module's own parameters, for those that it splits."""
    if isinstance(module, ExpertLayer) and role == "experts":
        return dict(zip(module.stacks, module.hidden_dims, strict=True))
    names = (name for name, _ in module.named_parameters(recurse=False))
    return dict.fromkeys(names, SPLIT_DIM[role]) if role in SPLIT_DIM else {}


def _is_in_split(name: str, roles: dict[str, TensorRole]) -> bool:
    """Return whether a module is a split one, or is inside of one."""
    parts = name.split(".")
    return any(roles.get(".".join(parts[:end])) in ("split", "experts") for end in range(1, len(parts) + 1))


def check_tensor(model: Model, degree: int) -> None:
    """Check that ranks can split the layers of a model on the meta device.

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
    for what, size in _sizes(model):
        if size % degree:
            near = max(other for other in range(1, degree + 1) if size % other == 0)
            fix = f"set model.args.vocab_size = {-(-size // degree) * degree}" if what == VOCABULARY else f"set {near}"
            raise UserError(f"{degree} does not divide the {size:,} {what}: {fix}")


def _sizes(model: Model) -> Iterator[tuple[str, int]]:
    """Yield what is split, and into how many pieces at most."""
    for name, role in roles_of(model).items():
        module = model.get_submodule(name)
        if role == "split" and isinstance(module, Attention):
            heads = {"query": module.wq, "key/value": module.wk}
            yield from ((f"{kind} heads of {name}", it.out_features // module.head_dim) for kind, it in heads.items())
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
        elif role == "experts":
            if not isinstance(module, ExpertLayer) or len(module.hidden_dims) != len(module.stacks):
                yield f"{name} is no ExpertLayer with a dim in hidden_dims for each of its stacks"
        elif role != "split" and not isinstance(module, nn.Linear):
            yield f"{name} is a {type(module).__name__}, and {role} is for linear layers"
        elif role == "rows" and isinstance(module, nn.Linear) and module.bias is not None:
            yield f"{name} has a bias, which each rank would add: rows is for layers without one"
        if role in ("columns", "rows") and not _is_in_split(name, roles):
            yield f"{name} is in no module that is split, so that gradients would be wrong: add the module around it"
