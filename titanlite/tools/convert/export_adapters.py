"""Export of a run with `[lora]` in the format of PEFT: adapter_config.json and adapter_model.safetensors."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor, nn

from titanlite.models.formats import HuggingFace
from titanlite.runtime.errors import UserError
from titanlite.techniques.lora.adapters import LORA_A, LORA_B
from titanlite.tools.convert.adapters import Adapters
from titanlite.tools.convert.export import content, format_of, json_bytes
from titanlite.tools.convert.hugging_face import HuggingFaceFolder
from titanlite.tools.convert.layout import outgoing
from titanlite.tools.convert.source import Source
from titanlite.tools.convert.target import Target

WEIGHTS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"
PEFT_NAMES = {LORA_A: "lora_A", LORA_B: "lora_B"}


def export_adapters(
    source: Source, target: Target, *, dtype: torch.dtype | None = None, drop: Sequence[str] = ()
) -> int:
    """Write the adapters of a checkpoint, and return their size in bytes. They must fit in memory.

    Args:
        dtype: of the adapters; None keeps the stored one.
        drop: globs of the model's tensors that the format may leave out.

    Raises:
        UserError: the folder exists, or the format has no place for a layer with an adapter, or for another tensor.
    """
    assert source.adapters is not None
    target.check()
    form, adapters = format_of(source), source.adapters
    outgoing(source, form.tensors, dtype=None, drop=drop)  # a tensor that the base in this format would lack
    modules = {layer: _module(form, layer) for layer in adapters.layers}
    tensors = {
        f"base_model.model.{module}.{theirs}.weight": _read(adapters, f"{layer}.{ours}", dtype)
        for layer, module in modules.items()
        for ours, theirs in PEFT_NAMES.items()
    }
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": _base(source),
        "r": adapters.rank,
        "lora_alpha": int(adapters.alpha) if adapters.alpha.is_integer() else adapters.alpha,
        "lora_dropout": 0.0,
        "target_modules": _targets(source, form, [*modules.values()]),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    target.begin()
    target.write(WEIGHTS, content(save(tensors, metadata={"format": "pt"})))
    target.write(CONFIG, content(json_bytes(config)))
    target.commit()
    return sum(tensor.nbytes for tensor in tensors.values())


def _read(adapters: Adapters, name: str, dtype: torch.dtype | None) -> Tensor:
    tensor = adapters.read(name)
    return tensor.to(dtype or tensor.dtype).contiguous()


def _module(form: HuggingFace, layer: str) -> str:
    """Return the name of a layer there.

    Raises:
        UserError: there is none, or its weight has another layout, in which the adapter would be another.
    """
    found = form.tensors.find(f"{layer}.weight")
    if found is None or found[0].transposed or found[0].interleaved:
        reason = "has no place" if found is None else "has another layout"
        raise UserError(f"{layer} {reason} in this format, so its adapter cannot be written: export with --merge")
    return found[1].removesuffix(".weight")


def _targets(source: Source, form: HuggingFace, modules: list[str]) -> list[str]:
    """Return PEFT's target_modules: last parts of names, as programs expect them, where those match no other layer."""
    linears = [name for name, module in source.spec.build().named_modules() if isinstance(module, nn.Linear)]
    known = {found[1].removesuffix(".weight") for name in linears if (found := form.tensors.find(f"{name}.weight"))}
    last = {module.rpartition(".")[2] for module in modules}
    is_all = {name for name in known if name.rpartition(".")[2] in last} == {*modules}
    return sorted(last) if is_all else modules


def _base(source: Source) -> str | None:
    """Return the Hugging Face folder that the run began with; None if it began with other weights."""
    path: Any = source.config.checkpoint.initial_load_path if source.config else None
    return path if path and "://" not in path and HuggingFaceFolder.matches(Path(path).expanduser()) else None
