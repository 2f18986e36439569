"""Checks of a model's table for tensor parallelism, and of the sizes that ranks split."""

from collections.abc import Iterator
from fnmatch import fnmatchcase
from typing import get_args

from torch import nn

from titanlite.models.base import Model, head_of
from titanlite.models.experts import ExpertLayer
from titanlite.models.layers import Attention
from titanlite.models.tensor_plan import TensorRole
from titanlite.techniques.tensor import is_in_split, roles_of, split_blocks, split_dims
from titanlite.runtime.errors import UserError

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
        elif role == "tokens":
            if module is not model.layers:
                yield f"{name} is not the model's layers, whose tokens alone can be split"
        elif role == "experts":
            if not isinstance(module, ExpertLayer) or len(module.hidden_dims) != len(module.stacks):
                yield f"{name} is no ExpertLayer with a dim in hidden_dims for each of its stacks"
        elif role != "split" and not isinstance(module, nn.Linear):
            yield f"{name} is a {type(module).__name__}, and {role} is for linear layers"
        elif role == "rows" and isinstance(module, nn.Linear) and module.bias is not None:
            yield f"{name} has a bias, which each rank would add: rows is for layers without one"
        if role in ("columns", "rows") and not is_in_split(name, roles):
            yield f"{name} is in no module that is split, so that gradients would be wrong: add the module around it"
