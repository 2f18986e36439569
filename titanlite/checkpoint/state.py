"""State of a model and its optimizer, by name, and its comparison with a checkpoint."""

import json
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from titanlite.models.base import unique_parameters
from titanlite.optim.quantized import inner_tensors, is_quantized
from titanlite.runtime.dtensor import unwrapped
from titanlite.runtime.errors import UserError
from titanlite.runtime.private_torch.tensors import non_persistent_buffers
from titanlite.runtime.ranks import gather

STACK = re.compile(r" \[\d+, (?!1,)\d+, \d+\]")
"""Shape of a stack of matrices, in a line of a `Difference`. Kernels of convolutions have a dim of 1 in the middle."""
State = dict[str, dict[str, Tensor]]
AVERAGE, OUTER = FURTHER = "average", "outer"
"""Parts of a state that a checkpoint and a run need not have: the average of the weights, and the outer optimizer."""


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> State:
    """Return the tensors to save: {"model": {name: tensor}, "optimizer": {"state.<parameter>.<moment>": tensor}}.

    They are the tensors in use and no copies, so loading into them restores the model and the optimizer. Only numbers
    that an optimizer keeps are copied into tensors, and `put_back_numbers` sets them after a load. A parameter that
    modules share has one entry. A quantized moment has one for each of its tensors (<moment>.codes, <moment>.scale).
    Learning rates and weight decay are not state: they come from the config.

    Raises:
        UserError: the optimizer keeps something other than tensors and numbers.
    """
    parameters = dict(unique_parameters(model))
    moments = {
        f"state.{name}.{key}": value
        for name, parameter in parameters.items()
        for key, value in optimizer.state.get(parameter, {}).items()
        if value is not None
    }
    for name, value in [*moments.items()]:
        if is_quantized(value):
            del moments[name]
            moments |= {f"{name}.{piece}": tensor for piece, tensor in inner_tensors(value).items()}
        elif not isinstance(value, Tensor | int | float):
            kinds = f"{type(optimizer).__name__} keeps {name} as {type(value).__name__}"
            raise UserError(f"{kinds}: only tensors and numbers can be saved")
    return {
        "model": model_state(model),
        "optimizer": {name: unwrapped(_as_tensor(value)) for name, value in moments.items()},
    }


def model_state(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and persistent buffers of a model by name. A shared parameter has one entry."""
    modules: dict[str, nn.Module] = dict(model.named_modules())  # pyright: ignore[reportUnknownArgumentType]
    buffers = {
        f"{prefix}.{name}" if prefix else name: buffer
        for prefix, module in modules.items()
        for name, buffer in module.named_buffers(recurse=False)
        if name not in non_persistent_buffers(module)
    }
    return {name: unwrapped(tensor) for name, tensor in (dict(unique_parameters(model)) | buffers).items()}


def put_back_numbers(model: nn.Module, optimizer: torch.optim.Optimizer, state: State) -> None:
    """Set the numbers that an optimizer keeps from the tensors into which they were loaded."""
    for name, parameter in unique_parameters(model):
        moments = optimizer.state.get(parameter, {})
        for key, value in moments.items():
            if isinstance(value, int | float):
                moments[key] = state["optimizer"][f"state.{name}.{key}"].item()


def begin_anew(
    model: nn.Module, optimizer: torch.optim.Optimizer, loaded: Collection[str], *, has_from_start: Collection[Tensor]
) -> None:
    """Let the optimizer begin with parameters of which nothing was loaded, as in its first step, after
    `complete_optimizer_state` made a step.

    Args:
        loaded: names in a state with `state_of`'s part `optimizer` that were loaded.
        has_from_start: parameters whose state the optimizer's class makes before its first step, as zeros.
    """
    trained = {parameter_of(name) for name in loaded if name.startswith("optimizer.")}
    for name, parameter in unique_parameters(model):
        if f"optimizer.state.{name}" in trained or parameter not in optimizer.state:
            continue
        if parameter not in has_from_start:
            del optimizer.state[parameter]
            continue
        for key, value in optimizer.state[parameter].items():
            if isinstance(value, int | float):
                optimizer.state[parameter][key] = type(value)(0)
            elif isinstance(value, Tensor):
                value.zero_()


def parameter_of(moment: str) -> str:
    """Return the name of a moment in a checkpoint without that of the moment: optimizer.state.<parameter>."""
    return moment.removesuffix(".codes").removesuffix(".scale").rpartition(".")[0]


def complete_optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Create the state of an optimizer that has not made a step, so that a checkpoint can be loaded into it.

    The optimizer makes a step with learning rates and gradients of zero. Adam counts that step, so a load must follow.
    """
    if all(parameter in optimizer.state for parameter in model.parameters() if parameter.requires_grad):
        return
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], Tensor) else 0.0
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


def flat(state: State) -> dict[str, Tensor]:
    """Return the tensors of a state by their names in a checkpoint: <part>.<name>."""
    return {f"{part}.{name}": tensor for part, tensors in state.items() for name, tensor in tensors.items()}


def names_of_ranks(state: State, group: dist.ProcessGroup | None) -> set[str]:
    """Return the names of the tensors of a state: of this rank, and of the ranks of a group that hold others."""
    names = {*flat(state)}
    return names if group is None else names.union(*gather(names, group))


def selected(name: str, patterns: Iterable[str]) -> bool:
    """Return whether a glob matches a name or a part before a dot: `model` selects model.head.weight."""
    return any(fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*") for pattern in patterns)


def to_globs(names: Iterable[str]) -> list[str]:
    """Return globs for names, with numbers of layers and experts as wildcards."""
    return [*dict.fromkeys(re.sub(r"(?<=\.)\d+(?=\.)", "*", name) for name in names)]


@dataclass(frozen=True)
class Difference:
    """Names that differ between this model and a checkpoint."""

    missing: dict[str, str]
    """Names of this model that the checkpoint lacks in this shape."""
    unexpected: dict[str, str]
    """Names of the checkpoint that this model lacks."""

    def without(self, *, missing: Iterable[str] = (), unexpected: Iterable[str] = ()) -> "Difference":
        return Difference(
            {name: text for name, text in self.missing.items() if not selected(name, missing)},
            {name: text for name, text in self.unexpected.items() if not selected(name, unexpected)},
        )

    def less(self, other: "Difference") -> "Difference":
        """Return the names of this difference that another one has not."""
        return Difference(
            {name: text for name, text in self.missing.items() if name not in other.missing},
            {name: text for name, text in self.unexpected.items() if name not in other.unexpected},
        )

    def offer(self) -> str:
        """Return the options that accept the difference, where something of use is left."""
        experts = (name for name, text in (self.missing | self.unexpected).items() if _is_expert(name, text))
        if self.missing and any(experts):
            return "Its experts are not those of this model, and the rest is of no use without them"
        globs = {"allow_missing": to_globs(self.missing), "allow_unexpected": to_globs(self.unexpected)}
        options = [f"  checkpoint.{option} = {json.dumps(of)}" for option, of in globs.items() if of]
        return "\n".join(["To load the rest all the same:", *options])

    def is_of_quantization(self) -> bool:
        """Return whether the only difference is that one side quantizes a moment and the other does not."""
        names = self.missing | self.unexpected
        quantized = {name.rpartition(".")[0] for name in names if name.endswith((".codes", ".scale"))}
        plain = {name for name in names if not name.endswith((".codes", ".scale"))}
        return bool(quantized) and quantized == plain

    def __str__(self) -> str:
        lines = [f"  missing     {text}" for text in self.missing.values()]
        lines += [f"  unexpected  {text}" for text in self.unexpected.values()]
        shown = lines[:20] + ([f"  and {len(lines) - 20} more"] if len(lines) > 20 else [])
        return "\n".join(shown)

    def __bool__(self) -> bool:
        return bool(self.missing or self.unexpected)


def difference(
    wanted: dict[str, Tensor], there: Metadata, patterns: Iterable[str], *, everywhere: Collection[str] = ()
) -> Difference:
    """Compare names and shapes.

    Args:
        patterns: globs of the names in the checkpoint to compare.
        everywhere: names of other ranks, which are not unexpected.
    """
    stored = {
        name: tuple(entry.size)
        for name, entry in there.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata) and selected(name, patterns)
    }
    missing = {
        name: f"{name} {[*tensor.shape]}" + (f", stored as {[*stored[name]]}" if name in stored else "")
        for name, tensor in wanted.items()
        if stored.get(name) != tuple(tensor.shape)
    }
    unexpected = {
        name: f"{name} {[*shape]}" for name, shape in stored.items() if name not in wanted and name not in everywhere
    }
    return Difference(missing, unexpected)


def _is_expert(name: str, text: str) -> bool:
    """Return whether a line of a `Difference` is of an expert, or of a stack of them."""
    return ".experts." in name or STACK.search(text) is not None


def _as_tensor(value: Tensor | int | float) -> Tensor:
    if isinstance(value, Tensor):
        return value
    return torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else None)
