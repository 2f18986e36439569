"""Optimizer classes by name: which there are, what they are given, and what they keep."""

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from titanlite.config.schema import Optimizer, OptimizerGroup
from titanlite.optim.groups import plan_groups
from titanlite.optim.muon import Muon
from titanlite.optim.quantized import block_of, is_quantized, pieces
from titanlite.runtime.errors import ConfigError, Problem, UserError
from titanlite.runtime.nearest import did_you_mean
from titanlite.runtime.user_code import find_object

REFUSED = {
    "LBFGS": "computes the loss several times a step",
    "SparseAdam": "is for sparse gradients",
    "Adafactor": "of PyTorch cannot update sharded parameters",
    "Rprop": "of PyTorch cannot update sharded parameters",
    "Muon": 'of PyTorch cannot update sharded parameters; optimizer.name = "Muon" is titanlite\'s own, which can',
}
SET_BY = {"lr": "lr", "weight_decay": "weight_decay", "betas": "beta1 and beta2", "eps": "eps"}


def find_class(name: str) -> type[torch.optim.Optimizer]:
    """Muon (titanlite's own), a class of torch.optim, or one that `find_object` finds: package.module.Class.

    Raises:
        UserError: there is none, or it cannot train here.
    """
    if name == "Muon":
        return Muon
    if "." in name or ":" in name:
        found = find_object(name)
        if not (isinstance(found, type) and issubclass(found, torch.optim.Optimizer)):
            raise UserError(f"{name} is not a subclass of torch.optim.Optimizer")
    else:
        kinds = [kind for kind in vars(torch.optim).values() if isinstance(kind, type)]
        known = {kind.__name__.lower(): kind for kind in kinds if issubclass(kind, torch.optim.Optimizer)}
        del known["optimizer"]
        found = known.get(name.lower())
        if found is None or found.__name__ != name:
            hint = did_you_mean(name, [known_cls.__name__ for known_cls in known.values()])
            names = ", ".join(sorted({kind.__name__ for kind in known.values()} - REFUSED.keys() | {"Muon"}))
            raise UserError(f"unknown value {name!r}{hint} (known: {names}; or package.module.Class)")
    if found.__module__.startswith("torch.optim") and found.__name__ in REFUSED:
        raise UserError(f"{found.__name__} {REFUSED[found.__name__]}: choose another one")
    return found


def takes(kind: type[torch.optim.Optimizer], argument: str) -> bool:
    return argument in inspect.signature(kind).parameters


def options_of(kind: type[torch.optim.Optimizer], config: Optimizer, args: Mapping[str, Any]) -> dict[str, Any]:
    """Keyword arguments of a class: lr and weight_decay if it takes them, beta1, beta2 and eps if it is of Adam's kind
    (it takes a pair of betas), and the `args` of the config over its own defaults."""
    options: dict[str, Any] = {}
    if takes(kind, "lr"):
        options["lr"] = config.lr
    if takes(kind, "weight_decay"):
        options["weight_decay"] = config.weight_decay
    if _is_of_adams_kind(kind):
        options["betas"] = config.beta1, config.beta2
        if takes(kind, "eps"):
            options["eps"] = config.eps
    if kind is torch.optim.AdamW:
        options["fused"] = True
    return options | dict(args)


def _is_of_adams_kind(kind: type[torch.optim.Optimizer]) -> bool:
    default = getattr(inspect.signature(kind).parameters.get("betas"), "default", ())
    return isinstance(default, tuple) and len(default) == 2


def check_optimizer(config: Optimizer, model: nn.Module | None, *, dtype: str) -> list[Problem]:
    """Everything wrong with `[optimizer]`, before anything is allocated.

    Args:
        model: on the meta device, say: names and shapes matter. None if it is not known: then groups are not checked.
        dtype: `training.dtype`.
    """
    problems: list[Problem] = []
    kinds: list[type[torch.optim.Optimizer]] = []
    groups = [(f"optimizer.groups.{number}", group) for number, group in enumerate(config.groups)]
    for key, section in [("optimizer", config), *groups]:
        try:
            kind = find_class(section.name or config.name)
        except UserError as error:
            problems += [Problem(f"{key}.name", str(error))] if section.name else []  # else told of optimizer.name
            continue
        kinds.append(kind)
        problems += _check_args(key, kind, config, section) or _check_use(key, kind, config, section, dtype)
    if config.name == "Muon" and not groups:
        kinds.append(torch.optim.AdamW)
    problems += _check_unused(config, kinds)
    try:
        plan_groups(config, dict(model.named_parameters())) if model else None
    except ConfigError as error:
        problems += error.problems
    return problems


def _check_args(
    key: str, kind: type[torch.optim.Optimizer], config: Optimizer, section: Optimizer | OptimizerGroup
) -> list[Problem]:
    """Names of `args` against the signature."""
    signature = inspect.signature(kind).parameters.values()
    ours = options_of(kind, config, {}).keys() & SET_BY.keys()
    known = [it.name for it in signature if it.kind not in (it.VAR_KEYWORD, it.VAR_POSITIONAL)][1:]
    known = [name for name in known if name not in ours]
    takes_any = any(it.kind == it.VAR_KEYWORD for it in signature)
    problems = []
    for name in section.args:
        if name in ours:
            problems.append(Problem(f"{key}.args.{name}", f"is set by {SET_BY[name]} of [optimizer]"))
        elif name not in known and not takes_any:
            message = f"unknown key {name!r}{did_you_mean(name, known)} ({kind.__name__} takes {', '.join(known)})"
            problems.append(Problem(f"{key}.args.{name}", message))
    return problems


def _check_use(
    key: str, kind: type[torch.optim.Optimizer], config: Optimizer, section: Optimizer | OptimizerGroup, dtype: str
) -> list[Problem]:
    """Whether a class can do with these types, values and checkpoints."""
    name, is_group = section.name or config.name, isinstance(section, OptimizerGroup)
    args = (config.args if name == config.name else {}) | section.args
    problems = []
    if is_group and section.lr and not config.lr:
        problems.append(Problem(f"{key}.lr", "is scheduled in proportion to optimizer.lr, which is 0"))
    if is_group and section.weight_decay and not takes(kind, "weight_decay"):
        problems.append(Problem(f"{key}.weight_decay", f"{name} has none"))
    if kind is torch.optim.AdamW:
        if args and "bfloat16" in (dtype, config.state_dtype):
            problems.append(Problem(f"{key}.args", "AdamW takes none where weights or moments are bfloat16"))
    elif dtype == "bfloat16" and kind.__module__.startswith(("torch.optim", "titanlite.optim")):
        message = f'{name} would lose small updates of bfloat16 weights: set training.dtype = "float32", or use AdamW'
        problems.append(Problem(f"{key}.name", message))
    elif dtype == "bfloat16" and block_of(kind, args) and not args.get("bf16_stochastic_round"):
        message = f"{name} would lose small updates of bfloat16 weights: set args = {{bf16_stochastic_round = true}}"
        problems.append(Problem(f"{key}.name", message))
    try:
        state = _state_after_a_step(kind, options_of(kind, config, args))
    except (TypeError, ValueError, IndexError) as error:
        return [*problems, Problem(f"{key}.args", f"{name}: {error}")]
    if kind is torch.optim.SGD and args.get("fused") and args.get("momentum"):
        message = "PyTorch's fused SGD begins its momentum with whatever is in memory if the first step is left out"
        problems.append(Problem(f"{key}.args.fused", message))
    for what, value in state.items():
        if not isinstance(value, Tensor | int | float | None):
            message = (
                f"{name} keeps {what} as {type(value).__name__}: only tensors and numbers of a parameter are saved"
            )
            problems.append(Problem(f"{key}.name", message))
    return problems


def _check_unused(config: Optimizer, kinds: list[type[torch.optim.Optimizer]]) -> list[Problem]:
    """Settings that are not the defaults, and that no class in use takes."""
    names = ", ".join(dict.fromkeys(kind.__name__ for kind in kinds))
    used = {
        "beta1": any(map(_is_of_adams_kind, kinds)),
        "beta2": any(map(_is_of_adams_kind, kinds)),
        "eps": any(map(_is_of_adams_kind, kinds)),
        "weight_decay": not config.weight_decay or any(takes(kind, "weight_decay") for kind in kinds),
        "state_dtype": torch.optim.AdamW in kinds,
    }
    return [
        Problem(f"optimizer.{option}", f"is not for {names}" + ("; see optimizer.args" if option == "eps" else ""))
        for option, is_used in used.items()
        if kinds and not is_used and getattr(config, option) != Optimizer.model_fields[option].default
    ]


def _state_after_a_step(kind: type[torch.optim.Optimizer], options: Mapping[str, Any]) -> dict[str, Any]:
    """What a class keeps of a matrix [64, 64] in float32; what it keeps elsewhere, too, as that is not saved.

    Raises:
        TypeError, ValueError: its options are wrong.
    """
    weight = nn.Parameter(torch.ones(64, 64))
    weight.grad = torch.ones_like(weight)
    optimizer = kind([weight], **options)
    before = dict(optimizer.param_groups[0])
    try:
        with torch.compiler.set_stance("force_eager"):
            optimizer.step()
    except (TypeError, ValueError, IndexError):
        raise
    except Exception:  # it needs a GPU, say
        return {}
    after = {name: value for name, value in optimizer.param_groups[0].items() if name != "params"}
    elsewhere = {f"{name} of a group": [value] for name, value in after.items() if value is not before.get(name)}
    elsewhere |= {str(name): [value] for name, value in optimizer.state.items() if name is not weight}
    return dict(optimizer.state[weight]) | elsewhere


def bytes_of_state(config: Optimizer, model: nn.Module, *, dtype: str) -> int:
    """Least memory that the states of all optimizers take, unsharded: what they keep of a parameter's own shape.

    Args:
        dtype: `training.dtype`.

    Raises:
        UserError: the config is wrong.
    """
    total = 0
    for group in plan_groups(config, dict(model.named_parameters())):
        kind = find_class(group.name)
        state = _state_after_a_step(kind, options_of(kind, config, group.args)).values()
        kept = [value for value in state if isinstance(value, Tensor) and value.shape == (64, 64)]
        width = getattr(torch, config.state_dtype if kind is torch.optim.AdamW else dtype).itemsize
        of_an_element = sum(_width(value, at_most=width) for value in kept)
        total += int(of_an_element * sum(parameter.numel() for parameter in group.parameters.values()))
    return total


def dtype_of_codes(kind: type[torch.optim.Optimizer]) -> torch.dtype | None:
    """In which a class of torchao.optim keeps moments of all but small shards. None: of other classes."""
    if block_of(kind, {}) is None:
        return None
    kept = [value for value in _state_after_a_step(kind, {}).values() if is_quantized(value)]
    return pieces(kept[0])["codes"].dtype if kept else None


def compiles_updates(config: Optimizer) -> bool:
    """Whether an optimizer hands its update to torch.compile, whatever [compile] says: those of torchao.optim do."""
    names = {config.name, *(group.name for group in config.groups if group.name)}
    return any(block_of(find_class(name), {}) is not None for name in names)


def _width(value: Tensor, *, at_most: int) -> float:
    """Bytes of an element."""
    if is_quantized(value):
        return sum(piece.nbytes for piece in pieces(value).values()) / value.numel()
    return min(at_most, value.element_size())
