"""State of a model and its optimizer, by name, and its comparison with a checkpoint."""

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from titanlite.models.base import unique_parameters
from titanlite.optim.quantized import inner_tensors, is_quantized
from titanlite.runtime.dtensor import unwrapped
from titanlite.runtime.errors import UserError
from titanlite.runtime.private_torch.tensors import non_persistent_buffers

State = dict[str, dict[str, Tensor]]
AVERAGE = "average"
"""Part of a state with the average of the weights, which a checkpoint and a run need not have."""


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> State:
    """Return {model: {name: tensor}, optimizer: {state.name.moment: tensor}}.

    Because these are the tensors in use, a load that writes into them needs no further copy; numbers do. A shared
    parameter has one entry. A quantized moment has one for each inner tensor: state.name.moment.codes,
    state.name.moment.scale. Learning rates and decay are not state: they come from the config.

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
    buffers = {
        f"{prefix}.{name}" if prefix else name: buffer
        for prefix, module in model.named_modules()
        for name, buffer in module.named_buffers(recurse=False)
        if name not in non_persistent_buffers(module)
    }
    return {name: unwrapped(tensor) for name, tensor in (dict(unique_parameters(model)) | buffers).items()}


def put_back_numbers(model: nn.Module, optimizer: torch.optim.Optimizer, state: State) -> None:
    """Set the optimizer's numbers from the tensors that were loaded in their place."""
    for name, parameter in unique_parameters(model):
        moments = optimizer.state.get(parameter, {})
        for key, value in moments.items():
            if isinstance(value, int | float):
                moments[key] = state["optimizer"][f"state.{name}.{key}"].item()


def complete_optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Give an optimizer that has not made a step the state that it has after one, to load into.

    It makes a step of no effect, which Adam counts: only for an optimizer that is then loaded.
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
    return {f"{part}.{name}": tensor for part, tensors in state.items() for name, tensor in tensors.items()}


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

    def options(self) -> str:
        """Return the options that accept the difference."""
        globs = {"allow_missing": to_globs(self.missing), "allow_unexpected": to_globs(self.unexpected)}
        return "\n".join(f"  checkpoint.{option} = {json.dumps(of)}" for option, of in globs.items() if of)

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


def difference(wanted: dict[str, Tensor], there: Metadata, patterns: Iterable[str]) -> Difference:
    """Compare names and shapes.

    Args:
        patterns: the names of the checkpoint to look at.
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
    unexpected = {name: f"{name} {[*shape]}" for name, shape in stored.items() if name not in wanted}
    return Difference(missing, unexpected)


def check_settings(now: dict[str, Any], then: dict[str, Any], allowed: Iterable[str], where: str) -> None:
    """Refuse to resume with other settings than the checkpoint's.

    One that is missing is one that is off: None, False, 0 or empty. An older version may not have known it.

    Raises:
        UserError: listing every setting that changed without being allowed to.
    """
    differing = (key for key in sorted(now | then) if (now.get(key) or None) != (then.get(key) or None))
    changed = [key for key in differing if not selected(key, allowed)]
    if changed:
        lines = "\n".join(f"  {_change(key, then.get(key), now.get(key))}" for key in changed)
        keys = ", ".join(f'"{key}"' for key in changed if not key.startswith("data."))
        accept = [f"checkpoint.allow_changes = [{keys}]"] if keys else []
        if any(key.startswith("data.") for key in changed):
            accept.append('data.on_change = "continue" or "restart"')
        raise UserError(
            f"{where} was trained with other settings, and a resumed run would be another experiment:\n{lines}\n"
            f"Restore them, or give the new run another job.name, or accept: {', '.join(accept)}"
        )


def _change(key: str, then: Any, now: Any) -> str:
    """Return a changed setting in words. That of a source is fingerprint-packing x weight, which people cannot read."""
    if not key.startswith("data.sources."):
        return f"{key} was {then}, is {now}"
    if then is None or now is None:
        return f"{key} is {'new' if then is None else 'gone'}"
    (old, _, old_weight), (new, _, new_weight) = (str(setting).rpartition(" x ") for setting in (then, now))
    if old == new:
        return f"{key}.weight was {old_weight}, is {new_weight}"
    if old.partition("-")[0] == new.partition("-")[0]:
        return f"{key} has its tokens in other sequences (data.packing, training.seq_len)"
    options = "data.tokenizer, chat_template, add_bos or add_eos"
    return f"{key} has other tokens (other text in data.path, or another {options})"


def _as_tensor(value: Tensor | int | float) -> Tensor:
    if isinstance(value, Tensor):
        return value
    return torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else None)
